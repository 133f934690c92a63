"""The run log and its writers."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from grpo_mega import config
from grpo_mega.observe.run_log import NullRunLog, open_run_log
from grpo_mega.observe.wandb_writer import wandb_mode
from grpo_mega.observe.writers import ConsoleWriter, JsonLinesWriter
from grpo_mega.types import Group, Prompt, Sample

METRICS = {
    "reward/mean": 1.4231,
    "reward/accuracy": 0.93,
    "kl/mean": 0.01234,
    "response_length/mean": 812.44,
    "clip/fraction": 0.0123,
    "mismatch/abs_mean": 1.2e-6,
    "seconds/sample": 101.23,
    "seconds/update": 45.01,
    "seconds/sync": 7.0,
    "seconds/score": 0.01,
    "seconds/other": 1.2,
    "seconds/step": 154.45,
}


def make_config(tmp_path: Path, **log: object) -> config.Config:
    return config.validate(
        {
            "run_dir": str(tmp_path / "run"),
            "steps": 200,
            "model": {"path": "m"},
            "data": {"train": "d.jsonl"},
            "log": log,
        }
    )


def make_group(num_samples: int) -> Group:
    prompt = Prompt(id=7, text="<user>1+1=?<assistant>", token_ids=(1, 2), answer="2")
    samples = [
        Sample(
            prompt, i, [65 + i, 66], [-0.1, -0.2], "stop", 0, {"accuracy": 1.0, "format": None}, {"accuracy": "correct"}, 1.0
        )
        for i in range(num_samples)
    ]
    samples[0].advantages = torch.tensor([0.5, 0.5])
    return Group(prompt, samples)


def decode(token_ids: list[int]) -> str:
    return "".join(map(chr, token_ids))


def console_output(num_steps: int, metrics: dict[str, float]) -> str:
    output = io.StringIO()
    ConsoleWriter(Console(file=output, width=80), num_steps).write_step(12, metrics)
    return output.getvalue()


def test_the_console_says_what_matters_in_one_plain_line_of_at_most_120_columns() -> None:
    assert console_output(200, METRICS) == (
        "step  12/200  reward 1.423  kl 0.0123  length 812  clip 0.012  mismatch 1e-06  "
        "154 s: sample 101, update 45.0, sync 7.0\n"
    )


def test_phases_of_a_short_step_are_all_shown() -> None:
    metrics = {"seconds/sample": 1.2, "seconds/score": 0.01, "seconds/other": 0.1, "seconds/update": 2.1, "seconds/step": 3.4}
    assert console_output(20, metrics) == "step 12/20  3.4 s: update 2.1, sample 1.2, other 0.1\n"


def test_the_console_leaves_out_what_was_not_measured() -> None:
    assert console_output(20, {"reward/mean": 0.5, "seconds/step": 3.21}) == "step 12/20  reward 0.500  3.2 s\n"


def test_json_lines_are_flushed_and_say_what_is_not_a_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    writer.write_step(3, {"a": 0.5, "b": float("nan"), "c": float("inf"), "d": float("-inf")})
    text = path.read_text()  # before close
    assert text == '{"step": 3, "a": 0.5, "b": "NaN", "c": "Infinity", "d": "-Infinity"}\n'
    assert float(json.loads(text)["c"]) == float("inf")


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for step in (1, 2):
        writer = JsonLinesWriter(tmp_path / "metrics.jsonl")
        writer.write_step(step, {})
        writer.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_rank_0_writes_steps_evaluations_and_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = open_run_log(make_config(tmp_path, samples_per_step=2), rank=0)
    log.message("loaded [3] prompts")
    log.log_eval(0, {"eval/score": 0.5, "eval/accuracy": 0.625})
    log.log_step(0, METRICS)
    log.log_samples(0, [make_group(4) for _ in range(3)], decode)
    log.close()
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert metrics == [{"step": 0, "eval/score": 0.5, "eval/accuracy": 0.625}, {"step": 0, **METRICS}]
    first, second = (json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines())
    assert first == {
        "step": 0,
        "prompt_id": 7,
        "index": 0,
        "policy_version": 0,
        "prompt": "<user>1+1=?<assistant>",
        "response": "AB",
        "answer": "2",
        "finish_reason": "stop",
        "reward": 1.0,
        "rewards": {"accuracy": 1.0, "format": None},
        "verdicts": {"accuracy": "correct"},
        "advantage": 0.5,
    }
    assert (second["index"], second["response"], second["advantage"]) == (1, "BB", None)
    output = capsys.readouterr().out
    assert "loaded [3] prompts\n" in output
    assert "held-out, step 0  score 0.500  accuracy 0.625\n" in output


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = open_run_log(make_config(tmp_path), rank=1)
    assert isinstance(log, NullRunLog)
    log.log_step(0, METRICS)
    log.log_samples(0, [make_group(2)], decode)
    log.close()
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_wandb_goes_online_only_where_a_key_is_set(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert wandb_mode(home) == "offline"
    assert wandb_mode({**home, "WANDB_MODE": "online"}) == "offline"
    assert wandb_mode({**home, "WANDB_API_KEY": "k"}) == "online"
    assert wandb_mode({**home, "WANDB_API_KEY": "k", "WANDB_MODE": "offline"}) == "offline"
    assert wandb_mode({**home, "WANDB_MODE": "disabled"}) == "disabled"
    (tmp_path / ".netrc").write_text("machine wandb.example.org login user password k\n")
    assert wandb_mode(home) == "offline"
    assert wandb_mode({**home, "WANDB_BASE_URL": "https://wandb.example.org"}) == "online"


def test_a_run_without_a_key_is_written_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    log = open_run_log(make_config(tmp_path, wandb=True), rank=0)
    log.log_step(0, METRICS)
    log.close()
    assert list((tmp_path / "run/wandb").glob("offline-run-*/*.wandb"))
