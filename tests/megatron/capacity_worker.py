"""One rank of the capacity tests: updates with model.router.capacity_factor over rows of several lengths."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from offload_worker import Trainee, make_config_of, make_groups

from grpo_mega.algorithm.advantages import assign_advantages
from grpo_mega.batching.pack import pack_mini_batches
from grpo_mega.megatron.routers import Routers
from tests.helpers.ranks import run_cases

FACTOR = 0.7
SIZES = {"hidden_size": 44, "vocab_size": 304}
real_dropping = Routers._within_capacity


def update(text: str, multiple: int) -> list[dict[str, float]]:
    """Return the metrics of two mini-batches. Each is one micro-batch per data-parallel rank, of an odd number of
    tokens.

    Nothing may swap two tokens at the edge of an expert's capacity on another CPU. Each sample has another first token,
    because equal prompts have router scores that differ only by rounding. A large optimizer.eps keeps Adam from turning
    the rounding of a tiny gradient into a full step.
    """
    layout, *overrides = text.split(" ")
    settings = (f"model.router.capacity_factor={FACTOR}", "batch.tokens_per_micro_batch=400", "optimizer.eps=0.01")
    config = make_config_of(f"{layout} float32", *settings, *overrides)
    trainee = Trainee(config, "qwen3_moe", **SIZES)
    groups = make_groups(3)
    samples = assign_advantages(groups, config.algorithm, max_response_length=24)
    for i, sample in enumerate(samples):
        sample.prompt = replace(sample.prompt, token_ids=(2 + i, *sample.prompt.token_ids[1:]))
    half = len(samples) // 2
    mini_batches = [samples[:half], samples[half:]]
    spec = trainee.policy.packing
    spec = replace(spec, token_budget=400, length_multiple=math.lcm(multiple, spec.length_multiple))
    batches = pack_mini_batches(mini_batches, [[0.01] * half] * 2, spec)
    assert all(len(mini_batch) == 1 for mini_batch in batches)
    return trainee.policy.update(trainee.policy.attach_logprobs(batches))


def check_row_lengths(text: str, multiples: Sequence[int], rank: int, folder: Path) -> None:
    found = {multiple: update(text, multiple) for multiple in multiples}
    if rank == 0:
        (folder / f"{text}.json").write_text(json.dumps(found))


def check_choices(rank: int, folder: Path) -> None:
    """Compare the kept tokens with loops over tokens and experts."""
    num_dropped = 0

    def checked(self: Routers, probs_tE: torch.Tensor, map_tE: torch.Tensor, tokens: Any) -> Any:
        nonlocal num_dropped
        probs, kept = real_dropping(self, probs_tE, map_tE, tokens)
        is_real = tokens.is_real_t.tolist()
        num_experts = map_tE.shape[1]
        capacity = math.ceil(sum(is_real) * self._topk / num_experts * FACTOR)
        for expert in range(num_experts):
            chosen = [t for t, real in enumerate(is_real) if real and map_tE[t, expert]]
            best = sorted(chosen, key=lambda t: (-float(probs_tE[t, expert]), t))[:capacity]
            assert kept[:, expert].nonzero()[:, 0].tolist() == sorted(best)
            num_dropped += len(chosen) - len(best)
        assert torch.equal(probs, probs_tE * kept)
        return probs, kept

    Routers._within_capacity = checked  # type: ignore[method-assign]
    try:
        update("tp=1", 48)
    finally:
        Routers._within_capacity = real_dropping  # type: ignore[method-assign]
    assert num_dropped > 50


if __name__ == "__main__":
    chosen = json.loads((Path(sys.argv[3]) / "cases.json").read_text())
    cases: dict[str, Any] = {text: partial(check_row_lengths, text, chosen["multiples"]) for text in chosen["layouts"]}
    run_cases(cases | ({"choices": check_choices} if sys.argv[2] == "1" else {}))
