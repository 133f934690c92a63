"""Tests that run on several gloo ranks.

`@ranks(n)` makes a test of a function that runs on each of n ranks. A launch is mostly imports, so all chosen tests of
a module with the same number of ranks share one launch. Tests that import Megatron or compare several launches use a
worker script instead: it calls `run_cases`, and the test calls `launch` and reads the errors of each case.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_mega.processes import die_with_parent
from tests.helpers import preloaded

ROOT = Path(__file__).resolve().parents[2]
FORKED = Path(__file__).with_name("forked.py")

Results = dict[str, list[str]]  # case -> a traceback per failed rank; an empty list if the case passed

DONE, RECORDS, CASES = "done.json", "rank_{rank}.jsonl", "cases.pickle"
_NO_PARAMETERS = SimpleNamespace(params={})


Test = Callable[..., None]


def ranks(world_size: int, command: Callable[[], Sequence[str]] = tuple) -> Callable[[Test], Test]:
    """Make `case(rank, folder, ...)` a test that passes if the case passes on each of `world_size` ranks.

    The ranks are joined in a gloo group. `folder` is shared by all cases of a launch. Further parameters come from
    `pytest.mark.parametrize` and must be picklable. `command` returns another command that runs forked.py.
    """

    def decorate(case: Test) -> Test:
        @pytest.mark.distributed
        @functools.wraps(case)
        def test(request: pytest.FixtureRequest, **parameters: Any) -> None:
            errors = _results_of(request, world_size, command)[request.node.name]
            assert not errors, "\n".join(errors)

        parameters = list(inspect.signature(case).parameters.values())[2:]
        request = inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        vars(test).update(__signature__=inspect.Signature([request, *parameters]), case=case, world_size=world_size)
        return test

    return decorate


def _results_of(request: pytest.FixtureRequest, world_size: int, command: Callable[[], Sequence[str]]) -> Results:
    """Return the errors of the module's chosen tests on `world_size` ranks. The first of these tests launches all of
    them.
    """
    module: Any = request.node.module
    if world_size not in vars(module).setdefault("_results", {}):
        items: list[Any] = [item for item in request.session.items if getattr(item, "module", None) is module]
        chosen = [item for item in items if getattr(item.function, "world_size", None) == world_size]
        cases = {
            item.name: (item.function.__name__, getattr(item, "callspec", _NO_PARAMETERS).params) for item in chosen
        }
        folder: Path = request.getfixturevalue("tmp_path_factory").mktemp(f"ranks{world_size}")
        (folder / CASES).write_bytes(pickle.dumps((module.__name__, cases)))
        module._results[world_size] = launch(module.__name__, world_size, folder, command=command())
    results: Results = module._results[world_size]
    return results


class CaseValues(dict[Any, Any]):
    """The results of the cases of one kind, keyed by the words of their names. Reading a failed case raises
    AssertionError with its tracebacks. In `problems` its key is "KIND NAME", or "NAME" if the kind is "".
    """

    def __init__(self, kind: str, problems: Results) -> None:
        super().__init__()
        self._kind, self._problems = kind, problems

    def __missing__(self, key: str | tuple[str, ...]) -> Any:
        name = " ".join(filter(None, [self._kind, *([key] if isinstance(key, str) else key)]))
        raise AssertionError("\n".join([f"case {name!r} left nothing", *self._problems.get(name, ["it was not run"])]))


def launch(
    worker: Path | str, world_size: int, folder: Path, timeout_s: float = 3600, command: Sequence[str] = ()
) -> Results:
    """Run a script with arguments RANK WORLD_SIZE FOLDER, or the tests of a module that `folder` lists.

    Return the tracebacks per case, in the order of `run_cases`.

    A case that fails ends its launch, because the ranks may be out of step. Another launch then runs the cases after
    it. Raises AssertionError if ranks fail outside of a case.
    """
    results: Results = {}
    while True:
        for path in (folder / "store", folder / "status", *folder.glob(RECORDS.format(rank="*"))):
            path.unlink(missing_ok=True)
        (folder / DONE).write_text(json.dumps(list(results)))
        arguments = "{rank}", str(world_size), str(folder)
        errors = ""
        try:
            run_forked(str(worker), world_size, *arguments, timeout_s=timeout_s, threads=1, command=command)
        except AssertionError as error:
            errors = str(error)
        all_cases, found = _read_records(folder, world_size, errors)
        assert found or not errors, errors
        results |= found
        if set(results) >= set(all_cases):
            assert not errors or any(results.values()), errors
            return {name: results[name] for name in all_cases}


def _read_records(folder: Path, world_size: int, errors: str) -> tuple[list[str], Results]:
    """Return the names of all cases, and the tracebacks of finished cases. If a rank died in a case, its error is
    `errors`.
    """
    all_cases: list[str] = []
    found: Results = {}
    for rank in range(world_size):
        path = folder / RECORDS.format(rank=rank)
        record: dict[str, Any] = {}
        for line in path.read_text().split("\n")[:-1] if path.exists() else ():
            record = json.loads(line)
            all_cases = record.get("cases", all_cases)
            if "case" in record:
                found.setdefault(record["case"], []).extend([record["error"]] * bool(record["error"]))
        if "started" in record:  # the rank's last record, so it ended inside this case
            found.setdefault(record["started"], []).append(f"rank {rank} ended inside this case: {errors}")
    return all_cases, found


def run_forked(
    target: str,
    world_size: int,
    *arguments: str,
    timeout_s: float = 1800,  # ranks that wait for each other end sooner by the timeout of their group
    threads: int | None = None,
    command: Sequence[str] = (),
) -> None:
    """Run a module or file as ranks that share imports (by forked.py or by `command`). Fail with the errors of the
    ranks.
    """
    folders = (ROOT, *filter(None, [os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    whole = [*(command or (preloaded.python(), str(FORKED))), str(world_size), target, *arguments]
    ask = partial(die_with_parent, os.getpid())
    process = subprocess.Popen(whole, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=ask)
    try:
        errors = process.communicate(timeout=timeout_s)[1]
    finally:
        process.kill()  # the ranks end with this process
    assert process.returncode == 0, errors


def run_cases(cases: Mapping[str, Callable[[int, Path], None]]) -> None:
    """Join the ranks in a worker. Run each case as `case(rank, folder)`, up to the first case that fails on any
    rank.
    """
    import torch
    import torch.distributed as dist

    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120))
    run_each(cases, rank, world_size, folder)
    dist.destroy_process_group()


def run_each(cases: Mapping[str, Callable[[int, Path], None]], rank: int, world_size: int, folder: Path) -> bool:
    """Run the cases that no earlier launch ran, up to the first case that fails on any rank. Return whether all passed.

    The ranks must already be joined. A failed rank does not wait for other ranks. They notice its end as an error.
    """
    import torch.distributed as dist

    done = set(json.loads((folder / DONE).read_text()))
    status = dist.FileStore(str(folder / "status"), world_size)
    with open(folder / RECORDS.format(rank=rank), "w", buffering=1) as records:

        def write(record: Mapping[str, Any]) -> None:
            records.write(json.dumps(record) + "\n")

        write({"cases": list(cases)})
        for name, case in cases.items():
            if name in done:
                continue
            write({"started": name})
            error = ""
            try:
                case(rank, folder)
            except Exception:
                error = f"rank {rank}: {traceback.format_exc()}"
            write({"case": name, "error": error})
            status.set(f"{name} {rank}", "failed" if error else "passed")
            if error or any(status.get(f"{name} {other}") != b"passed" for other in range(world_size)):
                return False
    return True


def run_chosen_tests(module: str) -> None:
    """Run the tests of @ranks that the launch chose, as one of its ranks."""
    _, cases = pickle.loads((Path(sys.argv[3]) / CASES).read_bytes())
    tests = vars(importlib.import_module(module))
    run_cases({name: partial(tests[function].case, **parameters) for name, (function, parameters) in cases.items()})
