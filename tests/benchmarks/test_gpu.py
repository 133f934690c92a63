"""The GPU benchmarks with sizes and an engine for a CPU. The tests cover all of their code except CUDA calls."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tools.benchmarks.gpu import __main__ as bench_gpu
from tools.benchmarks.gpu.mfu import RECOMPUTED
from tools.benchmarks.gpu.models import layers_that_fit, peak_tflops, shape_of
from tools.benchmarks.gpu.rank import Figure, extra_gib, run_sections
from tools.benchmarks.gpu.step import free_memory

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("preloaded_python")]

TOOL = Path(bench_gpu.__file__)
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture(scope="module")
def output() -> list[str]:
    result = subprocess.run([sys.executable, str(TOOL), "--tiny"], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()


@pytest.fixture(scope="module")
def found(output: list[str]) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(output[-1])
    return answer


def values(found: dict[str, Any], section: str) -> dict[str, float | None]:
    return {row["name"]: row["value"] for row in found["rows"] if row["section"] == section}


@needs_no_gpu
def test_every_section_measures_and_a_cpu_meets_no_target(found: dict[str, Any]) -> None:
    assert [s for s in bench_gpu.SECTIONS if not values(found, s)] == [] == found["failed"]
    assert found["card"] == "no GPU" and found["tiny"] and found["versions"]["torch"] == torch.__version__
    assert all(row["met"] is None for row in found["rows"])
    mfu = values(found, "mfu")
    assert mfu["of the dense peak"] is None and mfu["throughput"]


@needs_no_gpu
def test_omitted_sections_are_reported_in_a_line_with_the_reason(output: list[str]) -> None:
    assert sum(line.startswith("mfu: tiny in fp8") and "needs a GPU" in line for line in output) == 2
    assert any(line.startswith("engine: no GPU here") for line in output)


def test_the_table_has_a_line_for_every_value(output: list[str], found: dict[str, Any]) -> None:
    table = [line for line in output if line.startswith("| ")]
    assert len(table) == 2 + len(found["rows"])
    assert {line.count(" | ") for line in table} == {5}


def test_the_work_of_a_step_follows_the_formula(found: dict[str, Any]) -> None:
    """2 micro-batches of 2 segments of 32 tokens, 24 of them in the output layer. 2 layers with hidden size 64."""
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128
    by_hand = 2 * 3 * (2 * 64 * 2 * layer + 2 * 2 * 4 * 64 * (32 * 33 // 2) + 2 * 64 * 304 * 2 * 24)
    notes = {row["case"]: row["note"] for row in found["rows"] if row["name"] == "of the dense peak"}
    assert len(notes) == 2 and any("cpu_offload" in case for case in notes)
    assert all(f"{by_hand / 1e12:.4g} TFLOP in" in note for note in notes.values())


def test_log_probs_of_every_path_are_correct(found: dict[str, Any]) -> None:
    errors = {row["name"]: float(row["note"].split()[-1]) for row in found["rows"] if row["name"].endswith(": time")}
    assert len(errors) == 4 and max(errors.values()) < 0.05  # some paths compute bf16 logits
    assert errors["ours: time"] < 1e-5 > errors["ours with entropy: time"]
    heads = {row["name"]: float(row["note"].split()[-1]) for row in found["rows"] if row["name"].endswith(" logits")}
    assert heads["fp32 logits"] < 1e-5 < 1e-4 < heads["bf16 logits"]


def test_phases_of_a_step_add_up(found: dict[str, Any]) -> None:
    step = {name: value for name, value in values(found, "step").items() if value and "memory" not in name}
    whole = step.pop("whole step")
    assert {"sample", "update", "sync", "logprobs"} < set(step)
    assert sum(step.values()) == pytest.approx(whole, rel=0.02)


def test_a_token_of_a_conversation_is_compared_with_single_responses(found: dict[str, Any]) -> None:
    turns = values(found, "turns")
    rates = [turns[f"sampled tokens of {name}"] for name in ("single responses", "conversations")]
    assert all(rates) and turns["cost of a token"] == pytest.approx(rates[0] / rates[1])  # type: ignore[operator]


def test_free_memory_is_compared_with_the_plan() -> None:
    rows = [
        {"memory/free_training_gib": free, "memory/planned_free_training_gib": 12.0, "memory/free_sync_gib": 30.0}
        for free in (14.0, 11.0)
    ]
    training, sync = free_memory(rows, "case")
    assert (training.name, training.value, training.is_met) == ("free memory, training", 11.0, False)
    assert sync.value == 30 and sync.is_met is None


def test_recomputation_is_measured_in_every_form(found: dict[str, Any]) -> None:
    rows = [row for row in found["rows"] if row["name"] == "throughput against none"]
    assert len(rows) == len(RECOMPUTED) and all(row["value"] > 0 for row in rows)


def test_a_value_meets_its_target_from_the_correct_side() -> None:
    assert Figure("s", "c", "n", 0.9, "GiB", 1.0).is_met is True
    assert Figure("s", "c", "n", 1.1, "GiB", 1.0).is_met is False
    assert Figure("s", "c", "n", 1.4, "times", 1.3, "more").is_met is True
    assert Figure("s", "c", "n", 49.0, "%", 50.0, "more").is_met is False
    assert Figure("s", "c", "n", None, "%", 50.0).is_met is None is Figure("s", "c", "n", 1.0, "s").is_met


def test_peak_flops_are_looked_up_by_the_name_of_the_card() -> None:
    assert peak_tflops("NVIDIA H100 80GB HBM3", "bf16") == peak_tflops("NVIDIA H200", "bf16") == 989
    assert peak_tflops("NVIDIA H100 PCIe", "fp8") == 1513 and peak_tflops("NVIDIA B200", "fp8") == 4500
    assert peak_tflops("NVIDIA A100-SXM4-80GB", "fp8") is None is peak_tflops("NVIDIA GeForce RTX 3090", "bf16")


def test_a_model_gets_as_many_layers_as_fit_in_memory() -> None:
    """A layer of Qwen3-8B needs 18 x 193e6 = 3.5 GB, plus 2.8 GB with 16,384 tokens. Its two vocabulary matrices need
    22 GB.
    """
    shape = shape_of("qwen3-8b")
    assert layers_that_fit(shape, 16384, None) == shape.num_layers == 36
    assert layers_that_fit(shape, 16384, 140 << 30) == 16
    assert layers_that_fit(shape, 16384, 400 << 30) == 36
    assert layers_that_fit(shape, 16384, 1 << 30) == 1


def test_a_failing_section_does_not_affect_other_sections(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(options: Any) -> list[Figure]:
        raise RuntimeError("no such luck")

    monkeypatch.setitem(sys.modules, "tools.benchmarks.gpu.mfu", SimpleNamespace(run=fails))
    works = SimpleNamespace(run=lambda options: [Figure("step", "c", "n", 1.0, "s")])
    monkeypatch.setitem(sys.modules, "tools.benchmarks.gpu.step", works)
    rows, failed = run_sections(["mfu", "step"], quick=False, tiny=True)
    assert [row["section"] for row in rows] == ["step"] and failed == ["mfu"]
    assert "no such luck" in capsys.readouterr().err


@needs_no_gpu
def test_memory_is_not_measured_without_a_gpu() -> None:
    done: list[int] = []
    assert extra_gib(lambda: done.append(1), torch.device("cpu")) is None and done == [1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tiny --only mfu,mfus", "--only: 'mfus' is none of mfu, logprobs, engine, turns, memory, step"),
        ("--tiny --profile", "--profile and --try need --only mfu"),
        ("--tiny --only mfu,step --try tiles", "--profile and --try need --only mfu"),
        ("--tiny --only mfu --try tile", "--try: 'tile' is none of bf16-gradients, graphs, tiles, fused-passes"),
        pytest.param("--only mfu --profile", "there is no GPU here; use one, or --tiny to", marks=needs_no_gpu),
        pytest.param("--quick", "there is no GPU here; use one, or --tiny to try the code", marks=needs_no_gpu),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        bench_gpu.main(arguments.split())
    [line] = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and message in line


@needs_no_gpu
@pytest.mark.parametrize(
    ("options", "names"),
    [
        ("--profile", ["time without a kernel", "time with a matrix product"]),
        ("--try bf16-gradients", ["time against the product's", "difference of the gradient's norm"]),
        ("--try fused-passes", ["time against the product's", "difference of the gradient's norm"]),
        ("--try tiles", ["time against the product's", "difference of the gradient's norm"]),
        ("--try graphs", []),
    ],
)
def test_a_step_can_be_profiled_and_compared_with_a_trial(options: str, names: list[str]) -> None:
    command = [sys.executable, str(TOOL), "--tiny", "--only", "mfu", *options.split()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    found = [row["name"] for row in rows if not row["name"].startswith("kernel ")]
    assert found == names and len(rows) - len(found) == 10 * (options == "--profile")
    assert all(row["met"] for row in rows if row["target"] is not None)
    assert bool(names) or "graphs skipped" in result.stdout
