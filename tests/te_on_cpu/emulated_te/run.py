"""`python -m tests.te_on_cpu.emulated_te.run VERSION MODULE_OR_FILE.py [ARGUMENT ...]`: run a module on the
emulation.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main(version: str, target: str) -> None:
    from tests.te_on_cpu.emulated_te.package import emulate

    emulate(version)
    sys.argv = sys.argv[2:]
    if target.endswith(".py"):
        sys.path.insert(0, str(Path(target).resolve().parent))
        runpy.run_path(target, run_name="__main__")
    else:
        runpy.run_module(target, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
