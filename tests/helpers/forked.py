"""`python forked.py WORLD_SIZE FILE.py|MODULE [ARGUMENT ...]`: run several ranks that share imports.

In a test, imports of torch, Megatron-core and transformers take most of a rank's time. Imports at the top of the file
or module run once. Then a fork per rank runs the file as `__main__`, or the module's tests of `@ranks`, with torchrun's
variables. "{rank}" in the arguments is replaced. The exit code is 0, or 1 if a rank has failed. The other ranks then
get ten seconds. No rank outlives this process.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path

from grpo_mega.distributed.launch import rank_environments
from grpo_mega.processes import die_with_parent
from tests.helpers.ranks import run_chosen_tests

SECONDS_TO_END = 10.0


def main(world_size: int, target: str, arguments: list[str]) -> int:
    environments = rank_environments(os.environ, world_size)
    os.environ["OMP_NUM_THREADS"] = environments[0]["OMP_NUM_THREADS"]  # torch reads it only when it is loaded
    import_only(target)
    gc.collect()
    gc.freeze()  # a collection in a rank would visit the imports, 0.25 s each time, and copy their pages
    pids = [start(rank, environment, target, arguments) for rank, environment in enumerate(environments)]
    return wait(pids)


def import_only(target: str) -> None:
    if target.endswith(".py"):
        sys.path.insert(0, str(Path(target).resolve().parent))
        runpy.run_path(target, run_name="imported")
    else:
        importlib.import_module(target)


def start(rank: int, environment: dict[str, str], target: str, arguments: list[str]) -> int:
    """Fork a rank. Return its process id."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    code = 1
    try:
        die_with_parent(parent)
        os.environ.update(environment)
        sys.argv = [target, *(argument.replace("{rank}", str(rank)) for argument in arguments)]
        if target.endswith(".py"):
            runpy.run_path(target, run_name="__main__")
        else:
            run_chosen_tests(target)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(pids: list[int]) -> int:
    """Wait for all processes. Return 0 if all succeeded. After a failure, give the others a deadline, kill them, return
    1.
    """
    running, until = set(pids), float("inf")
    while running and time.monotonic() < until:
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                if status:
                    print(f"rank {pids.index(pid)} failed: wait status {status}", file=sys.stderr, flush=True)
                    until = min(until, time.monotonic() + SECONDS_TO_END)
        time.sleep(0.02)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    return int(until < float("inf"))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
