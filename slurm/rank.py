"""Run one rank. torchrun starts `rank.py ARGUMENTS`, which runs `grpo-mega ARGUMENTS` and exits with its code.

Rank 0 writes to the job's output; other ranks write to RUN_DIR/logs/rank_N.log, as with grpo-mega's own launcher. A
rank that fails writes STATE/failures/NODE-RANK at once, with time, exit code, and a line that names node and rank.
torchrun would report the failure half a minute later, when all ranks of the node have ended. By then the job has killed
its other nodes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from node import report

from grpo_mega.distributed.launch import die_with_launcher, exit_description, log_tail
from grpo_mega.text import filter_output


def main() -> int:
    rank = int(os.environ["RANK"])
    logs = Path(os.environ["RUN_DIR"]) / "logs"
    log = logs / f"rank_{rank}.log"
    output, start = None, 0
    if rank != 0:
        logs.mkdir(parents=True, exist_ok=True)
        output = log.open("ab")
        start = output.tell()
    launcher = os.getpid()

    def prepare() -> None:
        # The launcher ignores SIGTERM and its children inherit that, but the rank's helper processes must end on
        # SIGTERM.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_launcher(launcher)

    command = [sys.executable, "-m", "grpo_mega.cli", *sys.argv[1:]]
    code = subprocess.Popen(command, stdout=output, stderr=output, preexec_fn=prepare).wait()
    if code:
        node = os.environ["SLURMD_NODENAME"]
        output_at = "see above" if rank == 0 else log_tail(log, start)
        failure = Path(os.environ["STATE"]) / "failures" / f"{node}-{rank}"
        report(failure, code, f"node {node}: rank {rank} {exit_description(code)}; {output_at}")
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    filter_output()
    sys.exit(main())
