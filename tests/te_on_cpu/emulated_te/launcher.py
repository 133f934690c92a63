"""Start processes on the emulation. This module imports only the standard library."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
WHEELS = ROOT / ".venv-te"
DEFAULT, OTHERS = "2.11.0", ("2.10.0", "2.9.0")


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
