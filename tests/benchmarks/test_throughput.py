"""The throughput benchmark on a tiny model: a run with sampled responses on two data-parallel ranks, and a run with
synthetic responses on two pipeline stages.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_mega.cli.checks.machine import CARDS
from grpo_mega.errors import ConfigError
from grpo_mega.weights.spec import ModelShape
from tools.benchmarks import kills
from tools.benchmarks.throughput import __main__ as bench_throughput
from tools.benchmarks.throughput import result as throughput_result
from tools.benchmarks.throughput import synthetic as throughput_synthetic
from tools.benchmarks.throughput.rank import work_of
from tools.benchmarks.throughput.result import ROWS, SKIPPED, problem, quartiles

pytestmark = pytest.mark.usefixtures("preloaded_python")

ROOT = Path(__file__).resolve().parents[2]
STEPS, PROMPTS, GROUP = 2, 4, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("throughput")
    kills.write_inputs(folder, "dp=2")
    return folder


def bench(folder: Path, name: str, *arguments: str) -> tuple[dict[str, Any], list[str]]:
    """Return the tool's JSON and the lines before it. Its exit code is 1 if other programs took the time of phases."""
    command = [sys.executable, str(ROOT / "tools" / "benchmarks" / "throughput"), str(folder / "config.json")]
    command += [
        "--set",
        f"run_dir={folder / name}",
        "--steps",
        str(STEPS),
        "--out",
        str(folder / f"{name}.json"),
        *arguments,
    ]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tools'}", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert result.returncode in (0, 1) and result.stdout, result.stdout + result.stderr
    *lines, last = result.stdout.splitlines()
    found = json.loads(last)
    assert result.returncode == (problem(found) is not None), result.stdout + result.stderr
    return found, lines


@pytest.fixture(scope="module")
def real(folder: Path) -> tuple[dict[str, Any], list[str]]:
    return bench(folder, "real", "--set", "layout={cp: 2}")


@pytest.fixture(scope="module")
def synthetic(folder: Path) -> tuple[dict[str, Any], list[str]]:
    return bench(folder, "synthetic", "--set", "layout={pp: 2}", "--synthetic", "uniform:4,16", "--gpu", "h100")


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["real", pytest.param("synthetic", marks=pytest.mark.full)])
def test_phases_cover_the_step_on_every_rank_in_any_layout(name: str, request: pytest.FixtureRequest) -> None:
    """On a busy machine other programs run between two phases, so the bound is wide."""
    found, _ = request.getfixturevalue(name)
    assert found["phases_cover"] == pytest.approx(1, abs=0.4) and found["worst_cover"] == pytest.approx(1, abs=0.6)
    shares = [row["share"] for row in found["phases"].values() if row["share"] is not None]
    assert sum(shares) == pytest.approx(found["phases_cover"])
    assert sum(row["seconds"] or 0 for row in found["phases"].values()) == pytest.approx(
        found["phases_cover"] * found["step"]["seconds"]
    )


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["real", "synthetic"])
def test_rates_are_work_divided_by_time(name: str, request: pytest.FixtureRequest) -> None:
    found, _ = request.getfixturevalue(name)
    rows = [row for row in [*found["phases"].values(), found["step"]] if row["tokens"] is not None]
    assert len(rows) == (5 if name == "real" else 4)
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert row["tokens_per_second_per_gpu"] == pytest.approx(row["tokens_per_second"] / 2)
        assert row["mfu"] == pytest.approx(row["tflops"] / found["peak"]["tflops"])
    assert found["sync_bytes_per_second"] == pytest.approx(found["sync_bytes"] / found["phases"]["sync"]["seconds"])
    assert "measured here" in found["peak"]["source"]


@pytest.mark.distributed
def test_the_flops_of_an_update_equal_a_count_by_hand(real: tuple[dict[str, Any], list[str]]) -> None:
    """2 layers, hidden 64, 4 heads, 2 key-value heads of 16, ffn 192, vocabulary 304; an update counts as 3 forward
    passes.
    """
    found, _ = real
    update, reference = found["phases"]["update"], found["phases"]["reference"]
    tokens, responses = found["prompt_tokens"] + found["response_tokens"], found["response_tokens"]
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 192
    without_attention = 3 * (2 * 2 * layer * tokens + 2 * 64 * 304 * responses)
    counted = update["tflops"] * 1e12 * update["seconds"]
    mean_length = tokens / (PROMPTS * GROUP)
    attention = 3 * 2 * 4 * 64 * tokens * (mean_length + 1) / 2  # lower bound: equal lengths
    assert without_attention + attention <= counted * (1 + 1e-9) and counted < without_attention + 1.2 * attention
    assert counted == pytest.approx(3 * reference["tflops"] * 1e12 * reference["seconds"])
    assert update["tokens"] == tokens and found["phases"]["sample"]["tokens"] == responses


@pytest.mark.distributed
def test_a_sampled_step_has_all_phases_that_exist_on_a_cpu(real: tuple[dict[str, Any], list[str]]) -> None:
    found, lines = real
    missing = {name for name, row in found["phases"].items() if row["seconds"] is None}
    assert missing == {"sleep/wake"}
    assert found["steps"] == STEPS and found["samples"] == PROMPTS * GROUP
    assert (found["layout"]["cp"], found["layout"]["dp"]) == (2, 1)
    assert found["bubble"] == 0 and found["bubble_measured"] is None and 0 <= found["padding_waste"] < 1
    assert found["dp_imbalance"] >= 0 and found["sync_received_bytes"] == 0  # each rank has all weights
    assert found["step"]["peak_memory_gib"] > 0.1
    assert found["plan"]["seconds"]["update"] > 0 and found["plan"]["peak_memory_gib"] is None
    assert any(line.startswith("sleep/wake") and " - " in line for line in lines)


@pytest.mark.distributed
def test_synthetic_responses_are_trained_on_like_real_responses(synthetic: tuple[dict[str, Any], list[str]]) -> None:
    found, lines = synthetic
    assert all(found["phases"][name]["seconds"] is None for name in SKIPPED)
    assert 4 <= found["response_tokens"] / found["samples"] <= 16 and found["samples"] == PROMPTS * GROUP
    assert found["synthetic"] == "uniform:4,16"
    assert all(found["phases"][name]["seconds"] > 0 for name in ("logprobs", "reference", "update", "sync", "idle"))
    number = found["micro_batches"]
    assert found["bubble"] == pytest.approx(1 / (number + 1)) and 0 < found["bubble_measured"] < 1
    assert found["sync_received_bytes"] > 0  # each rank has half of its engine's weights
    assert CARDS["h100"].title in found["plan"]["source"] and found["plan"]["peak_memory_gib"] > 0
    assert any("synthetic responses (uniform:4,16)" in line for line in lines)


@pytest.mark.distributed
def test_a_run_compares_equal_to_itself_and_its_folder_is_removed(
    real: tuple[dict[str, Any], list[str]], folder: Path
) -> None:
    found, _ = real
    path = folder / "real.json"
    before = throughput_result.read_result(path)
    assert before == found
    throughput_result.check_comparable(found["settings"], before, path)
    assert throughput_result.differing(found, before) == []
    verdicts = throughput_result.compare(found, before)
    assert {one["verdict"] for name, one in verdicts.items() if name != "sleep/wake"} == {"same"}
    assert verdicts["sleep/wake"] == {"before": None, "ratio": None, "verdict": None}
    assert set(verdicts) == {*ROWS, "step"}
    assert not (folder / "real-throughput").exists()


@pytest.mark.distributed
def test_runs_of_other_configs_are_not_compared_and_layouts_are_named(
    real: tuple[dict[str, Any], list[str]], folder: Path
) -> None:
    before, path = real[0], folder / "real.json"
    other = copy.deepcopy(before)
    other["settings"]["batch"]["prompts_per_step"] = 8
    with pytest.raises(ConfigError, match=r"batch\.prompts_per_step is 4 .*8 here; "):
        throughput_result.check_comparable(other["settings"], before, path)
    other = copy.deepcopy(before)
    other["layout"]["tp"] = 2
    [line] = throughput_result.differing(other, before)
    assert line.startswith("layout.tp is 2 ")


@pytest.mark.distributed
def test_a_file_of_another_config_is_refused_before_anything_starts(
    real: tuple[dict[str, Any], list[str]], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        str(folder / "config.json"),
        "--set",
        f"run_dir={folder / 'never'}",
        "--against",
        str(folder / "real.json"),
    ]
    assert bench_throughput.main([*arguments, "--synthetic", "fixed:8"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "synthetic is None " in line and "'fixed:8' here; " in line


def test_the_work_of_a_step_equals_a_count_by_hand() -> None:
    """A layer with hidden 4, 2 heads of 2, one key-value head, ffn 8, vocabulary 10. Each prompt is processed once."""
    shape = ModelShape("llama", 1, 4, 8, 2, 1, 2, 10, False)
    layer = 4 * (4 + 2 * 2) + 4 * 4 + 3 * 4 * 8
    work = work_of(shape, 0, [(3, [2, 1])])
    assert (work["samples"], work["prompt_tokens"], work["response_tokens"]) == (2, 6, 3)
    assert work["forward_flops"] == 2 * layer * 9 + 4 * 4 * (15 + 10) + 2 * 4 * 10 * 3
    assert work["sample_flops"] == 2 * layer * 6 + 4 * 4 * (15 + 10 - 6) + 2 * 4 * 10 * 3


@pytest.mark.parametrize(
    ("now", "before", "verdict"),
    [
        (quartiles([1.0, 1.0, 1.0]), quartiles([1.04, 1.04, 1.04]), "same"),  # the difference is below 5%
        (quartiles([1.0, 1.2, 1.4]), quartiles([1.2, 1.4, 1.6]), "same"),  # quartiles are 1.1..1.3 and 1.3..1.5
        (quartiles([1.0, 1.1, 1.2]), quartiles([1.3, 1.4, 1.5]), "faster"),
        (quartiles([1.3, 1.4, 1.5]), quartiles([1.0, 1.1, 1.2]), "slower"),
        (quartiles([0.0]), quartiles([0.0]), "same"),
        (quartiles([0.1]), quartiles([0.0]), "slower"),
        (quartiles([0.1]), {"median": None}, None),
    ],
)
def test_a_verdict_is_judged_against_the_noise(
    now: dict[str, Any], before: dict[str, Any], verdict: str | None
) -> None:
    found = throughput_result.compare(
        {"phases": {"update": now}, "step": now}, {"phases": {"update": before}, "step": before}
    )
    assert found["update"]["verdict"] == found["step"]["verdict"] == verdict


@pytest.mark.parametrize(
    ("text", "mean", "longest"),
    [
        ("fixed:12", 12, 12),
        ("uniform:10,30", 20, 30),
        ("lognormal:mean=40,sigma=0.5,max=1000", 40, 1000),
        ("lognormal:max=1000,mean=40,sigma=0.5", 40, 1000),
        ("", 246, 1000),
    ],
)
def test_lengths_have_the_requested_distribution(text: str, mean: float, longest: int) -> None:
    lengths = throughput_synthetic.lengths_of(text, 1000)
    drawn = [lengths.sample(np.random.default_rng((0, i))) for i in range(4000)]
    assert (
        np.mean(drawn) == pytest.approx(mean, rel=0.04) and 1 <= min(drawn) <= max(drawn) <= longest == lengths.longest
    )


def test_lengths_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text("[3, 3, 50]")
    lengths = throughput_synthetic.lengths_of(f"file:{path}", 64)
    drawn = {lengths.sample(np.random.default_rng(i)) for i in range(50)}
    assert drawn == {3, 50} and lengths.longest == 50


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--steps 0", "--steps=0 must be at least 1; see --help"),
        (
            "--synthetic fixed:0",
            "--synthetic fixed:0: must be fixed:512, uniform:16,1024, lognormal:",
        ),
        ("--synthetic uniform:9,3", "with numbers above 0; correct it, or give CONFIG before --synthetic"),
        ("--synthetic fixed:17", "up to 17 tokens, above rollout.max_response_length=16; lower them, or raise it"),
        ("--synthetic lognormal:mean=4,max=16", "--synthetic lognormal:mean=4,max=16: must be fixed:512,"),
        ("--synthetic lognormal:mean=0,sigma=1,max=16", "lognormal:mean=0,sigma=1,max=16: must be fixed:512,"),
        ("--synthetic file:/nowhere.json", "No such file or directory; name a JSON file with a list of lengths"),
        ("--synthetic gamma:3", "--synthetic gamma:3: must be fixed:512,"),
        ("--synthetic fixed:3,9", "--synthetic fixed:3,9: must be fixed:512,"),
        ("--synthetic uniform:3", "--synthetic uniform:3: must be fixed:512,"),
        ("--synthetic lognormal:mean=4,sigma=0,max=16", "sigma=0,max=16: must be fixed:512,"),
        ("--synthetic lognormal:mean=4,sigma=1,max=16,min=2", "max=16,min=2: must be fixed:512,"),
        ("--set batch.prompts=3", "batch.prompts"),
        ("--set layout.tp=3", "layout.tp=3"),
        ("--against /nowhere.json", "--against /nowhere.json cannot be read"),
        ("--out /nowhere/x.json", "--out=/nowhere/x.json: its folder does not exist; make it"),
        ("--gpu v100", "v100"),
    ],
)
def test_bad_arguments_are_refused_in_one_line_before_anything_starts(
    arguments: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = folder / "never"
    try:
        code = bench_throughput.main([str(folder / "config.json"), "--set", f"run_dir={run_dir}", *arguments.split()])
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
    [line] = capsys.readouterr().err.splitlines()
    assert code == 2 and message in line
    assert not run_dir.exists() and not run_dir.with_name("never-throughput").exists()


def test_a_table_whose_phases_do_not_cover_the_step_is_not_trusted() -> None:
    good = {"phases_cover": 1.01, "worst_cover": 0.985}
    assert problem(good) is None
    assert "97.0%" in (problem(good | {"phases_cover": 0.97}) or "")
    assert "103.0%" in (problem(good | {"worst_cover": 1.03}) or "")
