"""The synthetic task of benchmarks/vs_trl, for both contestants: model, tokenizer, prompts, given responses.

The model is a Qwen2 of about 31M random parameters with a vocabulary of 32,768. One dimension of its hidden states is
constant, and the output row of the end-of-sequence token reads it. So a sampled response ends with about the same
probability after each token, and lengths have a geometric tail with mean `mean_length`.
"""

from __future__ import annotations

import json
import math
import random
import string
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

VOCAB = 32_768
PAD, EOS = 0, 1
NUM_PROMPTS = 64
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass(frozen=True)
class Task:
    """Sizes of a step: `prompts` groups of `group_size`; responses of `mean_length` tokens on average."""

    folder: Path
    prompts: int
    group_size: int
    prompt_length: int
    mean_length: int
    max_length: int  # maximum tokens of a sampled response
    mini_batches: int
    lr: float
    seed: int

    @property
    def num_samples(self) -> int:
        return self.prompts * self.group_size


def given_rollout(task: Task, ratio: float, number: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the prompt ids of each group, and the response ids of each sample, group by group.

    The longest response is `ratio` times as long as their mean. Each `number` has different responses.
    """
    rng = random.Random(f"{task.seed} {ratio} {number}")

    def tokens(length: int) -> list[int]:
        return [rng.randrange(2, VOCAB) for _ in range(length)]

    responses = [
        [*tokens(length - 1), EOS] for length in ragged_lengths(task.num_samples, task.mean_length, ratio, rng)
    ]
    return [tokens(task.prompt_length) for _ in range(task.prompts)], responses


def ragged_lengths(num: int, mean: int, ratio: float, rng: random.Random) -> list[int]:
    """Return lengths with this mean and a geometric tail. The longest is `ratio` times the mean."""
    longest, total = round(mean * ratio), num * mean
    rest = [min(longest, 1 + rng.expovariate(1)) for _ in range(num - 1)]
    scale = (total - longest - (num - 1)) / sum(rest)
    lengths = [1 + min(longest - 1, math.floor(scale * value)) for value in rest]
    shortfall = total - longest - sum(lengths)
    for i in sorted(range(num - 1), key=lambda i: lengths[i]):  # distribute the rest that rounding and the limit left
        more = min(shortfall, longest - lengths[i], max(1, mean // 8))
        lengths[i] += more
        shortfall -= more
    lengths.insert(rng.randrange(num), longest)
    return lengths


def write_task(task: Task) -> int:
    """Write FOLDER/model and FOLDER/train.jsonl. Return the number of parameters."""
    torch.manual_seed(task.seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    model = Qwen2ForCausalLM(config)
    _end_with_probability(model, 1 / task.mean_length)
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD)
    model.save_pretrained(task.folder / "model")
    _tokenizer().save_pretrained(task.folder / "model")
    rng = random.Random(task.seed)
    with (task.folder / "train.jsonl").open("w") as file:
        for _ in range(NUM_PROMPTS):
            letters = "".join(rng.choices(string.ascii_lowercase, k=task.prompt_length))
            file.write(json.dumps({"prompt": [{"role": "user", "content": letters}], "answer": "0"}) + "\n")
    return sum(p.numel() for p in model.parameters())


@torch.no_grad()
def _end_with_probability(model: Qwen2ForCausalLM, wanted: float) -> None:
    """Set the first dimension of the embedding so that EOS has about the probability `wanted` after any token."""
    weight_VH = model.model.embed_tokens.weight
    weight_VH[:, 0] = 1.0
    probe = torch.randint(3, VOCAB, (8, 32), generator=torch.Generator().manual_seed(0))
    for _ in range(4):
        hidden_BTH = model.model(probe).last_hidden_state
        found = (hidden_BTH @ weight_VH.t()).softmax(dim=-1)[..., EOS].mean().item()
        weight_VH[EOS, 0] += math.log(wanted / found) / hidden_BTH[..., 0].mean().item()


def _tokenizer() -> Qwen2Tokenizer:
    """Return a byte-level tokenizer without merges: each letter is a token. Every other id has a word."""
    words = ["<pad>", "<eos>", "<unk>", *sorted(ByteLevel.alphabet())]
    words += [f"w{i}" for i in range(len(words), VOCAB)]
    settings = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    vocabulary = {word: i for i, word in enumerate(words)}
    return Qwen2Tokenizer(vocab=vocabulary, merges=[], chat_template=CHAT_TEMPLATE, model_max_length=4096, **settings)
