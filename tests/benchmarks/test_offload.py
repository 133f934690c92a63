"""The benchmark of offloading at tiny sizes: it runs the trainer's code, and the last line has the documented keys."""

from __future__ import annotations

import json
import math

import pytest
import torch

from tools.benchmarks import offload as bench_offload
from tools.benchmarks.gpu.models import shape_of


def test_the_last_line_has_finite_ratios_of_measured_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_offload.main(["--model", "tiny", "--gib", "0.002", "--repeat", "2"]) == 0
    output = capsys.readouterr().out
    found = json.loads(output.splitlines()[-1])
    seconds = found["seconds"]
    for name in ("offload", "onload"):
        assert math.isfinite(found[f"{name}_ratio"]) and found[f"{name}_ratio"] > 0
        assert found[f"{name}_ratio"] == pytest.approx(seconds[name] / seconds[f"plain_{name}"], rel=0.05)
    assert found["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
    if found["device"] == "cpu":
        assert found["met"] is None and "which has no target" in output


def test_the_benchmark_moves_14_bytes_per_parameter_like_a_trainer() -> None:
    """The embedding of 304 x 64 and two layers of known sizes fit. With half the memory, fewer of them fit."""
    shape = shape_of("tiny")
    both = bench_offload.parameter_sizes(shape, 2 << 20)
    matrices = 304 * 64 + 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128)
    # Norms, then biases of queries, keys and values.
    assert sum(both) == matrices + 64 * (1 + 2 * 2) + 2 * (64 + 2 * 32)
    assert 0 < len(bench_offload.parameter_sizes(shape, 14 * 70_000)) < len(both)
    weights, state = bench_offload.make(both, torch.device("cpu"))
    assert len({t.untyped_storage().data_ptr() for t in weights}) == 1
    assert len({t.untyped_storage().data_ptr() for t in state}) == 3 * len(both)


def test_a_bit_that_changed_in_transfer_is_detected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(weights: list[torch.Tensor], *rest: object) -> dict[str, float]:
        weights[-1][-1] += 1
        return dict.fromkeys(("offload", "plain_offload", "onload", "plain_onload"), 1.0)

    monkeypatch.setattr(bench_offload, "measure", broken)
    assert bench_offload.main(["--model", "tiny", "--gib", "0.002"]) == 1
    assert "offloading and onloading changed the values" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--gib -1", "--gib=-1.0 must be above 0"),
        ("--repeat 0", "--repeat=0 must be at least 1"),
        ("--gib 0.001", "--gib=0.001 does not hold a layer of 0.19 GiB; raise it or use a smaller --model"),
        ("--model gpt", "invalid choice: 'gpt'"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = bench_offload.main(["--model", "qwen2.5-0.5b", *arguments.split()])
    except SystemExit as end:
        assert isinstance(end.code, int)
        code = end.code
    [line] = capsys.readouterr().err.splitlines()
    assert code == 2 and message in line
