"""The curves of a run, drawn as a picture, and thinned for the report.

Values that are not finite leave a gap in a picture. The report keeps at most MAX_POINTS points of a curve: each is the
mean of several steps, or the maximum for metrics whose name ends in "max".
"""

import math
from pathlib import Path
from typing import Any

from grpo_mega.errors import ConfigError
from grpo_mega.observe.curves import Curve, Curves, read_curves

MAX_POINTS = 2000
_NOT_FUNCTIONS = {"mean", "std", "min", "max"}
_COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]  # distinguishable for colour-blind readers
_HELDOUT_STYLE = {"color": "#222222", "marker": "D", "markersize": 6, "linestyle": "--", "linewidth": 1.2, "zorder": 5}
_MANY_POINTS = 30  # from this many points on, points are drawn faintly below their moving average
_LEGEND_COLUMNS = 4  # more columns run into the title
_PANELS = {  # title -> metric of the panels below the rewards panel
    "KL to the reference": "kl/mean",
    "Response length (tokens)": "response_length/mean",
    "Clip fraction": "clip/fraction",
    "Mismatch, trainer to engine": "mismatch/abs_mean",
}


def draw_curves(metrics_path: Path, out_png: Path) -> None:
    """Write the picture to `out_png`. Raises ConfigError if there are no metrics to draw."""
    found = read_curves(metrics_path)
    functions = sorted(name.removeprefix("reward/") for name in found if name.startswith("reward/"))
    rewards = {"total": "reward/mean"} | {name: f"reward/{name}" for name in functions if name not in _NOT_FUNCTIONS}
    rewards |= {"held-out score": "eval/score"} if "eval/score" in found else {"held-out accuracy": "eval/accuracy"}
    wanted = {"Reward": rewards} | {title: {name: name} for title, name in _PANELS.items()}
    panels = [
        (title, {label: found[name] for label, name in names.items() if name in found})
        for title, names in wanted.items()
        if not found.keys().isdisjoint(names.values())
    ]
    # A curve shows something if a value changes or is not finite. Leave out panels that show nothing.
    changing = [
        (title, lines)
        for title, lines in panels
        if any(len(set(curve.values())) > 1 or not all(map(math.isfinite, curve.values())) for curve in lines.values())
    ]
    panels = changing or panels[:1]
    if not panels:
        raise ConfigError(f"{metrics_path} holds no step yet; draw it after the first step")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    first, *small = panels
    num_columns = max(2, math.ceil(len(small) / 2))
    num_rows = 1 + math.ceil(len(small) / num_columns)
    figure = plt.figure(figsize=(5.2 * num_columns, 3.4 + 2.7 * (num_rows - 1)), layout="constrained")
    grid = figure.add_gridspec(num_rows, num_columns, height_ratios=[1.35] + [1.0] * (num_rows - 1))
    _draw(figure.add_subplot(grid[0, :]), *first)
    for index, panel in enumerate(small):
        _draw(figure.add_subplot(grid[1 + index // num_columns, index % num_columns]), *panel)
    out_png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out_png, dpi=150)
    plt.close(figure)


def steps_done(found: Curves) -> int:
    """Return the number of the last training step."""
    return max(found.get("seconds/step") or found.get("reward/mean") or found.get("loss/total") or {0: 0.0})


def series(found: Curves) -> dict[str, Any]:
    """Return {"steps": lists of steps, "series": {name: {"s": index of a list, "v": values}}, "points_averaged":
    width}.
    """
    longest = max((len(curve) for curve in found.values()), default=0)
    width = max(1, math.ceil(longest / MAX_POINTS))
    lists: dict[tuple[int, ...], int] = {}  # values have six digits, more than a picture shows
    thinned = {}
    for name, curve in found.items():
        steps = sorted(curve)
        size = width if len(steps) > MAX_POINTS else 1
        bins = [steps[i : i + size] for i in range(0, len(steps), size)]
        key = tuple(one[-1] for one in bins)
        summarise = max if name.endswith("max") else _mean
        values = [summarise([curve[s] for s in one]) for one in bins]
        thinned[name] = {
            "s": lists.setdefault(key, len(lists)),
            "v": [float(f"{v:.6g}") if math.isfinite(v) else None for v in values],
        }
    return {"steps": [list(key) for key in lists], "series": thinned, "points_averaged": width}


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
            half = max(1, len(values) // 30)  # each mean is over a centred window of a fifteenth of the run
            averages = [_mean(values[max(0, place - half) : place + half + 1]) for place in range(len(values))]
            axes.plot(steps, averages, color=color, linewidth=2, label=label)
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
        ncols = min(len(lines), _LEGEND_COLUMNS)
        axes.legend(frameon=False, ncols=ncols, loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2)


def _mean(values: list[float]) -> float:
    """Return the mean of the finite values; NaN if there are none."""
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan
