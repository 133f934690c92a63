"""One rank of the dispatcher tests: updates of an MoE policy by each token dispatcher, in rows of several lengths.

DeepEP's kernels are replaced by gathers over gloo, with the arguments and results of Megatron's fused_a2a.py.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe import token_dispatcher
from offload_worker import Trainee, make_config_of, make_groups
from torch import Tensor

from grpo_mega.algorithm.advantages import assign_advantages
from grpo_mega.batching.pack import pack_mini_batches
from grpo_mega.megatron import loaded_kernels
from tests.helpers.ranks import run_cases

SIZES = {"hidden_size": 44, "vocab_size": 304}
NAMES = ("loss/total", "loss/policy", "grad_norm", "kl/mean", "mismatch/k3", "moe/load_max")
calls: list[int] = []  # tokens of each dispatch


def gathered(x: Tensor, group: Any) -> Tensor:
    return gather_from_sequence_parallel_region(x, group=group)


def received(x: Tensor, map_tE: Tensor, probs_tE: Tensor, group: Any, num_local: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens of this rank's experts, expert after expert, their probabilities, and their map [all, E]."""
    assert probs_tE.dtype == torch.float32 and map_tE.dtype == torch.bool
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(lengths, torch.tensor([len(x)]), group=group)
    assert len({int(length) for length in lengths}) == 1, f"ranks dispatch {lengths} tokens"
    calls.append(len(x))
    mine = slice(group.rank() * num_local, (group.rank() + 1) * num_local)
    chosen_ET = gathered(map_tE.float().contiguous(), group)[:, mine].T.bool()
    probs_ET = gathered(probs_tE.contiguous(), group)[:, mine].T
    return gathered(x.contiguous(), group)[chosen_ET.nonzero()[:, 1]], probs_ET[chosen_ET], chosen_ET


def returned(x: Tensor, chosen_ET: Tensor, group: Any) -> Tensor:
    summed = x.new_zeros(chosen_ET.shape[1], x.shape[1]).index_add(0, chosen_ET.nonzero()[:, 1], x)
    return reduce_scatter_to_sequence_parallel_region(summed, group=group)


def hybrid_dispatch(
    x: Tensor, routing_map: Tensor, probs: Tensor, group: Any, num_local_experts: int, **more: Any
) -> Any:
    assert len(x) % 128 == 0, f"HybridEP's chunks do not fit {len(x)} tokens"
    assert more.get("num_permuted_tokens") is None and not more.get("fused")
    tokens, weights, chosen_ET = received(x, routing_map, probs, group, num_local_experts)
    return tokens, weights, None, chosen_ET.sum(1), (chosen_ET, group)


def hybrid_combine(x: Tensor, handle: Any, num_permuted_tokens: Tensor, **_: Any) -> Tensor:
    assert int(num_permuted_tokens) == len(x)
    return returned(x, *handle)


def deep_dispatch(x: Tensor, token_indices: Tensor, token_probs: Tensor, num_experts: int, group: Any, **_: Any) -> Any:
    """Return a token once if this rank has any of its experts, with local indices, and -1 for other ranks' experts."""
    num_local = num_experts // group.size()
    indices_T = gathered(token_indices.float(), group).long() - group.rank() * num_local
    probs_T, is_mine = gathered(token_probs, group), (indices_T >= 0) & (indices_T < num_local)
    rows = is_mine.any(1).nonzero()[:, 0]
    indices = indices_T.masked_fill(~is_mine, -1)[rows]
    counts = torch.bincount(indices[indices >= 0], minlength=num_local)
    calls.append(len(x))
    return gathered(x, group)[rows], indices, probs_T[rows], counts, (rows, len(is_mine), group)


def deep_combine(x: Tensor, group: Any, handle: Any, **_: Any) -> Any:
    rows, total, _ = handle
    summed = x.new_zeros(total, x.shape[1]).index_add(0, rows, x)
    return reduce_scatter_to_sequence_parallel_region(summed, group=group), None


def update(layout: str, kind: str, multiple: int, *overrides: str) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Return the metrics of an update of two mini-batches, and how it changed the weights.

    A large optimizer.eps keeps Adam from turning the rounding of a tiny gradient into a full step.
    """
    calls.clear()
    settings = ("batch.tokens_per_micro_batch=400", "optimizer.eps=0.01", f"layout.token_dispatcher={kind}")
    config = make_config_of(f"{layout} float32", *settings, *overrides)
    policy = Trainee(config, "qwen3_moe", **SIZES).policy
    samples = assign_advantages(make_groups(3), config.algorithm, max_response_length=24)
    half, spec = len(samples) // 2, policy.packing
    spec = replace(spec, length_multiple=math.lcm(multiple, spec.length_multiple))
    batches = pack_mini_batches([samples[:half], samples[half:]], [[0.01] * half] * 2, spec)
    before = {name: tensor.clone() for name, tensor in policy.tensors().items()}
    metrics = policy.update(policy.attach_logprobs(batches))
    assert bool(calls) == (kind != "alltoall")
    managers = [vars(d._comm_manager) for d in policy.routers._dispatchers if kind != "alltoall"]
    kept = [name for values in managers for name, v in values.items() if isinstance(v, Tensor) and v.grad_fn]
    assert not kept, f"{kept} keep the autograd graph alive"
    return metrics, {name: tensor - before[name] for name, tensor in policy.tensors().items()}


def compare(layout: str, kind: str, overrides: tuple[str, ...], rank: int, folder: Path) -> None:
    """Compare with alltoall in the shortest rows."""
    metrics, changes = update(layout, kind, 256 if kind == "alltoall" else 1, *overrides)
    expected, exact = update(layout, "alltoall", 1, *overrides)
    for mine, theirs in zip(metrics, expected, strict=True):
        for name in NAMES:
            assert math.isclose(mine[name], theirs[name], rel_tol=1e-4, abs_tol=1e-7), (name, mine[name], theirs[name])
    for name, change in exact.items():
        error, size = (changes[name] - change).norm(), change.norm()
        assert error <= 1e-3 * size, (name, error, size)


if __name__ == "__main__":
    loaded_kernels.dispatcher_problems = lambda *_: iter(())  # type: ignore[assignment]
    replaced: Any = token_dispatcher
    replaced.hybrid_ep_dispatch, replaced.hybrid_ep_combine = hybrid_dispatch, hybrid_combine
    replaced.fused_dispatch, replaced.fused_combine = deep_dispatch, deep_combine
    replaced.set_deepep_num_sms = lambda _: None
    cases = json.loads((Path(sys.argv[3]) / "cases.json").read_text())
    run_cases({" ".join(case): partial(compare, case[0], case[1], tuple(case[2:])) for case in cases})
