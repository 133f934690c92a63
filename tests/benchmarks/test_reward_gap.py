"""The gap between built-in rewards and an oracle: value, exit code, task and oracle."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from grpo_mega.config import load
from grpo_mega.rewards import BUILT_IN, resolve_reward
from tools.benchmarks.harness import RunFailed
from tools.benchmarks.reward_gap import __main__ as reward_gap
from tools.benchmarks.reward_gap import task

sys.path.append(str(reward_gap.ROOT / "examples"))

from arithmetic import Problem  # type: ignore[import-not-found]

CURVES = {
    "seconds/step": {1: 1.0, 2: 1.0, 3: 1.0},
    "reward/paid_but_wrong": {1: 0.0, 2: 0.0101, 3: 0.01},
    "verdict/len/correct": {1: 0.5, 3: 0.75},
}


def test_the_worst_step_decides() -> None:
    gap = reward_gap.gap_of(CURVES, "len")
    assert gap == reward_gap.Gap(3, 0.0101, 2, 0.5, 0.75) and not gap.is_within
    assert reward_gap.gap_of(CURVES | {"reward/paid_but_wrong": {1: 0.0, 2: 0.01, 3: 0.0}}, "len").is_within


def test_a_step_without_a_value_and_a_run_without_rewards_are_errors() -> None:
    with pytest.raises(RunFailed, match="step 2 has no reward/paid_but_wrong"):
        reward_gap.gap_of(CURVES | {"reward/paid_but_wrong": {1: 0.0, 3: 0.0}}, "len")
    with pytest.raises(RunFailed, match="accuracy called no response correct"):
        reward_gap.gap_of(CURVES, "accuracy")


@pytest.mark.parametrize(("worst", "code"), [(0.01, 0), (0.02, 1)])
def test_the_exit_code_and_the_last_line_report_a_gap(
    worst: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(run: Path, *_: object) -> None:
        run.mkdir()
        row = {"step": 1, "seconds/step": 1.0, "reward/paid_but_wrong": worst, "verdict/accuracy/correct": 0.5}
        (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")

    monkeypatch.setattr(reward_gap, "train", train)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "heldout.jsonl").touch()
    assert reward_gap.main([str(tmp_path), "--tasks", "bare", "--rewards", "accuracy", "--steps", "1"]) == code
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["is_within"] == (code == 0) and last["runs"]["bare-accuracy"]["worst"] == worst


def test_every_built_in_reward_but_oracle_and_server_is_trained_on() -> None:
    assert set(reward_gap.REWARDS) == set(BUILT_IN) - {"arithmetic_oracle", "word_sums_oracle", "reward_model"}
    for reward in reward_gap.REWARDS:
        names = [function["name"] for function in reward_gap.functions_of(reward, False)]
        assert names == [
            reward,
            *(["accuracy"] if reward not in ("accuracy", "len", "cosine") else []),
            "arithmetic_oracle",
        ]
    (accuracy, oracle) = reward_gap.functions_of("accuracy", True)
    assert accuracy["options"] == {"unevaluated": True} and oracle["weight"] == 0.0


@pytest.mark.parametrize("name", ["quickstart.yaml", "process_supervision.yaml"])
def test_the_examples_with_sums_log_the_oracle(name: str) -> None:
    functions = {
        function.name: function.weight for function in load(reward_gap.ROOT / "examples" / name).rewards.functions
    }
    assert functions["arithmetic_oracle"] == 0.0


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
    score = resolve_reward("arithmetic_oracle")("p", response, "58", {})
    assert (score.value, score.verdict) == (float(is_right), "oracle_right" if is_right else "oracle_wrong")  # type: ignore[union-attr]


def test_bare_demonstrations_end_in_a_sum_or_before_its_result() -> None:
    rng, problem = random.Random(1), Problem((34, 7, 9, 8))
    texts = [task.demonstrate(problem, rng) for _ in range(600)]
    ends = {"=" if text.endswith("=") else "+8" if text.endswith("+8") else "whole" for text in texts}
    assert ends == {"=", "+8", "whole"} and not any("<" in text for text in texts)
    assert 0.1 < sum(text.endswith(("=", "+8")) for text in texts) / 600 < 0.3
    assert any(text.rpartition("=")[2] == problem.answer for text in texts)
