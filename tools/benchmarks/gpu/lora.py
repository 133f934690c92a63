"""Measure a GRPO step that trains an adapter of rank 16 on all linear layers: the run of step.py with model.lora.

Compare with the section step: updates compute no weight gradients of the base, and a sync sends only the adapter.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from grpo_mega.yaml_text import dump_yaml
from tools.benchmarks import harness
from tools.benchmarks.gpu import step
from tools.benchmarks.gpu.rank import Figure, Options

NAMES = ("whole step", "update", "sync")


def run(options: Options) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="bench_gpu_") as name:
        folder = Path(name)
        settings = step.settings_of(options, folder)
        settings["model"]["lora"] = {"rank": 16}
        step.write_inputs(folder, "tiny" if options.tiny else "qwen2.5-1.5b")
        (folder / "config.yaml").write_text(dump_yaml(settings))
        rows = harness.train(folder / "config.yaml", folder / "run", {})
    found = [replace(one, section="lora") for one in step.figures(rows, settings) if one.name in NAMES]
    peak = max(row.get("memory/update_gib", 0.0) for row in rows)
    return [*found, Figure("lora", found[0].case, "peak memory of the update", peak, "GiB")]
