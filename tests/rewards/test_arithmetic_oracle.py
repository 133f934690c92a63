"""The oracle of the quickstart's sums, and the examples that log it."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_mega.config import load
from grpo_mega.rewards import resolve_reward

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("name", ["quickstart.yaml", "process_supervision.yaml"])
def test_the_examples_with_sums_log_the_oracle(name: str) -> None:
    functions = {function.name: function.weight for function in load(EXAMPLES / name).rewards.functions}
    assert functions["arithmetic_oracle.py:arithmetic_oracle"] == 0.0


@pytest.mark.parametrize(
    ("response", "is_right"),
    [
        ("<think>\n50+8=58\n</think>\n<answer>58</answer>", True),
        ("<think>\n50+8=57\n</think>\n<answer>58</answer>", True),
        ("<answer>57</answer><answer>58</answer>", True),
        ("<answer>58</answer><answer>57</answer>", False),
        ("<answer>58</answer>\n<answer>5", True),
        ("50+8=58\n<answer>", False),
        ("50+8=58</answer>", False),
        ("12</answer>\n50+8=58", False),
        ("50+8=58<answer>57</answer>", False),
        ("<answer>50+8=58</answer>", False),
        ("<answer>50+8</answer>", False),
        ("<answer>58.</answer>", False),
        ("<answer>058</answer>", False),
        ("<answer>5 8</answer>", False),
        ("<answer>58 58</answer>", False),
        ("<answer><answer>58</answer>", True),
        ("<answer></answer>", False),
        ("<think>\n50+8=58\n</think>\n58", True),
        ("<think>\n50+8=58\n</think>\n57", False),
        ("<think>\n50+8=57\n</think>\n58", True),
        ("<think>\n50+8=58\n</think>", False),
        ("<think>\n50+8=58\n</think>\n50+8=57", False),
        ("<think>\n50+8=58\n</think>\n5\n58", False),
        ("<think>\n<answer>58</answer>\n</think>\n57", False),
        ("<think>\n50+8=57\n</think>\n58=58", True),
        ("50+8=58", True),
        ("58", True),
        ("50+8=", False),
        ("50+8", False),
        ("50+8=58+0", False),
        ("50+8=058", False),
        ("50+8=58.", False),
        ("50+8=57\n58", False),
        ("50+8=5 8", False),
        ("58=", False),
        ("", False),
    ],
)
def test_the_oracle_requires_the_exact_text_of_the_answer(response: str, is_right: bool) -> None:
    score = resolve_reward("arithmetic_oracle.py:arithmetic_oracle", EXAMPLES)("p", response, "58", {})
    assert (score.value, score.verdict) == (float(is_right), "oracle_right" if is_right else "oracle_wrong")  # type: ignore[union-attr]
