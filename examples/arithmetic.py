"""Make the quickstart's start model and data: `python examples/arithmetic.py OUT --seed N [--moe | --hybrid]`.

Output: OUT/model (a Hugging Face Qwen2, with --moe Qwen3-MoE, or with --hybrid Qwen3.5 checkpoint in fp32 with its
tokenizer and random weights), OUT/train.jsonl and OUT/heldout.jsonl with {"prompt": "34+7+9+8=?", "answer": "58"}, and
OUT/sft.jsonl with a demonstration of each training prompt, {"prompt": ..., "completion": ...}. No held-out prompt is
used in training. A response adds one term per line inside <think> and ends with <answer>.

The demonstrations are noisy on purpose: they often drop the carry of a large digit (CARRY_DROPPED) and sometimes leave
out the tags of the answer (TAGS_MISSING). So after `grpo-mega sft` (quickstart_sft.yaml) the model samples both right
and wrong sums, and its greedy answer is right about half the time. GRPO teaches it to carry. The output is
deterministic for a given seed.
"""

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AddedToken,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from grpo_mega.checkpoint_io.hf_files import with_old_fields
from grpo_mega.paths import user_path
from grpo_mega.text import filter_output

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
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--moe", action="store_true", help="make an MoE model with 8 experts per layer and 2 per token")
    kind.add_argument("--hybrid", action="store_true", help="make a Qwen3.5 with linear attention in 3 of 4 layers")
    options = read_options(parser)
    rng = random.Random(options.seed)
    train, heldout = make_problems(rng)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, "moe" if options.moe else "hybrid" if options.hybrid else "dense")
    save(options.out, model, tokenizer, train, heldout, [demonstrate(problem, rng) for problem in train])
    print(f"a model with random weights, {NUM_TRAIN} demonstrations, and held-out sums are in {options.out}")


def read_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Add OUT and --seed to the parser, read the command line, and seed torch. Other tasks use it too."""
    parser.add_argument("out", type=user_path, help="folder to write model/, train.jsonl and heldout.jsonl to")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    disable_progress_bar()  # Hugging Face draws a bar for each file it writes
    set_verbosity_error()  # it warns that kernels for linear attention are missing, and they need a GPU
    return options


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


def make_tokenizer(
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    tags: Sequence[str] = TAGS,
    characters: Sequence[str] = CHARACTERS,
    chat_template: str = CHAT_TEMPLATE,
) -> Qwen2Tokenizer:
    """Make a tokenizer with one token per character and one per tag. Decoding keeps the tags, because they are ordinary
    tokens.

    The tokenizer is byte-level BPE without merges. It must be a Qwen2Tokenizer, because AutoTokenizer loads one for
    every Qwen2 checkpoint. Other characters are dropped.
    """
    vocab = {name: i for i, name in enumerate((*special_tokens, *tags, *characters))}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[], **TOKENIZER_SETTINGS | {"chat_template": chat_template})
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in special_tokens])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return tokenizer


def make_model(tokenizer: Qwen2Tokenizer, kind: Literal["dense", "moe", "hybrid"] = "dense") -> PreTrainedModel:
    """Make a model that two ranks can share: heads, layers, FFN, experts and vocabulary are even numbers."""
    classes = {"dense": Qwen2Config, "moe": Qwen3MoeConfig, "hybrid": Qwen3_5TextConfig}
    fields: dict[str, dict[str, object]] = {
        "dense": {},
        "moe": {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 96,
            "head_dim": 16,
            "norm_topk_prob": True,
        },
        "hybrid": {
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    }
    config = classes[kind](
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4 if kind == "hybrid" else 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        **fields[kind],
    )
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def render_prompts(tokenizer: Qwen2Tokenizer, problems: Sequence[Problem]) -> list[str]:
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.prompt}], tokenize=False, add_generation_prompt=True
        )
        for problem in problems
    ]


def save(
    out: Path,
    model: PreTrainedModel,
    tokenizer: Qwen2Tokenizer,
    train: Sequence[Problem],
    heldout: Sequence[Problem],
    completions: Sequence[str] = (),
) -> None:
    """Save a model and its data. `completions`: demonstrations of all training prompts, or none."""
    rows = {
        "train": [{"prompt": problem.prompt, "answer": problem.answer} for problem in train],
        "heldout": [{"prompt": problem.prompt, "answer": problem.answer} for problem in heldout],
    }
    if completions:
        pairs = zip(train, completions, strict=True)
        rows["sft"] = [{"prompt": problem.prompt, "completion": text} for problem, text in pairs]
    save_task(out, model, tokenizer, rows)


def save_task(
    out: Path, model: PreTrainedModel, tokenizer: Qwen2Tokenizer, rows: Mapping[str, Sequence[Mapping[str, Any]]]
) -> None:
    """Save the model, its tokenizer, and OUT/NAME.jsonl for each name of `rows`. Other tasks use it too."""
    model.save_pretrained(out / "model")
    config = out / "model" / "config.json"
    config.write_text(json.dumps(with_old_fields(json.loads(config.read_text()), "float32"), indent=2) + "\n")
    tokenizer.save_pretrained(out / "model", save_jinja_files=False)
    for name, some in rows.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))


if __name__ == "__main__":
    filter_output()
    main()
