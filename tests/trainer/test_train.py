"""One small run from start to end: its files, and conditions that hold during training."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from grpo_mega import config as configs
from grpo_mega.trainer.folder import changed_settings
from tests.helpers.runs import check_same_weights
from tools.benchmarks import kills

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("preloaded_python")]

ROOT = Path(__file__).resolve().parents[2]
SUMS = "seconds/step", "seconds/idle"  # the whole step, and a part of seconds/sample


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    config = kills.write_inputs(folder, "tp=2")
    settings = ("steps=3", "batch.mini_batches=1", "log.wandb=true", "checkpoint.interval=2", "rollout.temperature=0.7")
    settings += ("log.samples_per_step=1000", "log.report_interval=1", "log.tensorboard=true")
    arguments = ["--profile", "2"] + [part for setting in settings for part in ("--set", setting)]
    process = kills.start(config, folder / "run", arguments, output=subprocess.PIPE)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    (folder / "output.txt").write_text(output)
    return folder / "run"


def steps(run_dir: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss/total" in row]


def test_the_first_optimizer_step_of_a_rollout_is_on_policy(run_dir: Path) -> None:
    for row in steps(run_dir):
        assert row["ratio/mean"] == row["ratio/max"] == 1.0
        assert row["clip/fraction"] == 0.0


def test_engine_and_trainer_have_equal_log_probs_for_every_token(run_dir: Path) -> None:
    assert len(steps(run_dir)) == 3
    assert max(row["mismatch/abs_max"] for row in steps(run_dir)) < 1e-5


def test_the_policy_moves_and_leaves_the_reference(run_dir: Path) -> None:
    first, *_, last = steps(run_dir)
    assert abs(first["kl/mean"]) < 1e-10 and last["kl/mean"] > 1e-5
    assert all(row["grad_norm"] > 0 for row in steps(run_dir))


def test_phases_sum_to_the_time_of_the_step(run_dir: Path) -> None:
    for row in steps(run_dir):
        phases = [value for name, value in row.items() if name.startswith("seconds/") and name not in SUMS]
        assert sum(phases) == pytest.approx(row["seconds/step"], rel=0.02)


def test_idle_slots_of_the_engines_are_measured(run_dir: Path) -> None:
    assert all(0 <= row["seconds/idle"] < row["seconds/sample"] for row in steps(run_dir))
    assert not any("engine/retracted" in row for row in steps(run_dir))


def test_the_start_prints_the_settings_that_differ_from_the_defaults(run_dir: Path) -> None:
    _, _, rest = (run_dir.parent / "output.txt").read_text().partition("settings that differ from the defaults:\n")
    lines = {line.split(":")[0]: line for line in rest.splitlines()[:20] if line.startswith("  ")}
    assert f"run_dir={run_dir}, steps=3" in rest.splitlines()[0]
    assert lines["  layout"] == "  layout: tp=2"
    assert "wandb=true, tensorboard=true, samples_per_step=1000, report_interval=1, profile=2" in lines["  log"]
    assert "mini_batches" not in rest and "wandb_project" not in rest  # these have their defaults
    assert len(list((run_dir / "tensorboard").iterdir())) == 1


def test_a_long_text_among_the_settings_is_cut_and_stays_on_its_line() -> None:
    raw = {"run_dir": "r", "steps": 3, "model": {"path": "m"}}
    text = changed_settings(configs.validate(raw | {"data": {"train": "d", "system_prompt": "Add.\n" + "x" * 300}}))
    assert text.splitlines()[1:] == [
        "  run_dir=r, steps=3",
        "  model: path=m",
        '  data: train=[{"path": "d"}], system_prompt=Add.\\n' + "x" * 194 + "...",
    ]


@pytest.mark.parametrize("has_pad_token", [True, False])
def test_transformers_generates_the_answers_of_the_exported_policy(
    run_dir: Path, tmp_path: Path, has_pad_token: bool
) -> None:
    if not has_pad_token:
        shutil.copytree(run_dir / "hf", tmp_path / "hf")
        path = tmp_path / "hf/tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": None}))
        assert AutoTokenizer.from_pretrained(tmp_path / "hf").pad_token is None
        for heldout in run_dir.glob("heldout-*.jsonl"):
            shutil.copy(heldout, tmp_path)
        run_dir = tmp_path
    command = [sys.executable, str(ROOT / "examples" / "answer_again.py"), str(run_dir)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "to 2 of 2 held-out prompts" in result.stdout


def test_the_exported_folder_has_config_and_tokenizer_byte_for_byte(run_dir: Path) -> None:
    source = run_dir.parent / "model"
    for path in source.iterdir():
        assert (run_dir / "hf" / path.name).read_bytes() == path.read_bytes()


def test_the_last_checkpoint_exports_to_the_same_weights(run_dir: Path) -> None:
    command = [sys.executable, "-m", "grpo_mega.cli", "export", str(run_dir), str(run_dir.parent / "exported")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    check_same_weights(run_dir.parent / "exported", run_dir / "hf")


def test_the_run_folder_stores_how_the_run_was_started(run_dir: Path) -> None:
    (start,) = json.loads((run_dir / "run.json").read_text())["starts"]
    assert start["command"][:2] == ["grpo-mega", "train"]
    assert start["versions"]["megatron-core"] and start["versions"]["torch"]
    config = configs.validate(yaml.safe_load((run_dir / "config.yaml").read_text()))
    assert config.layout.tp == 2 and config.steps == 3 and config.rollout.temperature == 0.7
    assert (run_dir / "logs" / "rank_1.log").exists()


def test_samples_are_logged_with_text_and_rewards(run_dir: Path) -> None:
    rows = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {1, 2, 3}
    assert all("response" in row and "prompt" in row for row in rows)


def test_logged_samples_have_the_log_probs_that_the_metrics_summarize(run_dir: Path) -> None:
    rows = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    for metrics in steps(run_dir):
        mine = [row for row in rows if row["step"] == metrics["step"]]
        assert len(mine) == 16
        values = [abs(value) for row in mine for value in row["mismatch"]]
        assert len(values) == metrics["num_tokens"]
        assert sum(values) / len(values) == pytest.approx(metrics["mismatch/abs_mean"], rel=1e-2)
        assert max(values) == pytest.approx(metrics["mismatch/abs_max"], rel=1e-2)
        for row in mine:
            assert len(row["rollout_logprobs"]) == len(row["token_ends"]) == len(row["mismatch"])
            assert row["token_ends"][-1] == len(row["response"])


def test_a_finished_run_has_a_report(run_dir: Path) -> None:
    text = (run_dir / "report.html").read_text()
    assert '"status":{"text":"finished","kind":"good"}' in text and '"steps_done":3' in text
    assert "tp 2, pp 1, dp 1, engine embedded" in text
    assert not list(run_dir.glob(".report*"))


def test_a_profiled_step_stores_phases_and_operations_of_both_ranks(run_dir: Path) -> None:
    folder = run_dir / "trace"
    assert sorted(path.name for path in folder.iterdir()) == [
        "step-000002-rank-0.json",
        "step-000002-rank-1.json",
        "step-000002.json",
    ]
    events = json.loads((folder / "step-000002.json").read_text())["traceEvents"]
    seconds = next(row["seconds/step"] for row in steps(run_dir) if row["step"] == 2)
    for rank in (0, 1):
        spans = {event["name"]: event for event in events if event["ph"] == "X" and event["pid"] == rank}
        assert {"step 2", "sample", "logprobs", "update", "checkpoint", "sync"} <= spans.keys()
        step = spans.pop("step 2")
        assert all(step["ts"] <= e["ts"] and e["ts"] + e["dur"] <= step["ts"] + step["dur"] for e in spans.values())
        assert sum(e["dur"] for e in spans.values()) < 1.5e6 * seconds
        name = next(
            event["args"]["name"] for event in events if event["name"] == "process_name" and event["pid"] == rank
        )
        assert name.startswith(f"rank {rank} on ")
        own = json.loads((folder / f"step-000002-rank-{rank}.json").read_text())["traceEvents"]
        names = {event["name"] for event in own}
        assert "phase: update" in names and any(name.startswith("aten::") for name in names)


def test_wandb_logs_offline_without_a_key(run_dir: Path) -> None:
    assert list((run_dir / "wandb").glob("offline-run-*"))


def test_a_second_start_in_the_same_folder_is_refused(run_dir: Path) -> None:
    process = kills.start(run_dir.parent / "config.json", run_dir, [], output=subprocess.PIPE)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2
    [line] = [line for line in output.splitlines() if not line.startswith("grpo-mega: note: device=auto: ")]
    assert "already has a run; continue it with --resume" in line
