"""`python ranks.py CONFIG RUN_DIR PLACEMENT CORE CORE` starts the ranks of one run; with RANK set it is one of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))


def main(config: str, run_dir: str, placement: str, cores: list[int]) -> int:
    from grpo_mega.cli import main as grpo_mega
    from grpo_mega.distributed.launch import run_ranks
    from tools.benchmarks.kills import share_of_vowels  # noqa: F401  # the config's reward

    engine_ranks, staleness = {"in turns": (1, 0), "ahead": (1, 1), "colocated": (0, 0)}[placement]
    if "RANK" not in os.environ:
        return run_ranks([sys.executable, *sys.argv], 1 + engine_ranks, Path(f"{run_dir}-logs"))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"])]} if engine_ranks else cores)
    kind = "separate" if engine_ranks else "colocated"
    settings = {"run_dir": run_dir, "layout.engine_ranks": engine_ranks, "rollout.placement": kind}
    settings |= {"rollout.max_staleness": staleness}
    return grpo_mega(["train", config, *(part for item in settings.items() for part in ("--set", "{}={}".format(*item)))])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4], [int(core) for core in sys.argv[4:]]))
