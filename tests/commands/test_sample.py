"""`grpo-mega sample`: scored responses with log-probs, compared with transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_mega import cli
from tests.helpers.runs import run
from tools.benchmarks import kills

pytestmark = pytest.mark.usefixtures("preloaded_python")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    config = kills.write_inputs(folder, "tp=1")
    code, output = run(config, folder / "run", "--set", "steps=1", "--set", "eval.num_prompts=1")
    assert code == 0, output
    return folder / "run"


def sampled(run_dir: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "grpo_mega.cli", "sample", *arguments]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=run_dir.parent, env=environment, text=True, timeout=240, **pipes)
    assert done.returncode == 0, done.stdout
    return done.stdout


def logprobs_of(model: Any, prompt: list[int], response: list[int]) -> list[float]:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).squeeze(1).tolist()


def test_responses_to_a_data_set_have_rewards_and_transformers_logprobs(run_dir: Path, tmp_path: Path) -> None:
    out, data = tmp_path / "rows.jsonl", run_dir.parent / "heldout.jsonl"
    output = sampled(run_dir, str(run_dir), "--data", str(data), "--n", "3", "--out", str(out))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["gold"], row["index"]) for row in rows] == [(gold, i) for gold in ("nine", "ten") for i in range(3)]
    assert "evaluating" in output and "the policy after step 1" in output
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "hf")
    model = AutoModelForCausalLM.from_pretrained(run_dir / "hf")
    for row in rows:
        prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        assert row["logprobs"] == pytest.approx(logprobs_of(model, prompt, row["token_ids"]), abs=1e-4)
        vowels = kills.share_of_vowels("", row["response"], "", {})
        assert row["reward"] == pytest.approx(vowels)
        line = f"[{row['index'] + 1}/3] reward {vowels:.3f} (tools.benchmarks.kills.share_of_vowels {vowels:.3f}),"
        assert f"{line} log-prob {sum(row['logprobs']):.3f}, " in output
    summary = json.loads(output.splitlines()[-1])
    assert (summary["step"], summary["responses"]) == (1, 6)
    assert summary["reward"] == pytest.approx(sum(row["reward"] for row in rows) / 6)


@pytest.mark.parametrize(
    ("arguments", "score", "count"),
    [
        ((), "reward none (accuracy gold_unparsable)", 2),
        (("--answer", "4", "--temperature", "0"), "[1/1] reward 0.000", 1),
    ],
)
def test_a_model_without_a_run_is_scored_by_accuracy(
    run_dir: Path, arguments: tuple[str, ...], score: str, count: int
) -> None:
    shorter = ("--max-response-length", "8")
    output = sampled(run_dir, str(run_dir / "hf"), "--prompt", "What is 2+2?", "--n", "2", *shorter, *arguments)
    assert "<user>What is 2+2?<end><assistant>" in output
    summary = json.loads(output.splitlines()[-1])
    assert (output.count(score), summary["responses"]) == (count, count)
    assert summary["reward"] == (0.0 if arguments else None)


SERVER = ("rollout.cache_tokens=16384", "rollout.max_concurrent=8", "rollout.start_deadline_s=300")


@pytest.mark.full
@pytest.mark.sglang
def test_a_server_samples_like_transformers(run_dir: Path, tmp_path: Path) -> None:
    out, model = tmp_path / "rows.jsonl", str(run_dir / "hf")
    server = ("--engine", "sglang", "--max-response-length", "6", *(word for key in SERVER for word in ("--set", key)))
    output = sampled(run_dir, model, "--prompt", "Hello", "--n", "2", "--out", str(out), *server)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 2 and json.loads(output.splitlines()[-1])["responses"] == 2
    tokenizer, oracle = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    prompt = tokenizer("<user>Hello<end><assistant>", add_special_tokens=False)["input_ids"]
    for row in rows:
        assert row["logprobs"] == pytest.approx(logprobs_of(oracle, prompt, row["token_ids"]), abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--prompt", "a", "--data", "b"], "--prompt and --data b both give prompts"),
        (["--prompt", " "], "--prompt=' ': must be a text"),
        (["--answer", "4"], "--answer=4: must go with --prompt"),
        ([], "is a model without a run; name a dataset by --data, or give --prompt"),
        (["--prompt", "a", "--n", "0"], "eval.greedy=false needs eval.samples > 0"),
        (["--prompt", "a", "--temperature", "-1"], "eval.temperature=-1.0: must be above 0"),
        (["--prompt", "a", "--step", "1"], "--step 1 is an option for a run"),
        (["--prompt", "a", "--set", "model.size=1"], "unknown key 'model.size'"),
        (["--data", "none.jsonl"], "dataset none.jsonl does not exist"),
    ],
)
def test_bad_options_are_refused_in_one_line(
    arguments: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").touch()
    assert cli.main(["sample", str(tmp_path), *arguments]) == 2
    output = capsys.readouterr()
    lines = [line for line in output.err.splitlines() if "error: " in line]
    assert sum(problem in line for line in lines) == 1 and "error" not in output.out
