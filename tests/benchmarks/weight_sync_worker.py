"""One of four ranks of test_weight_sync.py: the measured paths of the benchmark in several layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from grpo_mega.errors import SyncError
from grpo_mega.weights.layout import EngineLayout, MegatronLayout
from grpo_mega.weights.spec import ModelShape
from tests.helpers.ranks import run_cases
from tools.benchmarks.weight_sync.dry import Spec, dry_run
from tools.benchmarks.weight_sync.rank import Bench, Engine, measure, meet

LLAMA = ModelShape(
    "llama", num_layers=8, hidden=12, ffn=24, num_heads=8, num_kv_heads=2, head_dim=4, vocab=128, tied=False
)
QWEN = ModelShape(
    "qwen2", num_layers=5, hidden=12, ffn=24, num_heads=4, num_kv_heads=1, head_dim=4, vocab=101, tied=True
)
MIXTURE = replace(QWEN, model_type="qwen3_moe", num_experts=4, moe_ffn=8)

LAYOUTS = {
    "tp2 pp2 to tp2": (LLAMA, MegatronLayout(tp=2, pp=2), EngineLayout(2, 2)),
    "tp4 to tp1": (LLAMA, MegatronLayout(tp=4), EngineLayout(1, 4)),
    "pp4 vpp2 to tp2": (LLAMA, MegatronLayout(pp=4, vpp=2), EngineLayout(2, 2)),
    "pp2 dp2 near to one engine of tp4": (LLAMA, MegatronLayout(pp=2, dp=2, order="tp-pp-dp"), EngineLayout(4, 1)),
    "dp4 to tp2": (LLAMA, MegatronLayout(dp=4), EngineLayout(2, 2)),
    "ep4 to tp4": (replace(MIXTURE, tied=False), MegatronLayout(dp=4, ep=4), EngineLayout(4, 1)),
    "pp2 ep2 to tp1": (replace(MIXTURE, tied=False), MegatronLayout(pp=2, dp=2, ep=2), EngineLayout(1, 3)),
    "padded and tied, tp2 pp2 to tp4": (QWEN, MegatronLayout(tp=2, pp=2), EngineLayout(4, 1)),
    "padded and tied, tp2 ep2 to tp2": (MIXTURE, MegatronLayout(tp=2, dp=2, ep=2, etp=2), EngineLayout(2, 2)),
}


def fills_alike(name: str, bucket_bytes: int, rank: int, folder: Path) -> None:
    shape, source, target = LAYOUTS[name]
    spec = Spec(shape, source, target, 2, bucket_bytes)
    found, planned = measure(spec, repeat=1), dry_run(spec)
    assert found["problems"] == []
    assert all(len(rounds) == 1 and rounds[0]["seconds"] > 0 for rounds in found["rounds"].values())
    moved = {path: rounds[0]["bytes"] for path, rounds in found["rounds"].items()}
    assert moved["sync"] == moved["unproven"] == planned.lower_bound == planned.traffic.moved
    gathered, least = moved["full_gather"], planned.full_gather_bytes
    # Shards are padded, and a rank also receives weights that it has but does not send.
    assert least <= gathered <= 2 * least, (gathered, least)


class Forgetful(Engine):
    """An engine that loses its loaded weights before the check."""

    def end_update(self, version: int) -> list[str]:
        for tensor in self.tensors.values():
            tensor.zero_()
        return super().end_update(version)


def tells_a_difference(rank: int, folder: Path) -> None:
    """Flip a bit of a weight on the last rank between two syncs. Only the second one loads it."""
    bench = Bench(Spec(LLAMA, MegatronLayout(tp=2, pp=2), EngineLayout(2, 2), 2, 4096))
    bench.sync()
    if rank == 3:
        bench.weights["chunk0.decoder.layers.0.mlp.linear_fc2.weight"].view(torch.int16)[5, 5] ^= 1
    name = "model.layers.4.mlp.down_proj.weight"
    assert bench.unlike_a_direct_fill() == []
    bench.sync()
    assert meet("", bench.unlike_a_direct_fill()) == [[], [name], [], [name]]
    bench.engine = Forgetful(bench.wanted)
    with pytest.raises(SyncError, match="down_proj"):  # verification is part of the measured time
        bench.sync()


def makes_contents_in_which_no_two_places_are_alike(rank: int, folder: Path) -> None:
    """Check that contents differ between tensors and places. Otherwise a wrong slice would be undetected."""
    bench = Bench(Spec(LLAMA, MegatronLayout(dp=4), EngineLayout(), 8, 1 << 20))
    tensors = bench.weights
    values = torch.cat([t.view(torch.int16).flatten() for t in tensors.values()])
    assert len(values.unique()) > 0.5 * min(len(values), 1 << 15)
    assert all(t.isfinite().all() and t.abs().max() < 2 for t in tensors.values())


if __name__ == "__main__":
    cases: dict[str, Callable[[int, Path], None]] = {name: partial(fills_alike, name, 3000) for name in LAYOUTS}
    cases["tp2 pp2 to tp2 in one bucket"] = partial(fills_alike, "tp2 pp2 to tp2", 1 << 20)
    cases |= {"difference": tells_a_difference, "contents": makes_contents_in_which_no_two_places_are_alike}
    run_cases(cases)
