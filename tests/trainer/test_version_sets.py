"""A run records its set of package versions, and resume, eval and export say when it is another one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mega import cli
from grpo_mega.checkpoint_io.checkpoints import read_manifest
from grpo_mega.cli.commands.eval import make_request
from grpo_mega.cli.commands.options import EvalOptions
from grpo_mega.distributed.versions import installed_set
from tests.helpers.versions import fake_packages
from tools.benchmarks import kills

pytestmark = [pytest.mark.distributed, pytest.mark.waiting, pytest.mark.usefixtures("preloaded_python")]

OURS = installed_set().record
OTHERS = f"{OURS} with torch=2.12.5"
CHANGE = f"the checkpoint is from versions of set {OTHERS}, and this is set {OURS}; rounding may differ"


def train(config: Path, *arguments: str, **variables: str) -> str:
    command = [sys.executable, "-m", "grpo_mega.cli", "train", str(config), *arguments]
    environment = os.environ | {"PYTHONPATH": str(kills.harness.ROOT), "OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def run_with_another_torch(folder: Path, *arguments: str) -> tuple[Path, str]:
    """Train 2 steps beside an untested torch. Return the config and the output."""
    config = kills.write_inputs(folder, "tp=1")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"run_dir": str(folder / "run"), "steps": 2}))
    path = f"{fake_packages(folder / 'fakes', {'torch': '2.12.5+cu130'})}:{kills.harness.ROOT}"
    return config, train(config, *arguments, PYTHONPATH=path, GRPO_MEGA_UNTESTED_VERSIONS="1")


def test_a_resume_on_another_set_says_so_once_and_records_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, output = run_with_another_torch(tmp_path)
    run_dir = tmp_path / "run"
    assert f"versions: set {OTHERS}\n" in output
    assert output.count("grpo-mega: note: torch=2.12.5+cu130: is not tested; set ") == 1
    assert read_manifest(run_dir / "checkpoints/step-000002").versions == OTHERS
    for options, note in ((EvalOptions(run_dir), CHANGE), (EvalOptions(run_dir, model=run_dir / "hf"), "")):
        found = make_request(options).note
        assert (CHANGE in found) == bool(note), found
    assert cli.main(["export", str(run_dir), str(tmp_path / "out")]) == 0
    assert f"the policy after step 2; {CHANGE}\n" in capsys.readouterr().err

    output = train(config, "--resume", "--set", "steps=3")
    assert f"versions: set {OURS}\n" in output and output.count(CHANGE) == 1
    starts = json.loads((run_dir / "run.json").read_text())["starts"]
    assert [start["version_set"] for start in starts] == [OTHERS, OURS]
    assert starts[0]["versions"]["torch"] == "2.12.5+cu130"
    assert read_manifest(run_dir / "checkpoints/step-000003").versions == OURS
    assert "the checkpoint is from" not in train(config, "--resume", "--set", "steps=4")

    manifest = run_dir / "checkpoints/step-000004/checkpoint.json"
    values = json.loads(manifest.read_text())
    assert values.pop("versions") == OURS
    manifest.write_text(json.dumps(values))  # an older checkpoint names no set
    assert read_manifest(manifest.parent).versions == "one"


def test_a_policy_without_checkpoints_has_the_set_of_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_with_another_torch(tmp_path, "--set", "checkpoint.interval=0")
    assert make_request(EvalOptions(tmp_path / "run")).note.endswith(f"the policy after step 2; {CHANGE}")
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert CHANGE in capsys.readouterr().err
    record = tmp_path / "run/hf/grpo_mega.json"
    values = json.loads(record.read_text())
    assert values.pop("versions") == OTHERS
    record.write_text(json.dumps(values))
    assert ("from versions" in make_request(EvalOptions(tmp_path / "run")).note) == (OURS != "one")


def test_an_export_beside_other_versions_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("{run_dir: x, model: {path: m}, data: {train: d.jsonl}, steps: 1}")
    monkeypatch.syspath_prepend(fake_packages(tmp_path / "fakes", {"torch": "2.12.5"}))
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("grpo-mega: error: torch=2.12.5: must be torch==")
    assert not (tmp_path / "out").exists()
