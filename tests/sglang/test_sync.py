"""Weights sent to a real server: every family, several trainer layouts, engines at TP1 and TP2; see sync_worker.py."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_mega.distributed.launch import free_port
from tests.helpers.ranks import ROOT, CaseValues, launch
from tests.sglang.sync_cases import CASES

pytestmark = [pytest.mark.distributed, pytest.mark.sglang, pytest.mark.usefixtures("preloaded_python")]

HERE = Path(__file__).parent
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def differences(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CaseValues:
    """Run the cases of the selected tests."""
    folder = tmp_path_factory.mktemp("sync")
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    chosen = [item.callspec.params["name"] for item in items]
    (folder / "cases.json").write_text(json.dumps(chosen))
    (folder / "port").write_text(str(free_port()))
    problems = launch(HERE / "sync_worker.py", 4, folder, timeout_s=1500)
    (folder / "cases.json").write_text(json.dumps([name for name in chosen if not problems[name]]))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(HERE / "sync_oracle.py"), str(folder)], env=environment, check=True)
    found = CaseValues("", problems)
    found |= json.loads((folder / "differences.json").read_text())
    return found


NAMES = [
    pytest.param(name, marks=[getattr(pytest.mark, case.level)] if case.level else []) for name, case in CASES.items()
]


@pytest.mark.parametrize("name", NAMES)
def test_synced_servers_return_transformers_logprobs_in_every_layout(differences: CaseValues, name: str) -> None:
    case = CASES[name]
    for number, (layout, found) in enumerate(zip(case.layouts, differences[name], strict=True)):
        print(f"{name}, {layout}: {found}")
        assert len(found["same"]) == len(case.engine_tps)
        assert max(found["same"].values()) < TOLERANCE, (layout, found)
        assert found["before"] > 100 * TOLERANCE, (layout, found)
        if number:
            assert max(found["continued"].values()) < TOLERANCE, (layout, found)
        assert (found["routes"] is not None) == ("moe" in name or "deepseek" in name or "mixtral" in name)
        assert found["routes"] in (None, 1.0) or found["routes"] > 0.999, (layout, found)
        assert (found["exact"] > 100 * TOLERANCE) == case.quantise, (layout, found)
