"""The project from a Python program: the checks and the runs of the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import grpo_mega
from grpo_mega import cli
from grpo_mega.config import load
from grpo_mega.errors import RunFailed, UserError
from tests.helpers.models import make_model, save_checkpoint
from tests.helpers.runs import write_small

pytestmark = pytest.mark.pool

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "transformers", "megatron", "numpy", "pydantic"}
BAD: dict[str, dict[str, Any]] = {
    "an unknown key": {"stepz": 3},
    "a wrong type": {"steps": "three"},
    "a missing key": {"steps": None},
    "an unknown value": {"device": "gpu"},
    "two broken rules": {"batch": {"prompts_per_step": 3, "mini_batches": 2}, "rollout": {"temperature": -1}},
    "a section as text": {"layout": "tp=2"},
    "a layout": {"layout": {"tp": 3}},
    "an unknown reward": {"rewards": {"functions": [{"name": "acuracy"}]}},
    "no model": {"model": {"path": "none"}},
    "no data": {"data": {"train": "none.jsonl"}},
    "a folder of something else": {"run_dir": "model"},
    "a group": {"algorithm": {"group_size": 1}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    save_checkpoint(make_model("qwen2"), folder / "model")
    write_small(folder)
    return folder


@pytest.mark.parametrize("name", BAD)
def test_python_refuses_what_the_command_refuses_in_the_same_lines(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    keys = yaml.safe_load((folder / "config.yaml").read_text()) | BAD[name]
    keys = {key: value for key, value in keys.items() if value is not None}
    (folder / "bad.yaml").write_text(yaml.safe_dump(keys))
    assert cli.main(["train", "bad.yaml"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("grpo-mega: error: ")]
    with pytest.raises(UserError) as refused:
        grpo_mega.start(grpo_mega.Config(**keys, code_dir=str(folder)))
    assert lines == [f"grpo-mega: error: {line}" for line in refused.value.lines]
    assert not (folder / "run").exists()


def test_a_failed_rank_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    config = load(folder / "config.yaml", ["run_dir=failed"])
    python = folder / "python"
    python.write_text(f'#!/bin/sh\n[ "$3" = rank ] && exit 5\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(RunFailed, match="exit code 5"):
        grpo_mega.start(config)


def test_the_example_trains_and_exports(folder: Path, tmp_path: Path) -> None:
    assert len((ROOT / "examples/start.py").read_text().splitlines()) <= 15
    task = tmp_path / "runs/quickstart/task"
    task.mkdir(parents=True)
    (task / "sft").mkdir()
    (task / "sft/hf").symlink_to(folder / "model")
    rows = (json.dumps({"prompt": f"{i}+1=?", "answer": str(i + 1)}) + "\n" for i in range(33))
    (task / "train.jsonl").write_text("".join(rows))
    done = subprocess.run(
        [sys.executable, ROOT / "examples/start.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs/from_python"
    steps = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert (run / "hf/model.safetensors").is_file()


def test_the_package_imports_nothing_until_it_is_used() -> None:
    program = "import sys, grpo_mega\nprint(*sys.modules)\ngrpo_mega.Config\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    before, after = ({name.partition(".")[0] for name in line.split()} for line in done.stdout.splitlines())
    assert not before & HEAVY and after & HEAVY == {"pydantic"}
    with pytest.raises(AttributeError, match="has no attribute 'strat'"):
        grpo_mega.strat  # noqa: B018
