"""Write the policy of a run's checkpoint as a Hugging Face folder: its weights alone, from any layout, streamed.

No model is built and no optimizer state read, so that a checkpoint whose optimizer state is refused can be exported too. A
finished run without checkpoints has such a folder, which is copied.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from grpo_mega import config as configs
from grpo_mega.errors import ConfigError
from grpo_mega.formats.checkpoint_files import STATE, find, find_finished, read_manifest, without_checkpoints
from grpo_mega.paths import CHECKPOINTS, CONFIG_FILE


def export(run_dir: Path, out: Path, step: int | None) -> None:
    """Write `out` and print a line. Raises ResumeError if there is no such checkpoint or it is damaged."""
    if out.exists():
        raise ConfigError(f"{out} exists; name a folder that does not")
    config = configs.load(run_dir / CONFIG_FILE)
    finished = find_finished(run_dir, step)
    if finished is not None:
        print(f"grpo-mega: note: {without_checkpoints(finished)}", file=sys.stderr, flush=True)
        _copy_folder(finished, out)
        print(f"policy of {finished} written to {out}")
        return
    checkpoint = find(run_dir / CHECKPOINTS, step)
    manifest = read_manifest(checkpoint)
    import torch.distributed as dist  # only where a checkpoint is to be read

    from grpo_mega.formats.convert import convert_mcore_to_hf
    from grpo_mega.run.checkpoints import verify

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        verify(checkpoint, manifest, rank=0, world_size=1)
    finally:
        dist.destroy_process_group()
    convert_mcore_to_hf(checkpoint / STATE, out, config_folder=config.model.path, show_progress=config.log.progress)
    print(f"policy after step {manifest.step} written to {out}")


def _copy_folder(source: Path, out: Path) -> None:
    """Copy a folder such that `out` appears only when it is complete."""
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial)
    os.rename(partial, out)
