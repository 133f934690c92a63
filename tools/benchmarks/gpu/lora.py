"""Measure a GRPO step that trains an adapter of rank 16 on all linear layers: the run of step.py with model.lora.

Compare with the section step: updates compute no weight gradients of the base, and a sync sends only the adapter.
"""

from __future__ import annotations

from dataclasses import replace

from tools.benchmarks.gpu import step
from tools.benchmarks.gpu.rank import Figure, Options

NAMES = ("whole step", "update", "sync")


def run(options: Options) -> list[Figure]:
    rows, settings = step.measured(options, lora={"rank": 16})
    found = [replace(one, section="lora") for one in step.figures(rows, settings) if one.name in NAMES]
    peak = max(row.get("memory/update_gib", 0.0) for row in rows)
    return [*found, Figure("lora", found[0].case, "peak memory of the update", peak, "GiB")]
