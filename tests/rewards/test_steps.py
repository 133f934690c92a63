"""Ends of steps in a response: tables per splitter, invariants for any text, and linear time."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega.config.data import STEP_SPLITTERS
from grpo_mega.errors import ConfigError
from grpo_mega.rewards.api import splitter

NAMES = [*STEP_SPLITTERS, "regex:;", "regex:(?=<)", r"regex:\s*", "regex:x?"]


def _split(text: str, name: str) -> list[str]:
    ends = splitter(name)(text)
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("blank-lines", ["First,\nso.\n\n", "Then\r\n \t\n\n", "at last\n"]),
        ("blank-lines", ["\n\n  First.\n\n", "Last."]),
        ("blank-lines", ["one step\n"]),
        ("lines", ["34+7=41\n", "\n41+9=50\n", "50+8=58"]),
        ("lines", ["\n\na\n", "b\n\n"]),
        ("step-k", ["Let us see.\n", "Step 1: add\nthem\n", "**Step 2:** step 7 is no step\n", "### step 3. end\n"]),
        ("step-k", ["Step 1\nx\n", "- Step 10) y\n", "  > **step 3** z\nSteps 4\nStepping 5\nstep four"]),
        ("regex:;", ["a;", "b;", " c"]),
        ("regex:(?=<)", ["a", "<b>", "<c>"]),
        ("regex:(?i)so", ["it is so", ", and SO", " on"]),
    ],
)
def test_a_text_is_split_into_its_steps(name: str, steps: list[str]) -> None:
    assert _split("".join(steps), name) == steps


@settings(max_examples=300, derandomize=True)
@given(
    st.lists(st.sampled_from(["\n", "\n\n", " ", "\r\n", "\t", "a", ";", "<", "x", "Step 1", "**", "é"]), max_size=14)
)
def test_steps_cover_the_text_and_none_is_blank(pieces: list[str]) -> None:
    text = "".join(pieces)
    for name in NAMES:
        steps = _split(text, name)
        assert "".join(steps) == (text if text.strip() else "")
        assert all(step.strip() for step in steps)


@settings(max_examples=200, derandomize=True)
@given(st.text(alphabet="a \n", max_size=20))
def test_lines_and_blank_lines_agree_with_a_regular_expression(text: str) -> None:
    assert [s.strip() for s in _split(text, "lines")] == [s.strip() for s in text.split("\n") if s.strip()]
    assert [s.strip() for s in _split(text, "blank-lines")] == [
        s.strip() for s in re.split(r"\n\s*\n", text) if s.strip()
    ]


@pytest.mark.parametrize("piece", ["\n", " ", "\n ", "#", "> ", "Step 1", "*_", "\nstep", "\n \t"])
@pytest.mark.parametrize("name", STEP_SPLITTERS)
def test_it_takes_linear_time(name: str, piece: str) -> None:
    started = time.process_time()
    splitter(name)("a" + piece * (300_000 // len(piece)) + "b")
    assert time.process_time() - started < 2.0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("line", "step_splitter='line' is unknown; use blank-lines, lines, step-k or regex:PATTERN"),
        ("regex:", "step_splitter='regex:' is unknown"),
        ("regex:(a", "is not a regular expression"),
    ],
)
def test_a_splitter_that_does_not_exist_is_refused(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        splitter(name)
