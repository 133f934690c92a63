"""FP8 block weights from trainer ranks to engine ranks, compared with slices of naively quantized whole tensors."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from grpo_mega.errors import SyncError
from grpo_mega.rollout.sglang import loader
from grpo_mega.rollout.sglang.buckets import padded, parameters
from grpo_mega.trainer.colocation import WeightSync
from grpo_mega.weights.apply import (
    Bucket,
    Entry,
    load_shards,
    mismatched_blocks,
    mismatched_tensors,
    scales_name,
    subtensor,
    write_entries,
)
from grpo_mega.weights.boxes import Box, RankShards, region
from grpo_mega.weights.families import family_of
from grpo_mega.weights.layout import (
    EngineLayout,
    MegatronLayout,
    ShardLayout,
    engine_shards,
    hf_shards,
    megatron_shards,
)
from grpo_mega.weights.plan import plan_transfers
from grpo_mega.weights.spec import ModelShape
from tests.helpers.mapping import Tensors, slice_of
from tests.helpers.ranks import ranks
from tests.oracles import fp8_blocks as oracle

WORLD_SIZE = 4
E4M3 = torch.float8_e4m3fn
DENSE = ModelShape("qwen2", 2, hidden=256, ffn=512, num_heads=4, num_kv_heads=2, head_dim=128, vocab=70, tied=True)
MIXTURE = replace(DENSE, model_type="qwen3_moe", hidden=128, tied=False, num_experts=4, moe_ffn=256)
# Partial blocks, and byte counts that no other dtype divides, so later entries start at odd addresses.
ODD = ModelShape("qwen2", 2, hidden=131, ffn=77, num_heads=2, num_kv_heads=1, head_dim=128, vocab=33, tied=False)
BUCKETS = (1 << 16, 1 << 22)


@dataclass(frozen=True)
class Case:
    shape: ModelShape
    trainer: MegatronLayout
    targets: Callable[[bool], ShardLayout]  # argument: if tensors are quantized
    dtype: torch.dtype  # dtype of unquantized tensors, and of an engine without blocks

    @property
    def weights(self) -> Tensors:
        return weights_of(self.shape)


@cache
def weights_of(shape: ModelShape) -> Tensors:
    """Return float32 checkpoint weights whose blocks differ in magnitude."""
    random = torch.Generator().manual_seed(7)
    shapes = family_of(shape.model_type).hf_tensors(shape)
    made = {name: torch.randn(size, generator=random) for name, size in shapes.items()}
    for tensor in made.values():
        tensor *= torch.linspace(1e-3, 1, tensor.numel()).view(tensor.shape)
    return made


def to_engines(shape: ModelShape, layout: EngineLayout) -> Callable[[bool], ShardLayout]:
    family = family_of(shape.model_type)
    return lambda quantise: engine_shards(family, shape, layout, WORLD_SIZE, quantise=quantise)


def to_replicas(shape: ModelShape) -> Callable[[bool], ShardLayout]:
    return lambda quantise: hf_shards(family_of(shape.model_type), shape, WORLD_SIZE, quantise=quantise)


def all_cases() -> Iterator[tuple[str, Case]]:
    trainers = {"tp2 pp2": {"tp": 2, "pp": 2}, "tp4": {"tp": 4}, "pp2 vpp1 dp2": {"pp": 2, "dp": 2}}
    engines = {"tp1": EngineLayout(1, 4), "tp2": EngineLayout(2, 2), "one of tp4": EngineLayout(4, 1)}
    for number, ((source, sizes), (target, layout)) in enumerate(product(trainers.items(), engines.items())):
        dtype = (torch.bfloat16, torch.float32)[number % 2]
        yield f"dense {source} to {target}", Case(DENSE, MegatronLayout(**sizes), to_engines(DENSE, layout), dtype)
    spread, apart = MegatronLayout(dp=4, ep=2), MegatronLayout(tp=2, dp=2, ep=2, etp=2)
    yield "experts dp4 ep2 to tp2", Case(MIXTURE, spread, to_engines(MIXTURE, EngineLayout(2, 2)), torch.bfloat16)
    yield "experts tp2 ep2 to tp1", Case(MIXTURE, apart, to_engines(MIXTURE, EngineLayout(1, 3)), torch.bfloat16)
    yield "dense tp2 pp2 to replicas", Case(DENSE, MegatronLayout(tp=2, pp=2), to_replicas(DENSE), torch.bfloat16)
    yield "odd pp2 to replicas", Case(ODD, MegatronLayout(pp=2), to_replicas(ODD), torch.bfloat16)
    yield "odd pp2 to float32 replicas", Case(ODD, MegatronLayout(pp=2), to_replicas(ODD), torch.float32)


class Quantised:
    """Whole tensors, quantized by the oracle: all matrices except embedding, output layer and router."""

    def __init__(self, weights: Tensors) -> None:
        others = ("model.embed_tokens.weight", "lm_head.weight", ".mlp.gate.weight")
        self.of = {n: oracle.quantise(t) for n, t in weights.items() if t.ndim == 2 and not n.endswith(others)}

    def values(self, box: Box) -> torch.Tensor:
        return self.of[box.tensor][0][region(box.start, box.shape)]

    def scales(self, box: Box) -> torch.Tensor:
        start = tuple(n // 128 for n in box.start)
        return self.of[box.tensor][1][region(start, tuple(-(-n // 128) for n in box.shape))]

    def meant(self, box: Box, dtype: torch.dtype) -> torch.Tensor:
        return oracle.dequantise(self.values(box), self.scales(box), dtype)


@cache
def quantised_of(shape: ModelShape) -> Quantised:
    return Quantised(weights_of(shape))


class Engine:
    """Tensors that receive weights. `keeps_blocks`: like a server on a GPU. `flip` may change one byte before a
    load.
    """

    def __init__(self, side: ShardLayout, rank: int, dtype: torch.dtype, *, keeps_blocks: bool) -> None:
        self.holding, self.version, self.flipped = side.rank_shards(rank), -1, ""
        self.quantised = side.quantised_shards(rank)
        self.tensors = {
            name: torch.zeros(t.shape, dtype=E4M3 if keeps_blocks and name in self.quantised else dtype)
            for name, t in self.holding.items()
        }
        for name, tensor in self.quantised.items() if keeps_blocks else ():
            self.tensors[scales_name(name)] = torch.full([-(-n // 128) for n in tensor.shape], torch.nan)
        self.flip: Callable[[Bucket, Entry], int] | None = (
            None  # selects the byte to flip, in the first quantized entry
        )
        self._entries, self._problems = list[Entry](), list[str]()

    def start_update(self) -> list[str]:
        self._entries, self._problems = [], []
        return []

    def allocate(self, index: int, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def load(self, bucket: Bucket) -> None:
        for entry in bucket.entries:
            if self.flip is not None and entry.is_quantised:
                bucket.values[self.flip(bucket, entry)] ^= 1
                self.flipped, self.flip = entry.target, None
        write_entries(bucket.entries, bucket.values, self.tensors, bucket.dtype)
        self._entries += bucket.entries
        self._problems += mismatched_blocks(bucket.entries, bucket.values, self.tensors)

    def end_update(self, version: int) -> list[str]:
        problems = self._problems + mismatched_tensors(self._entries, self.tensors)
        self.version = self.version if problems else version
        return problems


class Policy:
    def __init__(self, holding: RankShards, weights: Tensors) -> None:
        self._tensors = {name: torch.zeros(local.shape) for name, local in holding.items()}
        load_shards(holding, self._tensors, lambda box: slice_of(weights, box))

    def tensors(self) -> Tensors:
        return self._tensors


def meet(phase: str, mine: list[str]) -> list[list[str]]:
    found: list[list[str]] = [[]] * WORLD_SIZE
    dist.all_gather_object(found, mine)
    return found


def parts_of(case: Case, rank: int) -> tuple[ShardLayout, ShardLayout, ShardLayout, Policy]:
    """Return the trainer's layout, the quantized and the plain targets, and this rank's policy."""
    trainer = megatron_shards(family_of(case.shape.model_type), case.shape, case.trainer)
    holding = trainer.rank_shards(rank) if rank < trainer.world_size else {}
    return trainer, case.targets(True), case.targets(False), Policy(holding, case.weights)


@ranks(WORLD_SIZE)
@pytest.mark.parametrize("name", [name for name, _ in all_cases()])
def test_every_layout_receives_naively_quantized_slices_in_half_the_bytes(rank: int, folder: Path, name: str) -> None:
    case = dict(all_cases())[name]
    trainer, targets, plain, policy = parts_of(case, rank)
    quantised, made = quantised_of(case.shape), plan_transfers(trainer, targets, ranks_per_node=2)
    for bucket_bytes, keeps_blocks in product(BUCKETS, (True, False)):
        engine = Engine(targets, rank, case.dtype, keeps_blocks=keeps_blocks)
        received = WeightSync(made, case.dtype, bucket_bytes, meet).sync_weights(policy.tensors(), engine, version=3)
        assert engine.version == 3
        assert received == made.traffic(case.dtype.itemsize).received[rank]
        check_tensors(case, engine, quantised, keeps_blocks=keeps_blocks)
    assert len(made.rounds(BUCKETS[0], case.dtype.itemsize)) > 4
    before, after = plan_transfers(trainer, plain, ranks_per_node=2).traffic(2).moved, made.traffic(2).moved
    assert not before or 0.5 < after / before < (0.57 if case.shape is ODD else 0.53), (after, before)


def check_tensors(case: Case, engine: Engine, quantised: Quantised, *, keeps_blocks: bool) -> None:
    """Compare bit for bit. Padding stays 0."""
    for name, local in engine.holding.items():
        found = engine.tensors[name]
        expected = torch.zeros(local.shape, dtype=found.dtype)
        for piece in local.pieces:
            place = expected[region(piece.offset, piece.box.shape)]
            if name not in engine.quantised:
                place.copy_(slice_of(case.weights, piece.box).to(case.dtype))
            elif keeps_blocks:
                place.copy_(quantised.values(piece.box))
                scales = quantised.scales(piece.box)
                offset = tuple(n // 128 for n in piece.offset)
                assert torch.equal(engine.tensors[scales_name(name)][region(offset, tuple(scales.shape))], scales), name
            else:
                place.copy_(quantised.meant(piece.box, case.dtype))
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), name
        assert name not in engine.quantised or found.view(torch.uint8).any()
    assert not any(t.isnan().any() for t in engine.tensors.values() if t.dtype != E4M3), "a scale was not sent"


@ranks(WORLD_SIZE)
def test_a_changed_byte_of_a_value_or_scale_is_an_error_with_its_tensor(rank: int, folder: Path) -> None:
    """Change a byte of a value and of a scale, in engines with and without blocks. The next sync repairs it."""
    case = dict(all_cases())["dense tp2 pp2 to tp2"]
    trainer, targets, _, policy = parts_of(case, rank)
    sync = WeightSync(plan_transfers(trainer, targets, ranks_per_node=2), case.dtype, BUCKETS[0], meet)
    quantised = quantised_of(case.shape)
    flips: list[Callable[[Bucket, Entry], int]] = [
        lambda bucket, entry: entry.start + 5,
        lambda bucket, entry: entry.start + math.prod(entry.shape) + 1,
    ]
    for keeps_blocks, flip in product((True, False), flips):
        engine = Engine(targets, rank, case.dtype, keeps_blocks=keeps_blocks)
        engine.flip = flip if rank == 2 else None
        with raises(SyncError, "the engine does not have policy version 4, at rank 2: model.*proj.weight;") as said:
            sync.sync_weights(policy.tensors(), engine, version=4)
        assert rank != 2 or engine.flipped in said[0]
        assert engine.version == (-1 if rank == 2 else 4)
        sync.sync_weights(policy.tensors(), engine, version=5)
        check_tensors(case, engine, quantised, keeps_blocks=keeps_blocks)


@ranks(WORLD_SIZE)
def test_the_servers_loader_keeps_blocks_and_reports_differences(rank: int, folder: Path) -> None:
    """Handle requests like a server's process: a model with SGLang's names, and experts in one parameter."""
    tempfile.tempdir = str(folder)  # folder of the loader's reports
    for name in ("dense tp4 to tp2", "experts dp4 ep2 to tp2"):
        case = dict(all_cases())[name]
        trainer, targets, _, policy = parts_of(case, rank)
        engine = ServedEngine(targets, rank, case.dtype)
        sync = WeightSync(plan_transfers(trainer, targets, ranks_per_node=2), case.dtype, BUCKETS[0], meet)
        sync.sync_weights(policy.tensors(), engine, version=6)
        plain = Engine(targets, rank, case.dtype, keeps_blocks=True)
        plain.tensors = {n: subtensor(engine.parameters, n) for n in plain.tensors}
        check_tensors(case, plain, quantised_of(case.shape), keeps_blocks=True)
        engine.flip = lambda bucket, entry: entry.start
        with raises(SyncError, "at rank 0: model.*(weight|w13_weight.*|w2_weight.*);"):
            sync.sync_weights(policy.tensors(), engine, version=7)


class ServedEngine(Engine):
    """A module with the parameters of a server on a GPU, filled by the server's loader."""

    def __init__(self, side: ShardLayout, rank: int, dtype: torch.dtype) -> None:
        super().__init__(side, rank, dtype, keeps_blocks=True)
        self.model, self._rank = torch.nn.Module(), rank
        self._wanted = parameters(self.holding, self.quantised, dtype)
        for name, (shape, kind) in self._wanted.items():
            *path, leaf = name.split(".")
            module = self.model
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, torch.nn.Module())
                module = module.get_submodule(part)
            empty = torch.zeros(shape, dtype=getattr(torch, kind.removeprefix("torch.")))
            module.register_parameter(leaf, torch.nn.Parameter(empty, requires_grad=False))
        self.parameters = dict(self.model.named_parameters())

    def ask(self, values: torch.Tensor, **request: Any) -> list[str]:
        text = json.dumps(request | {"number": 1, "tp_rank": self._rank})
        loader.load(self.model, [(text, values)])
        report = json.loads(loader.report_path(Path(tempfile.gettempdir()), 1, self._rank).read_text())
        assert not report["has_failed"], report
        found: list[str] = report["problems"]
        return found

    def start_update(self) -> list[str]:
        self._entries, self._problems = [], []
        nothing = torch.empty(0)
        some = next(name for name in self._wanted if name.endswith("_scale_inv"))
        other = self._wanted | {some: ((3, 3), "torch.int32")}
        [problem] = self.ask(nothing, action="check", parameters=other, padded=[])
        assert some in problem and "(3, 3) of torch.int32; " in problem
        return self.ask(nothing, action="check", parameters=self._wanted, padded=padded(self.holding))

    def load(self, bucket: Bucket) -> None:
        for entry in bucket.entries:
            if self.flip is not None and entry.is_quantised:
                bucket.values[self.flip(bucket, entry)] ^= 1
                self.flip = None
        size, dtype = bucket.values.numel(), str(bucket.dtype)
        self._problems += self.ask(
            bucket.values,
            action="fill",
            slot=0,
            opens=True,
            entries=bucket.entries,
            used_bytes=size,
            dtype=dtype,
            verify=True,
        )
        self._entries += [entry for entry in bucket.entries if not entry.is_quantised]

    def end_update(self, version: int) -> list[str]:
        return self._problems + self.ask(torch.empty(0), action="verify", entries=self._entries)


@ranks(WORLD_SIZE)
def test_without_verification_the_same_arrives(rank: int, folder: Path) -> None:
    case = replace(dict(all_cases())["dense tp4 to tp2"], dtype=torch.bfloat16)
    trainer, targets, _, policy = parts_of(case, rank)
    made = plan_transfers(trainer, targets, ranks_per_node=2)
    engine = Engine(targets, rank, case.dtype, keeps_blocks=True)
    engine.end_update = lambda version: []  # type: ignore[method-assign]
    received = WeightSync(made, case.dtype, BUCKETS[1], meet, verify=False).sync_weights(
        policy.tensors(), engine, version=8
    )
    assert received == made.traffic(2).received[rank]
    check_tensors(case, engine, quantised_of(case.shape), keeps_blocks=True)


@contextmanager
def raises(kind: type[Exception], pattern: str) -> Iterator[list[str]]:
    said: list[str] = []
    try:
        yield said
    except kind as error:
        said.append(str(error))
        assert re.search(pattern, str(error)), error
    else:
        raise AssertionError(f"no {kind.__name__}")
