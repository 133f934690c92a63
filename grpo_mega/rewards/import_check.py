"""Import a run's own reward functions in a child process, before any rank starts, as a worker will import them.

User code never runs in the process of a command. The child prints its results, because an import may end the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from grpo_mega.config.rewards import RewardFunctionConfig
from grpo_mega.errors import UserError
from grpo_mega.rewards import registry
from grpo_mega.rewards.forked import START_LIMIT_S, describe_error

PROGRAM = """
import json, sys
request = json.load(sys.stdin)
sys.path[:] = request["path"]
from grpo_mega.rewards import import_check
import_check.report(request)
"""


def import_problems(functions: Sequence[RewardFunctionConfig], splitter: str, code_dir: Path | None) -> Iterator[str]:
    """Yield a line for each user function that cannot be imported, does not exist, or takes other options."""
    request = {
        "path": [folder or os.getcwd() for folder in sys.path],
        "functions": [[function.name, function.options] for function in functions],
        "splitter": splitter,
        "code_dir": None if code_dir is None else str(code_dir),
    }
    names = ", ".join(repr(function.name) for function in functions)
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=START_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        yield f"reward function {names}: the import takes more than {START_LIMIT_S:.0f} s; make it lighter"
        return
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        yield from json.loads(lines[-1])
        return
    last = (done.stderr.strip().splitlines() or ["no text"])[-1]
    yield f"reward function {names}: the import ended the process with code {done.returncode} ({last}); correct it"


def report(request: dict[str, object]) -> None:
    """Import the functions, and print the problems as JSON. What their modules print goes to stderr."""
    output, sys.stdout = sys.stdout, sys.stderr
    code_dir = request["code_dir"]
    problems: list[str] = []
    for name, options in request["functions"]:  # type: ignore[attr-defined]
        try:
            registry.bind(name, options, str(request["splitter"]), None if code_dir is None else Path(str(code_dir)))
        except UserError as error:
            problems += error.lines
        except Exception as error:  # for example of a class that needs arguments
            problems.append(f"reward function {name!r}: {describe_error(error)}; correct it")
    print(json.dumps(problems), file=output, flush=True)
    os._exit(0)  # threads of a module must not keep the command waiting
