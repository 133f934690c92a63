"""One rank of the planner's comparison with Megatron: the real buffers of every case, one layout after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import grpo_mega.megatron  # isort: skip  # noqa: F401  # import its patches first
import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from grpo_mega.algorithm.losses import LossOutputs
from grpo_mega.checkpoint_io.reader import random_reader
from grpo_mega.cli.checks.machine import CARDS
from grpo_mega.cli.planner.activations import activations
from grpo_mega.cli.planner.job import PlannedJob
from grpo_mega.cli.planner.state import Storage, buffer_of, chunk_parameters, stage_state
from grpo_mega.distributed import device as devices
from grpo_mega.megatron import runtime as runtimes
from grpo_mega.megatron.policy import Policy
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.types import PackedBatch
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import ModelShape
from tests.helpers.models import make_config
from tests.helpers.planner_cases import ACTIVATIONS, CASES, StateCase
from tests.helpers.ranks import run_cases

SMALL_BUCKET = 1500  # elements; small, so tiny models have several buckets


def main() -> None:
    device = devices.select("cpu", 0)
    run_cases(
        {
            "state": partial(compare, CASES, check_state, device),
            "activations": partial(compare, ACTIVATIONS, check_activations, device),
        }
    )


def compare(
    cases: Sequence[StateCase],
    check: Callable[[StateCase, Runtime], None],
    device: devices.Device,
    rank: int,
    folder: Path,
) -> None:
    """Run all cases even if one fails, so the ranks stay in step. Neighbouring cases share the process groups of a
    layout.
    """
    problems = []
    for _, alike in groupby(cases, key=lambda case: case.config.layout):
        members = list(alike)
        runtime = runtimes.arrange(members[0].config, device)
        for case in members:
            try:
                check(case, runtime)
            except AssertionError as error:
                problems.append(f"{case.name}: {error}")
    assert not problems, "\n".join(problems)


def build(case: StateCase, runtime: Runtime) -> tuple[Policy, ModelShape]:
    hf_config = make_config(case.family, tied=case.tied, **case.changes)
    shape = ModelShape.from_hf_config(hf_config.to_dict())
    family = family_of(shape.model_type)
    policy = Policy(case.config, shape, family, hf_config, runtime)
    policy.load(random_reader(family.hf_tensors(shape), 0, 0.02))
    return policy, shape


def check_state(case: StateCase, runtime: Runtime) -> None:
    policy, shape = build(case, runtime)
    layout, family = runtime.layout, family_of(shape.model_type)
    policy._optimizer.step()  # Adam allocates its moments
    planned = stage_state(family, shape, layout, runtime.pp_rank, Storage.of(case.config, shape))

    buffers = [b for chunk in policy.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    weights = sum(
        {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in policy.parameters.values()}.values()
    )
    gradients = sum(b.grad_data.nbytes for b in buffers)
    assert planned.num_parameters == sum(p.numel() for p in policy.parameters.values())
    assert planned.weights == weights == sum(b.param_data.nbytes for b in buffers)
    assert planned.gradients == gradients
    assert planned.optimizer(layout.rank_in_stage(runtime.rank)) == policy.memory.device_bytes - weights - gradients

    chunks = chunk_parameters(family, shape, layout, runtime.rank)
    for index, (model, chunk) in enumerate(zip(policy.models, chunks, strict=True)):
        assert [p.name for p in chunk] == [f"chunk{index}.{name}" for name, _ in model.named_parameters()]
        dense = [(mine, theirs) for mine, theirs in zip(chunk, model.parameters(), strict=True) if not mine.is_spread]
        check_buckets([mine for mine, _ in dense], [theirs for _, theirs in dense], policy, layout.num_replicas)


def check_buckets(mine: list[Any], theirs: list[Any], policy: Policy, num_replicas: int) -> None:
    """Compare with a small bucket size. With the real one only models of 40 million parameters have several buckets."""
    chunk = policy.chunks[0]
    groups = ProcessGroupCollection()
    groups.tp, groups.dp_cp = chunk.tp_group, chunk.dp_cp_group
    real = _ParamAndGradBuffer(
        chunk.ddp_config,
        theirs[0].dtype,
        torch.float32,
        theirs,
        chunk.intra_dp_cp_group,
        SMALL_BUCKET,
        {p: str(i) for i, p in enumerate(theirs)},
        1.0,
        list(range(len(theirs))),
        False,
        groups,
    )
    planned = buffer_of(mine, num_replicas, SMALL_BUCKET)
    assert planned.size == real.numel, (planned.size, real.numel)
    assert planned.largest_bucket == max(bucket.grad_data.numel() for bucket in real.buckets)
    assert sum(planned.shares) == sum(p.numel() for p in theirs)


def check_activations(case: StateCase, runtime: Runtime) -> None:
    """Count the bytes that autograd saves in the forward pass of one full micro-batch, by storage."""
    policy, shape = build(case, runtime)
    config = case.config
    setup = PlannedJob(config, shape, 0, CARDS["h100"], 4, 4, 32.0, 32.0, uses_te=False)
    held: dict[int, torch.UntypedStorage] = {}
    known = {p.untyped_storage().data_ptr() for p in policy.parameters.values()}
    at_the_end: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            held[storage.data_ptr()] = storage  # keep the storage, so its address is not reused
        return tensor

    def on_hidden(hidden_TH: Tensor, batch: PackedBatch) -> LossOutputs:
        at_the_end.append(sum(s.nbytes() for s in held.values()))
        return LossOutputs(loss=hidden_TH.float().sum() * 0, sums={}, maxima={})

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.pipeline.forward_backward([one_batch(setup.micro_batch_tokens, runtime)], on_hidden)
    planned = activations(setup, 0, padding=1.0).saved  # segments of equal length need no padding
    # The plan omits tensors that do not grow with the model's width, such as positions.
    assert abs(planned - at_the_end[0]) < 0.05 * at_the_end[0] + 2**15, (
        f"planned {planned:,.0f} bytes, autograd saved {at_the_end[0]:,}"
    )


def one_batch(num_tokens: int, runtime: Runtime) -> PackedBatch:
    """Return a batch of eight segments of equal length."""
    length = num_tokens // 8
    tokens = torch.arange(num_tokens) % 90
    return PackedBatch(
        tokens=tokens,
        targets=tokens,
        position_ids=torch.arange(num_tokens) % length,
        cu_seqlens=torch.arange(0, num_tokens + 1, length, dtype=torch.int32),
        loss_mask=torch.ones(num_tokens),
        loss_weights=torch.ones(num_tokens),
        advantages=torch.ones(num_tokens),
        rollout_logprobs=torch.zeros(num_tokens),
        sample_indices=list(range(8)),
        segment_numbers=[0] * 8,
        lengths=[length * runtime.layout.cp] * 8,
        cp_size=runtime.layout.cp,
        cp_rank=runtime.cp_rank,
    )


if __name__ == "__main__":
    main()
