"""Measure a weight sync and a full gather on processes of this machine.

`measure` starts one gloo process (rank.py) for each rank of the trainer. Both paths run there in turn. Each process counts the
bytes that arrive from other ranks.
"""

from __future__ import annotations

import json
import os
import pickle
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from grpo_mega.distributed.launch import run_ranks
from grpo_mega.errors import ConfigError, UserError
from grpo_mega.weights.families import family_of
from grpo_mega.weights.layout import engine_shards, megatron_shards
from tools.benchmarks import harness
from tools.benchmarks.weight_sync.dry import ITEM_BYTES, Spec, num_elements

WORKER = Path(__file__).with_name("rank.py")
PROCESS_BYTES = 400 << 20  # memory of a rank without weights
BUFFERS = 6  # buckets that a rank holds for both paths together


@dataclass(frozen=True)
class Measured:
    """The figures of each round by path: sync, unproven (without checksums at either end) and full_gather."""

    rounds: dict[str, list[harness.Figures]]
    problems: list[str]  # tensors that the paths filled differently

    @property
    def sync_bytes(self) -> int:
        [found] = {int(one["bytes"]) for path in ("sync", "unproven") for one in self.rounds[path]}
        return found

    @property
    def full_gather_bytes(self) -> int:
        """The bytes include padding, and weights that a rank already had."""
        [found] = {int(one["bytes"]) for one in self.rounds["full_gather"]}
        return found

    def median(self, path: str, figure: str = "seconds") -> float:
        return statistics.median(one[figure] for one in self.rounds[path])

    def spread(self, path: str) -> str:
        seconds = [one["seconds"] for one in self.rounds[path]]
        return f"{self.median(path):.3f} ({min(seconds):.3f} to {max(seconds):.3f})"


class RanksFailed(UserError):
    """The ranks failed and have printed the reason."""


def check_spec(spec: Spec) -> None:
    """Raise ConfigError if this machine cannot run the sync."""
    ranks, engine_ranks = spec.source.world_size, spec.target.world_size
    if engine_ranks > ranks:
        raise ConfigError(
            f"--target needs {engine_ranks} ranks and --source has {ranks}; measured engines share the trainer's, "
            "so use fewer engines, or --dry"
        )
    needed, free = bytes_needed(spec), free_bytes()
    if needed > free:
        raise ConfigError(
            f"{ranks} ranks with these weights need {needed / 1e9:.0f} GB, and {free / 1e9:.0f} GB of memory are free; "
            "use fewer --layers, or --dry"
        )


def bytes_needed(spec: Spec) -> int:
    family, ranks = family_of(spec.shape.model_type), spec.source.world_size
    trainer = megatron_shards(family, spec.shape, spec.source)
    engines = engine_shards(family, spec.shape, spec.target, ranks)
    weights = sum(map(num_elements, trainer.blocks)) + 2 * sum(map(num_elements, engines.blocks))
    return ITEM_BYTES * weights + ranks * (PROCESS_BYTES + BUFFERS * spec.bucket_bytes)


def free_bytes() -> int:
    """Return the available memory, including file caches if the system reports it; otherwise the total memory."""
    try:
        [line] = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable")]
        return int(line.split()[1]) << 10
    except (OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def measure(spec: Spec, repeat: int) -> Measured:
    """Start the ranks and return their figures. Raise RanksFailed."""
    with tempfile.TemporaryDirectory(prefix="weight_sync_") as name:
        folder = Path(name)
        (folder / "spec.pkl").write_bytes(pickle.dumps(spec))
        code = run_ranks([sys.executable, str(WORKER), str(folder), str(repeat)], spec.source.world_size, folder)
        if code:
            raise RanksFailed(f"the ranks ended with code {code}; try fewer --layers or ranks")
        return Measured(**json.loads((folder / "result.json").read_text()))
