"""Compare two results of benchmarks/throughput: is each phase faster, slower, or the same within the noise?

A phase is the same if the medians differ by less than 5 %, or if the ranges between the quartiles of the steps overlap.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_mega.errors import ConfigError

NOISE = 0.05


def read(path: Path) -> dict[str, Any]:
    """Read a file written by --out, or a log of the tool's output. Raise ConfigError."""
    try:
        lines = path.read_text().strip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--against {path} cannot be read ({error}); name a file written by --out") from None
    for text in ("\n".join(lines), lines[-1] if lines else ""):
        try:
            found = json.loads(text)
        except ValueError:
            continue
        if isinstance(found, dict) and {"fingerprint", "phases", "settings", "layout", "step"} <= found.keys():
            return found
    raise ConfigError(f"--against {path} holds no result of this tool; name a file written by --out")


def check(settings: Mapping[str, Any], before: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError if the earlier result has other settings."""
    for name, here, there in _differences("", settings, before["settings"]):
        raise ConfigError(
            f"--against {path}: {name} is {there!r} there and {here!r} here; compare runs that differ in layout only"
        )


def differing(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Describe differences in layout and machine."""
    pairs = [(f"layout.{name}", size, before["layout"].get(name)) for name, size in now["layout"].items()]
    pairs += [(name, now[name], before.get(name)) for name in ("world_size", "device", "card", "threads")]
    return [f"{name} is {here} here and was {there} there" for name, here, there in pairs if here != there]


def compare(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return {"before", "ratio" of the medians, "verdict"} by row, and for the step; None if a result lacks the figure."""
    rows = {name: (row, before["phases"].get(name)) for name, row in now["phases"].items()}
    rows["step"] = (now["step"], before["step"])
    return {name: _compared(here, there) for name, (here, there) in rows.items()}


def _compared(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    was = None if before is None else before["median"]
    if before is None or now["median"] is None or was is None:
        return {"before": was, "ratio": None, "verdict": None}
    ratio = now["median"] / was if was else None
    is_close = now["median"] == was if ratio is None else abs(ratio - 1) < NOISE
    overlaps = now["low"] <= before["high"] and before["low"] <= now["high"]
    verdict = "same" if is_close or overlaps else "faster" if now["median"] < was else "slower"
    return {"before": was, "ratio": ratio, "verdict": verdict}


def _differences(prefix: str, now: Any, before: Any) -> list[tuple[str, Any, Any]]:
    """Return leaves with different values: dotted name, value now, value before."""
    if not (isinstance(now, dict) and isinstance(before, dict)):
        return [] if now == before else [(prefix, now, before)]
    names = [*now, *(name for name in before if name not in now)]
    return [
        found
        for name in names
        for found in _differences(f"{prefix}.{name}" if prefix else name, now.get(name), before.get(name))
    ]
