"""Writes a checkpoint of a run as a Hugging Face folder. Any layout's checkpoint loads into the single rank that does it."""

from __future__ import annotations

from pathlib import Path

from grpo_mega import job as jobs
from grpo_mega.checkpoint_files import STATE, find, read_manifest
from grpo_mega.checkpoints import verify
from grpo_mega.config import Config
from grpo_mega.megatron import runtime as runtimes


def export_checkpoint(config: Config, checkpoints: Path, step: int | None, out: Path) -> str:
    """Returns a line that says what was written. Raises ResumeError if there is no such checkpoint or it is damaged."""
    found = find(checkpoints, step)
    manifest = read_manifest(found)
    model = jobs.read_model(config)
    runtime = runtimes.start(config)
    try:
        verify(found, manifest, runtime.rank, runtime.layout.world_size)
        policy = jobs.build_policy(config, model, runtime)
        policy.restore(found / STATE)
        jobs.export_policy(policy, model, out)
    finally:
        runtimes.stop()
    return f"policy after step {manifest.step} written to {out}"
