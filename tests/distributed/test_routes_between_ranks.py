"""Recorded experts between four gloo ranks: from the rank of the engine to the rank that trains the sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from grpo_mega.batching.pack import PackingSpec, pack_mini_batches
from grpo_mega.distributed.device import Device
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.rollout import backlog
from grpo_mega.rollout.backlog import gather_samples
from grpo_mega.rollout.routes import RouterSizes
from grpo_mega.trainer.batches import attach_routes, check_routes, share_live
from grpo_mega.types import Group, PackedBatch, Prompt, Sample, Span
from grpo_mega.weights.layout import MegatronLayout
from tests.distributed.forced_routes import random_routes
from tests.helpers.ranks import ranks

WORLD_SIZE = 4
NUM_TRAINED = 10  # groups of the next update; the later two wait in the backlog
ROUTERS = RouterSizes(num_layers=9, num_dense=1, num_experts=300, top_k=4)
LAYOUTS = [MegatronLayout(dp=4), MegatronLayout(tp=2, dp=2), MegatronLayout(cp=2, dp=2), MegatronLayout(pp=2, dp=2)]


def make_groups() -> dict[int, Group]:
    """Return groups of four samples. The first group has no routes."""
    groups, random = {}, torch.Generator().manual_seed(1)
    for p in range(12):
        prompt = Prompt(p, "", tuple(range(3 + p)), "")
        lengths = torch.randint(10, 60, (4,), generator=random).tolist()
        samples = [Sample(prompt, i, [0] * n, [0.0] * n, "stop", [Span(0, 0, n)]) for i, n in enumerate(lengths)]
        for i, sample in enumerate(samples):
            sample.advantages = torch.zeros(sample.response_len)
            sample.routes = random_routes(ROUTERS, sample.total_len, seed=4 * p + i) if p else None
        groups[p] = Group(prompt, samples)
    return groups


def packed(samples: list[Sample], layout: MegatronLayout, runtime: Runtime) -> list[list[PackedBatch]]:
    spec = PackingSpec(layout.dp, runtime.dp_rank, 200, cp_size=layout.cp, cp_rank=runtime.cp_rank)
    halves = samples[:24], samples[24:]
    return pack_mini_batches(halves, [[1.0] * 24] * 2, spec)


@ranks(WORLD_SIZE)
def test_a_rank_receives_only_the_experts_of_the_samples_that_it_trains(rank: int, folder: Path) -> None:
    everything = make_groups()
    everyone = [sample for group in everything.values() for sample in group.samples]
    sizes = [sample.routes.experts.nbytes if sample.routes else 0 for sample in everyone]
    staying, shared = sum(sizes[: 4 * NUM_TRAINED]), sum(sizes[4 * NUM_TRAINED :])
    # Rank 3 recorded no group of the next update.
    mine = {p: group for p, group in everything.items() if p % (3 if p < NUM_TRAINED else WORLD_SIZE) == rank}
    prompts = {p: group.prompt for p, group in everything.items()}
    for number, layout in enumerate(LAYOUTS):
        runtime = Runtime(Device("cpu", torch.device("cpu")), layout, rank, None)  # type: ignore[arg-type]
        with counted("all_reduce") as gathered, counted("all_to_all_single") as received:
            found = gather_samples(mine, prompts, (), f"{number}", without_routes=range(NUM_TRAINED))
            samples = [sample for group in found.values() for sample in group.samples]
            batches = packed(samples, layout, runtime)
            attach_routes(batches, samples, runtime)
        check_routes(batches, samples, runtime)
        for batch, same in zip(chain(*batches), chain(*packed(everyone, layout, runtime)), strict=True):
            expected = routes_by_token(same, everyone)
            assert (batch.routes is None) == (expected is None)
            if batch.routes is not None and expected is not None:
                assert bytes(batch.routes.numpy()) == expected.tobytes()
        assert 0.2 < share_live(samples, runtime) == share_live(everyone, runtime) < 0.4
        assert shared < sum(gathered) < shared + 50_000, "the exchange of samples carries routes that stay"
        assert sum(received) <= staying / layout.dp + 200 * ROUTERS.token_bytes, layout
        assert len(received) > 3 and dist_sum(sum(received)) > staying * WORLD_SIZE / layout.dp / 2, (
            "too little was sent"
        )


@contextmanager
def counted(name: str) -> Iterator[list[int]]:
    """Count the bytes of the first argument of each call of a collective."""
    call, counts = getattr(dist, name), list[int]()

    def counting(values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        counts.append(values.nbytes)
        return call(values, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, name, counting)
        patch.setattr(backlog, "_ROUND_BYTES", 2**14)  # several rounds
        yield counts


def dist_sum(value: int) -> int:
    total = torch.tensor([value])
    dist.all_reduce(total)
    return int(total)


def routes_by_token(batch: PackedBatch, samples: list[Sample]) -> NDArray[Any] | None:
    """Return the row's experts, token by token."""
    cuts, row = batch.cu_seqlens.tolist(), ROUTERS.not_known(batch.num_tokens)
    for index, start, end in zip(batch.sample_indices, cuts, cuts[1:], strict=False):
        for t in range(start, end):
            position, routes = int(batch.position_ids[t]), samples[index].routes
            if routes and position < len(routes.experts):
                row[t] = routes.experts[position]
    return row if any(samples[index].routes for index in batch.sample_indices) else None
