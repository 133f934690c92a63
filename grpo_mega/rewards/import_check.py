"""Import a run's own functions in a child process, before any rank starts, as a worker will import them.

User code never runs in the process of a command. The child prints its results, because an import may end the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from grpo_mega.config.rewards import RewardFunctionConfig
from grpo_mega.errors import ConfigError, UserError
from grpo_mega.rewards import registry
from grpo_mega.rewards.forked import START_LIMIT_S, describe_error

PROGRAM = """
import importlib, json, sys
request = json.load(sys.stdin)
sys.path[:] = request["path"]
importlib.import_module(request["module"]).report(request)
"""


def import_problems(functions: Sequence[RewardFunctionConfig], splitter: str, code_dir: Path | None) -> Iterator[str]:
    """Yield a line for each user function that cannot be imported, does not exist, or takes other options."""
    names = ", ".join(repr(function.name) for function in functions)
    given = {"functions": [[function.name, function.options] for function in functions], "splitter": splitter}
    try:
        yield from ask_child(__name__, given, code_dir, f"reward function {names}")
    except ConfigError as error:
        yield from error.lines


def ask_child(module: str, given: dict[str, Any], code_dir: Path | None, what: str) -> Any:
    """Call `report(given)` of a module in a child process, and return the JSON value that it prints.

    Raises ConfigError, about `what`, if the child does not end or fails.
    """
    request = given | {
        "module": module,
        "path": [folder or os.getcwd() for folder in sys.path],
        "code_dir": None if code_dir is None else str(code_dir),
    }
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
        raise ConfigError(f"{what}: the import takes more than {START_LIMIT_S:.0f} s; make it lighter") from None
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    last = (done.stderr.strip().splitlines() or ["no text"])[-1]
    raise ConfigError(f"{what}: the import ended the process with code {done.returncode} ({last}); correct it")


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
