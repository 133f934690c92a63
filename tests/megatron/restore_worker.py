"""One rank of the restore tests: policies saved in one layout and restored in others, against policies that continued.

Two ranks save. One and three ranks restore the same checkpoints. Four ranks test how ranks share saving and restoring.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import iterated_replay
import torch
import torch.distributed as dist
from offload_worker import Trainee, make_config_of
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from grpo_mega.checkpoint_io.reader import open_reader
from grpo_mega.errors import ResumeError
from grpo_mega.megatron import compat
from grpo_mega.megatron import optimizer as optimizers
from grpo_mega.weights.boxes import region
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import ModelShape
from tests.helpers.models import make_config
from tests.helpers.ranks import run_cases

# Sizes that leave padding in every bucket.
SIZES = {
    "num_hidden_layers": 5,
    "hidden_size": 44,
    "intermediate_size": 76,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 304,
}
TIED, SEPARATE = SIZES | {"tie_word_embeddings": True}, SIZES | {"tie_word_embeddings": False}
# Dense layers first; routers with moving biases, and frozen routers.
BIASED = {
    "model_type": "deepseek_v3",
    "q_lora_rank": 10,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
FROZEN = {"model_type": "qwen3_moe"}
ROUTERS = {"deepseek_v3": "model.router.bias_update_rate=0.05", "qwen3_moe": "model.router.freeze=true"}
# elements; small, so a tiny model has as many buckets as a model of 40 million parameters
SMALL_BUCKET = 1500
OVERLAP = "overlap_grad_reduce=true,overlap_param_gather=true"

# By name: model, dtype, layout of the save; layouts of the restores by world size.
SAVED = {
    "tied": (TIED, "float32", "pp=2", {1: ("tp=1",), 2: ("dp=2", "cp=2"), 3: ("pp=3",)}),
    "context parallel": (TIED, "float32", "cp=2", {1: ("tp=1",), 3: ("cp=3",)}),
    "tied, interleaved": (TIED | {"num_hidden_layers": 4}, "bfloat16", "pp=2,vpp=2", {3: ("dp=3",)}),
    "buckets": (SEPARATE, "bfloat16", f"dp=2,{OVERLAP}", {1: ("tp=1",), 2: ("pp=2",), 3: (f"dp=3,{OVERLAP}",)}),
    "one bucket": (SEPARATE, "bfloat16", "pp=2", {}),
    "biased": (BIASED, "float32", "dp=2,ep=2", {1: ("tp=1",), 3: ("pp=3",)}),
    "frozen": (FROZEN, "bfloat16", "pp=2", {2: ("dp=2,ep=2",)}),
}
# Names whose optimizer state Megatron shifts without the patch. "one bucket" is saved correctly without the patch too.
SHIFTED = ("tied", "buckets")
OVERHEAD = 60_000  # bytes of torch's format per rank, about 1 kB per tensor
TOLERANCE = 1e-5  # for float32 metrics in another layout


@contextmanager
def small_buckets() -> Iterator[None]:
    real = optimizers.DistributedDataParallelConfig
    optimizers.DistributedDataParallelConfig = partial(real, bucket_size=SMALL_BUCKET)
    try:
        yield
    finally:
        optimizers.DistributedDataParallelConfig = real


def trainee_of(name: str, layout: str) -> Trainee:
    sizes, dtype, *_ = SAVED[name]
    routers = [ROUTERS[sizes["model_type"]]] if "model_type" in sizes else []
    with small_buckets():
        return Trainee(make_config_of(f"{layout} {dtype}", "batch.tokens_per_micro_batch=256", *routers), **sizes)


@contextmanager
def without_patch() -> Iterator[None]:
    """Save as Megatron does, without this package's patch."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    compat.save_optimizer_state_in_place()
    patched: Any = DistributedOptimizer.sharded_param_state_fully_reshardable
    DistributedOptimizer.sharded_param_state_fully_reshardable = patched.__wrapped__
    try:
        yield
    finally:
        DistributedOptimizer.sharded_param_state_fully_reshardable = patched


def check_saving(name: str, rank: int, folder: Path) -> None:
    """A policy restored in the layout of the save continues bit for bit, including moments."""
    layout = SAVED[name][2]
    trainee = trainee_of(name, layout)
    trainee.update(0)
    trainee.update(1)
    state = new_folder(folder, name)
    with without_patch() if name == "one bucket" else nullcontext():
        trainee.policy.save(state)
    expected = [trainee.record(trainee.update(step)) for step in (2, 3)]
    metrics: list[Any] = [m for record in expected for m in record[0]]
    assert metrics[-1]["grad_norm"] > 0
    if rank == 0:
        (folder / f"{name}.json").write_text(json.dumps(metrics))
    restored = trainee_of(name, layout)
    restored.policy.restore(state)
    assert [restored.record(restored.update(step)) for step in (2, 3)] == expected


def check_restoring(name: str, layout: str, rank: int, folder: Path) -> None:
    trainee = trainee_of(name, layout)
    trainee.policy.restore(folder / name)
    found = [m for step in (2, 3) for m in trainee.update(step)]
    expected = json.loads((folder / f"{name}.json").read_text())
    for ours, theirs in zip(found, expected, strict=True):
        for metric in ("loss/total", "grad_norm", "ratio/max", "kl/mean", "moe/load_mean"):
            a, b = ours.get(metric, 0.0), theirs.get(metric, 0.0)
            assert abs(a - b) <= TOLERANCE * max(0.1, abs(b)), (metric, a, b)


def check_restored_state(name: str, layout: str, rank: int, folder: Path) -> None:
    """A policy restored in another layout saves the same weights, master weights and moments, bit for bit.

    The next updates are not compared: in bf16 they depend on the layout and on the CPU's kernels.
    """
    trainee = trainee_of(name, layout)
    trainee.policy.restore(folder / name)
    again = new_folder(folder, f"{name} again, {layout}")
    trainee.policy.save(again)
    if rank == 0:
        found, expected = tensors_of(again), tensors_of(folder / name)
        assert found.keys() == expected.keys() and sum("exp_avg_sq" in key for key in found) > 5, sorted(found)
        differing = [key for key, tensor in expected.items() if not torch.equal(found[key], tensor)]
        assert not differing, differing


def tensors_of(state: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a checkpoint with torch's reader."""
    found: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(found, storage_reader=FileSystemReader(state), planner=planner, no_dist=True)
    return {key: value for key, value in flatten_state_dict(found)[0].items() if isinstance(value, torch.Tensor)}


def check_shifted(name: str, rank: int, folder: Path) -> None:
    """Save without compat's patch, as Megatron does: every rank refuses the optimizer state, but the weights can be
    read.

    If this test fails, Megatron saves the state correctly and the patch can go.
    """
    trainee = trainee_of(name, SAVED[name][2])
    trainee.update(0)
    state = new_folder(folder, f"{name}, shifted")
    with without_patch():
        trainee.policy.save(state)
    weights = {n: t.clone() for n, t in trainee.policy.tensors().items()}
    try:
        trainee_of(name, SAVED[name][2]).policy.restore(state)
    except ResumeError as error:
        line = str(error)
    else:
        raise AssertionError("a checkpoint with shifted optimizer state was restored")
    assert "\n" not in line and "grpo-mega export" in line and str(state) in line, line
    lines: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(lines, line)
    assert set(lines) == {line}
    shape = ModelShape.from_hf_config(make_config("qwen2", **SAVED[name][0]).to_dict())
    with open_reader(state, family_of("qwen2"), shape) as reader:
        for local, held in trainee.policy.shards.rank_shards(rank).items():
            for piece in held.pieces:
                assert torch.equal(weights[local][region(piece.offset, piece.box.shape)], reader.read(piece.box)), local


def check_shares(layout: str, rank: int, folder: Path) -> None:
    """Verify that data-parallel ranks share the work: no rank writes or reads more than its share plus one tensor.
    Together they write `state_bytes`, the announced size of a save."""
    trainee = Trainee(make_config_of(f"{layout} bfloat16", "batch.tokens_per_micro_batch=256"), **TIED)
    trainee.update(0)
    state = new_folder(folder, layout)
    trainee.policy.save(state)
    dist.barrier()
    of_rank = [[p.stat().st_size for p in state.glob(f"__{r}_*")] for r in range(dist.get_world_size())]
    written = [sum(sizes) for sizes in of_rank]
    num_replicas = dist.get_world_size() // trainee.config.layout.tp
    largest = 4 * TIED["vocab_size"] * TIED["hidden_size"] // trainee.config.layout.tp + OVERHEAD
    for group in range(trainee.config.layout.tp):
        shares = written[group :: trainee.config.layout.tp]
        assert max(shares) <= sum(shares) / num_replicas + largest, written
    needed = torch.tensor([trainee.policy.state_bytes])
    dist.all_reduce(needed)
    overhead = len(FileSystemReader(state).read_metadata().storage_data) * 1300
    assert 0.95 * int(needed) < sum(written) - overhead * 0.8 and sum(written) - overhead < 1.05 * int(needed), (
        written,
        needed,
    )

    read = [0]
    original = FileSystemReader.read_data

    def read_data(self: Any, plan: Any, planner: Any) -> Any:
        read[0] += sum(self.storage_data[item.storage_index].length for item in plan.items)
        return original(self, plan, planner)

    FileSystemReader.read_data = read_data
    try:
        restored = Trainee(trainee.config, **TIED)
        restored.policy.restore(state)
    finally:
        FileSystemReader.read_data = original
    everyone: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(everyone, read[0])
    for group in range(trainee.config.layout.tp):
        shares = everyone[group :: trainee.config.layout.tp]
        assert (
            min(shares) > 0 and max(shares) <= sum(written[group :: trainee.config.layout.tp]) / num_replicas + largest
        ), everyone
    assert restored.record(restored.update(1)) == trainee.record(trainee.update(1))
    if rank == 0:
        print(f"{layout}: written {written}, read {everyone}, largest tensor {largest - OVERHEAD}", flush=True)


def new_folder(folder: Path, name: str) -> Path:
    if dist.get_rank() == 0:
        (folder / name).mkdir()
    dist.barrier()
    return folder / name


def main() -> None:
    world_size = int(sys.argv[2])
    cases: dict[str, Callable[[int, Path], None]] = {}
    if world_size == 2:
        cases |= {f"{name}: saved": partial(check_saving, name) for name in SAVED}
        cases |= {f"{name}: shifted": partial(check_shifted, name) for name in SHIFTED}
    if world_size == 4:
        cases |= {f"{layout}: shares": partial(check_shares, layout) for layout in ("dp=4", "tp=2,dp=2")}
    for name, (_, dtype, _, layouts) in SAVED.items():
        check = check_restoring if dtype == "float32" else check_restored_state
        cases |= {f"{name}: {text}": partial(check, name, text) for text in layouts.get(world_size, ())}
    run_cases(cases | iterated_replay.cases(world_size))


if __name__ == "__main__":
    main()
