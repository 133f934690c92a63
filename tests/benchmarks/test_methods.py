"""The comparison of methods: values from handwritten curves, the F ratio, the task and the arguments."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from grpo_mega.config import load
from tools.benchmarks.methods import __main__ as bench_methods
from tools.benchmarks.methods import task
from tools.benchmarks.methods.__main__ import Run

YAML = Path(bench_methods.HERE) / "task.yaml"


def test_separation_is_the_f_ratio_of_a_worked_example() -> None:
    groups = [6, 8, 4, 5, 3, 4], [8, 12, 9, 11, 6, 8], [13, 9, 11, 8, 7, 12]  # Wikipedia, "One-way analysis of variance"
    assert bench_methods.separation(groups) == pytest.approx((84 / 2) / (68 / 15))


def test_separation_needs_two_methods_two_seeds_and_a_spread() -> None:
    assert bench_methods.separation([[0.5], [0.7]]) is None
    assert bench_methods.separation([[0.5, 0.6]]) is None
    assert bench_methods.separation([[0.5, 0.5], [0.6, 0.6]]) is None


def test_samples_of_dynamic_sampling_are_counted_by_rollouts(tmp_path: Path) -> None:
    config = load(YAML)
    per_rollout = config.batch.prompts_per_step * config.algorithm.group_size
    evaluation = f"eval/mean@{config.eval.samples}"
    lines = [
        {"step": 0, evaluation: 0.2, "eval/sampled_response_length": 40.0},
        {"step": 1, "seconds/step": 1.0, "rollouts": 3.0, "entropy/mean": 0.7},
        {"step": 2, "seconds/step": 1.0, "rollouts": 1.0},  # this step has no update
        {"step": 2, evaluation: 0.6, "eval/sampled_response_length": 44.0},
        {"step": 3, "seconds/step": 1.0, "rollouts": 2.0, "entropy/mean": 0.5},
        {"step": 3, evaluation: 1.0, "eval/sampled_response_length": 42.0},
    ]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = bench_methods._read(metrics)
    assert run.samples == [0, 4 * per_rollout, 6 * per_rollout]
    assert (run.score, run.length, run.entropy) == ([0.2, 0.6, 1.0], [40, 44, 42], [0.7, 0.7, 0.5])
    metrics.write_text("".join(json.dumps({k: v for k, v in line.items() if k != "rollouts"}) + "\n" for line in lines))
    assert bench_methods._read(metrics).samples == [0, 2 * per_rollout, 3 * per_rollout]


def test_values_are_read_at_equal_numbers_of_samples() -> None:
    run = Run([0, 100, 300], [0.2, 0.6, 1.0], [40, 44, 40], [0.7, 0.5, 0.3])
    assert run.at("score", 200) == pytest.approx(0.8) and run.at("length", 200) == pytest.approx(42)
    assert run.mean_score(100) == pytest.approx(0.4)
    assert run.mean_score(200) == pytest.approx((40 + 70) / 200)
    assert run.mean_score(300) == pytest.approx((40 + 160) / 300)
    assert run.samples_to_target() == pytest.approx(250)
    assert Run([0, 100], [0.2, 0.89], [40, 40], [0.7, 0.7]).samples_to_target() is None


def test_the_table_has_mean_and_range_and_the_best_method_first() -> None:
    names = ("mean_score", "score", "samples_to_target", "length", "entropy")
    slow, fast = (
        [dict(zip(names, values, strict=True)) for values in seeds]
        for seeds in (
            [(0.4, 0.8, None, 44.0, 0.1), (0.5, 0.7, None, 46.0, 0.1)],
            [(0.6, 0.9, None, 40.0, 0.1), (0.8, 1.0, 1200.0, 41.0, 0.3)],
        )
    )
    first, second = bench_methods._table({"slow": slow, "fast": fast}).splitlines()[2:]
    assert first == (
        "| `fast` | 0.700 (0.600 to 0.800) | 0.950 (0.900 to 1.000) | 1,200, 1 of 2 seeds | 40.5 (40.0 to 41.0) "
        "| 0.200 (0.100 to 0.300) |"
    )
    assert second.startswith("| `slow` |") and "not reached" in second


def test_demonstrations_dither_and_drop_carries_and_nothing_else() -> None:
    rng = random.Random(3)
    train, heldout = task.make_problems(rng)
    assert not set(train) & set(heldout)
    num_carries, num_dropped, num_blank, num_lines = dict.fromkeys(task.DIGITS, 0), dict.fromkeys(task.DIGITS, 0), 0, 0
    for problem in train[:2000]:
        demonstration = task.demonstrate(problem, rng)
        lines = re.findall(r"(\d+)\+(\d)=(\d+)", demonstration)
        num_lines += len(lines)
        num_blank += demonstration.count("\n") - len(lines) - 2
        assert [int(term) for _, term, _ in lines] == list(problem.terms[1:])
        for total, term, following in (map(int, line) for line in lines):
            num_carries[term] += total % 10 + term >= 10
            num_dropped[term] += total + term != following
            assert following in (total + term, total + term - 10)
    for digit, carries in num_carries.items():
        assert num_dropped[digit] / carries == pytest.approx(task.CARRY_DROPPED.get(digit, 0), abs=0.08)
    assert num_blank / num_lines == pytest.approx(task.BLANK_LINE / (1 - task.BLANK_LINE), rel=0.05)


def test_the_response_limit_is_from_the_config() -> None:
    assert load(YAML).rollout.max_response_length == task.MAX_RESPONSE_TOKENS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--steps 0", "--steps=0 must be at least 1"),
        ("--steps many", "--steps: invalid int value: 'many'"),
        ("--methods grpo opd", "--methods: invalid choice: 'opd'"),
        ("--methods grpo grpo", "--methods=grpo grpo must differ from one another"),
        ("--seeds 1 1", "--seeds=1 1 must differ from one another"),
        ("--seeds -1", "--seeds=-1 must not be negative"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        bench_methods.main(arguments.split())
    error = capsys.readouterr().err
    assert end.value.code == 2 and message in error and len(error.splitlines()) == 1


def test_a_finished_run_of_another_length_is_not_reused(tmp_path: Path) -> None:
    (tmp_path / "grpo-0" / "hf").mkdir(parents=True)
    (tmp_path / "grpo-0" / "metrics.jsonl").write_text('{"step": 7, "seconds/step": 1.0}\n')
    bench_methods._train(tmp_path, "grpo", 0, 7)
    with pytest.raises(SystemExit, match="has 7 steps, not --steps=9"):
        bench_methods._train(tmp_path, "grpo", 0, 9)
