"""The benchmark of oversampling at tiny sizes: the last line has the documented keys, and invalid arguments are
refused.
"""

from __future__ import annotations

import json

import pytest

from tools.benchmarks import oversampling as bench_oversampling

TINY = "--prompts 3 --group-size 2 --rounds 2 --mean-length 16 --max-length 48 --factors 2"


def test_the_last_line_has_gain_waste_and_bias_of_every_factor(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_oversampling.main(TINY.split()) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["identical"] is True
    plain, doubled = found["factors"]["1.0"], found["factors"]["2.0"]
    assert (plain["gain"], plain["gain_in_tokens"], plain["waste"], plain["length_bias"]) == (1, 1, 0, 0)
    assert doubled["gain_in_tokens"] > 1 and 0 < doubled["waste"] < 1
    assert doubled["length_kept"] < doubled["length_all"] and doubled["length_bias"] < 0
    assert doubled["reward_kept"] > doubled["reward_all"]
    assert found["partial"]["identical"] is True and found["partial"]["gain"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--prompts 0", "--prompts=0 must be at least 1"),
        ("--factors 0.5", "--factors=0.5 must be from 1 to 16"),
        ("--factors many", "--factors=many must be numbers"),
        ("--mean-length 1", "--mean-length=1 must be from 2 to 256"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        bench_oversampling.main(arguments.split())
    error = capsys.readouterr().err
    assert end.value.code == 2 and message in error and len(error.splitlines()) == 1
