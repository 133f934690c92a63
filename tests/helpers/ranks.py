"""Starts a test's worker script as several gloo ranks, and joins them from inside.

A launch is mostly imports, so one launch should carry many cases: a worker calls `run_cases`, the test reads what each said.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

HELPERS = Path(__file__).parent
ROOT = HELPERS.parents[1]

Results = dict[str, list[str]]  # by case: what went wrong, a traceback for each rank that failed


def launch(worker: Path, world_size: int, folder: Path, timeout_s: float = 300) -> Results:
    """Runs `worker` with arguments RANK WORLD_SIZE FOLDER; returns what `run_cases` wrote."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HELPERS))),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(world_size), str(folder)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        errors = [rank.communicate(timeout=timeout_s)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world_size, "\n".join(errors)
    found = [json.loads((folder / f"results_{rank}.json").read_text()) for rank in range(world_size)]
    return {case: [results[case] for results in found if results.get(case)] for case in found[0]}


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
