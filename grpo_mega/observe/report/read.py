"""Read a run's folder as the data of its report. Missing or broken files are not errors here."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from typing import Any

from grpo_mega import config as configs
from grpo_mega.errors import ConfigError
from grpo_mega.files import read_json
from grpo_mega.json_lines import read_json_lines
from grpo_mega.observe.curves import Curves, curves
from grpo_mega.observe.report import metrics, responses
from grpo_mega.paths import CONFIG_FILE, EXPERTS_FILE, LOCK_FILE, MESSAGES_FILE, METRICS_FILE, RUN_FILE, SAMPLES_FILE
from grpo_mega.yaml_text import parse_yaml

MAX_MESSAGES = 1000
_RECENT = 20  # number of recent steps whose median time predicts the rest


def is_run(run_dir: Path) -> bool:
    return any((run_dir / name).is_file() for name in (METRICS_FILE, CONFIG_FILE))


def read_run(run_dir: Path, *, is_over: bool = False) -> dict[str, Any]:
    """Return the data that page/*.js draws. `is_over`: the run is ending, although it still holds its folder."""
    records, num_bad = read_lines(run_dir / METRICS_FILE)
    found = curves(records)
    raw = _read_yaml(run_dir / CONFIG_FILE)
    num_steps = raw.get("steps") if isinstance(raw.get("steps"), int) else None
    done = metrics.steps_done(found)
    is_live = not is_over and _is_held(run_dir / LOCK_FILE)
    warn = (raw.get("rollout") or {}).get("mismatch_warn")
    findings = metrics.findings(found, warn if isinstance(warn, int | float) else None)
    if num_bad:
        findings.append(f"{num_bad} lines of {METRICS_FILE} cannot be read and are left out")
    starts = _starts(run_dir / RUN_FILE)
    messages, _ = read_lines(run_dir / MESSAGES_FILE)
    return {
        "title": f"{run_dir.resolve().parent.name}/{run_dir.resolve().name}",
        "subtitle": _subtitle(run_dir, raw),
        "written": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "status": _status(done, num_steps, has_begun=bool(found), is_live=is_live, is_over=is_over),
        "num_steps": num_steps,
        "steps_done": done,
        "time_left": _time_left(found, num_steps - done) if is_live and num_steps else None,
        "metrics": metrics.series(found),
        "experts": _experts(run_dir / EXPERTS_FILE),
        "samples": responses.samples(run_dir / SAMPLES_FILE),
        "heldout": responses.heldout(run_dir),
        "config": _config_rows(raw),
        "environment": {"starts": starts, "layout": _layout(raw)},
        "messages": [
            {name: record.get(name, "") for name in ("step", "time", "level", "text")} for record in messages[-MAX_MESSAGES:]
        ],
        "findings": findings,
    }


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the objects of a JSON lines file, and the number of broken lines, not counting a half-written last one."""
    if not path.is_file():
        return [], 0
    lines = list(read_json_lines(path))
    num_bad = sum(record is None and line.endswith(b"\n") for line, record in lines)
    return [record for _, record in lines if record is not None], num_bad


def _status(done: int, num_steps: int | None, *, has_begun: bool, is_live: bool, is_over: bool) -> dict[str, str]:
    if num_steps is not None and done >= num_steps:
        return {"text": "finished", "kind": "good"}
    if is_live:
        return {"text": "still running" if has_begun else "starting: no step is done yet", "kind": "live"}
    if not has_begun:
        return {"text": "no step was logged", "kind": "warn"}
    of = f" of {num_steps}" if num_steps is not None else ""
    return {"text": f"ended after step {done}{of}" if is_over else f"not running here; step {done}{of} is done", "kind": "warn"}


def _time_left(found: Curves, steps_left: int) -> float | None:
    seconds = found.get("seconds/step", {})
    recent = [seconds[step] for step in sorted(seconds)[-_RECENT:]]
    return steps_left * median(recent) if recent else None


def _is_held(lock: Path) -> bool:
    """Return True if a process of this machine holds the folder. Does not take the lock, because that could disturb a start."""
    locks = Path("/proc/locks")
    if not lock.exists() or not locks.exists():
        return False
    inode = f":{lock.stat().st_ino}"
    lines = [line.split() for line in locks.read_text().splitlines()]
    return any("FLOCK" in words and any(word.endswith(inode) for word in words) for words in lines)


def _subtitle(run_dir: Path, raw: dict[str, Any]) -> str:
    model = (raw.get("model") or {}).get("path")
    layout = ", ".join(f"{name} {value}" for name, value in _layout(raw))
    return " · ".join(part for part in (str(run_dir), f"model {model}" if model else "", layout) if part)


def _layout(raw: dict[str, Any]) -> list[list[str]]:
    """Return the layout keys that differ from a single rank, and the engine."""
    layout = raw.get("layout") or {}
    rows = [[f"layout.{name}", str(value)] for name, value in layout.items() if value not in (None, 1, False)]
    engine = (raw.get("rollout") or {}).get("engine")
    return rows + ([["engine", str(engine)]] if engine else [])


def _config_rows(raw: dict[str, Any]) -> list[list[Any]]:
    """Return [dotted key, value as text, is_default] of every leaf. is_default is None if the config is no longer valid."""
    try:
        changed = _leaves(configs.validate(raw).model_dump(mode="json", exclude_defaults=True))
    except ConfigError:
        return [[key, text, None] for key, text in _leaves(raw).items()]
    return [[key, text, key not in changed] for key, text in _leaves(raw).items()]


def _leaves(value: Any, prefix: str = "") -> dict[str, str]:
    if isinstance(value, dict) and value:
        leaves: dict[str, str] = {}
        for name, item in value.items():
            leaves |= _leaves(item, f"{prefix}.{name}" if prefix else str(name))
        return leaves
    return {prefix: value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)}


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        raw = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}


def _experts(path: Path) -> dict[str, Any] | None:
    """Return {"step", "rows": [{"layer", "tokens": one number per expert}]}; None for a dense model."""
    try:
        raw = read_json(path)
        rows = [{"layer": i, "tokens": [int(n) for n in tokens]} for i, tokens in enumerate(raw["tokens"]) if tokens]
        return {"step": int(raw["step"]), "rows": rows}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _starts(path: Path) -> list[dict[str, Any]]:
    try:
        starts = read_json(path)["starts"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []
