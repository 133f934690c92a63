"""Progress: a bar on a terminal, occasional lines elsewhere, nothing if it is off."""

import io
import time

import pytest
from rich.console import Console

from grpo_mega.tracking import progress as module
from grpo_mega.tracking.progress import Bar, Pace, phase, progress


def test_without_a_terminal_a_line_is_printed_at_most_every_5_seconds() -> None:
    lines: list[str] = []
    now = 0.0
    bar = Bar(20, "sampling", "items", lines.append, lambda: now)
    for _ in range(12):
        now += 1
        bar.advance()
    assert lines == ["sampling: 5/20 (5 s, 15 s left)", "sampling: 10/20 (10 s, 10 s left)"]


def test_lines_show_tokens_per_second_and_no_time_left_without_a_total() -> None:
    lines: list[str] = []
    now = 0.0
    bar = Bar(None, "sampling", "items", lines.append, lambda: now)
    for _ in range(6):
        now += 1
        bar.advance(2, tokens=2500)
    assert lines == ["sampling: 10 (5 s, 2,500 tokens/s)"]


def test_quick_work_without_a_terminal_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(3, "counting") as bar:
        bar.advance(3)
    assert capsys.readouterr().out == ""


def test_a_disabled_bar_can_be_advanced() -> None:
    with progress(3, "nothing", enabled=False) as bar:
        bar.advance(2)


def test_on_a_terminal_bars_nest_and_disappear_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr("grpo_mega.tracking.progress.get_console", lambda: console)
    with progress(2, "outer") as outer:
        with progress(3, "inner") as inner:
            inner.advance()
        outer.advance(tokens=1000)
    assert "outer" in screen.getvalue() and "tokens/s" in screen.getvalue()
    assert "inner" in screen.getvalue()


def test_bytes_show_their_share_and_a_wait_shows_its_deadline() -> None:
    lines: list[str] = []
    now = 0.0
    loading = Bar(4_000_000_000, "loading the model", "bytes", lines.append, lambda: now)
    waiting = Bar(600, "waiting for the server", "seconds", lines.append, lambda: now)
    now = 8.0
    loading.advance(1_600_000_000)
    waiting.advance(8)
    assert lines == [
        "loading the model: 40%, 1.6 of 4.0 GB, 200 MB/s, 12 s left",
        "waiting for the server: 8 s of at most 600 s",
    ]


def test_a_slow_phase_is_announced_and_a_quick_one_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "SECONDS_OF_SILENCE", 0.1)
    with phase("slow"):
        time.sleep(0.3)
        assert capsys.readouterr().out == "slow\n"
    with phase("quick"), phase("of another rank", enabled=False):
        pass
    with phase("of another rank", enabled=False):
        time.sleep(0.3)
    assert capsys.readouterr().out == ""


def test_the_time_left_counts_each_kind_of_piece_at_its_own_pace() -> None:
    """Two mini-batches of two micro-batches: forward 1 s, backward 2 s, optimizer 10 s, so 16 s per mini-batch."""
    lines: list[str] = []
    now = 0.0
    pace = Pace(lambda: now)
    pieces = {"forward": 4, "backward": 4, "optimizer": 2}
    seconds = {"forward": 1.0, "backward": 2.0, "optimizer": 10.0, "": 0.0}
    mini_batch = ["forward", "", "backward", "forward", "backward", "optimizer"]

    def update() -> None:
        nonlocal now
        bar = Bar(10, "update", "items", lines.append, lambda: now)
        with pace.over(pieces, bar) as start:
            for kind in mini_batch * 2:
                start(kind)
                now += seconds[kind]

    update()
    assert lines == [
        "update: 4/10 (6 s, 6 s + optimizer left)",  # 2 x 3 s, and optimizer steps of an unknown duration
        "update: 5/10 (16 s, 16 s left)",
        "update: 9/10 (22 s, 10 s left)",
    ]
    lines.clear()
    update()
    assert lines == [
        "update: 4/10 (6 s, 26 s left)",
        "update: 5/10 (16 s, 16 s left)",
        "update: 9/10 (22 s, 10 s left)",
    ]
