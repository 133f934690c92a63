"""Equations in running text, compared with tables and Python's arithmetic, and rewards of steps with equations."""
# ruff: noqa: RUF001 -- look-alike characters are part of the cases

import random
import re
import sys
import time
from fractions import Fraction
from pathlib import Path

import pytest

from grpo_mega.rewards import registry
from grpo_mega.rewards.api import Score, Step

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
arithmetic_steps = registry.resolve_reward("process_supervision/arithmetic_steps.py:arithmetic_steps", EXAMPLES)
equations_hold = sys.modules[arithmetic_steps.__module__].equations_hold

RIGHT = [
    "34+7=41",
    "x = 3 + 4 = 7",
    "1,234 + 1 = 1,235",
    "1,000,000 / 10 = 100,000.",
    "12 x 3 = 36 and 12×3=36 and 12 * 3 = 36",
    "36 ÷ 3 = 12",
    "0.1 + 0.2 = 0.3",
    ".5*4=2",
    "1/2 + 1/3 = 5/6",
    "10/3 = 3.33",
    "2/3 = 0.67",
    "50 * 20% = 10",
    "10% + 20% = 30%",
    "-3 + 5 = 2",
    "it is -3 + 5 = 2",
    "5 + (-3) = 2",
    "5 - -3 = 8",
    "(3 + 4) * 2 = 14",
    "so (3 + 4 = 7), fine",
    "It is 3 + 4 = 7 apples.",
    "3 * $5 = $15",
    "3+4=7, and 7*2=14",
    "3 + 4 = 7 (which is prime)",
    "3 + 4 + 5\n= 7 + 5\n= 12",
    "3 + 4 = 7 = 14/2",
    "- 3 + 4 = 7",
    "1. 3 + 4 = 7\n2) 3 + 4 = 7",
    "**12 + 3 = 15**",
    "Step 1: 12 + 3 = 15",
    "<answer>3+4=7</answer>",
    "48/2 = <<48/2=24>>24 clips",
    "$12 \\times 3 = 36$",
    "\\(\\frac{1}{2} + \\frac{1}{4} = \\dfrac{3}{4}\\)",
    "3 + 4 = \\boxed{7}",
    "3 + 4 = 7 \\text{ apples}",
    "\\begin{aligned} 3+4 &= 7 \\\\ &= 14 \\div 2 \\end{aligned}",
    "2*(3+4)=14 \\\\ 14/7 = 2",
]
WRONG = [
    "34+7=31",
    "3 + 4 = 7 = 8",
    "x = 3 + 4 = 8",
    "3+4=7, and 7*2=15",
    "1/2 + 1/3 = 2/5",
    "2/3 = 0.66",
    "10/3 = 3",
    "2.5 * 2.5 = 6.3",
    "5 / 0 = 0",
    "1,234 + 1 = 1,236",
    "0.1 + 0.2 = 0.30000000000000004",
    "3 + 4\n= 8",
    "12 x 3 = 26",
    "48/2 = <<48/2=24>>25 clips",
]
NOT_OF_NUMBERS = [
    "",
    "34+7+9+8=?",
    "x = 5",
    "3 = 3",
    "2x + 3 = 7",
    "x + 3 = 7",
    "x - 3 = 5",
    "x -3 = 5",
    "f(3) + 4 = 9",
    "sqrt(9) + 1 = 4",
    "\\sqrt{9} + 1 = 4",
    "log 8 + 1 = 4",
    "x_1 + 2 = 5",
    "a3 + 4 = 9",
    "2^3 + 1 = 9",
    "2**3 + 1 = 9",
    "3! + 1 = 7",
    "|3-5| = 2",
    "3(4) + 1 = 13",
    "1 1/2 + 1 = 2 1/2",
    "10% of 80 + 2 = 10",
    "17 mod 5 + 1 = 3",
    "5 apples + 3 apples = 8 apples",
    "30 minutes / 60 = 5",
    "3 + 4 = 7x",
    "3 + 4 = 8 - y",
    "3 + 4 = 8 thousand",
    "3 + 4 = 8 apples / 2",
    "at 10:30 + 1 = 2",
    "3 + 4 <= 8, 3 + 4 != 8, 3 + 4 ≠ 8, 10/3 ≈ 3",
    "2*(3+4 = x",
    "1" * 50 + " + 1 = 2",
    "(" * 50 + "1 + 1" + ")" * 50 + " = 3",
]


@pytest.mark.parametrize("text", RIGHT)
def test_a_correct_equation_holds(text: str) -> None:
    assert equations_hold(text) is True


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_equation_does_not_hold(text: str) -> None:
    assert equations_hold(text) is False


@pytest.mark.parametrize("text", NOT_OF_NUMBERS)
def test_equations_not_between_numbers_have_no_verdict(text: str) -> None:
    assert equations_hold(text) is None


def test_it_agrees_with_pythons_arithmetic() -> None:
    rng = random.Random(0)

    def expression(depth: int) -> str:
        if depth == 0 or rng.random() < 0.3:
            return rng.choice(
                [str(rng.randint(0, 99)), f"{rng.randint(0, 9)}.{rng.randint(1, 99)}", f"(-{rng.randint(1, 9)})"]
            )
        text = f"{expression(depth - 1)} {rng.choice('+-*/')} {expression(depth - 1)}"
        return f"({text})" if rng.random() < 0.5 else text

    num_checked = 0
    for _ in range(1000):
        left, right = expression(3), expression(2)
        try:
            values = [eval(_exact(text), {"Fraction": Fraction}) for text in (left, right)]
        except ZeroDivisionError:
            continue
        if any(f" {sign} " in left for sign in "+-*/"):
            num_checked += 1
            value = f"{values[0].numerator}/{values[0].denominator}"
            assert equations_hold(f"so {left} = {value}.") is True, (left, value)
            assert equations_hold(f"{left} = {right}") is (values[0] == values[1]), (left, right)
    assert num_checked > 500


def _exact(text: str) -> str:
    return re.sub(r"\d+(?:\.\d+)?", lambda match: f"Fraction('{match[0]}')", text)


@pytest.mark.parametrize(
    "piece", ["1+", "1+1=2 ", "1=", "(", "(1+", "=", "1,111,", "\\frac{", "<<", "1/0=", "- ", "1. ", "a "]
)
def test_it_takes_linear_time(piece: str) -> None:
    started = time.process_time()
    equations_hold(piece * (40_000 // len(piece)))
    assert time.process_time() - started < 4.0


def test_steps_with_equations_are_rewarded_and_others_are_not() -> None:
    response = "<think>\n34+7=31\n31+9=40\nand so\n40+8=48, 48=48\n</think>\n<answer>48</answer>"
    ends = [response.index(step) + len(step) + 1 for step in ("34+7=31", "31+9=40", "48=48")]
    assert arithmetic_steps("", response, "58", {}, step_splitter="lines") == Score(
        None, "steps_wrong", (Step(ends[0], 0.0), Step(ends[1], 1.0), Step(ends[2], 1.0))
    )
    assert arithmetic_steps("", response, "58", {}) == Score(None, "steps_wrong", (Step(len(response), 0.0),))
    assert arithmetic_steps("", "1+1=2\n\nso", "", {}) == Score(None, "steps_right", (Step(7, 1.0),))
    assert arithmetic_steps("", "58", "58", {}) == Score(None, "no_steps")
