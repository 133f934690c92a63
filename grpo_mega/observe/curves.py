"""metrics.jsonl as curves: each metric by step. The last line of a step counts, because a resumed run repeats steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grpo_mega.errors import ConfigError
from grpo_mega.json_lines import read_json_lines

Curve = dict[int, float]  # step -> value
Curves = dict[str, Curve]


def curves(records: Iterable[Mapping[str, Any]]) -> Curves:
    """Return each metric by step. Skip records without a step and values that are not numbers."""
    result: Curves = {}
    for record in records:
        step = record.get("step")
        if not isinstance(step, int):
            continue
        for name, value in record.items():
            try:
                number = float(value)
            except (TypeError, ValueError):
                continue
            if name != "step":
                result.setdefault(name, {})[step] = number
    return result


def read_curves(metrics_path: Path) -> Curves:
    """Read the curves of a run. Skip a half-written last line.

    Raises ConfigError for a missing file or a broken line.
    """
    try:
        records = [record for _, record in read_json_lines(metrics_path)]
    except OSError as error:
        raise ConfigError(f"{metrics_path}: {error.strerror}; name the run_dir of a run that has started") from None
    for number, record in enumerate(records[:-1], start=1):
        if record is None or "step" not in record:
            raise ConfigError(f"{metrics_path}:{number} is not a line of metrics; remove it")
    return curves(record for record in records if record is not None)
