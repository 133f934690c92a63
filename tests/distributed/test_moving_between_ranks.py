"""Weights and samples between four gloo ranks: execute, buckets, syncs, export and gather."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from grpo_mega.checkpoint_io.reader import open_hf_reader
from grpo_mega.errors import SyncError
from grpo_mega.rollout.backlog import gather_samples
from grpo_mega.rollout.sglang.loader import NUM_BUFFERS
from grpo_mega.trainer.colocation import WeightSync
from grpo_mega.types import Group, Prompt, Sample, Span
from grpo_mega.weights.apply import (
    Bucket,
    Entry,
    buckets,
    execute,
    load_shards,
    mismatched_tensors,
    subtensor,
    write_entries,
)
from grpo_mega.weights.boxes import RankShards, region
from grpo_mega.weights.families import family_of
from grpo_mega.weights.layout import (
    EngineLayout,
    MegatronLayout,
    ShardLayout,
    engine_shards,
    hf_rank_shards,
    hf_shards,
    megatron_shards,
)
from grpo_mega.weights.plan import plan_transfers
from grpo_mega.weights.spec import Family, ModelShape, read_config
from tests.helpers.exports import export_shards
from tests.helpers.mapping import (
    Tensors,
    assert_equal,
    blank,
    filled,
    megatron_side,
    numbered,
    plan,
    slice_of,
    transfers_of,
)
from tests.helpers.models import make_model, save_checkpoint
from tests.helpers.ranks import ranks

WORLD_SIZE = 4
FAMILY = family_of("qwen2")
# vocab 11 leaves rank 1 of tp=2 with padding
SHAPE = ModelShape("qwen2", num_layers=4, hidden=6, ffn=8, num_heads=4, num_kv_heads=2, head_dim=3, vocab=11, tied=True)
TENSORS = numbered(FAMILY, SHAPE)
TRAINER = megatron_side(FAMILY, SHAPE, MegatronLayout(tp=2, pp=2))
LONGEST_ROW = 12  # elements of a row of o_proj
MIXTURE = family_of("mixtral")
MIXTURE_SHAPE = ModelShape(
    "mixtral",
    2,
    hidden=6,
    ffn=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    vocab=70,
    tied=True,
    num_experts=4,
    moe_ffn=8,
)


@dataclass(frozen=True)
class Moving:
    """A transfer from a trainer to engines, in a dtype."""

    family: Family
    shape: ModelShape
    layout: MegatronLayout
    targets: ShardLayout
    dtype: torch.dtype


@contextmanager
def recorded_sends() -> Iterator[list[tuple[int, int]]]:
    """Record (outgoing, incoming) bytes of this rank's weights in each round with messages, without checksums.

    No round may wait for all ranks.
    """
    sizes: list[tuple[int, int]] = []
    original, collectives = dist.batch_isend_irecv, list[Any]()

    def record(messages: list[dist.P2POp]) -> list[dist.Work]:
        weights = [message for message in messages if message.tensor.dtype == torch.uint8]
        sent, received = (sum(m.tensor.nbytes for m in weights if m.op is op) for op in (dist.isend, dist.irecv))
        assert len({(m.op, m.group_peer) for m in weights}) == len(weights), "several messages to a rank in a round"
        sizes.append((sent, received))
        return original(messages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", record)
        for name in ("all_reduce", "all_to_all_single", "all_gather", "barrier"):
            call = getattr(dist, name)
            patch.setattr(dist, name, lambda *a, call=call, **k: (collectives.append(call), call(*a, **k))[1])
        yield sizes
    assert len(collectives) <= 1, "only the start of a sync is collective"


def check_execute(rank: int, targets: Sequence[RankShards], bucket_bytes: int) -> None:
    made = plan(TRAINER, targets)
    sources, found = filled(TRAINER, TENSORS)[rank], blank(targets)[rank]
    with recorded_sends() as sizes:
        received = execute(made, sources, found, dtype=torch.int64, bucket_bytes=bucket_bytes)
    assert_equal([found], [filled(targets, TENSORS)[rank]])
    remote = [t for t in transfers_of(made) if t.source_rank != t.target_rank]
    assert (
        received
        == sum(incoming for _, incoming in sizes)
        == 8 * sum(t.box.size for t in remote if t.target_rank == rank)
    )
    assert sum(outgoing for outgoing, _ in sizes) == 8 * sum(t.box.size for t in remote if t.source_rank == rank)
    limit = max(bucket_bytes, 8 * LONGEST_ROW)
    assert all(size <= limit for pair in sizes for size in pair), (sizes, limit)


@ranks(WORLD_SIZE)
def test_execute_moves_weights_to_another_layout_in_rounds_of_any_size(rank: int, folder: Path) -> None:
    layouts = [MegatronLayout(pp=4), MegatronLayout(tp=2, dp=2), MegatronLayout(pp=2, vpp=2, dp=2, order="tp-pp-dp")]
    layouts.append(MegatronLayout(pp=3, layers_per_chunk=(1, 2, 1)))
    for layout in layouts:
        targets = megatron_side(FAMILY, SHAPE, layout)
        targets += [{}] * (WORLD_SIZE - len(targets))
        for bucket_bytes in (500, 1 << 20):
            check_execute(rank, targets, bucket_bytes)


@ranks(WORLD_SIZE)
def test_execute_fills_engines_on_all_ranks_on_some_and_on_none(rank: int, folder: Path) -> None:
    for holders in ((0, 1, 2, 3), (3,), (1, 2), ()):
        targets = [hf_rank_shards(FAMILY, SHAPE) if r in holders else {} for r in range(WORLD_SIZE)]
        for bucket_bytes in (500, 1 << 20):
            check_execute(rank, targets, bucket_bytes)


class Ring:
    """Three buffers in turn. A bucket is read only when its buffer is about to be filled again, three buckets later.

    The bucket is then compared with a copy made on arrival, because nothing may change it in between.
    """

    def __init__(self, targets: Tensors) -> None:
        self._targets = targets
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * NUM_BUFFERS
        self._waiting: dict[int, tuple[Bucket, torch.Tensor]] = {}
        self.sizes: list[int] = []

    def allocate(self, index: int, num_bytes: int) -> torch.Tensor:
        assert index == len(self.sizes)
        self.sizes.append(num_bytes)
        self._read(index - NUM_BUFFERS)
        if self._buffers[index % NUM_BUFFERS].numel() < num_bytes:
            self._buffers[index % NUM_BUFFERS] = torch.zeros(num_bytes, dtype=torch.uint8)
        return self._buffers[index % NUM_BUFFERS][:num_bytes]

    def take(self, bucket: Bucket) -> None:
        assert not bucket.entries or bucket.values.data_ptr() == self._buffers[bucket.index % NUM_BUFFERS].data_ptr()
        assert (
            bucket.values.numel()
            == self.sizes[bucket.index]
            == sum(num_bytes_of(e, bucket.dtype) for e in bucket.entries)
        )
        self._waiting[bucket.index] = (bucket, bucket.values.clone())

    def finish(self) -> None:
        for index in list(self._waiting):
            self._read(index)

    def _read(self, index: int) -> None:
        if index in self._waiting:
            bucket, copy = self._waiting.pop(index)
            assert torch.equal(as_bytes(bucket.values), as_bytes(copy))
            write_entries(bucket.entries, bucket.values, self._targets, bucket.dtype)


def num_bytes_of(entry: Entry, dtype: torch.dtype) -> int:
    return math.prod(entry.shape) * dtype.itemsize


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def check_buckets(case: Moving, rank: int, bucket_bytes: int) -> list[Bucket]:
    """Move float32 weights in `case.dtype` through a ring, and compare bytes and checksums with a direct fill."""
    values = {name: (t % 251 / 7).float() for name, t in numbered(case.family, case.shape).items()}
    trainer = megatron_side(case.family, case.shape, case.layout)
    sources = {name: torch.zeros(local.shape) for name, local in trainer[rank].items()} if rank < len(trainer) else {}
    load_shards(trainer[rank] if sources else {}, sources, lambda box: slice_of(values, box))
    wanted = case.targets.rank_shards(rank)
    found = {name: torch.zeros(local.shape, dtype=case.dtype) for name, local in wanted.items()}
    expected = {name: torch.zeros(local.shape, dtype=case.dtype) for name, local in wanted.items()}
    load_shards(wanted, expected, lambda box: slice_of(values, box).to(case.dtype))

    made = plan_transfers(megatron_shards(case.family, case.shape, case.layout), case.targets, ranks_per_node=2)
    ring, taken = Ring(found), []
    with recorded_sends() as sizes:
        for bucket in buckets(made, sources, dtype=case.dtype, bucket_bytes=bucket_bytes, allocate=ring.allocate):
            ring.take(bucket)
            taken.append(bucket)
    ring.finish()
    assert found.keys() == expected.keys()
    assert all(torch.equal(as_bytes(found[name]), as_bytes(expected[name])) for name in found)
    entries = [entry for bucket in taken for entry in bucket.entries]
    assert not mismatched_tensors(entries, found)
    limit = max(bucket_bytes, case.dtype.itemsize * max(1, LONGEST_ROW))
    assert all(outgoing <= limit for outgoing, _ in sizes)
    assert all(size <= limit for size in ring.sizes)
    received = sum(bucket.num_bytes_received for bucket in taken)
    assert received == sum(incoming for _, incoming in sizes) == made.traffic(case.dtype.itemsize).received[rank]
    if entries:  # verify that a changed element is found
        last = subtensor(found, entries[-1].target)[region(entries[-1].offset, entries[-1].shape)]
        last.view(torch.uint8)[..., 0].bitwise_xor_(1)
        assert mismatched_tensors(entries, found) == [entries[-1].target]
    return taken


@ranks(WORLD_SIZE)
def test_servers_are_filled_through_three_buffers_with_valid_checksums(rank: int, folder: Path) -> None:
    """Fill tensor-parallel servers on one, some or all of the ranks, dense and mixture models, in several dtypes."""
    trainers = (MegatronLayout(tp=2, pp=2), MegatronLayout(tp=1, pp=2, dp=2), MegatronLayout(dp=4, ep=2))
    for number, (layout, engines) in enumerate(
        product(trainers, (EngineLayout(2, 2), EngineLayout(4, 1), EngineLayout(1, 1)))
    ):
        family, shape = (FAMILY, SHAPE) if layout.ep == 1 else (MIXTURE, MIXTURE_SHAPE)
        dtype = (torch.bfloat16, torch.float8_e4m3fn, torch.float32)[number % 3]
        case = Moving(family, shape, layout, engine_shards(family, shape, engines, WORLD_SIZE), dtype)
        for bucket_bytes in (1 if number == 0 else 80 * dtype.itemsize, 1 << 20):
            taken = check_buckets(case, rank, bucket_bytes)
            if rank >= engines.world_size:
                assert not any(bucket.entries or bucket.values.numel() for bucket in taken)
            assert len(taken) >= (300 if bucket_bytes == 1 else 4 if bucket_bytes < 1 << 20 else 1), len(taken)


@ranks(WORLD_SIZE)
def test_whole_replicas_are_filled_through_three_buffers_in_turn(rank: int, folder: Path) -> None:
    case = Moving(FAMILY, SHAPE, MegatronLayout(tp=2, pp=2), hf_shards(FAMILY, SHAPE, WORLD_SIZE), torch.bfloat16)
    for bucket_bytes in (64, 1 << 20):
        check_buckets(case, rank, bucket_bytes)


@ranks(WORLD_SIZE)
def test_all_experts_of_a_layer_may_be_in_one_parameter(rank: int, folder: Path) -> None:
    """One engine tensor contains all experts; an indexed name means a part of it."""
    targets = engine_shards(MIXTURE, MIXTURE_SHAPE, EngineLayout(2, 2), WORLD_SIZE)
    trainer = MegatronLayout(dp=4, ep=4)
    made = plan_transfers(megatron_shards(MIXTURE, MIXTURE_SHAPE, trainer), targets, ranks_per_node=4)
    tensors = numbered(MIXTURE, MIXTURE_SHAPE)
    wanted = targets.rank_shards(rank)
    [apart] = filled([wanted], tensors)
    together = {name: torch.zeros_like(t) for name, t in apart.items() if "[" not in name}
    for name in {name.partition("[")[0] for name in apart} - together.keys():
        together[name] = torch.zeros(MIXTURE_SHAPE.num_experts, *apart[f"{name}[0]"].shape, dtype=torch.int64)
    sources = filled(megatron_side(MIXTURE, MIXTURE_SHAPE, trainer), tensors)[rank]
    execute(made, sources, together, dtype=torch.int64, bucket_bytes=1000)
    assert len(together) < len(apart)
    assert all(torch.equal(subtensor(together, name), t) for name, t in apart.items())


@ranks(WORLD_SIZE)
def test_execute_works_in_a_group_of_some_of_the_ranks(rank: int, folder: Path) -> None:
    """Only ranks 1 and 3 run; the plan uses ranks within the group."""
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return
    sources, targets = (megatron_side(FAMILY, SHAPE, MegatronLayout(**{axis: 2})) for axis in ("tp", "pp"))
    place = dist.get_rank(group)
    found = blank(targets)[place]
    execute(
        plan(sources, targets), filled(sources, TENSORS)[place], found, dtype=torch.int64, group=group, bucket_bytes=64
    )
    assert_equal([found], [filled(targets, TENSORS)[place]])


class Engine:
    """The part of an engine that a sync uses: `plain` tensors, filled by buckets."""

    def __init__(self, side: ShardLayout, rank: int) -> None:
        self.version, self.damage = -1, False
        self.plain = {name: torch.zeros(t.shape, dtype=torch.int64) for name, t in side.rank_shards(rank).items()}
        self._names, self._entries = set(self.plain), list[Entry]()

    def start_update(self) -> list[str]:
        self._entries = []
        return sorted(self.plain.keys() ^ self._names)

    def allocate(self, index: int, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def load(self, bucket: Bucket) -> None:
        write_entries(bucket.entries, bucket.values, self.plain, bucket.dtype)
        self._entries += bucket.entries

    def end_update(self, version: int) -> list[str]:
        if self.damage:
            self.plain["model.norm.weight"][1] += 1
        problems = mismatched_tensors(self._entries, self.plain)
        self.version = self.version if problems else version
        return problems


class Policy:
    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def tensors(self) -> Tensors:
        return self._tensors


def meet(phase: str, mine: list[str]) -> list[list[str]]:
    found: list[list[str]] = [[]] * WORLD_SIZE
    dist.all_gather_object(found, mine)
    return found


@ranks(WORLD_SIZE)
def test_publish_sends_each_version_and_names_wrong_tensors_on_all_ranks(rank: int, folder: Path) -> None:
    engines = hf_shards(FAMILY, SHAPE, WORLD_SIZE)
    made = plan_transfers(
        megatron_shards(FAMILY, SHAPE, MegatronLayout(tp=2, pp=2)), engines, ranks_per_node=WORLD_SIZE
    )
    sync = WeightSync(made, torch.int64, 3000, meet)
    policy, engine = Policy(filled(TRAINER, TENSORS)[rank]), Engine(engines, rank)
    for version, factor in ((0, 1), (1, -3)):
        for t in policy.tensors().values():
            t *= factor
        assert sync.sync_weights(policy.tensors(), engine, version=version) > 0
        assert engine.version == version
        assert_equal([engine.plain], [{name: t * factor for name, t in TENSORS.items()}])
    engine.damage = rank == 2
    with raises(SyncError, "policy version 2, at rank 2: model.norm.weight"):
        sync.sync_weights(policy.tensors(), engine, version=2)
    assert engine.version == (1 if rank == 2 else 2)
    other = Engine(engines, rank)
    if rank == 1:
        other.plain["model.layers.0.self_attn.k_proj.bias_scale"] = other.plain.pop(
            "model.layers.0.self_attn.k_proj.bias"
        )
    with raises(SyncError, "at rank 1: model.layers.0.self_attn.k_proj.bias;"):
        sync.sync_weights(policy.tensors(), other, version=3)
    assert other.version == -1
    assert not any(t.any() for t in other.plain.values())


@contextmanager
def raises(kind: type[Exception], pattern: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        assert re.search(pattern, str(error)), error
    else:
        raise AssertionError(f"no {kind.__name__}")


@ranks(WORLD_SIZE)
@pytest.mark.parametrize(("name", "max_shard_bytes"), [("sharded", 30_000), ("single", 5 << 30)])
def test_an_untrained_model_is_exported_as_it_was_loaded(
    rank: int, folder: Path, name: str, max_shard_bytes: int
) -> None:
    source, target = folder / f"source of {name}", folder / name
    if rank == 0:
        save_checkpoint(make_model("qwen2", tied=True), source)
    dist.barrier()
    config = read_config(source)
    shape = ModelShape.from_hf_config(config)
    family = family_of(shape.model_type)
    side = megatron_side(family, shape, MegatronLayout(tp=2, pp=2))
    tensors = {name: torch.full(local.shape, torch.nan) for name, local in side[rank].items()}
    with open_hf_reader(source) as reader:
        load_shards(side[rank], tensors, reader.read)
    export_shards(side, tensors, source, target, torch.float32, max_shard_bytes)
    assert (target / "config.json").exists()  # on every rank when export returns
    assert (len(list(target.glob("*.safetensors"))) > 3) == (name == "sharded")
    if rank == 0:
        for path in source.iterdir():
            if path.suffix != ".safetensors":
                assert (target / path.name).read_bytes() == path.read_bytes()
        before, after = (AutoModelForCausalLM.from_pretrained(where).state_dict() for where in (source, target))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)


def make_groups(num_prompts: int) -> list[Group]:
    """Return samples with every kind of score: numbers, None for one reward, None for all."""
    groups = []
    for p in range(num_prompts):
        prompt = Prompt(id=100 - p, text=f"p{p}", token_ids=(p,), answer=str(p), extras={"row": p})
        samples = [
            Sample(
                prompt=prompt,
                index=i,
                response_ids=[7 * p + i + t for t in range(1 + (p + i) % 3)],
                rollout_logprobs=[-0.1 * (t + 1) / (p + 1) for t in range(1 + (p + i) % 3)],
                finish_reason="stop" if i % 2 else "length",
                spans=[Span(2, 0, 1), Span(3, 1, 1 + (p + i) % 3)][(p + i) % 3 == 0 :],
                scores={"accuracy": None if (p + i) % 3 == 0 else i / 3, "format": 1.0},
                verdicts={"accuracy": "timeout" if (p + i) % 3 == 0 else "correct", "format": "wrong"},
                reward=None if (p + i) % 3 == 0 else 0.1 * i - p,
                step_ends=list(range((p + i) % 3)),
                step_rewards=[0.3 * t - p for t in range((p + i) % 3)],
            )
            for i in range(3)
        ]
        groups.append(Group(prompt, samples))
    return groups


@ranks(WORLD_SIZE)
def test_gather_gives_every_rank_all_groups_in_order_with_missing_scores(rank: int, folder: Path) -> None:
    for num_prompts in (6, 4, 2, 1):  # from uneven shares to ranks without a share
        expected = make_groups(num_prompts)
        prompts = [g.prompt for g in expected]
        groups = {index: expected[index] for index in range(rank, num_prompts, WORLD_SIZE)}
        found = list(
            gather_samples(groups, dict(enumerate(prompts)), ["correct", "wrong", "timeout"], "first").values()
        )
        for sample in (s for g in expected for s in g.samples):  # every rank stores samples in this form
            sample.response_ids = array("i", sample.response_ids)
            sample.rollout_logprobs = array("f", sample.rollout_logprobs)
        assert found == expected
        assert all(s.prompt is g.prompt is p for g, p in zip(found, prompts, strict=True) for s in g.samples)
    others = gather_samples(groups, dict(enumerate(prompts)), ["correct"], "second")
    assert {s.verdicts["format"] for g in others.values() for s in g.samples} == {"other"}
