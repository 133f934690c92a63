"""The comparison of methods: settings of the rows, figures from handwritten curves, and the start data."""

from __future__ import annotations

import random
import re

import pytest

from grpo_mega.config import load
from tools.benchmarks import harness
from tools.benchmarks.methods import __main__ as methods
from tools.benchmarks.methods import task

QUICKSTART = harness.ROOT / "examples" / "quickstart.yaml"


def test_each_row_adds_a_setting_of_dapo_and_all_rows_are_valid() -> None:
    found = []
    for name in (*methods.ROWS, *methods.DR_ROWS):
        settings = {"run_dir": "run", **methods.SETTINGS, **methods.settings_of(name)}
        config = load(QUICKSTART, [f"{key}={value}" for key, value in settings.items()])
        one = config.algorithm
        norm = one.loss_agg_func, one.normalize_by_std
        dapo = one.overlong_filter, one.ratio_clip_eps_high, one.overlong_buffer, norm, one.dynamic_sampling_tries
        found.append((config.rollout.max_response_length, dapo))
    by_mean, by_token = ("seq-mean-token-mean", True), ("token-mean", True)
    assert found == [
        (52, (False, None, 0.0, by_mean, 0)),
        (52, (True, None, 0.0, by_mean, 0)),
        (52, (True, 0.28, 0.0, by_mean, 0)),
        (52, (True, 0.28, 0.2, by_mean, 0)),
        (52, (True, 0.28, 0.2, by_token, 0)),
        (52, (True, 0.28, 0.2, by_token, 4)),
        (128, (False, None, 0.0, by_mean, 0)),
        (128, (False, None, 0.0, ("seq-mean-token-sum-norm", False), 0)),
    ]


def test_figures_are_means_over_the_last_steps_and_count_rollouts() -> None:
    curves = {
        "seconds/step": dict.fromkeys(range(1, 7), 1.0),
        methods.SCORE: {0: 0.1, 3: 0.5, 6: 0.75},
        "response_length/cut": {step: step / 10 for step in range(1, 7)},
        "entropy/mean": {1: 9.0, 4: 2.0, 6: 1.0},
        "rollouts": {2: 3.0},
        "wrong_length": {1: 10.0, 2: 20.0, 3: 30.0, 4: 40.0, 5: 50.0},
    }
    assert methods.figures_of(curves) == {
        "score": 0.75,
        "cut": pytest.approx(0.45),
        "samples": 128 * 8,
        "entropy": 4.0,
        "wrong": 35.0,
    }


def test_the_length_of_wrong_responses_leaves_out_right_and_unscored_ones() -> None:
    rows = [
        {"step": step, "rewards": {"accuracy": accuracy}, "rollout_logprobs": [0.0] * length}
        for step, accuracy, length in ((1, 0.0, 4), (1, 0.0, 8), (1, 1.0, 90), (1, None, 70), (2, 1.0, 5))
    ]
    assert methods.wrong_lengths(rows) == {1: 6.0}


def test_demonstrations_have_blank_lines_and_fit_the_limit_without_them() -> None:
    rng = random.Random(3)
    train, heldout = task.make_problems(rng)
    assert not set(train) & set(heldout)
    num_lines = num_blank = num_cut = 0
    for problem in train[:2000]:
        text = task.demonstrate(problem, rng)
        lines = re.findall(r"(\d+)\+(\d)=(\d+)", text)
        assert [int(term) for _, term, _ in lines] == list(problem.terms[1:])
        assert all(int(c) in (int(a) + int(b), int(a) + int(b) - 10) for a, b, c in lines)
        blank, num_tokens = text.count("\n") - len(lines) - 2, len(re.sub("</?[a-z]+>", "x", text)) + 1
        num_lines, num_blank, num_cut = num_lines + len(lines), num_blank + blank, num_cut + (num_tokens > task.TIGHT)
        assert num_tokens - blank <= 49 < task.TIGHT
    assert num_blank / num_lines == pytest.approx(task.BLANK_LINE / (1 - task.BLANK_LINE), rel=0.05)
    assert 0.05 < num_cut / 2000 < 0.4
