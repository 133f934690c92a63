"""`python pinned.py LOGS CORES ARGUMENT ...`: run `grpo-mega ARGUMENT ...` with each rank pinned to its cores.

CORES lists the cores of each rank, for example "0/1" (two ranks) or "0,1" (one rank). If RANK is set, this process is a rank.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from grpo_mega import console
from grpo_mega.cli import main as grpo_mega
from grpo_mega.distributed.launch import run_ranks


def main(logs: str, cores: str, arguments: list[str]) -> int:
    by_rank = [[int(core) for core in part.split(",")] for part in cores.split("/")]
    if "RANK" not in os.environ:
        return run_ranks([sys.executable, *sys.argv], len(by_rank), Path(logs))
    os.sched_setaffinity(0, by_rank[int(os.environ["RANK"])])
    return grpo_mega(arguments)


if __name__ == "__main__":
    console.install()
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
