"""Progress: a bar on a terminal, occasional lines elsewhere, nothing if it is off."""

import io

import pytest
from rich.console import Console

from grpo_mega.observe.progress import Bar, progress


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
    monkeypatch.setattr("grpo_mega.console.get_console", lambda: console)
    with progress(2, "outer") as outer:
        with progress(3, "inner") as inner:
            inner.advance()
        outer.advance(tokens=1000)
    assert "outer" in screen.getvalue() and "tokens/s" in screen.getvalue()
    assert "inner" in screen.getvalue()
