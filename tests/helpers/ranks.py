"""Starts a test's worker script as several gloo ranks, and joins them from inside.

A launch is mostly imports, so one launch should carry many cases: a worker calls `run_cases`, the test reads what each said.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

from grpo_mega.processes import die_with_parent

HELPERS = Path(__file__).parent
ROOT = HELPERS.parents[1]
FORKED = HELPERS / "forked.py"
COMMAND = (sys.executable, str(FORKED))

Results = dict[str, list[str]]  # by case: what went wrong, a traceback for each rank that failed


def launch(worker: Path, world_size: int, folder: Path, timeout_s: float = 900, command: Sequence[str] = COMMAND) -> Results:
    """Runs `worker` with arguments RANK WORLD_SIZE FOLDER; returns what `run_cases` wrote."""
    arguments = "{rank}", str(world_size), str(folder)
    run_forked(str(worker), world_size, *arguments, timeout_s=timeout_s, threads=1, command=command)
    found = [json.loads((folder / f"results_{rank}.json").read_text()) for rank in range(world_size)]
    return {case: [results[case] for results in found if results.get(case)] for case in found[0]}


def run_forked(
    target: str,
    world_size: int,
    *arguments: str,
    timeout_s: float = 1800,  # ranks that wait for one another end sooner, by their groups' own limit
    threads: int | None = None,
    command: Sequence[str] = COMMAND,
) -> None:
    """Run a module or file as ranks that share one import (forked.py, or a `command` that runs it); fail with their errors."""
    folders = (ROOT, HELPERS, *filter(None, [os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    whole = [*command, str(world_size), target, *arguments]
    ask = partial(die_with_parent, os.getpid())
    process = subprocess.Popen(whole, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=ask)
    try:
        errors = process.communicate(timeout=timeout_s)[1]
    finally:
        process.kill()  # the ranks go with it
    assert process.returncode == 0, errors


def run_cases(cases: dict[str, Callable[[int, Path], None]]) -> None:
    """In a worker: joins the ranks and runs each case as `case(rank, folder)`, up to the first that fails here."""
    import torch
    import torch.distributed as dist

    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120))
    results = dict.fromkeys(cases, "not run, since another case failed")
    for name, case in cases.items():
        try:
            case(rank, folder)
            results[name] = ""
        except Exception:
            results[name] = f"rank {rank}: {traceback.format_exc()}"
            break  # the ranks may be out of step
    (folder / f"results_{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
