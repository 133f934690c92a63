"""`grpo-mega sft` with the config of train: its log, a stopped and a killed run, and training from its model.

Starting a run is mostly imports, so tests share runs.
"""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from grpo_mega import cli
from grpo_mega import config as configs
from grpo_mega.cli.commands.train import with_steps
from grpo_mega.config.data import as_sft
from grpo_mega.errors import ConfigError
from tests.helpers.runs import losses, metrics, run, wait_for_step
from tools.benchmarks import kills
from tools.benchmarks.kills import End, read_end

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("preloaded_python")]

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven")
STEPS = 12


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a config that train and sft share. The rows do not divide into steps, and some have two turns."""
    folder = tmp_path_factory.mktemp("sft")
    path = kills.write_inputs(folder, "tp=1", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    rows = [{"prompt": f"Say {word}.", "answer": word, "completion": f"{word}, as you say."} for word in WORDS]
    chat = [
        *({"role": role, "content": "again"} for role in ("assistant", "user")),
        {"role": "assistant", "content": "2"},
    ]
    rows[3]["completion"] = chat  # type: ignore[assignment]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "heldout.jsonl").write_text(json.dumps({"prompt": "Say it.", "answer": "it", "completion": "it"}) + "\n")
    config = json.loads(path.read_text())
    config |= {"steps": STEPS}
    config["data"] |= {"max_length": 64}
    config["algorithm"] |= {"recipe": "dapo"}
    path.write_text(json.dumps(config))
    return path


def sft(inputs: Path, run_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    return kills.start(inputs, run_dir, list(arguments), output=subprocess.PIPE, name="sft")


def finished(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def whole(inputs: Path) -> End:
    run_dir = inputs.parent / "whole"
    output = finished(sft(inputs, run_dir))
    assert "11 rows with" in output and "\u00abone, as you say." in output and "policy saved" in output
    return read_end(run_dir)


def test_the_loss_falls_and_only_metrics_of_sft_are_logged(inputs: Path, whole: End) -> None:
    run_dir = inputs.parent / "whole"
    found, rows = losses(run_dir), metrics(run_dir)
    evaluated = {row["step"]: row["eval/loss"] for row in rows if "eval/loss" in row}
    assert len(found) == STEPS and found[-1] < 0.8 * found[0]
    assert list(evaluated) == [0, 4, 8, STEPS] and evaluated[STEPS] < evaluated[0]
    step = next(row for row in rows if row["step"] == 3 and "loss/nll" in row)
    assert step["rows"] == 4 and step["epoch"] == 1 and step["grad_norm"] > 0
    assert not [name for name in step if name.startswith(("ratio/", "clip/", "mismatch/", "reward/"))]
    assert (run_dir / "report.html").exists() and (run_dir / "hf" / "model.safetensors").exists()
    recorded = configs.load(run_dir / "config.yaml")
    assert recorded.algorithm.recipe == "sft" and recorded.data.max_length == 64


def test_ctrl_c_ends_the_step_and_a_resumed_run_is_the_same(inputs: Path, whole: End, tmp_path: Path) -> None:
    process = sft(inputs, tmp_path / "run")
    wait_for_step(tmp_path / "run", 3, process)
    process.send_signal(signal.SIGINT)
    output = finished(process)
    assert "press again to end now" in output and "as requested; continue with the same command and --resume" in output
    assert "resumed after step" in finished(sft(inputs, tmp_path / "run", "--resume"))
    assert read_end(tmp_path / "run") == whole


def test_a_killed_and_resumed_run_is_the_same(inputs: Path, whole: End, tmp_path: Path) -> None:
    process = sft(inputs, tmp_path / "run", "--set", "layout.dp=1")
    wait_for_step(tmp_path / "run", 7, process)
    process.kill()
    process.communicate()
    assert "resumed after step" in finished(sft(inputs, tmp_path / "run", "--resume", "--set", "layout.dp=1"))
    assert read_end(tmp_path / "run") == whole


def test_train_starts_from_the_exported_model(inputs: Path, whole: End, tmp_path: Path) -> None:
    model = [f"--set=model.path={inputs.parent / 'whole' / 'hf'}", "--set=model.init=checkpoint"]
    code, output = run(inputs, tmp_path / "run", "--set=steps=1", *model)
    assert code == 0 and "policy saved as a Hugging Face checkpoint" in output, output


def test_train_neither_resumes_a_run_of_sft_nor_takes_its_recipe(
    inputs: Path, whole: End, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", str(inputs), "--set", f"run_dir={inputs.parent / 'whole'}"]
    assert cli.main([*arguments, "--resume"]) == 2
    assert "differs from the run's" in capsys.readouterr().err
    assert cli.main([*arguments, "--set", "algorithm.recipe=sft"]) == 2
    assert "algorithm.recipe=sft: must be left to grpo-mega sft" in capsys.readouterr().err


def test_epochs_replace_steps_and_keys_of_train_are_ignored(inputs: Path) -> None:
    raw = configs.read(inputs, ["run_dir=unused", "data.epochs=2.5", "rollout.engine=unknown", "batch.mini_batches=3"])
    config = with_steps(configs.validate(as_sft(raw)))
    assert config.steps == 7  # 2.5 epochs of 11 rows, 4 in a step
    assert config.batch.mini_batches == 1 and config.rollout.engine == "embedded" and not config.algorithm.kl_beta
    assert config.data.max_prompt_length + config.rollout.max_response_length == 64
    with pytest.raises(ConfigError, match=r"batch.tokens_per_micro_batch=256 cannot .* sample, data.max_length = 999;"):
        configs.validate(as_sft(configs.read(inputs, ["run_dir=unused", "data.max_length=999"])))
    with pytest.raises(ConfigError, match=r"data.max_length=1: "):
        configs.validate(as_sft(configs.read(inputs, ["run_dir=unused", "data.max_length=1"])))
