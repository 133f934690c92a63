"""Draw the curves of a run from its metrics.jsonl: rewards with held-out score, KL, response length, clipping, mismatch.

Panels without metrics are omitted. Values that are not finite leave a gap.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from grpo_mega.errors import ConfigError
from grpo_mega.observe.curves import Curve, Curves, read_curves

_NOT_FUNCTIONS = {"mean", "std", "min", "max"}
_COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]  # distinguishable for colour-blind readers
_HELDOUT_STYLE = {"color": "#222222", "marker": "D", "markersize": 6, "linestyle": "--", "linewidth": 1.2, "zorder": 5}
_MANY_POINTS = 30  # from this many points on, points are drawn faintly below their moving average
_PANELS = [  # (title, metric) of the panels below the rewards panel
    ("KL to the reference", "kl/mean"),
    ("Response length (tokens)", "response_length/mean"),
    ("Clip fraction", "clip/fraction"),
    ("Mismatch, trainer to engine", "mismatch/abs_mean"),
]


def draw_curves(metrics_path: Path, out_png: Path) -> None:
    """Write the picture to `out_png`. Raises ConfigError if there are no metrics to draw."""
    panels = _panels(read_curves(metrics_path))
    if not panels:
        raise ConfigError(f"{metrics_path} holds no step yet; draw it after the first step")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    first, *small = panels
    num_columns = max(2, math.ceil(len(small) / 2)) if small else 1
    num_rows = 1 + math.ceil(len(small) / num_columns)
    figure = plt.figure(figsize=(5.2 * num_columns, 3.4 + 2.7 * (num_rows - 1)), layout="constrained")
    grid = figure.add_gridspec(num_rows, num_columns, height_ratios=[1.35] + [1.0] * (num_rows - 1))
    _draw(figure.add_subplot(grid[0, :]), *first)
    for place, panel in enumerate(small):
        _draw(figure.add_subplot(grid[1 + place // num_columns, place % num_columns]), *panel)
    out_png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out_png, dpi=150)
    plt.close(figure)


def _panels(curves: Curves) -> list[tuple[str, dict[str, Curve]]]:
    """Return the title and the curves by label of each panel, rewards first."""
    functions = sorted(name.removeprefix("reward/") for name in curves if name.startswith("reward/"))
    rewards = {"total": "reward/mean"} | {name: f"reward/{name}" for name in functions if name not in _NOT_FUNCTIONS}
    rewards |= {"held-out score": "eval/score"} if "eval/score" in curves else {"held-out accuracy": "eval/accuracy"}
    wanted = [("Reward", rewards)] + [(title, {name: name}) for title, name in _PANELS]
    panels = [(title, {label: curves[name] for label, name in names.items() if name in curves}) for title, names in wanted]
    return [(title, lines) for title, lines in panels if lines]


def _draw(axes: Any, title: str, lines: dict[str, Curve]) -> None:
    for (label, curve), color in zip(lines.items(), _COLORS * len(lines), strict=False):
        steps = sorted(curve)
        values = [curve[step] if math.isfinite(curve[step]) else math.nan for step in steps]
        if label.startswith("held-out"):
            axes.plot(steps, values, label=label, **_HELDOUT_STYLE)
            for step, value in {steps[0]: values[0], steps[-1]: values[-1]}.items():
                axes.annotate(f"{value:.2f}", (step, value), textcoords="offset points", xytext=(0, 8), ha="center")
        elif len(steps) < _MANY_POINTS:
            axes.plot(steps, values, color=color, marker="o", markersize=3, label=label)
        else:
            axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
            axes.plot(steps, _moving_average(values), color=color, linewidth=2, label=label)
    finite = [value for curve in lines.values() for value in curve.values() if math.isfinite(value)]
    if title.startswith("Mismatch") and finite and 0 < 10 * min(finite) < max(finite):
        axes.set_yscale("log")
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02, y=0.12)
    if len(lines) > 1:
        axes.legend(frameon=False, ncols=len(lines), loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2)


def _moving_average(values: list[float]) -> list[float]:
    """Return the mean over a centred window of a fifteenth of the run, ignoring NaN."""
    half = max(1, len(values) // 30)
    windows = [values[max(0, place - half) : place + half + 1] for place in range(len(values))]
    finite = [[v for v in window if not math.isnan(v)] for window in windows]
    return [sum(window) / len(window) if window else math.nan for window in finite]
