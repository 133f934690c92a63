"""Resumes and evaluations keep the date and the split of a run's first start. A model of sft names its stop token."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_mega import config as configs
from grpo_mega.checkpoint_io.model import read_model_files
from grpo_mega.errors import ResumeError
from grpo_mega.trainer.export import with_end_token
from grpo_mega.trainer.folder import first_start
from tools.benchmarks import kills

ROOT = Path(__file__).resolve().parents[2]
DATE = "29 Feb 2024 23:59:58"
pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("preloaded_python")]

DATED = "{{ strftime_now('%d %b %Y %H:%M:%S') }} "
END = 5  # the token that ends a turn; the config of the model names 1


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a config of two ranks. The template writes the second, and ends a turn with a token that is no eos id."""
    folder = tmp_path_factory.mktemp("dated")
    path = kills.write_inputs(folder, "dp=2", eos_token_id=1)
    settings = folder / "model" / "tokenizer_config.json"
    tokenizer = json.loads(settings.read_text())
    tokenizer["chat_template"] = DATED + tokenizer["chat_template"]
    settings.write_text(json.dumps(tokenizer))
    numbers = range(23)
    rows = [{"prompt": f"Say {n}.", "answer": str(n), "completion": f"{n}"} for n in numbers]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = json.loads(path.read_text())
    del config["data"]["heldout"]
    config["data"] |= {"heldout_size": 5, "max_prompt_length": 64}
    config |= {"steps": 1, "eval": {"interval": 1}}
    path.write_text(json.dumps(config))
    return path


def command(*arguments: object) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "grpo_mega.cli", *map(str, arguments)]
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert done.returncode == 0, done.stdout
    return done.stdout


def rows_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def dates_in(rows: list[dict[str, Any]]) -> set[str]:
    return {row["prompt"].partition(" <user>")[0] for row in rows}


def test_a_run_keeps_the_date_of_its_first_start_and_an_old_run_its_split(inputs: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    output = command("train", inputs, "--set", f"run_dir={run_dir}")
    assert f"names; add its token {END} to rollout.stop_token_ids" in output
    record = json.loads((run_dir / "run.json").read_text())
    assert record["starts"][0]["split"] == "prompt"
    held_out = rows_in(run_dir / "heldout-000001.jsonl")
    assert len(dates_in(rows_in(run_dir / "samples.jsonl") + held_out)) == 1

    # As if an earlier version had started the run, in another year and zone.
    del record["starts"][0]["split"]
    record["starts"][0]["time"] = "2024-02-29T23:59:58+0530"
    (run_dir / "run.json").write_text(json.dumps(record))
    command("train", inputs, "--resume", "--set", f"run_dir={run_dir}", "--set", "steps=2")
    texts = [f"{DATE} <user>Say {number}.<end><assistant>" for number in range(23)]
    expected = sorted(range(23), key=lambda number: hashlib.sha256(texts[number].encode()).digest())[:5]
    assert {row["id"] for row in held_out} != {*expected}
    again = rows_in(run_dir / "heldout-000002.jsonl")
    assert [row["id"] for row in again] == expected
    assert dates_in(again + [row for row in rows_in(run_dir / "samples.jsonl") if row["step"] == 2]) == {DATE}
    assert [start["split"] for start in json.loads((run_dir / "run.json").read_text())["starts"][1:]] == ["text"]

    targets: list[list[object]] = [[run_dir], [run_dir / "config.yaml"], [inputs, "--model", run_dir / "hf"]]
    for number, target in enumerate(targets):
        out = tmp_path / f"{number}.jsonl"
        assert f"add its token {END}" in command("eval", *target, "--set", "layout={}", "--out", out)
        assert [row["id"] for row in rows_in(out)] == expected and dates_in(rows_in(out)) == {DATE}
    out = tmp_path / "sample.jsonl"
    command("sample", run_dir, "--prompt", "Say 1.", "--set", "layout={}", "--out", out)
    assert dates_in(rows_in(out)) == {DATE}


def test_a_damaged_record_is_refused_in_one_line(tmp_path: Path) -> None:
    for text in ("{", '{"starts": []}', '{"starts": [{}]}', '{"starts": [{"time": "today"}]}'):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(ResumeError, match=r"run\.json cannot be read \(.*\); restore it, or"):
            first_start(tmp_path)


def test_a_model_of_sft_names_the_token_that_ends_a_turn(inputs: Path, tmp_path: Path) -> None:
    """Its model has no generation_config.json, so config.json names the token."""
    run_dir = tmp_path / "sft"
    settings = ["--set", "data.max_length=64", "--set", "checkpoint.interval=1"]
    output = command("sft", inputs, "--set", f"run_dir={run_dir}", *settings)
    assert f"add its token {END}" in output
    command("export", run_dir, tmp_path / "exported")
    for folder in (run_dir / "hf", tmp_path / "exported"):
        assert json.loads((folder / "config.json").read_text())["eos_token_id"] == [1, END]
    model = ["--set", f"model.path={run_dir / 'hf'}", "--set", "model.init=checkpoint"]
    assert "add its token" not in command("train", inputs, "--set", f"run_dir={tmp_path / 'run'}", *model)


@pytest.mark.parametrize("given", [None, 1, [1, 2]], ids=repr)
def test_only_the_file_of_eos_ids_is_rewritten(inputs: Path, tmp_path: Path, given: Any) -> None:
    shutil.copytree(inputs.parent / "model", tmp_path / "model")
    if given is not None:
        values = {"eos_token_id": given, "top_k": 20}
        (tmp_path / "model" / "generation_config.json").write_text(json.dumps(values))
    path = tmp_path / "model" / "config.json"
    fields = json.loads(path.read_text())
    del fields["rope_theta"]  # transformers 5 does not write it
    path.write_text(json.dumps(fields))
    config = configs.load(inputs, [f"model.path={tmp_path / 'model'}", "run_dir=unused"])
    ((name, content),) = with_end_token(read_model_files(config.model), config.rollout.stop_token_ids).items()
    found = json.loads(content)
    assert found["eos_token_id"] == ([1, 2, END] if given == [1, 2] else [1, END])
    assert name == ("config.json" if given is None else "generation_config.json")
    assert found["top_k"] == 20 if given else found["rope_theta"] == 10000.0
    (tmp_path / "model" / name).write_bytes(content)
    assert with_end_token(read_model_files(config.model), config.rollout.stop_token_ids) == {}
