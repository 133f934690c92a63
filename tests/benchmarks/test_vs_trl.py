"""The comparison with TRL's trainer: both do the same work, and sizes that cannot be compared are refused."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tools.benchmarks.vs_trl import task as vs_trl_task

pytestmark = pytest.mark.usefixtures("preloaded_python")

TOOL = Path(__file__).resolve().parents[2] / "tools" / "benchmarks" / "vs_trl"


@pytest.mark.parametrize("ratio", [3, 8])
@pytest.mark.parametrize("num", [10, 16, 64])
def test_given_lengths_have_the_requested_mean_and_maximum(num, ratio):
    for seed in range(20):
        lengths = vs_trl_task.ragged_lengths(num, 24, ratio, random.Random(seed))
        assert len(lengths) == num
        assert max(lengths) == 24 * ratio and sum(lengths) == 24 * num and min(lengths) >= 1


@pytest.mark.full
def test_both_trainers_have_equal_losses_and_gradients():
    found = run("--mean-length", "4", "--prompt-length", "8")
    assert found.returncode in (0, 1), found.stderr
    result = json.loads(found.stdout.splitlines()[-1])
    assert result["loss_difference"] < 1e-5
    assert result["norm_difference"] < 1e-3
    assert all(result[name] > 0 for name in ("update_ratio_8", "update_ratio_3", "step_ratio", "memory_ratio"))
    assert all(tokens > 0 for tokens in result["sampled_tokens"].values())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--rounds", "0"), "--rounds=0"),
        (("--mini-batches", "3"), "--mini-batches=3"),
        (("--micro-batch", "5"), "--micro-batch=5"),
        (("--mean-length", "2"), "--mean-length=4"),
    ],
)
def test_invalid_sizes_are_refused_in_one_line(arguments, named):
    found = run(*arguments)
    assert found.returncode == 2
    assert named in found.stderr and len(found.stderr.strip().splitlines()) == 1


def run(*arguments):
    return subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, timeout=600)
