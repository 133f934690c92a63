"""Run Python programs of a model in a sandbox: the reward `code`, which runs test cases, and the tool `python`.

A program runs in its own processes, which all end with the run: own user, mount, PID, network and IPC namespaces, a
root folder that has only Python and its libraries, read-only, an unprivileged user id without capabilities, an empty
working folder in memory, a cleared environment, and limits of memory, CPU time, processes, files and output. See
sandbox_main.py. Where the kernel forbids namespaces, the limits and the time hold, but the program can use the network
and read and write files as an unprivileged user. `missing_sandbox` says so.

`verdict` of a run: "finished" (exit status 0), "error" (an exception, another status or a signal), "timeout",
"memory", "output" (more than sandbox_main.OUTPUT_BYTES) or "refused" (an exception because the sandbox denies
network, files or processes).

The reward `code` runs the last fenced block of Python after the thought. The cases are in the first of these places:

    verification_info        open-r1: {"test_cases": [{"input", "output", "type": "stdin_stdout", "fn_name"?}, ...]}
    the answer               verl (PRIME, TACO, APPS): {"inputs": [...], "outputs": [...], "fn_name"?}, or a list of
                             asserts, or {"assert_case": [...]}
    test_list, test_cases,   lists of asserts, or of the cases above; `test_setup_code` and `test_imports` come first
    tests, test

Values may be JSON texts. The test text of HumanEval, `def check(candidate): ...`, is called with the function
`entry_point`. A case with fn_name calls the function with a JSON value per line or argument, and compares JSON values.
Outputs are compared line by line without spaces at the ends.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from grpo_mega.errors import ConfigError
from grpo_mega.processes import kill_session
from grpo_mega.rewards.api import Extras, NoScore, Score
from grpo_mega.rewards.math.answer import conclusion_of, whole_turn
from grpo_mega.rewards.split_tests import split_call, split_tests

TIMEOUT_S = 4.0
START_S = 4.0  # rewards.deadline_s must exceed the time of the programs by this
_COLUMNS = ("test_list", "test_cases", "tests", "test")
_BLOCK = re.compile(r"(?ims)^[ \t]*```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)^[ \t]*```")


class Program(NamedTuple):
    """A program, its standard input, and the judge of what it reports; see split_tests.py.

    `whole`: the program with its tests, for reports that cannot be judged.
    """

    text: str
    stdin: str = ""
    judge: str = ""
    whole: str = ""


class Case(NamedTuple):
    """A test case: asserts to run after the program, or a call of its function, or standard input and output."""

    stdin: str = ""
    output: str | None = None
    asserts: str = ""
    call: tuple[str, str, str] | None = None  # name, and JSON texts of arguments and value

    def program(self, text: str) -> Program:
        if self.call:
            inside, judge = split_call(*self.call)
            return Program(f"{text}\n{inside}", judge=judge)
        whole = Program(f"{text}\n{self.asserts}", self.stdin)
        parts = split_tests(self.asserts, text) if self.asserts else None
        return Program(f"{text}\n{parts[0]}", "", parts[1], whole.text) if parts else whole


def code(
    prompt: str,
    response: str,
    answer: str,
    extras: Extras,
    *,
    timeout_s: float = TIMEOUT_S,
    max_cases: int = 20,
    partial: bool = False,
) -> Score:
    """Return 1 if the program passes the first `max_cases` cases within `timeout_s` in all, else 0.

    With `partial` it is the share of cases that pass. The verdict is that of the first case that fails.
    """
    cases = cases_of(answer, extras)[:max_cases]
    if not cases:
        return Score(None, "gold_unparsable")
    blocks = _BLOCK.findall(conclusion_of(whole_turn(response, extras)))
    if not blocks:
        return Score(0.0, "wrong")
    programs = [case.program(blocks[-1]) for case in cases]
    for num_left in (1, 0):  # if the sandbox itself fails, try again once
        try:
            runs = run_programs(programs, timeout_s, total_s=timeout_s, stops_early=not partial)
            break
        except SandboxFailed as error:
            if not num_left:
                raise NoScore(str(error)) from None
    verdicts = [_verdict(run, case.output) for run, case in zip(runs, cases, strict=False)]
    failed = [verdict for verdict in verdicts if verdict != "correct"]
    value = 1.0 - len(failed) / len(cases) if partial else float(not failed)
    return Score(value, failed[0] if failed else "correct")


def check_deadline(options: Mapping[str, Any], deadline_s: float) -> None:
    """Raise ConfigError if the pool would end a check before its programs time out."""
    needed = options.get("timeout_s", TIMEOUT_S) + START_S
    if deadline_s < needed:
        raise ConfigError(
            f"reward function 'code': rewards.deadline_s={deadline_s:g} leaves no time for timeout_s and the start of"
            f" the sandbox; raise it to {needed:g}"
        )


def cases_of(answer: str, extras: Mapping[str, Any]) -> list[Case]:
    """Return the test cases of a row; [] if it has none that can be read."""
    setup = "\n".join(_lines(extras.get("test_imports")) + _lines(extras.get("test_setup_code")))
    for value in (extras.get("verification_info"), answer, *(extras.get(column) for column in _COLUMNS)):
        try:
            cases = _cases(_parsed(value), extras)
        except (KeyError, TypeError, ValueError):
            continue
        if cases:
            return [case._replace(asserts=f"{setup}\n{case.asserts}") if case.asserts else case for case in cases]
    return []


def _cases(value: Any, extras: Mapping[str, Any]) -> list[Case]:
    if isinstance(value, str):
        entry = f"\ncheck({extras['entry_point']})" if "def check(" in value and "entry_point" in extras else ""
        return [Case(asserts=value + entry)] if "assert" in value else []
    if isinstance(value, list):
        return [case for one in value for case in _cases(one, extras)]
    if not isinstance(value, dict):
        return []
    if "inputs" in value and "outputs" in value:
        pairs, name = zip(value["inputs"], value["outputs"], strict=True), value.get("fn_name")
        return [_pair(given, expected, name) for given, expected in pairs]
    if "input" in value and "output" in value:
        return [_pair(value["input"], value["output"], value.get("fn_name"))]
    return _cases(_parsed(value.get("test_cases") or value.get("assert_case") or value.get("asserts")), extras)


def _pair(given: Any, expected: Any, name: str | None) -> Case:
    if not name:
        return Case(_as_lines(given), _as_lines(expected))
    arguments = [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else given
    expected = json.loads(expected) if isinstance(expected, str) else expected
    return Case(call=(name, json.dumps(arguments), json.dumps(expected)))


def _verdict(run: Run, expected: str | None) -> str:
    if run.verdict != "finished":
        is_assert = expected is None and run.verdict == "error" and run.error.strip().rpartition("\n")[2]
        return "wrong" if is_assert and is_assert.startswith("AssertionError") else run.verdict
    if expected is None:
        return "correct" if run.is_complete else "wrong"
    lines = [[line.strip() for line in text.strip().splitlines()] for text in (run.output, expected)]
    return "correct" if lines[0] == lines[1] else "wrong"


def _parsed(value: Any) -> Any:
    """Return the value of a JSON text, and anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _as_lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(value: Any) -> list[str]:
    return [] if not value else [value] if isinstance(value, str) else list(map(str, value))


TOOL_TIMEOUT_S = 10.0
_MAX_TOOL_CHARS = 8000
_SANDBOX_START_S = 20.0  # limit for the start of the sandbox itself, which is slow on a busy machine
_JUDGE_S = 20.0  # limit for one judge, which may begin at the end of the programs' time
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
    programs: Sequence[Program],
    timeout_s: float,
    *,
    total_s: float = math.inf,
    stops_early: bool = False,
    isolates: bool | None = None,
) -> list[Run]:
    """Run programs one after another, each in fresh processes, and return their outcomes, or those of their judges.

    `timeout_s` is for each program, and `total_s` for all of them. With `stops_early` nothing runs after the first
    program that does not finish. `isolates`: whether to use namespaces; None uses them where the kernel allows it.
    Raises SandboxFailed.
    """
    if isolates is None and (hidden := hidden_python()):
        raise SandboxFailed(f"programs run as another user, who cannot enter {hidden}")
    request = _request(missing_sandbox() is None if isolates is None else isolates) | {
        "timeout_s": timeout_s,
        "total_s": min(total_s, len(programs) * timeout_s),
        "judge_s": _JUDGE_S,
        "stops_early": stops_early,
    }
    answer = _run_sandbox(request, programs, _SANDBOX_START_S + request["total_s"] + _JUDGE_S)
    if answer["missing"] and request["isolates"]:
        raise SandboxFailed(f"the sandbox failed: {answer['missing']}")
    return [Run(**one) for one in answer["runs"]]


@cache
def missing_sandbox() -> str | None:
    """Return why programs can use network and files here; None if namespaces isolate them."""
    try:
        return _run_sandbox(_request(isolates=True), [], _SANDBOX_START_S)["missing"] or None
    except SandboxFailed as error:
        return str(error)


@cache
def hidden_python() -> str | None:
    """Return a folder that keeps programs from this Python; None if there is none.

    Root's programs run as another user. Without namespaces this user has to enter the parents of Python's folders too.
    """
    folders = [Path(folder).resolve() for folder in _python_folders() if os.geteuid() == 0 and os.path.exists(folder)]
    folders += [parent for folder in folders if missing_sandbox() is not None for parent in folder.parents]
    return next((str(folder) for folder in folders if not folder.stat().st_mode & stat.S_IXOTH), None)


def _request(isolates: bool) -> dict[str, Any]:
    """Return the places of a sandbox. Programs work in /tmp, or in another folder if Python is installed below it."""
    folders = _python_folders()
    is_in_tmp = any(path.startswith("/tmp/") for folder in folders for path in (folder, os.path.realpath(folder)))
    return {"isolates": isolates, "folders": folders, "folder": "/program" if is_in_tmp else "/tmp"}


def _run_sandbox(request: dict[str, Any], programs: Sequence[Program], deadline_s: float) -> dict[str, Any]:
    """Start the sandbox in an empty folder, and return its answer. End everything that it started."""
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryDirectory(prefix="grpo-mega-sandbox-", ignore_cleanup_errors=True) as folder,
        os.fdopen(os.memfd_create("request"), "wb") as file,
    ):
        command = [sys.executable, "-I", "-B", str(_PROGRAM), str(_ROOT), str(_write_request(file, request, programs))]
        process = subprocess.Popen(
            command, stdin=file, stdout=pipe, stderr=pipe, cwd=folder, env=environment, start_new_session=True
        )
        try:
            out, problem = process.communicate(timeout=deadline_s)
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


def _write_request(file: BinaryIO, request: dict[str, Any], programs: Sequence[Program]) -> int:
    """Write the texts of the programs, then the request, and return where the request starts."""
    entries = []
    for program in programs:
        entry: dict[str, Any] = {"stdin": program.stdin}
        for name in ("text", "judge", "whole"):
            data = getattr(program, name).encode(errors="surrogatepass")
            entry[name] = [len(data), file.tell()]
            file.write(data)
        entries.append(entry)
    start = file.tell()
    file.write(json.dumps(request | {"programs": entries}).encode())
    file.flush()
    return start


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
    (run,) = run_programs([Program(code)], TOOL_TIMEOUT_S)
    text = run.output if len(run.output) <= _MAX_TOOL_CHARS else f"{run.output[:_MAX_TOOL_CHARS]}..."
    if run.verdict == "finished":
        return text
    notes = {"timeout": f"no end within {TOOL_TIMEOUT_S:g} s", "memory": "out of memory", "output": "too much output"}
    return f"{text}\nError: {notes.get(run.verdict, run.error)}".strip()
