"""The comparison of times with modeled operations: its verdict on known times, and one run."""

from __future__ import annotations

import json

import pytest

from tools.benchmarks.flops import main, report


@pytest.mark.parametrize(("times", "code"), [([2.0, 30.0], 0), ([2.0, 20.0], 1)])
def test_the_verdict_is_the_model_that_is_closer_to_the_times(
    times: list[float], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """By hand: 4.13M weights, 304 x 768 output weights for every second token, and 3,072 operations per pair of tokens."""
    linear, output, pair = 2 * 768 * 768 * (4 + 3), 2 * 768 * 304 / 2, 2 * 2 * 768
    per_token = [linear + output + pair * (n + 1) / 2 for n in (1024, 8192)]
    assert report([1024, 8192], times) == code
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["flops"][1] == pytest.approx(8 * per_token[1] / per_token[0])
    assert found["worst"] == pytest.approx(times[1] / 2 / found["flops"][1])
    assert found["worst_by_tokens"] == pytest.approx(times[1] / 2 / 8)


def test_every_length_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--lengths", "16", "48", "--repeat", "1"]) in (0, 1)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(found["seconds"]) == 2 and min(found["seconds"]) > 0 and found["tokens"] == [1.0, 3.0]
