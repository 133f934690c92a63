"""Evaluation in a run and by `grpo-mega eval`, on one small run: the same answers in any layout, and matching
metrics.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import combinations
from math import comb
from pathlib import Path
from typing import Any

import convert_mcore_to_hf
import inspect_checkpoint
import pytest
import verify_checkpoint
from transformers import AutoTokenizer

from grpo_mega import cli
from grpo_mega.cli.checks.model import check_model_files
from grpo_mega.config import ModelConfig
from grpo_mega.config.data import DataConfig
from grpo_mega.data import load_data
from grpo_mega.errors import ConfigError
from tools.benchmarks import kills

pytestmark = pytest.mark.usefixtures("preloaded_python")

ROOT = Path(__file__).resolve().parents[2]
REWARD = """
def is_odd(prompt, response, answer, extras):
    if "Whisper" in prompt:
        raise KeyError("too quiet")
    return float(sum(map(ord, response)) % 2)
"""
SAMPLES = 5


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two steps with evaluations before, between and after. The reward function raises on the last held-out
    set.
    """
    folder = tmp_path_factory.mktemp("eval")
    path = kills.write_inputs(folder, "tp=1")
    (folder / "scoring.py").write_text(REWARD)
    config = json.loads(path.read_text())
    rows = (folder / "heldout.jsonl").read_text()
    (folder / "second.jsonl").write_text(rows.replace("Say", "Shout"))
    del config["data"]["heldout"]
    (folder / "third.jsonl").write_text(rows.replace("Say", "Whisper"))
    files = {"said": "heldout.jsonl", "shouted": "second.jsonl", "whispered": "third.jsonl"}
    config["data"]["heldout_sets"] = {name: str(folder / file) for name, file in files.items()}
    config["rewards"]["functions"] = [{"name": "scoring.is_odd"}]
    config |= {
        "steps": 2,
        "eval": {"interval": 1, "samples": SAMPLES, "temperature": 1.3},
        "run_dir": str(folder / "run"),
    }
    path.write_text(json.dumps(config))
    command(folder, "train", str(path))
    return folder / "run"


@pytest.fixture(scope="module")
def evaluated(run_dir: Path) -> str:
    """Evaluate the checkpoint of step 1 in two pipeline stages. Write rows.jsonl next to the run. Return the output."""
    before = contents(run_dir)
    out = run_dir.parent / "rows.jsonl"
    output = command(run_dir.parent, "eval", str(run_dir), "--step", "1", "--set", "layout={pp: 2}", "--out", str(out))
    assert contents(run_dir) == before, "the run's folder was touched"
    return output


def command(folder: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, folder))), "OMP_NUM_THREADS": "1"}
    environment |= {"TMPDIR": str(folder / "temporary")}
    (folder / "temporary").mkdir(exist_ok=True)
    process = [sys.executable, "-m", "grpo_mega.cli", *arguments]
    done = subprocess.run(
        process, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, timeout=400
    )
    assert done.returncode == 0, done.stdout
    assert not list((folder / "temporary").glob("grpo_mega-eval-*"))
    return done.stdout


def contents(folder: Path) -> dict[Path, tuple[int, int]]:
    return {p: (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_command_returns_the_answers_of_the_run_in_another_layout(run_dir: Path, evaluated: str) -> None:
    rows = read(run_dir.parent / "rows.jsonl")
    assert [row["set"] for row in rows] == ["said"] * 2 + ["shouted"] * 2 + ["whispered"] * 2
    assert rows == read(run_dir / "heldout-000001.jsonl")


@pytest.mark.full
def test_ranks_of_torchrun_give_the_same_answers(run_dir: Path, evaluated: str) -> None:
    out = run_dir.parent / "torchrun.jsonl"
    arguments = ("--step", "1", "--set", "layout={pp: 2}", "--out", str(out))
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, run_dir.parent))), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *torchrun, "-m", "grpo_mega.cli", "eval", str(run_dir), *arguments],
        env=environment,
        timeout=400,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert read(out) == read(run_dir.parent / "rows.jsonl")


def test_the_commands_last_line_has_the_metrics_that_the_run_logged(run_dir: Path, evaluated: str) -> None:
    summary = json.loads(evaluated.splitlines()[-1])
    assert summary["step"] == 1 and summary["samples"] == SAMPLES and summary["temperature"] == 1.3
    (logged,) = [row for row in read(run_dir / "metrics.jsonl") if row["step"] == 1 and "eval/score" in row]
    for name, found in summary["sets"].items():
        for key in found.keys() - {"num_prompts", "num_unusable"}:
            assert logged[f"eval/{name}/{key}"] == pytest.approx(found[key])
    assert logged["eval/score"] == pytest.approx((logged["eval/said/score"] + logged["eval/shouted/score"]) / 3)
    assert "pass@4" in evaluated and "said" in evaluated


def test_metrics_follow_from_the_rows(run_dir: Path, evaluated: str) -> None:
    summary = json.loads(evaluated.splitlines()[-1])
    for name in ("said", "shouted"):
        rows = [row for row in read(run_dir.parent / "rows.jsonl") if row["set"] == name]
        found = summary["sets"][name]
        solved = [row["solved"] for row in rows]
        assert found["score"] == pytest.approx(sum(row["correct"] for row in rows) / 2)
        assert found[f"mean@{SAMPLES}"] == pytest.approx(sum(solved) / 2 / SAMPLES)
        for k in (1, 2, 4):
            missed = [len(list(combinations(range(SAMPLES - c), k))) / comb(SAMPLES, k) for c in solved]
            assert found[f"pass@{k}"] == pytest.approx(1 - sum(missed) / 2)
        for row in rows:
            assert row["correct"] == bool(sum(map(ord, row["response"])) % 2)
            assert len(row["answers"]) == row["samples"] == SAMPLES


def test_a_function_that_raises_on_a_whole_set_is_counted_and_reported(run_dir: Path, evaluated: str) -> None:
    found = json.loads(evaluated.splitlines()[-1])["sets"]
    assert (found["whispered"]["score"], found["whispered"]["reward_errors"]) == (0.0, 2 + 2 * SAMPLES)
    assert "reward_errors" not in found["said"]
    warnings = [
        row["text"] for row in read(run_dir / "messages.jsonl") if row["level"] == "warning" and row["step"] == 1
    ]
    assert [
        text for text in warnings if text.startswith("prompts of whispered: reward functions failed on 2 of 2 samples")
    ]
    for text in (*warnings, evaluated):
        assert "scoring.is_odd: KeyError: 'too quiet' (in is_odd, scoring.py:4)" in text


def test_evaluating_the_training_set_yields_pass_rates_that_filter_it(run_dir: Path) -> None:
    """Evaluate a Hugging Face folder instead of the run's checkpoint."""
    folder = run_dir.parent
    arguments = [
        "--model",
        str(run_dir / "hf"),
        "--train-set",
        "--samples",
        "4",
        "--no-greedy",
        "--out",
        str(folder / "r.jsonl"),
    ]
    output = command(folder, "eval", str(run_dir), *arguments)
    rows = read(folder / "r.jsonl")
    assert len(rows) == 8 and all("response" not in row and 0 <= row["solved"] <= 4 for row in rows)
    summary = json.loads(output.splitlines()[-1])["sets"]["all"]
    assert summary["mean@4"] == pytest.approx(sum(row["solved"] for row in rows) / 32)
    assert summary["never_solved"] == sum(row["solved"] == 0 for row in rows) / 8
    limits = {"pass_rates": str(folder / "r.jsonl"), "min_pass_rate": 0.3, "max_pass_rate": 0.7}
    config = DataConfig.model_validate({"train": str(folder / "train.jsonl"), "max_prompt_length": 32} | limits)
    data = load_data(config, AutoTokenizer.from_pretrained(folder / "model"))
    kept = {row["id"] for row in rows if 0.3 <= row["solved"] / 4 <= 0.7}
    assert 0 < len(kept) < 8
    assert {prompt.id for prompt in data.train} == kept
    assert f"{8 - len(kept)} of 8 training prompts dropped" in data.notes[-1]


def test_a_run_finished_after_its_last_checkpoint_is_evaluated_from_hf(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So ends a run that resumes with checkpoint.interval=0."""
    finished = tmp_path / "finished"
    shutil.copytree(run_dir, finished, ignore=shutil.ignore_patterns("step-000002"))
    (finished / "checkpoints/latest").write_text("step-000001\n")
    note = f"{finished} has an older checkpoint, of step 1: taking {finished / 'hf'}, the policy after step 2"
    output = command(run_dir.parent, "eval", str(finished), "--out", str(tmp_path / "rows.jsonl"))
    assert note in output and f"{finished / 'hf'} (step 2), held-out prompts" in output
    assert read(tmp_path / "rows.jsonl") == read(run_dir / "heldout-000002.jsonl")
    assert cli.main(["export", str(finished), str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert note in printed.err and printed.out == f"policy after step 2 written to {tmp_path / 'out'}\n"
    assert inspect_checkpoint.main([str(finished), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["kind"], facts["step"], facts["note"]) == ("Hugging Face folder", 2, note)


def test_a_finished_run_without_checkpoints_is_evaluated_from_hf(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The quickstart leaves such a run. The answers equal the answers that the run logged after its last step."""
    finished = tmp_path / "finished"
    shutil.copytree(run_dir, finished, ignore=shutil.ignore_patterns("step-*", "latest"))
    note = f"{finished} has no checkpoints: taking {finished / 'hf'}, the policy after step 2"
    output = command(run_dir.parent, "eval", str(finished), "--out", str(tmp_path / "rows.jsonl"))
    assert note in output
    assert read(tmp_path / "rows.jsonl") == read(run_dir / "heldout-000002.jsonl")
    summary = json.loads(output.splitlines()[-1])
    assert (summary["model"], summary["step"]) == (str(finished / "hf"), 2)

    assert cli.main(["export", str(finished), str(tmp_path / "out")]) == 0
    assert note in capsys.readouterr().err
    exported = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert exported == {path.name: path.read_bytes() for path in (run_dir / "hf").iterdir()}
    assert not list(tmp_path.glob("*.partial"))

    assert inspect_checkpoint.main([str(finished), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["kind"], facts["config"], facts["note"]) == (
        "Hugging Face folder",
        str(finished / "hf/config.json"),
        note,
    )
    assert verify_checkpoint.main([str(finished), str(tmp_path / "out"), "--no-logits"]) == 0
    assert note in capsys.readouterr().out

    there = f"grpo-mega: error: {note}, which is already a Hugging Face folder; use that folder\n"
    assert convert_mcore_to_hf.main([str(finished), str(tmp_path / "other")]) == 2
    assert capsys.readouterr().err == there
    for arguments in (["eval", str(finished)], ["export", str(finished), str(tmp_path / "other")]):
        assert cli.main([*arguments, "--step", "1"]) == 2
        line = f"--step 1: {finished} has no checkpoints; leave --step out to take {finished / 'hf'}"
        assert line in capsys.readouterr().err
    with pytest.raises(ConfigError, match=f"it is a run's folder, so name its policy, {finished / 'hf'}$"):
        check_model_files(ModelConfig(path=finished))
    shutil.rmtree(finished / "hf")
    with pytest.raises(ConfigError, match=f"by `grpo-mega export {finished} OUT`, and name that$"):
        check_model_files(ModelConfig(path=finished))
    assert cli.main(["eval", str(finished)]) == 2
    assert "has no checkpoint; there are: none" in capsys.readouterr().err
