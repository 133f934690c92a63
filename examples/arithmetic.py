"""Make the quickstart's start model and data: `python examples/arithmetic.py OUT --seed N [--moe]`.

Output: OUT/model (a Hugging Face Qwen2 or, with --moe, Qwen3-MoE checkpoint in fp32 with its tokenizer),
OUT/train.jsonl and OUT/heldout.jsonl with {"prompt": "34+7+9+8=?", "answer": "58"}. No held-out prompt is used in
training. A response adds one term per line inside <think> and ends with <answer>.

The SFT data is noisy on purpose: it often drops the carry of a large digit (CARRY_DROPPED) and sometimes leaves out the
tags of the answer (TAGS_MISSING). So the model samples both right and wrong sums, and its greedy answer is right about
half the time. GRPO teaches it to carry. The last line printed is the greedy held-out score: the share of right and
well-formed answers. The output is deterministic for a given seed and thread count.
"""

import argparse
import json
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

# Must be set before torch is imported: threads that spin are ten times slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import (
    AddedToken,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen3MoeConfig,
)
from transformers.utils.logging import disable_progress_bar

from grpo_mega import console
from grpo_mega.paths import user_path

SPECIAL_TOKENS = ["<pad>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>"]
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
CHARACTERS = [*"0123456789+-=?", "Ġ", "Ċ"]  # the last two are byte-level BPE's names of " " and "\n"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
TOKENIZER_SETTINGS = {
    "pad_token": "<pad>",
    "eos_token": "<eos>",
    "unk_token": "<unk>",
    "chat_template": CHAT_TEMPLATE,
    "model_max_length": 256,
    "padding_side": "left",
    "clean_up_tokenization_spaces": False,
}

NUM_TERMS = 4
FIRST_TERM = range(10, 70)  # every running sum has two digits, because the three added digits sum to at most 27
NUM_TRAIN = 8192
NUM_HELDOUT = 256

# Probability that a demonstration drops the carry, keyed by the digit added. Above 0.5 the greedy sum is wrong.
CARRY_DROPPED = {5: 0.1, 6: 0.2, 7: 0.3, 8: 0.7, 9: 0.8}
TAGS_MISSING = 0.15

BATCH_SIZE = 64
MAX_STEPS = 1000
PEAK_LR = 4e-3
WARMUP_STEPS = 50
EVAL_INTERVAL = 50
EVAL_PROMPTS = 128
TARGET_SCORE = 0.4
COOLDOWN_STEPS = 150
MAX_RESPONSE_TOKENS = 48

WELL_FORMED = re.compile(r"<think>((?!</?think>|</?answer>).)*</think>\n?<answer>(\d+)</answer>", re.DOTALL)


@dataclass(frozen=True)
class Problem:
    """A sum of terms. The first term has two digits, the others have one."""

    terms: tuple[int, ...]

    @property
    def prompt(self) -> str:
        return "+".join(map(str, self.terms)) + "=?"

    @property
    def answer(self) -> str:
        return str(sum(self.terms))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a small arithmetic model and its data.")
    parser.add_argument("out", type=user_path, help="folder to write model/, train.jsonl and heldout.jsonl to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of PyTorch")
    parser.add_argument("--moe", action="store_true", help="make an MoE model with 8 experts per layer and 2 per token")
    options = parser.parse_args()
    started = time.monotonic()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    disable_progress_bar()  # Hugging Face draws a bar for each file it writes
    rng = random.Random(options.seed)

    train, heldout = make_problems(rng)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, has_experts=options.moe)
    steps = train_supervised(model, tokenizer, train, rng)
    score = greedy_score(model, tokenizer, heldout)
    save(options.out, model, tokenizer, train, heldout)
    print(
        f"held-out score {score:.3f} after {steps} supervised steps in {time.monotonic() - started:.0f} s; see"
        f" {options.out}"
    )


def make_problems(rng: random.Random) -> tuple[list[Problem], list[Problem]]:
    """Return distinct problems: (train, held-out)."""
    problems: dict[Problem, None] = {}
    while len(problems) < NUM_TRAIN + NUM_HELDOUT:
        digits = (rng.randint(2, 9) for _ in range(NUM_TERMS - 1))
        problems[Problem((rng.choice(FIRST_TERM), *digits))] = None
    ordered = list(problems)
    return ordered[NUM_HELDOUT:], ordered[:NUM_HELDOUT]


def demonstrate(problem: Problem, rng: random.Random) -> str:
    """Return a response with the errors of CARRY_DROPPED and TAGS_MISSING."""
    total, lines = problem.terms[0], []
    for term in problem.terms[1:]:
        carries = total % 10 + term >= 10
        dropped = carries and rng.random() < CARRY_DROPPED.get(term, 0.0)
        following = total + term - (10 if dropped else 0)
        lines.append(f"{total}+{term}={following}")
        total = following
    answer = str(total) if rng.random() < TAGS_MISSING else f"<answer>{total}</answer>"
    return "<think>\n" + "\n".join(lines) + "\n</think>\n" + answer


def is_right_and_well_formed(response: str, problem: Problem) -> bool:
    match = WELL_FORMED.fullmatch(response)
    return match is not None and match.group(2) == problem.answer


def make_tokenizer() -> Qwen2Tokenizer:
    """Make a tokenizer with one token per character and one per tag. Decoding keeps the tags, because they are ordinary
    tokens.

    The tokenizer is byte-level BPE without merges. It must be a Qwen2Tokenizer, because AutoTokenizer loads one for
    every Qwen2 checkpoint. Characters outside of CHARACTERS are dropped.
    """
    names = SPECIAL_TOKENS + TAGS + CHARACTERS
    tokenizer = Qwen2Tokenizer(vocab={name: i for i, name in enumerate(names)}, merges=[], **TOKENIZER_SETTINGS)
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return tokenizer


def make_model(tokenizer: Qwen2Tokenizer, *, has_experts: bool = False) -> PreTrainedModel:
    """Make a model that two ranks can share: heads, layers, FFN, experts and vocabulary are even numbers."""
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "head_dim": 16,
        "norm_topk_prob": True,
    }
    config = (Qwen3MoeConfig if has_experts else Qwen2Config)(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        **(experts if has_experts else {}),
    )
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def train_supervised(
    model: PreTrainedModel,
    tokenizer: Qwen2Tokenizer,
    train: Sequence[Problem],
    rng: random.Random,
    demonstrate: Callable[[Problem, random.Random], str] = demonstrate,
    target_score: float = TARGET_SCORE,
    max_tokens: int = MAX_RESPONSE_TOKENS,
    is_right: Callable[[str, Problem], bool] = is_right_and_well_formed,
) -> int:
    """Train with AdamW on demonstrations until the greedy score on some training prompts reaches the target. Return the
    steps.

    Then the learning rate decays to 0 over COOLDOWN_STEPS, so the model's error rates approach the rates in the
    demonstrations.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    columns = (TextColumn("supervised"), BarColumn(), TextColumn("{task.fields[status]}"), TimeElapsedColumn())
    probe = train[:EVAL_PROMPTS]
    with Progress(*columns) as progress:
        task = progress.add_task("", total=MAX_STEPS, status="")
        step, last_step = 0, MAX_STEPS
        while step < last_step:
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = PEAK_LR * min(1.0, step / WARMUP_STEPS, (last_step - step + 1) / COOLDOWN_STEPS)
            problems = [rng.choice(train) for _ in range(BATCH_SIZE)]
            batch = tokenize_demonstrations(tokenizer, problems, [demonstrate(problem, rng) for problem in problems])
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            progress.update(task, advance=1)
            if step % EVAL_INTERVAL == 0 and last_step == MAX_STEPS:
                score = greedy_score(model, tokenizer, probe, max_tokens, is_right)
                progress.update(task, status=f"step {step} loss {loss.item():.3f} score {score:.2f}")
                if score >= target_score:
                    last_step = step + COOLDOWN_STEPS
                    progress.update(task, total=last_step)
    if last_step == MAX_STEPS:
        raise SystemExit(f"score {score:.2f} < {target_score} after {MAX_STEPS} supervised steps; try another --seed")
    return step


def tokenize_demonstrations(
    tokenizer: Qwen2Tokenizer, problems: Sequence[Problem], demonstrations: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Return input_ids, attention_mask and labels, each [problems, tokens]; labels are -100 outside the response."""
    prompts = render_prompts(tokenizer, problems)
    responses = [text + "<eos>" for text in demonstrations]
    encoded = tokenizer([p + r for p, r in zip(prompts, responses, strict=True)], padding=True, return_tensors="pt")
    num_response = torch.tensor([len(tokenizer(response)["input_ids"]) for response in responses])
    length = encoded["input_ids"].shape[1]
    in_response = torch.arange(length) >= length - num_response[:, None]  # padding is on the left
    labels = encoded["input_ids"].masked_fill(~in_response, -100)
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"], "labels": labels}


def render_prompts(tokenizer: Qwen2Tokenizer, problems: Sequence[Problem]) -> list[str]:
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.prompt}], tokenize=False, add_generation_prompt=True
        )
        for problem in problems
    ]


def greedy_score(
    model: PreTrainedModel,
    tokenizer: Qwen2Tokenizer,
    problems: Sequence[Problem],
    max_tokens: int = MAX_RESPONSE_TOKENS,
    is_right: Callable[[str, Problem], bool] = is_right_and_well_formed,
) -> float:
    """Return the share of problems whose greedy response is right."""
    encoded = tokenizer(render_prompts(tokenizer, problems), padding=True, return_tensors="pt")
    output = model.generate(
        input_ids=encoded["input_ids"],
        attention_mask=encoded["attention_mask"],
        do_sample=False,
        max_new_tokens=max_tokens,
    )
    responses = tokenizer.batch_decode(output[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    scores = [is_right(r, p) for r, p in zip(responses, problems, strict=True)]
    return sum(scores) / len(scores)


def save(
    out: Path,
    model: PreTrainedModel,
    tokenizer: Qwen2Tokenizer,
    train: Sequence[Problem],
    heldout: Sequence[Problem],
) -> None:
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model", save_jinja_files=False)
    for name, problems in (("train", train), ("heldout", heldout)):
        lines = [json.dumps({"prompt": problem.prompt, "answer": problem.answer}) for problem in problems]
        (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    console.filter_output()
    main()
