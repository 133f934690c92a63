"""One rank of the layout tests: all cases of one world size run one after another in the same processes.

`python layouts_worker.py RANK WORLD_SIZE FOLDER` reads cases.pt. A logits case compares the policy's logits with
transformers' logits, computed by the parent, and writes the largest difference. An update case is a case of
commands.check. It also writes the gradient norms by layer and compares their total with Megatron's norm.
"""

import gc
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from grpo_mega.algorithm.losses import LossOutputs
from grpo_mega.batching.pack import pack_mini_batches
from grpo_mega.checkpoint_io.model import read_model_files
from grpo_mega.cli.commands.check import Case, run_case
from grpo_mega.distributed.device import Device
from grpo_mega.megatron import optimizer as optimizers
from grpo_mega.megatron import runtime as runtimes
from grpo_mega.megatron.model import output_weight
from grpo_mega.megatron.policy import Policy
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.trainer.batches import attach_routes
from grpo_mega.trainer.parts import build_policy
from grpo_mega.types import PackedBatch
from grpo_mega.weights.apply import load_shards
from grpo_mega.weights.boxes import region
from tests.distributed.layout_cases import LogitsCase, as_samples, label
from tests.helpers import late_streams
from tests.helpers.ranks import run_each

SQUARED_NORMS = optimizers.squared_norms


def checked_norms(
    squared_norms: Any, seen: list[list[float]], optimizer: Any, group_of: Mapping[torch.Tensor, int], num_groups: int
) -> torch.Tensor:
    squares = squared_norms(optimizer, group_of, num_groups)
    total = squares.clone()
    dist.all_reduce(total)
    seen.append(total.sqrt().tolist())
    ours, theirs = float(total.sum().sqrt()), float(optimizer.get_grad_norm())
    assert math.isclose(ours, theirs, rel_tol=1e-6), (ours, theirs)
    return squares


def main(rank: int, world_size: int, folder: Path) -> None:
    late_streams.install()  # a missing wait shows as a wrong number
    torch.set_num_threads(1)
    cases: dict[int, Case | LogitsCase] = torch.load(folder / "cases.pt", weights_only=False)
    device = runtimes.join(next(iter(cases.values())).config)
    has_passed = run_each(
        {label(case): partial(run_one, index, case, device) for index, case in cases.items()}, rank, world_size, folder
    )
    if not has_passed:
        return  # the ranks may be out of step
    dist.barrier()
    runtimes.stop()
    alive = sum(isinstance(found, GPTModel) for found in gc.get_objects())
    # Megatron keeps the last policy's chunks.
    assert alive <= 2, f"{alive} chunks outlive their policies, with all groups"


def run_one(index: int, case: Case | LogitsCase, device: Device, rank: int, folder: Path) -> None:
    runtime = runtimes.arrange(case.config, device)
    if isinstance(case, LogitsCase):
        differences = compared_with_transformers(case, runtime)
        if rank == 0:
            torch.save(differences, folder / f"{index}.pt")
        return
    groups = torch.load(folder / f"groups-{case.name.split(':')[0]}.pt", weights_only=False)
    norms: list[list[float]] = []
    optimizers.squared_norms = partial(checked_norms, SQUARED_NORMS, norms)
    run_case(case, groups[::-1] if "reversed" in case.name else groups, runtime, folder / str(index))
    if rank == 0:
        torch.save(norms, folder / str(index) / "norms.pt")


def compared_with_transformers(case: LogitsCase, runtime: Runtime) -> dict[str, float]:
    """Return the largest difference of any logit ("logits") and of each tensor's gradient (by name), over all ranks,
    relative to the largest expected value."""
    model = read_model_files(case.config.model)
    policy = build_policy(case.config, model, runtime)
    samples = as_samples(case.sequences)
    for sample, routes in zip(samples, case.routes, strict=False):
        sample.routes = routes
    batches = pack_mini_batches(
        [samples],
        [[1.0] * len(samples)],
        replace(policy.packing, token_budget=max(case.token_budget, *map(len, case.sequences))),
    )[0]
    attach_routes([batches], samples, runtime)
    found = policy.pipeline.forward(batches, partial(_differences, case, runtime, policy, model.shape.vocab))
    worst = {"logits": max((d for micro_batch in found for d in micro_batch), default=0.0)}
    if case.gradients:
        policy.memory.offload_optimizer()
        policy.memory.offload_weights()
        policy.memory.onload()
        policy.pipeline.forward_backward(batches, partial(_probed, case, runtime.layout.tp))
        worst |= _gradient_differences(case, runtime, policy)
        metrics, loads = policy.routers.metrics(), policy.routers.loads
        assert not case.routes or metrics["routing/moved"] > 0.5
        worst["loads"] = float(loads != case.loads)
        worst |= {name: abs(metrics[name] / expected - 1) for name, expected in case.balance.items()}
    by_rank: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(by_rank, worst)
    return {name: max(one.get(name, 0.0) for one in by_rank) for one in by_rank for name in one}


def _probed(case: LogitsCase, tp: int, hidden_TH: torch.Tensor, batch: PackedBatch) -> LossOutputs:
    """Return a tensor-parallel rank's part of the loss. These ranks add up their gradients of the hidden states."""
    probes = [(rows, case.probes[index][positions]) for index, rows, positions in _places(case, batch)]
    return LossOutputs(sum((hidden_TH[rows] * p).sum() for rows, p in probes) / tp, {}, {})


def _places(case: LogitsCase, batch: PackedBatch) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Return per sequence: its index, the rows of this rank with its tokens (without padding), and their positions."""
    cuts, places = batch.cu_seqlens.tolist(), []
    for start, end, index in zip(cuts, cuts[1:], batch.sample_indices, strict=False):
        positions = batch.position_ids[start:end]
        is_real = positions < len(case.sequences[index])
        places.append((index, start + is_real.nonzero()[:, 0], positions[is_real]))
    return places


def _gradient_differences(case: LogitsCase, runtime: Runtime, policy: Policy) -> dict[str, float]:
    """Return differences keyed by Megatron's names. The distributed optimizer reduces a slice of each gradient to each
    rank.
    """
    shards, names = policy.shards.rank_shards(runtime.rank), {p: name for name, p in policy.parameters.items()}
    worst: dict[str, float] = {}
    for part in optimizers.parts(policy._optimizer):
        for p in [] if part.is_stub_optimizer else part.model_param_gbuf_map:
            expected = torch.zeros(p.shape, dtype=torch.float64)
            load_shards(
                {"": shards[names[p]]},
                {"": expected},
                lambda box: case.gradients[box.tensor][region(box.start, box.shape)],
            )
            scale = max(float(case.gradients[piece.box.tensor].abs().max()) for piece in shards[names[p]].pieces)
            mine = part._get_model_param_range_map(p)["param"]
            difference = p.main_grad.view(-1)[mine.start : mine.end] - expected.view(-1)[mine.start : mine.end]
            worst[f"{names[p]} of {runtime.rank}"] = (
                float(difference.abs().max()) / (scale or 1.0) if len(difference) else 0.0
            )
    return worst


def _differences(
    case: LogitsCase, runtime: Runtime, policy: Policy, vocab: int, hidden_TH: torch.Tensor, batch: PackedBatch
) -> list[float]:
    logits_TV = hidden_TH @ output_weight(policy.models[-1]).t()
    shards = [torch.empty_like(logits_TV) for _ in range(runtime.layout.tp)]
    dist.all_gather(shards, logits_TV.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    full_TV = torch.cat(shards, dim=1)[:, :vocab].float()
    assert not full_TV.isnan().any(), case.name
    worst = []
    for index, rows, positions in _places(case, batch):
        expected = case.expected[index]
        assert full_TV[rows].shape == expected[positions].shape
        worst.append(
            float(((full_TV[rows] - expected[positions]).abs() / expected.abs().max()).amax() if len(rows) else 0.0)
        )
    return worst


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
