"""Write the policy of a run's checkpoint as a Hugging Face folder: only its weights, from any layout, streamed.

No model is built and no optimizer state is read, so even a checkpoint whose optimizer state is refused can be exported.
If RUN_DIR/hf is newer than the last checkpoint, it already is such a folder, so export copies it.
"""

from __future__ import annotations

import os
import shutil
import sys

from grpo_mega import config as configs
from grpo_mega.commands.options import ExportOptions
from grpo_mega.errors import ConfigError
from grpo_mega.formats.detect import read_manifest
from grpo_mega.paths import ADAPTER_DIR, CONFIG_FILE, STATE
from grpo_mega.run.checkpoints import find_policy


def run(options: ExportOptions) -> int:
    """Write the folder and print a line. Raise ResumeError if the checkpoint does not exist or is damaged."""
    run_dir, out, step = options.run_dir, options.out, options.step
    if out.exists():
        raise ConfigError(f"{out} exists; name a folder that does not")
    config = configs.load(run_dir / CONFIG_FILE)
    policy = find_policy(run_dir, step)
    lora = config.model.lora
    if options.is_merged and lora is None:
        raise ConfigError(f"--merged: {run_dir} trains all weights, without model.lora; leave it out")
    if policy.export is not None:
        print(f"grpo-mega: note: {policy.note}", file=sys.stderr, flush=True)
        partial = out.with_name(out.name + ".partial")  # `out` appears only when the copy is complete
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(policy.path if lora is None or options.is_merged else run_dir / ADAPTER_DIR, partial)
        os.rename(partial, out)
        print(f"policy after step {policy.step} written to {out}")
        return 0
    checkpoint, manifest = policy.path, read_manifest(policy.path)
    print(f"grpo-mega: note: exporting {checkpoint}, the policy after step {policy.step}", file=sys.stderr, flush=True)
    import torch.distributed as dist  # needed only to read a checkpoint

    from grpo_mega.formats.convert import convert_mcore_to_hf
    from grpo_mega.run.saving import verify_files

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        verify_files(checkpoint, manifest, rank=0, world_size=1)
        if lora is not None:
            from grpo_mega.formats import adapter
            from grpo_mega.run.model_files import check_base

            if options.is_merged and config.model.init == "random":
                raise ConfigError(
                    "--merged: must not be with model.init=random; finish the run, which writes the model"
                )
            check_base(config, manifest, rank=0, world_size=1)
            adapter.export(checkpoint / STATE, out, config.model, is_merged=options.is_merged)
            print(f"policy after step {manifest.step} written to {out}")
            return 0
    finally:
        dist.destroy_process_group()
    convert_mcore_to_hf(checkpoint / STATE, out, config_folder=config.model.path, show_progress=config.log.progress)
    print(f"policy after step {manifest.step} written to {out}")
    return 0
