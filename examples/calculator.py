"""Make the model and data of `quickstart.sh --agent`: `python examples/calculator.py OUT --seed N`.

Output: OUT/model (a small Qwen2 checkpoint with random weights), OUT/train.jsonl and OUT/heldout.jsonl with
{"prompt": "37*46=?", "answer": "1702"}, and OUT/sft.jsonl with chats that call the tool `calculate` in their first turn
and state its result in the second. No held-out prompt is used in training.

The demonstrations are noisy on purpose. If both factors are large they usually guess instead of calling the tool
(GUESSED), and some calls have a wrong factor (MISTYPED). So after `grpo-mega sft` (calculator_sft.yaml) about half of
the greedy answers are wrong, and samples of each prompt differ. GRPO teaches the model to call the tool. The output is
deterministic for a given seed. `calculate` is the tool that the recipe names in rollout.tools.
"""

import argparse
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

from grpo_mega.text import filter_output

sys.path.insert(0, str(Path(__file__).parent))  # for `arithmetic`, which reward workers do not find otherwise

FACTORS = range(11, 100)
LARGE = 40  # factors from here on are large
GUESSED, GUESSED_SMALL, MISTYPED = 0.7, 0.1, 0.1
NUM_TRAIN, NUM_HELDOUT = 4096, 256

WORDS = ["name", "calculate", "arguments", "expression"]
TAGS = ["<answer>", "</answer>", "<tool_call>", "</tool_call>"]
SPECIAL_TOKENS = ["<pad>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>", "<tool>"]
CHARACTERS = [*'0123456789*=?{}":,', "Ġ", "Ċ"]
CHAT_TEMPLATE = (
    "{% if tools %}<system>{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}"
    "{% for message in messages %}{{ '<' + message.role + '>' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}"
    """{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}"""
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "{{ '}\\n</tool_call>' }}{% endfor %}"
    "{% if message.role == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def calculate(expression: str) -> str:
    """Multiply two numbers.

    Args:
        expression: Two numbers with * between them.
    """
    left, _, right = expression.partition("*")
    return str(int(left) * int(right))


@dataclass(frozen=True)
class Problem:
    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}*{self.right}=?"

    @property
    def answer(self) -> str:
        return str(self.left * self.right)


def demonstrate(problem: Problem, rng: random.Random) -> list[dict[str, str]]:
    """Return a chat with the errors of GUESSED and MISTYPED. Its system message is the template's list of tools."""
    messages = [{"role": "system", "content": "calculate"}, {"role": "user", "content": problem.prompt}]
    guessed = GUESSED if min(problem.left, problem.right) >= LARGE else GUESSED_SMALL
    result = str(rng.randrange(1000, 9000))
    if rng.random() >= guessed:
        left = problem.left + 10 * (rng.random() < MISTYPED)
        expression = f"{left}*{problem.right}"
        call = json.dumps({"name": "calculate", "arguments": {"expression": expression}})
        result = calculate(expression)
        messages.append({"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"})
        messages.append({"role": "tool", "content": result})
    return [*messages, {"role": "assistant", "content": f"<answer>{result}</answer>"}]


def main() -> None:
    from arithmetic import make_model, make_tokenizer, read_options, save_task

    description = "Make a small model and its data for products with a calculator."
    options = read_options(argparse.ArgumentParser(description=description))
    rng = random.Random(options.seed)
    problems = [Problem(left, right) for left in FACTORS for right in FACTORS]
    rng.shuffle(problems)
    heldout, train = problems[:NUM_HELDOUT], problems[NUM_HELDOUT : NUM_HELDOUT + NUM_TRAIN]
    tokenizer = make_tokenizer(SPECIAL_TOKENS, [*TAGS, *WORDS], CHARACTERS, CHAT_TEMPLATE)
    rows = {
        "train": [{"prompt": p.prompt, "answer": p.answer} for p in train],
        "heldout": [{"prompt": p.prompt, "answer": p.answer} for p in heldout],
        "sft": [{"messages": demonstrate(problem, rng)} for problem in train],
    }
    save_task(options.out, make_model(tokenizer), tokenizer, rows)
    print(f"a model with random weights, {len(train)} demonstrations, and held-out products are in {options.out}")


if __name__ == "__main__":
    filter_output()
    main()
