"""Answers that are too large to compute are refused before sympy sees them. Other answers are computed."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_mega.rewards.api import Score
from grpo_mega.rewards.math import accuracy as module
from grpo_mega.rewards.math.accuracy import accuracy, quick
from grpo_mega.rewards.math.arithmetic import is_bounded
from grpo_mega.rewards.math.mathverify import cpu_limit

ROOT = str(Path(__file__).resolve().parents[2])
HUGE = [
    *(
        "9^{9^{9}}",
        "10^{10^{10}}",
        "9**9**9",
        "9^9^9",
        "9^{9}^{9}^{9}",
        "3^{100000000}",
        "x^{10^{10}}",
        "2^{2^{2^{2^{2^2}}}}",
    ),
    *("1000000!", "((5!)!)!", "5!!!!", "(9^9)!", r"\binom{10^9}{5*10^8}", r"\binom{10^9}{500000000}", "10^{-10^{10}}"),
    *(
        r"9^{9\cdot 9^{9}}",
        r"9^{9 \times 9^{9}}",
        r"2^{10^3\cdot 10^3\cdot 10^3}",
        r"\left(10^{10}\right)^{10^{10}}",
        "7+9^{9^{9}}",
    ),
    *(r"\frac{10^{10^{10}}}{10^{10^{10}}}", r"10^{99999}\cdot 10^{99999}", r"\sqrt{9^{9^{9}}}", r"\exp(10^{10^{10}})"),
    *(
        "(" * 500 + "1" + ")" * 500,
        "{" * 500 + "1" + "}" * 500,
        "(" * 900,
        r"\sqrt{" * 200 + "2" + "}" * 200,
        r"\frac{1}{1+" * 30,
    ),
    *("9" * 5000, "-" + "9" * 5000, "0." + "9" * 5000, "9" * 1999 + "!", "2^{" + "9" * 1900 + "}"),
]
COMPUTED = [
    *(
        "2^{100}",
        "2^{10000}",
        "7^{2023}-1",
        "100!",
        "2024!",
        r"\binom{1000}{500}",
        "10^{100}x",
        "2^{2^{10}}",
        "(x+1)^{2023}",
        "e^{100}",
    ),
    *(r"3^{1000}\cdot 5^{1000}", "((2^3)^4)^5", r"\frac{2024!}{2^{100}}", "(((x+1)^2+1)^2+1)^2", r"\binom{10^5}{2}"),
]
ALL_AT_ONCE = f"""
import time
from grpo_mega.rewards.math import mathverify
from grpo_mega.rewards.math.accuracy import accuracy
for text in {HUGE!r}:
    for gold in ("5", "x+1", text):
        for answer in (text, f"${{text}}+1$"):
            started = time.process_time()
            accuracy("", rf"\\boxed{{{{{{answer}}}}}}", gold, {{}})
            assert time.process_time() - started < 2.5, (text[:50], gold[:50])
print("done")
"""


def test_no_huge_answer_keeps_a_process_busy() -> None:
    out = subprocess.run(
        [sys.executable, "-c", ALL_AT_ONCE], capture_output=True, text=True, cwd=ROOT, timeout=300, check=False
    )
    assert out.stdout.split() == ["done"], out.stderr[-2000:]


@pytest.mark.parametrize("text", HUGE)
def test_a_huge_answer_has_no_reward_and_a_huge_gold_answer_is_unreadable(text: str) -> None:
    for gold in ("5", "x+1"):
        score = accuracy("", rf"\boxed{{{text}}}", gold, {})
        assert score.value == 0.0 and quick(rf"\boxed{{{text}}}", gold)[0] in (score, None)
    if len(text) < 5000:  # longer answers are cut, so they cannot be compared
        assert accuracy("", rf"\boxed{{{text}}}", text, {}) == Score(None, "gold_unparsable")


def test_two_long_numbers_with_the_same_end_are_not_equal() -> None:
    assert accuracy("", r"\boxed{8" + "9" * 4999 + "}", "9" * 5000, {}).value != 1.0


@pytest.mark.parametrize("text", COMPUTED)
def test_answers_that_can_be_computed_are_accepted(text: str) -> None:
    assert is_bounded(text)
    assert accuracy("", rf"\boxed{{{text}}}", text, {}) == Score(1.0, "correct")
    assert accuracy("", rf"\boxed{{{text}+0}}", text, {}) == Score(1.0, "correct")
    assert accuracy("", rf"\boxed{{{text}+1}}", text, {}) == Score(0.0, "wrong")


def test_a_gold_answer_that_is_not_parsed_in_time_is_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    gold = "+".join("{" * 10 + f"x_{{{i}}}" + "}" * 10 for i in range(5))  # parsed in about a second
    monkeypatch.setattr(module, "GOLD_SECONDS", 0.02)
    for response in (r"\boxed{5}", "", rf"\boxed{{{gold}}}"):
        assert accuracy("", response, gold, {}) == Score(None, "gold_unparsable")
    module._parse_gold.cache_clear()


def test_a_limit_ends_code_that_catches_every_exception() -> None:
    is_past = True
    with cpu_limit(0.05):
        while True:
            try:
                time.process_time()
            except Exception:
                is_past = False
    assert is_past
    with cpu_limit(60.0):
        is_past = False
    assert not is_past
