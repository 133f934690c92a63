"""metrics.jsonl as curves: each metric by step. The last line of a step counts, because a resumed run repeats steps."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grpo_mega.config.base import MAX_COUNT
from grpo_mega.errors import ConfigError
from grpo_mega.text import read_json_lines

Curve = dict[int, float]  # step -> value
Curves = dict[str, Curve]


def curves(records: Iterable[Mapping[str, Any]]) -> Curves:
    """Return each metric by step. Skip records without a step and values that are not numbers."""
    result: Curves = {}
    for record in records:
        step = record.get("step")
        if not isinstance(step, int) or not 0 <= step < MAX_COUNT:
            continue
        for name, value in record.items():
            try:
                number = float(value)
            except (TypeError, ValueError, OverflowError):
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


def by_step(found: Curves) -> dict[int, dict[str, float]]:
    """Return the metrics of each step."""
    steps: dict[int, dict[str, float]] = {}
    for name, curve in found.items():
        for step, value in curve.items():
            steps.setdefault(step, {})[name] = value
    return steps
