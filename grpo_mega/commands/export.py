"""Write a checkpoint of a run as a Hugging Face folder: its weights alone, of any layout, streamed.

No model is built and no optimizer state read, so that a checkpoint whose optimizer state is refused can be exported too.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from grpo_mega.config import Config
from grpo_mega.formats.checkpoint_files import STATE, find, read_manifest
from grpo_mega.formats.convert import convert_mcore_to_hf
from grpo_mega.run.checkpoints import verify


def export_checkpoint(config: Config, checkpoints: Path, step: int | None, out: Path) -> str:
    """Return a line that says what was written. Raises ResumeError if there is no such checkpoint or it is damaged."""
    found = find(checkpoints, step)
    manifest = read_manifest(found)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        verify(found, manifest, rank=0, world_size=1)
    finally:
        dist.destroy_process_group()
    convert_mcore_to_hf(found / STATE, out, config_folder=config.model.path, show_progress=config.log.progress)
    return f"policy after step {manifest.step} written to {out}"
