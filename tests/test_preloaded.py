"""Programs on the preloaded Python behave as on the real one (helpers/preloaded.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import preloaded

REPORT = """
import os, sys
print(sys.argv[1:], os.getcwd(), os.environ.get("ONLY_HERE"), sys.path[0], sys.stdin.read(), __name__)
print("an error", file=sys.stderr)
if sys.argv[1] == "raises":
    raise ValueError("of the program")
sys.exit({"text": "a message", "code": 3}.get(sys.argv[1]))
"""
WAIT = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(5))
print(os.getpid(), flush=True)
while True:
    time.sleep(0.1)  # a signal just before a sleep does not end it
"""
IMPORTED = "import sys\nprint('torch' in sys.modules)\n"


def run(python: str, program: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [python, str(program), *arguments]
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(
        command, cwd=program.parent, input="typed", env=variables, capture_output=True, text=True, timeout=300
    )


@pytest.mark.pool
@pytest.mark.parametrize("way", ["text", "code", "none", "raises"])
def test_a_program_gets_and_returns_what_it_would_from_python(way: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(REPORT)
    real, found = (run(python, program, way, "b c", ONLY_HERE="1") for python in (sys.executable, preloaded.python()))
    assert found.returncode == real.returncode
    assert found.stdout == real.stdout and "typed" in found.stdout
    assert found.stderr.splitlines()[0] == "an error" and found.stderr.splitlines()[-1] == real.stderr.splitlines()[-1]


@pytest.mark.pool
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_reaches_the_program_and_a_kill_ends_it(number: signal.Signals, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(WAIT)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([preloaded.python(), str(program)], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert pid != process.pid and os.path.exists(f"/proc/{pid}")
    process.send_signal(number)
    assert process.wait(timeout=300) == (5 if number == signal.SIGTERM else -signal.SIGKILL)
    until = time.monotonic() + 300
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.pool
def test_a_program_with_other_variables_of_libraries_gets_the_real_python(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(IMPORTED)
    assert run(preloaded.python(), program).stdout == "True\n"
    assert run(preloaded.python(), program, ATEN_CPU_CAPABILITY="default").stdout == "False\n"
