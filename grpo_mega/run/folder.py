"""The run's folder: who owns it, and what it says of how the run was started.

    config.yaml      as resolved at the last start          metrics.jsonl   a line a step, and one an evaluation
    run.json         command, versions, git state, seed     samples.jsonl   some responses of every step
    checkpoints/     step-N folders and `latest`            heldout-N.jsonl answers to the held-out prompts after step N
    logs/            output of the ranks but the first      messages.jsonl  what the run said besides, warnings among it
    lock             held by the process that trains here   report.html     all of this to look at, refreshed and at the end
    stop             made by you: stop after this step      curves.png      from `grpo-mega report`
    hf/              the trained policy, at the end         hang/           where every rank was, if it got stuck
    trace/           from `train --profile STEPS`

`claim` is called before any rank starts. A folder is never shared: it is new, or resumed by asking for it, or refused.
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

import yaml

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
    RUN_FILE,
    SAMPLES_FILE,
    heldout_files,
    write_atomically,
)

PACKAGES = ("grpo-mega", "torch", "megatron-core", "transformers", "transformer-engine", "sglang", "math-verify")
# What may differ when a run goes on: where and how fast it runs, and what a person adjusts to keep it healthy. All else would
# make it another run, or is read from the checkpoint (Adam's constants, with the optimizer's state).
FREE_ON_RESUME = {"run_dir", "steps", "device", "layout", "sync", "eval", "checkpoint", "log", "max_nonfinite_steps"}
FREE_ON_RESUME |= {f"rollout.{name}" for name in ("tp", "max_concurrent", "cache_tokens", "memory_fraction", "sleep")}
FREE_ON_RESUME |= {f"rollout.{name}" for name in ("start_deadline_s", "stall_deadline_s", "phase_deadline_s", "max_restarts")}
FREE_ON_RESUME |= {f"rollout.{name}" for name in ("mismatch_warn", "mismatch_stop", "server_args")}
FREE_ON_RESUME |= {"precision.guard", "hang_deadline_s", "model.recompute", "batch.tokens_per_micro_batch"}
FREE_ON_RESUME |= {f"optimizer.{name}" for name in ("lr", "min_lr", "schedule", "warmup_steps", "weight_decay", "clip_grad")}
FREE_ON_RESUME |= {f"algorithm.{name}" for name in ("kl_beta", "kl_clamp", "entropy_bonus", "calculate_entropy", "correction")}
FREE_ON_RESUME |= {f"algorithm.ratio_clip_{name}" for name in ("eps", "eps_low", "eps_high", "c")}
FREE_ON_RESUME |= {"algorithm.early_stop_imp_ratio"}


@contextmanager
def claim(config: Config, *, resume: bool, argv: list[str]) -> Iterator[None]:
    """Makes the folder this run's while the context lasts. Raises ConfigError or ResumeError, having written nothing."""
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
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"run_dir={folder} is in use by another process; wait for it or name another run_dir") from None
        if is_run:
            latest(folder / CHECKPOINTS)  # before a rank starts: it must not name what is not there
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
    """Removes a folder in which no run has begun to log, so that the same command works once what was wrong is mended."""
    if {path.name for path in folder.iterdir()} <= {CONFIG_FILE, RUN_FILE, LOCK_FILE, LOGS}:
        shutil.rmtree(folder)


def adopt(config: Config) -> list[str]:
    """Record `config` as the run's, now that it starts, and return a line for each setting that was another until now."""
    if not (config.run_dir / CONFIG_FILE).exists():
        return []
    changes = _changes(config.run_dir, config)
    write_atomically(config.run_dir / CONFIG_FILE, configs.dump(config).encode())
    return [f"from here on {key}={now!r}; it was {before!r}" for key, (before, now) in changes.items()]


def trim(folder: Path, step: int) -> None:
    """Takes out what was logged after `step`, from where a resumed run does it again."""
    for name in (METRICS_FILE, SAMPLES_FILE, MESSAGES_FILE):
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
    """Empty but for logs, or left by a start that was killed before the folder was a run's."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {RUN_FILE}
    return {name for name in names if not name.startswith(f".{RUN_FILE}.")} <= {CONFIG_FILE, LOCK_FILE, LOGS}


def _changes(folder: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """Return the values before and now of what differs from the run's. Raises ResumeError for what must not differ."""
    recorded = yaml.safe_load((folder / CONFIG_FILE).read_text())
    with suppress(ConfigError):  # keys that were not known then have their defaults
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
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "git": _git_state(),
        "machine": _machine(),
    }


def _machine() -> dict[str, Any]:
    """Of the first rank's node: system, processor, cores, memory, GPUs by their driver."""
    found: dict[str, Any] = {"system": f"{platform.system()} {platform.release()}", "cores": os.cpu_count()}
    with suppress(OSError, ValueError):
        found["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        found["processor"] = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    found["gpus"] = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with suppress(OSError):
            lines = path.read_text().splitlines()
            found["gpus"] += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_state() -> str | None:
    """The commit that the code is at, with "-dirty" if it was changed; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
