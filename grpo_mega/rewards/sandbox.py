"""Run Python programs of a model in a sandbox: the tool `python`, and what the reward `code` uses.

A program runs in its own processes, which all end with the run: own user, mount, PID, network and IPC namespaces, a
root folder that has only Python and its libraries, read-only, an unprivileged user id without capabilities, an empty
working folder in memory, a cleared environment, and limits of memory, CPU time, processes, files and output. See
sandbox_main.py. Where the kernel forbids namespaces, the limits and the time hold, but the program can use the network
and read and write files as an unprivileged user. `missing` says so.

`verdict` of a run: "finished" (exit status 0), "error" (an exception, another status or a signal), "timeout",
"memory", "output" (more than MAX_OUTPUT_BYTES) or "refused" (an exception because the sandbox denies network, files or
processes).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from grpo_mega.processes import kill_session

MAX_OUTPUT_BYTES = 1 << 20
MEMORY_BYTES = 1 << 30  # address space of each process of a program
TOOL_TIMEOUT_S = 10.0
_MAX_TOOL_CHARS = 8000
_START_S = 20.0  # limit for the start of the sandbox itself, which is slow on a busy machine
_ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = Path(__file__).with_name("sandbox_main.py")  # not imported as a module, because the package takes long


class SandboxFailed(Exception):
    """The sandbox could not start or was killed from outside. The program is not to blame."""


@dataclass(frozen=True)
class Run:
    """The outcome of a program. `output` is its standard output, and `error` the end of its standard error.

    `is_complete` is True if the program ran to its last line, instead of ending itself before, as os._exit does.
    """

    verdict: str
    output: str
    error: str
    is_complete: bool


def run_programs(
    programs: Sequence[tuple[str, str]],
    timeout_s: float,
    *,
    total_s: float = math.inf,
    stops_early: bool = False,
    isolates: bool | None = None,
    memory_bytes: int = MEMORY_BYTES,
) -> list[Run]:
    """Run pairs of a program and its standard input one after another, each in fresh processes, and return outcomes.

    `timeout_s` is for each program, and `total_s` for all of them. With `stops_early` nothing runs after the first
    program that does not finish. `isolates`: whether to use namespaces; None uses them where the kernel allows it.
    Raises SandboxFailed.
    """
    request: dict[str, Any] = {
        "programs": list(programs),
        "timeout_s": timeout_s,
        "total_s": min(total_s, len(programs) * timeout_s),
        "stops_early": stops_early,
        "isolates": missing() is None if isolates is None else isolates,
        "memory_bytes": memory_bytes,
        "output_bytes": MAX_OUTPUT_BYTES,
        "folders": _python_folders(),
    }
    answer = _run_sandbox(request, _START_S + request["total_s"])
    if answer["missing"] and request["isolates"]:
        raise SandboxFailed(f"the sandbox failed: {answer['missing']}")
    return [Run(**one) for one in answer["runs"]]


@cache
def missing() -> str | None:
    """Return why programs can use network and files here; None if namespaces isolate them."""
    try:
        problem = _run_sandbox({"programs": [], "isolates": True, "folders": _python_folders()}, _START_S)["missing"]
    except SandboxFailed as error:
        problem = str(error)
    return problem or None


def _run_sandbox(request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
    """Start the sandbox in an empty folder, and return its answer. End everything that it started."""
    command = [sys.executable, "-I", "-B", str(_PROGRAM), str(_ROOT)]
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with tempfile.TemporaryDirectory(prefix="grpo-mega-sandbox-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=folder, env=environment, start_new_session=True
        )
        try:
            out, problem = process.communicate(json.dumps(request).encode(), deadline_s)
        except subprocess.TimeoutExpired:
            raise SandboxFailed(f"the sandbox did not end within {deadline_s:g} s") from None
        finally:
            has_ended = process.poll() is not None
            kill_session(process.pid, has_ended=has_ended)
            if not has_ended:
                process.communicate()  # waits for the killed process, and closes its pipes
    try:
        return dict(json.loads(out))
    except ValueError:
        last = (problem.decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise SandboxFailed(f"the sandbox failed: {last}") from None


@cache
def _python_folders() -> list[str]:
    """Return the folders that a Python program needs."""
    known = [
        sys.prefix,
        sys.base_prefix,
        *(path for path in sys.path if path.endswith(("site-packages", "dist-packages"))),
    ]
    return list(dict.fromkeys(os.path.abspath(path) for path in known))


def python(code: str) -> str:
    """Run a Python program and return what it prints. Nothing is kept between two calls.

    Args:
        code: The program. Only what it prints is returned.
    """
    (run,) = run_programs([(code, "")], TOOL_TIMEOUT_S)
    text = run.output if len(run.output) <= _MAX_TOOL_CHARS else f"{run.output[:_MAX_TOOL_CHARS]}..."
    if run.verdict == "finished":
        return text
    notes = {"timeout": f"no end within {TOOL_TIMEOUT_S:g} s", "memory": "out of memory", "output": "too much output"}
    return f"{text}\nError: {notes.get(run.verdict, run.error)}".strip()
