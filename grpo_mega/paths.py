"""File names in a run's folder (RUN_DIR), paths that a user writes, and how files are read and written.

Files are never seen half-written. Files that people name are never a pipe or a device, because it may have no end, and
have no more bytes than expected.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from grpo_mega.errors import ConfigError

MAX_JSON_BYTES = 256 << 20  # the largest tokenizer.json have tens of MB
MAX_NAME_BYTES = 4096

CONFIG_FILE = "config.yaml"
RUN_FILE = "run.json"  # every start of the run: command, host, versions, changed settings
LOCK_FILE = "lock"  # held by the process that uses the folder
RUN_KEY = "run_key"  # exists while ranks that torchrun started agree on a key; see distributed/messages.py
STOP_FILE = "stop"  # the user creates it to stop the run after the current step
METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
EXPERTS_FILE = "experts.json"  # tokens per expert and layer in the last mini-batch
MESSAGES_FILE = "messages.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"  # all samples, if rewards.refresh_command is set; see trainer/reward_model_refresh.py
REPLAY_FILE = "replay.jsonl"  # the samples that the command reads
REPORT_FILE = "report.html"
WANDB_ID_FILE = "wandb_id"  # id of the run on Weights & Biases
TENSORBOARD = "tensorboard"  # event files of log.tensorboard
LOGS = "logs"  # output of ranks and servers
HANG = "hang"  # stacks of all ranks, if the run got stuck
ENGINES = "engines"  # files of each SGLang server
TRACE = "trace"
CHECKPOINTS = "checkpoints"
LATEST = "latest"  # in CHECKPOINTS: holds the name of the last checkpoint
MANIFEST = "checkpoint.json"  # in a checkpoint
STATE = "state"  # in a checkpoint: the folder of Megatron's files and the backlog
EXPORT_DIR = "hf"  # the policy after the last step, as a Hugging Face folder
ADAPTER_DIR = "adapter"  # with model.lora: the adapter after the last step, as a PEFT folder
EXPORT_FILE = "grpo_mega.json"  # in EXPORT_DIR: the step of the policy, and the time of writing

_SUFFIXES = (".yaml", ".yml", ".json", ".jsonl", ".parquet")  # a path with one of them is no name on the hub


def user_path(path: str | Path) -> Path:
    """Return a path with ~ as the user's home. A path with an unknown home stays as it is."""
    return Path(os.path.expanduser(path))


def hub_hint(path: Path) -> str:
    """Return how to download a model if a path that does not exist looks like a name on the hub; else an empty text."""
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) is not None
    return (
        f"; for a model of the hub, `hf download {path} --local-dir FOLDER`"
        if is_name and path.suffix not in _SUFFIXES
        else ""
    )


def check_free(out: Path) -> None:
    """Raise ConfigError unless the output can be created there."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists; remove it or name another output")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent}, the parent of {out.name}, is not a folder; make it or name another output")


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
    return {int(step): path for path, step in sorted(steps.items()) if step.isdecimal() and path.is_file()}


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the content of the file atomically. At any time, even after a kill, it has the old or the new content."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_bytes(content)
        os.replace(fresh, path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def check_regular(path: Path) -> None:
    """Raise OSError unless a path leads to a regular file, not to a folder, a pipe, a socket or a device."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_file(path: Path, max_bytes: int) -> bytes:
    """Return the bytes of a file. Raise OSError if it is not a regular file or is larger than `max_bytes`."""
    check_regular(path)
    with Path(path).open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes:,} bytes", str(path))
    return content


def read_name(path: Path) -> str:
    """Return the one line of a small text file, such as the name of a folder. Raise OSError or ValueError."""
    return read_file(path, MAX_NAME_BYTES).decode("utf-8").strip()


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the value in a UTF-8 JSON file. Raise OSError or ValueError."""
    return parse_json(read_file(path, max_bytes).decode("utf-8"))


def parse_json(text: str | bytes) -> Any:
    """Return the value of JSON. Raise ValueError, also for deeply nested values and numbers with thousands of
    digits.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def sync_to_disk(path: Path) -> None:
    """Sync the content of a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
