"""The run's folder: ownership by one process, the record of each start, and which settings may change on resume.

    config.yaml      as resolved at the last start          metrics.jsonl   a line per step, and one per evaluation
    run.json         command, versions, git state, machine  samples.jsonl   some responses of every step
    checkpoints/     step-N folders and `latest`            heldout-N.jsonl answers to the held-out prompts after step N
    logs/            output of all ranks but the first      messages.jsonl  all other messages, including warnings
    lock             held by the process that trains here   report.html     all of this as a page, refreshed during the run
    stop             made by you: stop after this step      curves.png      from `grpo-mega report`
    hf/              the trained policy, at the end         hang/           the stacks of all ranks, if the run got stuck
    trace/           from `train --profile STEPS`

`claim` is called before any rank starts. A folder is never shared: it is new, or resumed with --resume, or refused.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from grpo_mega import config as configs
from grpo_mega.config import Config
from grpo_mega.errors import ConfigError, ResumeError, UserError
from grpo_mega.formats.checkpoint_files import latest
from grpo_mega.json_lines import read_json_lines
from grpo_mega.paths import (
    CHECKPOINTS,
    CONFIG_FILE,
    LOCK_FILE,
    LOGS,
    MESSAGES_FILE,
    METRICS_FILE,
    ROLLOUTS_FILE,
    RUN_FILE,
    SAMPLES_FILE,
    heldout_files,
    write_atomically,
)
from grpo_mega.yaml_text import parse_yaml

PACKAGES = ("grpo-mega", "torch", "megatron-core", "transformers", "transformer-engine", "sglang", "math-verify")
# These may differ when a run is resumed: where and how fast it runs, and settings adjusted to keep it healthy. Any other key
# would make it another run, or is read from the checkpoint (Adam's constants, with the optimizer's state).
FREE_ON_RESUME = {"run_dir", "steps", "device", "layout", "sync", "eval", "checkpoint", "log", "max_nonfinite_steps"}
FREE_ON_RESUME |= {f"rollout.{name}" for name in ("tp", "max_concurrent", "cache_tokens", "memory_fraction", "sleep")}
FREE_ON_RESUME |= {f"rollout.{name}" for name in ("start_deadline_s", "stall_deadline_s", "phase_deadline_s", "max_restarts")}
FREE_ON_RESUME |= {f"rollout.{name}" for name in ("mismatch_warn", "mismatch_stop", "server_args", "max_staleness")}
FREE_ON_RESUME |= {f"rollout.{name}" for name in ("ep", "dtype", "placement", "longest_first", "routing_replay")}
FREE_ON_RESUME |= {"model.grouped_experts", "model.fused_permutation"}
FREE_ON_RESUME |= {"precision.guard", "hang_deadline_s", "model.recompute", "batch.tokens_per_micro_batch"}
FREE_ON_RESUME |= {f"optimizer.{name}" for name in ("lr", "min_lr", "schedule", "warmup_steps", "weight_decay", "clip_grad")}
FREE_ON_RESUME |= {f"algorithm.{name}" for name in ("kl_beta", "kl_clamp", "entropy_bonus", "calculate_entropy", "correction")}
FREE_ON_RESUME |= {f"algorithm.{name}" for name in ("kl_target", "kl_horizon", "positive_nll")}
FREE_ON_RESUME |= {f"algorithm.ratio_clip_{name}" for name in ("eps", "eps_low", "eps_high", "c")}
FREE_ON_RESUME |= {"algorithm.early_stop_imp_ratio", "rewards.refresh_command", "rewards.refresh_deadline_s"}


@contextmanager
def claim(config: Config, *, resume: bool, argv: list[str]) -> Iterator[None]:
    """Own the folder while the context lasts. Raises ConfigError or ResumeError, and then has written nothing."""
    folder = config.run_dir
    is_run = (folder / RUN_FILE).exists()
    if not is_run and folder.exists() and not _is_free(folder):
        raise ConfigError(f"run_dir={folder} exists and is not a run's folder; name a new or empty one")
    if is_run and not resume:
        raise ConfigError(f"run_dir={folder} holds a run; go on with it by --resume, or name another run_dir")
    if is_run:
        _changes(folder, config)
    elif resume:
        raise ResumeError(f"run_dir={folder} holds no run to resume; start without --resume")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # the responses, and the logs, may be confidential
    with (folder / LOCK_FILE).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"run_dir={folder} is in use by another process; wait for it or name another run_dir") from None
        if is_run:
            latest(folder / CHECKPOINTS)  # raises ResumeError before any rank starts if it names a missing checkpoint
        else:
            (folder / CONFIG_FILE).write_text(configs.dump(config))
        starts = _starts(folder)
        write_atomically(folder / RUN_FILE, json.dumps({"starts": [*starts, _start(argv)]}, indent=1).encode() + b"\n")
        try:
            yield
        except UserError:
            discard_unstarted(folder)
            raise


def discard_unstarted(folder: Path) -> None:
    """Remove a folder in which no run has begun to log, so that the same command works once the error is fixed."""
    if {path.name for path in folder.iterdir()} <= {CONFIG_FILE, RUN_FILE, LOCK_FILE, LOGS}:
        shutil.rmtree(folder)


def adopt(config: Config) -> list[str]:
    """Record `config` as the run's, now that it starts; return a line for each setting that has changed."""
    if not (config.run_dir / CONFIG_FILE).exists():
        return []
    changes = _changes(config.run_dir, config)
    write_atomically(config.run_dir / CONFIG_FILE, configs.dump(config).encode())
    return [f"from here on {key}={now!r}; it was {before!r}" for key, (before, now) in changes.items()]


def trim(folder: Path, step: int) -> None:
    """Remove the log lines after `step`, whose steps a resumed run repeats."""
    for name in (METRICS_FILE, SAMPLES_FILE, MESSAGES_FILE, ROLLOUTS_FILE):
        path = folder / name
        if path.exists():
            whole = [(line, row) for line, row in read_json_lines(path) if row and "step" in row and line.endswith(b"\n")]
            write_atomically(path, b"".join(line for line, row in whole if row["step"] <= step))
    for evaluated, path in heldout_files(folder).items():
        if evaluated > step:
            path.unlink()


def last_step(folder: Path) -> int:
    """Return the last step that the run has logged; 0 if none."""
    path = folder / METRICS_FILE
    if not path.is_file():
        return 0
    return max((row["step"] for _, row in read_json_lines(path) if row), default=0)


def _is_free(folder: Path) -> bool:
    """Return True if the folder is empty except for logs, or was left by a start that was killed before it became a run's."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {RUN_FILE}
    return {name for name in names if not name.startswith(f".{RUN_FILE}.")} <= {CONFIG_FILE, LOCK_FILE, LOGS}


def _changes(folder: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """Return the old and new value of each changed setting. Raises ResumeError for one that must not change."""
    try:
        recorded = parse_yaml((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResumeError(f"{folder / CONFIG_FILE} cannot be read ({error}); restore it, or name another run_dir") from None
    with suppress(ConfigError):  # keys added since then have their defaults
        recorded = configs.validate(recorded).model_dump(mode="json")
    return dict(_differences("", recorded, config.model_dump(mode="json"), is_free=False))


def _differences(key: str, recorded: Any, current: Any, *, is_free: bool) -> Iterator[tuple[str, tuple[Any, Any]]]:
    is_free = is_free or key in FREE_ON_RESUME
    if isinstance(recorded, dict) and isinstance(current, dict):
        for name in dict.fromkeys([*current, *recorded]) if is_free else current:
            inner = f"{key}.{name}" if key else name
            yield from _differences(inner, recorded.get(name), current.get(name), is_free=is_free)
    elif recorded != current:
        if not is_free:
            raise ResumeError(
                f"{key}={current!r} differs from the run's {recorded!r}; give the run's value, or name another run_dir"
            )
        yield key, (recorded, current)


def _starts(folder: Path) -> list[dict[str, Any]]:
    path = folder / RUN_FILE
    return json.loads(path.read_text())["starts"] if path.exists() else []


def _start(argv: list[str]) -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": ["grpo-mega", *argv],
        "host": platform.node(),
        "python": sys.version.split()[0],
        "versions": {name: installed for name in PACKAGES if (installed := _version(name))},
        "git": _git_state(),
        "machine": _machine(),
    }


def _machine() -> dict[str, Any]:
    """Describe the first rank's node: system, processor, cores, memory, and the GPUs that the driver lists."""
    gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return {
        "system": f"{platform.system()} {platform.release()}",
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "processor": next(iter(_fields(Path("/proc/cpuinfo"), "model name")), None),
        "gpus": [model for path in gpus for model in _fields(path, "Model")],
    }


def _fields(path: Path, name: str) -> list[str]:
    """Return the values of the lines `name: value` of a file in /proc; nothing if it cannot be read."""
    with suppress(OSError):
        pairs = [line.partition(":") for line in path.read_text().splitlines()]
        return [value.strip() for key, _, value in pairs if key.strip() == name]
    return []


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_state() -> str | None:
    """Return the commit of the code, with "-dirty" if it was changed; None outside a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
