"""File names in a run's folder (RUN_DIR), paths that a user writes, and files that are never seen half-written."""

from __future__ import annotations

import os
from pathlib import Path

CONFIG_FILE = "config.yaml"
RUN_FILE = "run.json"  # every start of the run: command, host, versions, changed settings
LOCK_FILE = "lock"  # held by the process that uses the folder
RUN_KEY = "run_key"  # exists while ranks that torchrun started agree on a key; see distributed/messages.py
STOP_FILE = "stop"  # the user creates it to stop the run after the current step
METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
EXPERTS_FILE = "experts.json"  # tokens per expert and layer in the last mini-batch
MESSAGES_FILE = "messages.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"  # all samples, if rewards.refresh_command is set; see run/reward_model_refresh.py
REPLAY_FILE = "replay.jsonl"  # the samples that the command reads
REPORT_FILE = "report.html"
CURVES_FILE = "curves.png"
WANDB_ID_FILE = "wandb_id"  # id of the run on Weights & Biases
LOGS = "logs"  # output of ranks and servers
HANG = "hang"  # stacks of all ranks, if the run got stuck
ENGINES = "engines"  # files of each SGLang server
TRACE = "trace"
CHECKPOINTS = "checkpoints"
LATEST = "latest"  # in CHECKPOINTS: holds the name of the last checkpoint
MANIFEST = "checkpoint.json"  # in a checkpoint
STATE = "state"  # in a checkpoint: the folder of Megatron's files and the backlog
EXPORT_DIR = "hf"  # the policy after the last step, as a Hugging Face folder


def user_path(path: str | Path) -> Path:
    """Return a path with ~ as the user's home. A path with an unknown home stays as it is."""
    return Path(os.path.expanduser(path))


def rank_log(rank: int | str) -> str:
    """Return the name of a rank's file in LOGS."""
    return f"rank_{rank}.log"


def refresh_log(step: int) -> str:
    """Return the name of the file in LOGS with the output of rewards.refresh_command after `step`."""
    return f"refresh-{step:06d}.log"


def heldout_file(step: int) -> str:
    """Return the name of the file with the answers to the held-out prompts after `step`."""
    return f"heldout-{step:06d}.jsonl"


def heldout_files(run_dir: Path) -> dict[int, Path]:
    """Return the run's files of held-out answers, keyed by step."""
    steps = {path: path.stem.removeprefix("heldout-") for path in run_dir.glob("heldout-*.jsonl")}
    return {int(step): path for path, step in sorted(steps.items()) if step.isdecimal()}


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the content of the file atomically. At any time, even after a kill, it has the old or the new content."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_bytes(content)
        os.replace(fresh, path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def sync_to_disk(path: Path) -> None:
    """Sync the content of a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
