"""The run's folder: ownership by one process, the record of each start, and which settings may change on resume.

    config.yaml      the resolved config of the last start  metrics.jsonl   a line per step, and one per evaluation
    run.json         command, versions, git state, machine  samples.jsonl   some responses of every step
    checkpoints/     step-N folders and `latest`            heldout-N.jsonl answers to held-out prompts after step N
    logs/            output of all ranks except the first   messages.jsonl  all other messages, including warnings
    lock             locked by the process that trains here report.html     a page with all of this, kept up to date
    stop             create it to stop after this step      trace/          from `train --profile STEPS`
    hf/              the trained policy, at the end         hang/           stacks of all ranks, if the run got stuck

`lock_run_dir` is called before any rank starts. A folder is new, resumed, or refused: no two runs share one.
"""

import fcntl
import json
import os
import platform
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from grpo_mega import config as configs
from grpo_mega.checkpoint_io.checkpoints import latest, read_manifest, tell_latest
from grpo_mega.config import Config
from grpo_mega.config.base import free_keys
from grpo_mega.data.load import BY_PROMPT, BY_TEXT
from grpo_mega.distributed.launch import current_rank
from grpo_mega.distributed.versions import installed_set
from grpo_mega.errors import DISK_ERRORS, ConfigError, ResumeError, RunFolderError, UserError
from grpo_mega.paths import (
    CHECKPOINTS,
    CONFIG_FILE,
    EXPORT_DIR,
    LOCK_FILE,
    LOGS,
    MESSAGES_FILE,
    METRICS_FILE,
    ROLLOUTS_FILE,
    RUN_FILE,
    SAMPLES_FILE,
    heldout_files,
    rank_log,
    read_json,
    write_atomically,
)
from grpo_mega.text import as_text, read_json_lines
from grpo_mega.yaml_text import parse_yaml

_MOST_SHOWN = 200  # maximum number of characters of a setting at the start
FREE_ON_RESUME = frozenset(free_keys(Config))


@dataclass
class Claim:
    """The folder that a start of a run owns, and its earlier files. A refused start removes only files that it
    created.
    """

    folder: Path  # resolved path, without links
    before: frozenset[str]  # earlier names in the folder and its logs folder, except empty logs of ranks
    is_new: bool  # the start created the folder

    def discard_unstarted(self) -> None:
        """Remove the files of this start if the run has logged nothing, so the same command works after a fix."""
        names = {path.name for path in self.folder.iterdir()} if self.folder.is_dir() else {METRICS_FILE}
        if not names <= {CONFIG_FILE, RUN_FILE, LOCK_FILE, LOGS} | self.before:
            return
        logs = sorted((self.folder / LOGS).glob(rank_log("*")))
        for path in (*logs, *(self.folder / name for name in (CONFIG_FILE, RUN_FILE, LOCK_FILE))):
            if str(path.relative_to(self.folder)) not in self.before:
                path.unlink(missing_ok=True)
        for path in ((self.folder / LOGS), *([self.folder] if self.is_new else [])):
            if path == self.folder or str(path.relative_to(self.folder)) not in self.before:
                with suppress(OSError):  # the folder has other files, such as the log of a failed server
                    path.rmdir()


@contextmanager
def lock_run_dir(config: Config, *, resume: bool, command: list[str]) -> Iterator[Claim]:
    """Own the folder during the context. If this raises ConfigError or ResumeError, it has written nothing."""
    with ExitStack() as stack:
        try:
            claimed = stack.enter_context(_claimed(config, resume=resume, command=command))
        except (OSError, RuntimeError) as error:  # a circle of links raises RuntimeError
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"run_dir={config.run_dir} cannot be written ({reason}); free its disk or name another"
            ) from None
        try:
            yield claimed
        except (UserError, OSError):  # for example, a rank's log cannot be created
            claimed.discard_unstarted()
            raise


@contextmanager
def _claimed(config: Config, *, resume: bool, command: list[str]) -> Iterator[Claim]:
    folder = config.run_dir.resolve()  # a link's target need not exist yet
    is_run = (folder / RUN_FILE).exists()
    if not is_run and folder.exists() and not _is_free(folder):
        raise ConfigError(f"run_dir={config.run_dir} exists and is not a run's folder; name a new or empty one")
    if is_run and not resume:
        raise ConfigError(
            f"run_dir={config.run_dir} already has a run; continue it with --resume, or name another run_dir"
        )
    if is_run:
        _changes(folder, config)
    elif resume:
        raise ResumeError(f"run_dir={config.run_dir} holds no run to resume; start without --resume")
    paths = [path for pattern in ("*", f"{LOGS}/*") for path in folder.glob(pattern)]
    # Empty logs of ranks are left out, because this start may create them.
    before = [p for p in paths if not p.match(f"{LOGS}/{rank_log('*')}") or p.stat().st_size]
    claimed = Claim(folder, frozenset(str(p.relative_to(folder)) for p in before), is_new=not folder.exists())
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # responses and logs may be confidential
    mode = stat.S_IMODE(folder.stat().st_mode)  # is not changed, because the folder's owner has set it
    if mode & 0o055 and all(parent.stat().st_mode & 0o011 for parent in folder.parents):
        print(
            f"grpo-mega: warning: run_dir={folder} has mode {mode:o}: other users can read prompts, responses and logs;"
            " close it by chmod 700",
            file=sys.stderr,
            flush=True,
        )
    with ExitStack() as undo:
        undo.callback(claimed.discard_unstarted)
        with (folder / LOCK_FILE).open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                undo.pop_all()  # the files belong to the other process
                raise ConfigError(
                    f"run_dir={config.run_dir} is in use by another process; wait for it or name another run_dir"
                ) from None
            if is_run:
                checkpoint = latest(folder / CHECKPOINTS)
                if checkpoint is None:
                    _check_loses_nothing(config)
                elif (done := read_manifest(checkpoint).step) > config.steps:
                    epochs = "" if config.data.epochs is None else f", from data.epochs={config.data.epochs:g}"
                    raise ResumeError(
                        f"steps={config.steps}{epochs}: is below the {done} finished steps of run_dir={config.run_dir};"
                        f" raise it, or export an earlier policy by grpo-mega export {config.run_dir} OUT --step N"
                    )
            else:
                write_atomically(folder / CONFIG_FILE, configs.dump(config).encode())
            path = folder / RUN_FILE
            starts = json.loads(path.read_text())["starts"] if path.exists() else []
            starts.append(_start(config, command, first_start(folder).split))
            write_atomically(path, json.dumps({"starts": starts}, indent=1).encode() + b"\n")
            undo.pop_all()
            yield claimed


def _check_loses_nothing(config: Config) -> None:
    """Raise ResumeError if a resume without a checkpoint would train finished work again and remove its logs.

    A run that saves checkpoints may have been killed before the first one.
    """
    folder = config.run_dir
    if (folder / EXPORT_DIR / "config.json").exists():
        raise ResumeError(
            f"run_dir={folder} is finished and has no checkpoint to continue from; name another run_dir, and train"
            f" further with model.path={folder / EXPORT_DIR}"
        )
    path = folder / METRICS_FILE
    rows = [row for _, row in read_json_lines(path)] if path.exists() else []
    num_logged = sum((row or {}).get("step", 0) > 0 for row in rows)
    if num_logged and not config.checkpoint.interval:
        raise ResumeError(
            f"run_dir={folder} has logged {num_logged} steps and saved none (checkpoint.interval=0), so --resume would"
            " train them again; name another run_dir"
        )
    if num_logged:
        print(
            f"grpo-mega: note: run_dir={folder} has no checkpoint yet, so the run starts again at step 1",
            file=sys.stderr,
            flush=True,
        )


@contextmanager
def reraise_with_run_dir(run_dir: Path) -> Iterator[None]:
    """Replace an OSError by RunFolderError with a remedy, if the folder cannot be written or is gone."""
    try:
        yield
    except OSError as error:
        if not run_dir.is_dir():
            raise RunFolderError(
                f"run_dir={run_dir} was removed or moved while the run used it; start a new run"
            ) from error
        name = error.filename if isinstance(error.filename, str) else ""
        if error.errno not in DISK_ERRORS and not Path(name).is_relative_to(run_dir):
            raise
        raise RunFolderError(
            f"run_dir={run_dir} cannot be written ({name and f'{name}: '}{error.strerror}); free its disk and start"
            f" again; {tell_latest(run_dir / CHECKPOINTS)}"
        ) from error


def merge_changed_settings(config: Config) -> list[str]:
    """Write `config` as the run's config at its start. Return a line for each changed setting."""
    if not (config.run_dir / CONFIG_FILE).exists():
        return []
    changes = _changes(config.run_dir, config)
    write_atomically(config.run_dir / CONFIG_FILE, configs.dump(config).encode())
    return [f"from here on {key}={now!r}; it was {before!r}" for key, (before, now) in changes.items()]


def changed_settings(config: Config) -> str:
    """Return the settings that differ from the defaults, with a line for each section."""
    sections: dict[str, list[str]] = {}
    for key, value in configs.changed(config).items():
        section, name = key.split(".", 1) if "." in key else ("", key)
        text = as_text(value).replace("\n", "\\n")
        sections.setdefault(section, []).append(
            f"{name}={text if len(text) <= _MOST_SHOWN else f'{text[:_MOST_SHOWN]}...'}"
        )
    lines = [f"{f'{section}: ' if section else ''}{', '.join(values)}" for section, values in sections.items()]
    return "\n  ".join(["settings that differ from the defaults:", *lines])


class FirstStart(NamedTuple):
    """Hold the values of the first start that the whole run keeps."""

    time: str  # ISO format, without a zone; chat templates write it
    split: str  # rule by which held-out prompts are split off


def first_start(run_dir: Path) -> FirstStart:
    """Return the first start of the run in a folder; for a folder without a run, one that is now.

    Raise ResumeError if its record cannot be read.
    """
    try:
        start = read_json(run_dir / RUN_FILE)["starts"][0]
        time = datetime.fromisoformat(start["time"]).replace(tzinfo=None)
        return FirstStart(time.isoformat(), start.get("split", BY_TEXT))
    except FileNotFoundError:
        return FirstStart(datetime.now().isoformat(), BY_PROMPT)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ResumeError(f"{run_dir / RUN_FILE} cannot be read ({error!r}); restore it, or start a new run") from None


def recorded_dtype(run_dir: Path) -> str | None:
    """Return the model.dtype of the run in a folder; None if the folder has no readable config of a run."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return parse_yaml((run_dir / CONFIG_FILE).read_text(encoding="utf-8"))["model"]["dtype"]
    return None


def truncate_logs_after(folder: Path, step: int) -> None:
    """Remove the log lines after `step`, because a resumed run repeats these steps."""
    for name in (METRICS_FILE, SAMPLES_FILE, MESSAGES_FILE, ROLLOUTS_FILE):
        path = folder / name
        if path.exists():
            whole = [
                (line, row) for line, row in read_json_lines(path) if row and "step" in row and line.endswith(b"\n")
            ]
            write_atomically(path, b"".join(line for line, row in whole if row["step"] <= step))
    for evaluated, path in heldout_files(folder).items():
        if evaluated > step:
            path.unlink()


def _is_free(folder: Path) -> bool:
    """Return True if the folder is empty except for logs, or is left over from a start that was killed early.

    Such a start creates the lock before the config, so a config without a lock is the user's file.
    """
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {RUN_FILE}
    names -= {name for name in names if name.startswith((f".{RUN_FILE}.", f".{CONFIG_FILE}."))}
    return names <= {CONFIG_FILE, LOCK_FILE, LOGS} and not (CONFIG_FILE in names and LOCK_FILE not in names)


def _changes(folder: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """Return the old and new value of each changed setting. Raise ResumeError if a setting must not change."""
    try:
        recorded = parse_yaml((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResumeError(
            f"{folder / CONFIG_FILE} cannot be read ({error}); restore it, or name another run_dir"
        ) from None
    with suppress(ConfigError):  # keys added since the last start get their defaults
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
                f"{key}={current!r} differs from the run's {recorded!r}; use the run's value, or name another run_dir"
            )
        yield key, (recorded, current)


def _start(config: Config, command: list[str], split: str) -> dict[str, Any]:
    """Describe this start and the first rank's node: system, processor, cores, memory, and the GPUs of the driver."""
    # The commit of the code, with "-dirty" if it has changes. There is none outside a git checkout.
    git, here = None, str(Path(__file__).parent)
    describe = ["git", "-C", here, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        git = subprocess.run(describe, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    versions = installed_set()
    gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": command,
        "host": platform.node(),
        "num_ranks": config.layout.world_size if current_rank() is None else int(os.environ["WORLD_SIZE"]),
        "python": sys.version.split()[0],
        "versions": versions.versions,
        "version_set": versions.record,
        "git": git,
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "processor": next(iter(_fields(Path("/proc/cpuinfo"), "model name")), None),
            "gpus": [model for path in gpus for model in _fields(path, "Model")],
        },
        "dtype": config.model.dtype,
        "split": split,
    }


def _fields(path: Path, name: str) -> list[str]:
    """Return the values of the lines `name: value` in a file of /proc; [] if it cannot be read."""
    with suppress(OSError):
        pairs = [line.partition(":") for line in path.read_text().splitlines()]
        return [value.strip() for key, _, value in pairs if key.strip() == name]
    return []
