"""Run one node's part of a job. srun starts `node.py ARGUMENTS`, and torchrun starts `grpo-mega ARGUMENTS` in each
rank.

The node writes a heartbeat to STATE/beats/NODE. The job's script treats a node without heartbeats as lost. Invariant:
if the job's script, Slurm's daemon for this node's part of the job, or a rank of this node ends, all ranks of this node
are killed. After a failed rank the others have some seconds to report their own failures.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from grpo_mega.processes import descendants
from grpo_mega.text import filter_output

SECONDS_BETWEEN_BEATS = 1.0
SECONDS_AFTER_FAILURE = 5.0
SILENCES = 3  # the job's script may be silent this many times longer than a node


class Node:
    def __init__(self) -> None:
        environ = os.environ
        self.name = environ["SLURMD_NODENAME"]
        self.state, self.start = Path(environ["STATE"]), environ["START"]
        self.allowed_s = SILENCES * float(environ["NODE_SILENCE_SECONDS"])
        self.parent = os.getppid()
        self.is_ending = False  # True once this node kills its ranks, so their exit is not reported as a failure

    def run(self, arguments: list[str]) -> int:
        """Run torchrun and return its exit code."""
        # scancel and Slurm send both signals to all steps of a job. torchrun would die on SIGUSR1 and kill its ranks on
        # TERM, so it inherits that they are ignored. Ranks get SIGTERM too, and stop after their step.
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        threading.Thread(target=self.watch, daemon=True).start()
        code = subprocess.run([sys.executable, "-m", *torchrun_arguments(), *arguments]).returncode
        if code and not self.is_ending and not self.failures():
            report(
                self.state / "failures" / f"{self.name}-",
                code,
                f"node {self.name}: its torchrun exited with code {code}",
            )
        return code

    def watch(self) -> None:
        """Watch the job until this process ends. If the watch itself fails, kill the ranks too."""
        try:
            self.watch_for_ever()
        except BaseException as error:
            self.end(f"its watch ended with {type(error).__name__}: {error}")

    def watch_for_ever(self) -> None:
        heard, heard_at, failed_at = "", time.monotonic(), 0.0
        while True:
            now = time.monotonic()
            with contextlib.suppress(OSError):  # without a heartbeat the job's script asks whether this node is alive
                write(self.state / "beats" / self.name, "alive")
            beat = self.job_beat()
            if beat != heard:
                heard, heard_at = beat, now
            if os.getppid() != self.parent:
                self.end("Slurm's daemon for this part of the job is gone")
            if beat and beat.split()[0] != self.start:
                self.end("the job has been started again")
            if now - heard_at > self.allowed_s:
                self.end(f"no beat from the job's script for {self.allowed_s:.0f} s")
            if self.failures():
                failed_at = failed_at or now
                if now - failed_at > SECONDS_AFTER_FAILURE:
                    self.end("one of its ranks has failed")
            time.sleep(SECONDS_BETWEEN_BEATS)

    def failures(self) -> list[Path]:
        return list((self.state / "failures").glob(f"{self.name}-*"))

    def job_beat(self) -> str:
        try:
            return (self.state / "job_beat").read_text()
        except OSError:
            return ""

    def end(self, reason: str) -> None:
        """Kill all descendants of this process, then exit."""
        self.is_ending = True
        with contextlib.suppress(OSError):  # the reader of stderr may be gone
            print(f"node {self.name}: {reason}; its ranks are killed", file=sys.stderr, flush=True)
        while pids := descendants(os.getpid()):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        os._exit(1)


def torchrun_arguments() -> list[str]:
    environ = os.environ
    return [
        "grpo_mega.distributed.rendezvous",
        f"--nnodes={environ['SLURM_NNODES']}",
        # Node N always has ranks N * RANKS_PER_NODE and up, regardless of the order in which nodes reach the
        # rendezvous.
        f"--node-rank={environ['SLURM_NODEID']}",
        f"--nproc-per-node={environ['RANKS_PER_NODE']}",
        f"--master-addr={environ['MASTER_ADDR']}",
        f"--master-port={environ['MASTER_PORT']}",
        "--max-restarts=0",
        "--signals-to-handle=SIGINT",
        str(Path(__file__).with_name("rank.py")),
    ]


def write(path: Path, *fields: object) -> None:
    """Atomically write a line with the time and the fields."""
    path.parent.mkdir(parents=True, exist_ok=True)  # the folder is removed with a run that never started
    fresh = path.parent.parent / f".{path.parent.name}-{path.name}"
    fresh.write_text("\t".join(map(str, (f"{time.time():.3f}", *fields))) + "\n")
    os.replace(fresh, path)


def report(path: Path, code: int, text: str) -> None:
    """Write a failure to a file, or to stderr if the file cannot be written."""
    try:
        write(path, code, text)
    except OSError as error:
        with contextlib.suppress(OSError):
            print(f"{text}; {path} cannot be written ({error.strerror})", file=sys.stderr, flush=True)


if __name__ == "__main__":
    filter_output()
    sys.exit(Node().run(sys.argv[1:]))
