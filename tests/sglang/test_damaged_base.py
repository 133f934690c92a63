"""A run with an adapter whose base changes on the server, as by a faulty backup of a sleeping server's weights."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mega.distributed.launch import free_port
from tests.helpers.ranks import ROOT
from tools.benchmarks import kills

pytestmark = [pytest.mark.distributed, pytest.mark.sglang, pytest.mark.usefixtures("preloaded_python")]

STEP = 2


def test_a_base_damaged_between_two_steps_ends_the_run_in_one_line(tmp_path: Path) -> None:
    config = kills.write_inputs(tmp_path, "tp=1", {"engine": "sglang", "max_response_length": 7, "max_concurrent": 5})
    raw = json.loads(config.read_text())
    raw["model"]["lora"] = {"rank": 3}
    raw |= {"steps": 5, "checkpoint": {"interval": 0}, "eval": {"interval": 0}}
    config.write_text(json.dumps(raw))
    script = str(Path(__file__).with_name("damaged_base.py"))
    command = [sys.executable, script, str(STEP), "train", str(config), "--set", f"run_dir={tmp_path / 'run'}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    environment |= {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    printed = done.stdout + done.stderr
    assert done.returncode == 2, printed
    (name,) = set(re.findall(r"^.*damaged: (\S+)", printed, re.M))
    (line,) = {
        line[line.index("the engine does") :] for line in printed.splitlines() if "error: the engine does" in line
    }
    assert line.startswith(
        f"the engine does not have policy version {STEP}, at rank 0: its base changed since it was sent"
    )
    assert name in line and "set sync.lora=merged" in line and "; start again with --resume" in line
    rows = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(row["step"] for row in rows) == STEP, "no step follows"
