"""Resolve the requirements of tools/install_gpu.sh on a machine with a CUDA torch, because Transformer Engine needs
one.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 600


def test_pip_resolves_what_the_installation_asks_for_and_keeps_torch() -> None:
    command = ["bash", str(ROOT / "tools" / "install_gpu.sh"), "--dry-run"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    [line] = [line for line in lines if "transformer-engine[" in line]
    wanted = shlex.split(line.partition("pip install ")[2])
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", *wanted]
    found = subprocess.run(pip, capture_output=True, text=True, timeout=SECONDS)
    if "No matching distribution" in found.stderr or "Could not fetch" in found.stderr:
        pytest.skip("needs a reachable package index")
    assert found.returncode == 0, found.stderr
    collected = re.findall(r"Would install (.*)", found.stdout)
    assert not any(name.startswith("torch-") for text in collected for name in text.split()), collected
