"""Runs that version 0.1 wrote resume, and are exported and evaluated as version 0.1 did. See helpers/old_runs.py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import resumed_kinds
from tests.helpers.old_runs import KINDS, use
from tests.helpers.runs import metrics

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("preloaded_python")]

ROOT = Path(__file__).resolve().parents[2]
TIMES = ("seconds/", "memory/")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old_runs")
    with tarfile.open(ROOT / "tests/trainer/old_runs.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_version_01_is_used_and_resumed_as_before(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    expected = json.loads((folder / kind / "expected.json").read_text())
    found = json.loads(json.dumps(use(folder, kind)))
    assert found["exported"] == expected["exported"]  # to the byte
    assert found["answers"] == expected["answers"]

    saved = folder / kind / "run/checkpoints/step-000002"
    shutil.copytree(saved, folder / kind / "saved")
    resume(folder, kind)
    assert list(resumed_kinds.state_differences(saved, folder / kind / "saved")) == []
    assert resumed_kinds.waiting_samples(saved / "state/backlog.safetensors") or kind != "dense"
    rows = [row for row in metrics(folder / kind / "run") if row["step"] == 3]
    assert [shown(row) for row in rows] == [
        {key: pytest.approx(value, rel=1e-4, abs=1e-5) for key, value in shown(row).items()} for row in expected["rows"]
    ]


def resume(folder: Path, kind: str) -> None:
    """Resume a run. It saves what it loaded, and takes step 3."""
    command = [sys.executable, resumed_kinds.__file__, "--run", "sft" if kind == "sft" else "train"]
    arguments = [*command, f"{kind}/config.json", "--resume"]
    output = subprocess.PIPE
    done = subprocess.run(
        arguments, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=output, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout.decode()


def shown(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith(TIMES)}
