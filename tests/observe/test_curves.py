"""draw_curves: a picture from the metrics that a run has."""

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from grpo_mega.cli.report.picture import draw_curves
from grpo_mega.errors import ConfigError
from grpo_mega.observe.curves import read_curves


def write(path: Path, records: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def test_a_whole_run_is_drawn(tmp_path: Path) -> None:
    steps = [
        {
            "step": step,
            "reward/mean": step / 40,
            "reward/accuracy": step / 40,
            "reward/format": 1.0,
            "kl/mean": 0.01 if step else "NaN",
            "response_length/mean": 40.0,
            "clip/fraction": 0.0,
            "mismatch/abs_mean": 10.0 ** (step % 5 - 7),
        }
        for step in range(40)
    ]
    path = write(tmp_path / "metrics.jsonl", [{"step": 0, "eval/score": 0.4}, *steps, {"step": 40, "eval/score": 0.9}])
    draw_curves(path, tmp_path / "curves.png")
    assert is_png(tmp_path / "curves.png")


@pytest.mark.parametrize("name", ["reward/mean", "kl/mean", "eval/score", "response_length/mean"])
def test_metrics_that_a_run_lacks_are_left_out(tmp_path: Path, name: str) -> None:
    draw_curves(write(tmp_path / "metrics.jsonl", [{"step": 0, name: 1.0}]), tmp_path / "curves.png")
    assert is_png(tmp_path / "curves.png")


def test_a_panel_whose_values_never_change_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles: list[str] = []
    save = Figure.savefig

    def saved(figure: Figure, *args: Any, **kwargs: Any) -> None:
        titles[:] = [axes.get_title(loc="left") for axes in figure.axes]
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", saved)
    rows = [{"step": s, "reward/mean": s, "reward/format": 1.0, "clip/fraction": 0.0, "kl/mean": "NaN"} for s in (1, 2)]
    draw_curves(write(tmp_path / "metrics.jsonl", rows), tmp_path / "curves.png")
    assert titles == ["Reward", "KL to the reference"]
    draw_curves(write(tmp_path / "metrics.jsonl", rows[:1]), tmp_path / "curves.png")
    assert titles == ["KL to the reference"]


def test_the_last_line_of_a_step_counts_and_a_half_written_line_does_not(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", [{"step": 0, "a": 1.0}, {"step": 1, "a": 2.0}, {"step": 1, "a": 3.0}])
    path.write_text(path.read_text() + '{"step": 2, "a"')
    assert read_curves(path) == {"a": {0: 1.0, 1: 3.0}}


def test_a_run_without_metrics_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory; name the run_dir"):
        draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    with pytest.raises(ConfigError, match="holds no step yet"):
        draw_curves(write(tmp_path / "metrics.jsonl", []), tmp_path / "curves.png")


def test_the_legend_of_many_rewards_leaves_room_for_the_title(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overlaps: list[bool] = []
    save = Figure.savefig

    def saved(figure: Figure, *args: Any, **kwargs: Any) -> None:
        save(figure, *args, **kwargs)
        axes = figure.axes[0]
        legend, title = axes.get_legend().get_window_extent(), axes._left_title.get_window_extent()
        overlaps.append(legend.overlaps(title) or legend.x0 < 0)

    monkeypatch.setattr(Figure, "savefig", saved)
    names = ("accuracy", "arithmetic_oracle", "excluded", "format", "paid_but_wrong")
    steps = [
        {"step": i, "reward/mean": 1.0, "eval/score": 1.0} | {f"reward/{name}": 0.5 for name in names} for i in (1, 2)
    ]
    draw_curves(write(tmp_path / "metrics.jsonl", steps), tmp_path / "curves.png")
    assert overlaps == [False]
