"""One rank, as torchrun starts it: `rank.py ARGUMENTS` runs `grpo-mega ARGUMENTS` and ends as that does.

Rank 0 keeps the job's output; the others write to RUN_DIR/logs/rank_N.log, as with grpo-mega's own launcher. Of a failure it
writes STATE/failures/NODE-RANK at once: time, exit code, and a line that names node and rank. torchrun would tell only when the
node's other ranks have ended, half a minute later, and the job's other nodes are killed before that.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from node import write

from grpo_mega.distributed.launch import die_with_parent

LINES_OF_LOG = 5


def main() -> int:
    rank = int(os.environ["RANK"])
    logs = Path(os.environ["RUN_DIR"]) / "logs"
    log = logs / f"rank_{rank}.log"
    output, start = None, 0
    if rank != 0:
        logs.mkdir(parents=True, exist_ok=True)
        output = log.open("ab")
        start = output.tell()
    bind = die_with_parent(os.getpid())
    assert bind is not None, "Slurm runs on Linux"

    def prepare() -> None:
        # The launcher ignores it, and what is ignored is inherited: a rank's helpers must end on it.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        bind()

    command = [sys.executable, "-m", "grpo_mega.cli", *sys.argv[1:]]
    code = subprocess.Popen(command, stdout=output, stderr=output, preexec_fn=prepare).wait()
    if code:
        node = os.environ["SLURMD_NODENAME"]
        ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        told = "see above" if rank == 0 else f"{log} ends: {tail(log, start)}"
        write(Path(os.environ["STATE"]) / "failures" / f"{node}-{rank}", code, f"node {node}: rank {rank} {ending}; {told}")
    return code if code >= 0 else 128 - code


def tail(log: Path, start: int) -> str:
    """The last lines that this start wrote, joined into one."""
    if not log.exists():  # gone with a run that never began
        return "(empty)"
    with log.open("rb") as file:
        file.seek(start)
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-LINES_OF_LOG:]) or "(empty)"


if __name__ == "__main__":
    sys.exit(main())
