"""Start processes on the emulation. This module imports neither torch nor Megatron."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version as installed
from pathlib import Path

from grpo_mega.distributed.versions import find_set

ROOT = Path(__file__).resolve().parents[3]
WHEELS = ROOT / ".venv-te"
SET = find_set({"megatron-core": installed("megatron-core")})[0]
VERSIONS = dict(line.split(maxsplit=1) for line in (ROOT / "tests/transformer-engine.txt").read_text().splitlines())
DEFAULT, *OTHERS = VERSIONS[SET].split()


def wheel(version: str) -> Path:
    """Return the folder of a version's unpacked wheel, as installed by tests/run.sh."""
    return WHEELS / version


def why_not(version: str) -> str | None:
    """Return the reason why this machine cannot emulate a version, with the remedy; None if it can."""
    if (wheel(version) / "transformer_engine" / "__init__.py").exists():
        return None
    return (
        f"Transformer Engine's wheel is not in .venv-te/{version}; run tests/run.sh, or python -m pip install --no-deps"
        f" --target .venv-te/{version} transformer-engine=={version}"
    )


def command(version: str, target: str, *arguments: str) -> list[str]:
    """Return the command that runs a module, or a file that ends in .py, on the emulation."""
    return [sys.executable, "-m", "tests.te_on_cpu.emulated_te.run", version, target, *arguments]


def environment() -> dict[str, str]:
    """Return the environment of such a process: one thread, and the project folder."""
    folders = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "OMP_NUM_THREADS": "1"}
