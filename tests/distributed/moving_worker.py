"""One of the four ranks of test_moving_between_ranks.py: execute, publish, export and gather, case after case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mapping import Tensors, assert_equal, blank, filled, megatron_side, numbered
from ranks import run_cases

from grpo_mega.errors import SyncError
from grpo_mega.rollout import exchange
from grpo_mega.sync.publish import WeightSync
from grpo_mega.types import Group, Prompt, Sample
from grpo_mega.weights.apply import execute, fill
from grpo_mega.weights.boxes import Holding
from grpo_mega.weights.export import export
from grpo_mega.weights.families import family_of
from grpo_mega.weights.hf_io import CheckpointReader
from grpo_mega.weights.layout import MegatronLayout, hf_holding
from grpo_mega.weights.plan import plan
from grpo_mega.weights.spec import ModelShape, read_config

WORLD_SIZE = 4
FAMILY = family_of("qwen2")
# vocab 11 leaves rank 1 of tp=2 with padding
SHAPE = ModelShape("qwen2", num_layers=4, hidden=6, ffn=8, num_heads=4, num_kv_heads=2, head_dim=3, vocab=11, tied=True)
TENSORS = numbered(FAMILY, SHAPE)
TRAINER = megatron_side(FAMILY, SHAPE, MegatronLayout(tp=2, pp=2))


@contextmanager
def recorded_sends() -> Iterator[list[tuple[int, int]]]:
    """(outgoing, incoming) bytes of each exchange of this rank."""
    sizes: list[tuple[int, int]] = []
    original = dist.all_to_all_single

    def record(incoming: torch.Tensor, outgoing: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append((outgoing.nbytes, incoming.nbytes))
        return original(incoming, outgoing, *args, **kwargs)

    dist.all_to_all_single = record
    try:
        yield sizes
    finally:
        dist.all_to_all_single = original


def check_execute(rank: int, targets: Sequence[Holding], bucket_bytes: int) -> None:
    transfers = plan(TRAINER, targets)
    sources, found = filled(TRAINER, TENSORS)[rank], blank(targets)[rank]
    with recorded_sends() as sizes:
        received = execute(transfers, sources, found, dtype=torch.int64, bucket_bytes=bucket_bytes)
    assert_equal([found], [filled(targets, TENSORS)[rank]])
    remote = [t for t in transfers if t.source_rank != t.target_rank]
    assert received == sum(incoming for _, incoming in sizes) == 8 * sum(t.size for t in remote if t.target_rank == rank)
    assert sum(outgoing for outgoing, _ in sizes) == 8 * sum(t.size for t in remote if t.source_rank == rank)
    limit = max(bucket_bytes, 8 * max((t.size for t in remote), default=0))
    assert all(size <= limit for pair in sizes for size in pair), (sizes, limit)
    if bucket_bytes < 8:
        assert len(sizes) == len(remote)


def reshards(rank: int, folder: Path) -> None:
    layouts = [MegatronLayout(pp=4), MegatronLayout(tp=2, dp=2), MegatronLayout(pp=2, vpp=2, dp=2, order="tp-pp-dp")]
    layouts.append(MegatronLayout(pp=3, layers_per_chunk=(1, 2, 1)))
    for layout in layouts:
        targets = megatron_side(FAMILY, SHAPE, layout)
        targets += [{}] * (WORLD_SIZE - len(targets))
        for bucket_bytes in (1, 200, 1 << 20):
            check_execute(rank, targets, bucket_bytes)


def fills_engines(rank: int, folder: Path) -> None:
    for holders in ((0, 1, 2, 3), (3,), (1, 2), ()):
        targets = [hf_holding(FAMILY, SHAPE) if r in holders else {} for r in range(WORLD_SIZE)]
        for bucket_bytes in (100, 1 << 20):
            check_execute(rank, targets, bucket_bytes)


def casts(rank: int, folder: Path) -> None:
    """float32 to bfloat16, on the way and on the rank itself."""
    values = {name: torch.linspace(-1, 1, t.numel()).reshape(t.shape) / 3 for name, t in TENSORS.items()}
    sources = {name: torch.zeros(local.shape) for name, local in TRAINER[rank].items()}
    fill(TRAINER[rank], sources, lambda box: values[box.tensor][tuple(map(slice, box.start, box.stop))])
    found = {name: torch.zeros(t.shape, dtype=torch.bfloat16) for name, t in values.items()}
    execute(plan(TRAINER, [hf_holding(FAMILY, SHAPE)] * WORLD_SIZE), sources, found, dtype=torch.bfloat16, bucket_bytes=333)
    assert_equal([found], [{name: t.bfloat16() for name, t in values.items()}])


def works_in_a_group(rank: int, folder: Path) -> None:
    """Ranks 1 and 3 alone; the plan counts the group's ranks."""
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return
    sources, targets = (megatron_side(FAMILY, SHAPE, MegatronLayout(**{axis: 2})) for axis in ("tp", "pp"))
    place = dist.get_rank(group)
    found = blank(targets)[place]
    execute(plan(sources, targets), filled(sources, TENSORS)[place], found, dtype=torch.int64, group=group, bucket_bytes=64)
    assert_equal([found], [filled(targets, TENSORS)[place]])


class Store:
    """What a sync sees of a policy or an engine."""

    def __init__(self, tensors: Tensors) -> None:
        self.version = -1
        self._tensors = tensors

    def tensors(self) -> Tensors:
        return self._tensors


def publishes(rank: int, folder: Path) -> None:
    engines = [hf_holding(FAMILY, SHAPE)] * WORLD_SIZE
    sync = WeightSync(TRAINER, engines, torch.int64)
    policy, engine = Store(filled(TRAINER, TENSORS)[rank]), Store(blank(engines)[rank])
    for version, factor in ((0, 1), (1, -3)):
        for t in policy.tensors().values():
            t *= factor
        assert sync.publish(policy, engine, version=version) > 0
        assert engine.version == version
        assert_equal([engine.tensors()], [{name: t * factor for name, t in TENSORS.items()}])
    renamed = Store({f"{name}_scale" if "bias" in name else name: t for name, t in blank(engines)[rank].items()})
    try:
        sync.publish(policy, renamed, version=2)
    except SyncError as error:
        assert "model.layers.0.self_attn.k_proj.bias" in str(error)
    else:
        raise AssertionError("an engine with other names was filled")
    assert renamed.version == -1
    assert not any(t.any() for t in renamed.tensors().values())


def exports(rank: int, folder: Path) -> None:
    """Loads FOLDER/source in a layout and writes it again; the test compares. Small shards, then one."""
    source = folder / "source"
    config = read_config(source)
    shape = ModelShape.from_hf_config(config)
    family = family_of(shape.model_type)
    side = megatron_side(family, shape, MegatronLayout(tp=2, pp=2))
    tensors = {name: torch.full(local.shape, torch.nan) for name, local in side[rank].items()}
    with CheckpointReader(source) as reader:
        fill(side[rank], tensors, reader.read)
    for name, limit in (("sharded", 30_000), ("single", 5 << 30)):
        export(
            side,
            tensors,
            family=family,
            shape=shape,
            dtype=torch.float32,
            source_folder=source,
            folder=folder / name,
            max_shard_bytes=limit,
        )
        assert (folder / name / "config.json").exists()  # on every rank, as soon as export returns


def make_groups(num_prompts: int) -> list[Group]:
    """Samples with every kind of score: numbers, None for one reward, None for all."""
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
                policy_version=3,
                scores={"accuracy": None if (p + i) % 3 == 0 else i / 3, "format": 1.0},
                verdicts={"accuracy": "timeout" if (p + i) % 3 == 0 else "correct", "format": "wrong"},
                reward=None if (p + i) % 3 == 0 else 0.1 * i - p,
            )
            for i in range(3)
        ]
        groups.append(Group(prompt, samples))
    return groups


def gathers(rank: int, folder: Path) -> None:
    for num_prompts in (6, 4, 2, 1):  # from uneven shares to ranks with none
        expected = make_groups(num_prompts)
        prompts = [g.prompt for g in expected]
        mine = exchange.share(prompts, rank, WORLD_SIZE)
        groups = [next(g for g in expected if g.prompt is prompt) for prompt in mine]
        found = exchange.gather(groups, prompts, ["accuracy", "format"], ["correct", "wrong", "timeout"])
        assert found == expected, (found, expected)
        assert all(s.prompt is g.prompt is p for g, p in zip(found, prompts, strict=True) for s in g.samples)
    others = exchange.gather(groups, prompts, ["accuracy", "format"], ["correct"])
    assert {s.verdicts["format"] for g in others for s in g.samples} == {"other"}


if __name__ == "__main__":
    run_cases({f.__name__: f for f in (reshards, fills_engines, casts, works_in_a_group, publishes, exports, gathers)})
