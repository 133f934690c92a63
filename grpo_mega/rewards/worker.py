"""The job of a reward worker: it runs one check at a time. And the import of a run's own functions before a run.

The pool's fork server forks all workers. It imports math-verify if a check needs it.

After importing all functions, a worker sends the names of the functions that take groups, or the reason why it cannot
start. For each request (function name, pickled samples, pickled group data or None) it sends the outcome of every
sample. The worker ends with the connection or the fork server, even during a check that hangs.

pebble 5.2.3 (a library of killable process pools) was tried instead. It ends a hanging worker by SIGTERM, waits 3 s,
then kills it, so six hangs on two workers took 4.1 to 4.6 times their deadlines (this code: 1.13 to 1.17). Processes
that a check started survived the check, and all of them, the workers and the server survived a killed run. Its workers
import the trainer's `__main__`, with torch. It has one pipe for all workers, so it can neither retry a check first nor
drop a queued one.

`import_problems` imports a run's own functions in a child process, before any rank starts, as a worker will import
them. User code never runs in the process of a command. The child prints its results, because an import may end the
process.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from grpo_mega.config.data import RewardFunctionConfig, RewardsConfig
from grpo_mega.errors import ConfigError, UserError
from grpo_mega.rewards import registry
from grpo_mega.rewards.api import NoScore, RewardFunction, Score, as_score
from grpo_mega.workers.pool import START_LIMIT_S, ForkedJob, Serve, describe_error

MATH_VERIFY = "grpo_mega.rewards.math.mathverify"  # the fork server imports it
_OUT_OF_MEMORY_STATUS = 71

Outcome = tuple[Score, str | None]  # score, and the text of the exception if any
Request = tuple[str, list[bytes], bytes | None]


@dataclass(frozen=True)
class CheckJob(ForkedJob):
    """The task of a reward worker."""

    rewards: RewardsConfig
    is_replacement: bool  # True if it replaces a worker that ended during the run

    def prepare(self) -> tuple[frozenset[str], Serve]:
        """Import the functions. The first message has the names of the functions that take groups."""
        functions = self._import()
        forms = {f.name: "text" if f.name in registry.BUILT_IN else f.completions for f in self.rewards.functions}

        def serve(pool: connection.Connection[Any, Any]) -> None:
            while True:
                name, samples, group = pool.recv()
                pool.send(_run(functions[name], samples, group, forms.get(name, "text")))

        return frozenset(name for name, function in functions.items() if registry.takes_groups(function)), serve

    def _import(self) -> dict[str, RewardFunction]:
        functions: dict[str, RewardFunction] = {}
        options_of = {function.name: function.options for function in self.rewards.functions}
        for name in dict.fromkeys(registry.ACCURACY if name in registry.JUDGED else name for name in options_of):
            options = options_of.get(name, {})
            functions[name] = registry.bind(name, options, self.rewards.step_splitter, self.code_dir)
            if name == registry.ACCURACY:
                importlib.import_module(MATH_VERIFY)  # reports why the fork server could not import it
            elif name == "reward_model" and not self.is_replacement:  # a restarting server must not end the run
                from grpo_mega.rewards.reward_model import check_reachable

                check_reachable(options)
        return functions


def _run(function: RewardFunction, pickled: list[bytes], group: bytes | None, form: str) -> list[Outcome]:
    try:
        samples = [pickle.loads(sample) for sample in pickled]
        if group is None:
            returned = [function(*samples[0])]
        else:
            given, token_ids, conversations = pickle.loads(group)
            returned = registry.call_group(function, samples, given, token_ids, form, conversations)
        outcomes: list[Outcome] = []
        for value, (_, response, _, _) in zip(returned, samples, strict=True):
            try:
                outcomes.append((as_score(value, response), None))
            except Exception as error:
                outcomes.append(_failed(error))
        return outcomes
    except MemoryError:
        os._exit(_OUT_OF_MEMORY_STATUS)  # the heap is full, so only a fresh process can continue
    except BaseException as error:  # SystemExit and similar end the check, not the worker
        return [_failed(error)] * len(pickled)


def _failed(error: BaseException) -> Outcome:
    return Score(None if isinstance(error, NoScore) else 0.0, "error"), describe_error(error)


PROGRAM = """
import importlib, json, os, pickle, sys
module, path, given = pickle.load(sys.stdin.buffer)
sys.path[:] = path
output, sys.stdout = sys.stdout, sys.stderr
print(json.dumps(importlib.import_module(module).report(**given)), file=output, flush=True)
os._exit(0)  # threads of a module must not keep the command waiting
"""


def import_problems(functions: Sequence[RewardFunctionConfig], splitter: str, code_dir: Path | None) -> Iterator[str]:
    """Yield a line for each user function that cannot be imported, does not exist, or takes other options."""
    names = ", ".join(repr(function.name) for function in functions)
    given = {"options": {one.name: dict(one.options) for one in functions}, "splitter": splitter, "code_dir": code_dir}
    try:
        yield from ask_child(__name__, given, f"reward function {names}")
    except ConfigError as error:
        yield from error.lines


def ask_child(module: str, given: dict[str, Any], what: str) -> Any:
    """Call `report(**given)` of a module in a child process, and return its JSON value.

    What the module prints goes to stderr. Raises ConfigError, about `what`, if the child does not end or fails.
    """
    request = pickle.dumps((module, [folder or os.getcwd() for folder in sys.path], given))
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], input=request, capture_output=True, timeout=START_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{what}: the import takes more than {START_LIMIT_S:.0f} s; make it lighter") from None
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no text"])[-1]
    raise ConfigError(f"{what}: the import ended the process with code {done.returncode} ({last}); correct it")


def report(options: dict[str, dict[str, Any]], splitter: str, code_dir: Path | None) -> list[str]:
    """Import the functions, and return their problems."""
    problems: list[str] = []
    for name, own in options.items():
        try:
            registry.bind(name, own, splitter, code_dir)
        except UserError as error:
            problems += error.lines
        except Exception as error:  # for example of a class that needs arguments
            problems.append(f"reward function {name!r}: {describe_error(error)}; correct it")
    return problems
