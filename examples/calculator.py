"""Make the start model and data of the calculator example: `python examples/calculator.py OUT --seed N`.

Output: OUT/model (a Hugging Face Qwen2 checkpoint in fp32 with its tokenizer and random weights), OUT/train.jsonl and
OUT/heldout.jsonl with {"prompt": "34*27=?", "answer": "918"}, and OUT/sft.jsonl with a conversation for each training
prompt: the model calls the tool `calculate` with the product, and answers with the tool's result.

The model is too small to multiply, so it needs the tool. The demonstrations are noisy on purpose: they often swap the
digits of the second factor in the call (SWAPPED). So after `grpo-mega sft` (calculator_sft.yaml) the greedy answer is
right about half the time. GRPO (calculator.yaml) teaches it to copy both factors. The output is deterministic for a
given seed.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from arithmetic import SPECIAL_TOKENS, TOKENIZER_SETTINGS, make_model
from transformers import AddedToken, Qwen2Tokenizer
from transformers.utils.logging import disable_progress_bar

from grpo_mega import console
from grpo_mega.paths import user_path

# A call is few tokens, because its JSON is two of them.
OPENING, CLOSING = '{"name": "calculate", "arguments": {"expression": "', '"}}'
TAGS = ["<tool>", "<tool_call>", "</tool_call>", "<answer>", "</answer>", OPENING, CLOSING]
CHARACTERS = [*"0123456789*=?", "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"]  # the last one is byte-level BPE's space
SYSTEM = "calculate"  # the names of the tools, of which the vocabulary has no letter
CHAT_TEMPLATE = (
    "{% if tools %}<system>{% for tool in tools %}{{ tool['function']['name'] }}{% endfor %}{% endif %}"
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + '{\"name\": \"' + call['function']['name'] + '\", \"arguments\": '"
    " + (call['function']['arguments'] | tojson) + '}' + '</tool_call>' }}{% endfor %}"
    "{% if message['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
FACTORS = range(11, 100)
NUM_HELDOUT = 256
# Probability that a demonstration swaps the digits of the second factor, keyed by its last digit.
SWAPPED = dict.fromkeys(range(5), 0.2) | dict.fromkeys(range(5, 10), 0.65)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a small model that can call a calculator, and its data.")
    parser.add_argument("out", type=user_path, help="folder to write model/, train.jsonl and heldout.jsonl to")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    disable_progress_bar()  # Hugging Face draws a bar for each file it writes
    rng = random.Random(options.seed)

    problems = [(first, second) for first in FACTORS for second in FACTORS]
    rng.shuffle(problems)
    heldout, train = problems[:NUM_HELDOUT], problems[NUM_HELDOUT:]
    tokenizer = make_tokenizer()
    make_model(tokenizer).save_pretrained(options.out / "model")
    tokenizer.save_pretrained(options.out / "model", save_jinja_files=False)
    for name, chosen in (("train", train), ("heldout", heldout)):
        rows = [{"prompt": f"{first}*{second}=?", "answer": str(first * second)} for first, second in chosen]
        write(options.out / f"{name}.jsonl", rows)
    write(options.out / "sft.jsonl", [{"messages": demonstrate(*problem, rng)} for problem in train])
    print(f"a model with random weights, {len(train)} demonstrations, and held-out products are in {options.out}")


def demonstrate(first: int, second: int, rng: random.Random) -> list[dict[str, str]]:
    """Return a conversation with a call and an answer. The call has the errors of SWAPPED."""
    factor = f"{second}"[::-1] if rng.random() < SWAPPED[second % 10] else f"{second}"
    result = first * int(factor)
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{first}*{second}=?"},
        {"role": "assistant", "content": f"<tool_call>{OPENING}{first}*{factor}{CLOSING}</tool_call>"},
        {"role": "tool", "content": f"{result}"},
        {"role": "assistant", "content": f"<answer>{result}</answer>"},
    ]


def make_tokenizer() -> Qwen2Tokenizer:
    """Make a tokenizer with one token per character and one per tag. Other characters are dropped."""
    names = SPECIAL_TOKENS + TAGS + CHARACTERS
    settings = TOKENIZER_SETTINGS | {"chat_template": CHAT_TEMPLATE}
    tokenizer = Qwen2Tokenizer(vocab={name: i for i, name in enumerate(names)}, merges=[], **settings)
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return tokenizer


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    console.filter_output()
    main()
