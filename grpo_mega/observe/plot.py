"""Draws a run's curves from its metrics.jsonl: rewards with the held-out score, KL, response length, clipping and mismatch.

Panels whose metrics a run does not have are left out. Where a step was logged twice (a run resumed from before it), the last
line counts; values that are not finite leave a gap.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mega.errors import ConfigError
from grpo_mega.json_lines import read_json_lines

Curve = dict[int, float]  # step -> value

_NOT_FUNCTIONS = {"mean", "std", "min", "max"}
_COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]  # told apart by the colour-blind too
_HELDOUT_COLOR = "#222222"
_MANY_POINTS = 30  # from here on the points are drawn faintly under their moving average


@dataclass(frozen=True)
class Line:
    label: str
    curve: Curve
    color: str
    is_heldout: bool = False


@dataclass(frozen=True)
class Panel:
    title: str
    lines: list[Line]
    is_log: bool = False


def draw_curves(metrics_path: Path, out_png: Path) -> None:
    """Writes the picture to `out_png`. Raises ConfigError if there are no metrics to draw."""
    panels = _panels(read_curves(metrics_path))
    if not panels:
        raise ConfigError(f"{metrics_path} holds no step yet; draw it once the run has made one")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    reward, *small = panels
    num_columns = max(2, math.ceil(len(small) / 2)) if small else 1
    num_rows = 1 + math.ceil(len(small) / num_columns)
    figure = plt.figure(figsize=(5.2 * num_columns, 3.4 + 2.7 * (num_rows - 1)), layout="constrained")
    grid = figure.add_gridspec(num_rows, num_columns, height_ratios=[1.35] + [1.0] * (num_rows - 1))
    _draw(figure.add_subplot(grid[0, :]), reward)
    for place, panel in enumerate(small):
        _draw(figure.add_subplot(grid[1 + place // num_columns, place % num_columns]), panel)
    out_png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out_png, dpi=150)
    plt.close(figure)


def read_curves(metrics_path: Path) -> dict[str, Curve]:
    """Every metric of the file by name, each with its value by step. A half-written last line is passed over."""
    try:
        lines = list(read_json_lines(metrics_path))
    except OSError as error:
        raise ConfigError(f"{metrics_path}: {error.strerror}; name the run_dir of a run that has begun") from None
    curves: dict[str, Curve] = defaultdict(dict)
    for number, (_, record) in enumerate(lines, start=1):
        if record is None or "step" not in record:
            if number == len(lines):
                break
            raise ConfigError(f"{metrics_path}:{number} is not a line of metrics; remove it")
        step = record.pop("step")
        for name, value in record.items():
            curves[name][step] = float(value)
    return dict(curves)


def _panels(curves: dict[str, Curve]) -> list[Panel]:
    """What there is to draw, rewards first."""
    functions = sorted(
        name for name in curves if name.startswith("reward/") and name.removeprefix("reward/") not in _NOT_FUNCTIONS
    )
    heldout = [("eval/score", "held-out score")] if "eval/score" in curves else [("eval/accuracy", "held-out accuracy")]
    wanted: list[tuple[str, list[tuple[str, str]], bool]] = [
        (
            "Reward",
            [("reward/mean", "total")] + [(name, name.removeprefix("reward/")) for name in functions] + heldout,
            False,
        ),
        ("KL to the reference", [("kl/mean", "KL")], False),
        ("Response length (tokens)", [("response_length/mean", "length")], False),
        ("Clip fraction", [("clip/fraction", "clip")], False),
        ("Mismatch, trainer to engine", [("mismatch/abs_mean", "mismatch")], True),
    ]
    panels = []
    for title, names, is_log in wanted:
        lines = [
            Line(label, curves[name], _HELDOUT_COLOR if name.startswith("eval/") else color, name.startswith("eval/"))
            for (name, label), color in zip(names, _COLORS * len(names), strict=False)
            if name in curves
        ]
        if lines:
            panels.append(Panel(title, lines, is_log))
    return panels


def _draw(axes: Any, panel: Panel) -> None:
    for line in panel.lines:
        steps = sorted(line.curve)
        values = [line.curve[step] if math.isfinite(line.curve[step]) else math.nan for step in steps]
        if line.is_heldout:
            axes.plot(
                steps,
                values,
                color=line.color,
                marker="D",
                markersize=6,
                linestyle="--",
                linewidth=1.2,
                label=line.label,
                zorder=5,
            )
            for step, value in {steps[0]: values[0], steps[-1]: values[-1]}.items():
                axes.annotate(f"{value:.2f}", (step, value), textcoords="offset points", xytext=(0, 8), ha="center")
        elif len(steps) < _MANY_POINTS:
            axes.plot(steps, values, color=line.color, marker="o", markersize=3, label=line.label)
        else:
            axes.plot(steps, values, color=line.color, alpha=0.25, linewidth=1)
            axes.plot(steps, _moving_average(values), color=line.color, linewidth=2, label=line.label)
    if panel.is_log and _spans_decades(panel):
        axes.set_yscale("log")
    axes.set_title(panel.title, loc="left", fontweight="bold")
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02, y=0.12)
    if len(panel.lines) > 1:
        axes.legend(frameon=False, ncols=len(panel.lines), loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2)


def _spans_decades(panel: Panel) -> bool:
    values = [value for line in panel.lines for value in line.curve.values() if math.isfinite(value)]
    return bool(values) and min(values) > 0 and max(values) > 10 * min(values)


def _moving_average(values: list[float]) -> list[float]:
    """The mean over a centred window of a fifteenth of the run; what is not a number is left out of it."""
    half = max(1, len(values) // 30)
    means = []
    for place in range(len(values)):
        window = [v for v in values[max(0, place - half) : place + half + 1] if not math.isnan(v)]
        means.append(sum(window) / len(window) if window else math.nan)
    return means
