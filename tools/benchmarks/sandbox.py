"""Run hostile programs and agent functions with a deadline, and measure how late they end and what they leave.

    python tools/benchmarks/sandbox.py [--deadline-s 10] [--every 1] [--at-once 1]

Each of the 200 programs of hostile_programs.py runs in a separate sandbox; --every N runs each N-th one. Then agent
functions that ignore their deadline, block their event loop or spin run in agent workers.

The last line is JSON: ratio (longest run / deadline), ratio_agents, processes (left over), reached (connections and
packets that arrived at a socket of the host, and files outside of the sandbox), verdicts. The exit code is 1 if a ratio
exceeds 1.1 or anything is left or reached. Other work on the machine makes the ratios worse.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from grpo_mega.config.rollout import RolloutConfig
from grpo_mega.processes import descendants
from grpo_mega.rewards.code import missing_sandbox, run_programs
from grpo_mega.rollout.sessions.agents import AgentWorkers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # to run this file as a script

from tools.benchmarks import harness
from tools.benchmarks.hostile_programs import programs

MAX_RATIO = 1.1
AGENTS = """
import asyncio, contextlib, time

async def run(chat, prompt):
    how = prompt.messages[0]["content"]
    while how == "spins":
        pass
    if how == "blocks":
        time.sleep(600)
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(600)
"""


@harness.benchmark
def main(arguments: Sequence[str] | None) -> int:
    parser = harness.Parser(__doc__)
    parser.add_argument("--deadline-s", type=float, default=10.0)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=1)
    options = parser.parse(arguments, every=1, at_once=1)
    if (reason := missing_sandbox()) is not None:
        raise harness.RunFailed(f"this kernel allows no namespaces: {reason}")
    before, verdicts = set(descendants(os.getpid())), Counter[str]()
    with tempfile.TemporaryDirectory() as folder, Listener() as listener:
        Path(folder).chmod(0o777)
        chosen = list(programs(listener.port, folder))[:: options.every]

        def run(named: tuple[str, str]) -> tuple[float, str]:
            start = time.monotonic()
            (found,) = run_programs([(named[1], "")], options.deadline_s)
            return time.monotonic() - start, found.verdict

        with ThreadPoolExecutor(options.at_once) as threads:
            runs = dict(zip([name for name, _ in chosen], threads.map(run, chosen), strict=True))
        verdicts.update(verdict for _, verdict in runs.values())
        reached = listener.num_reached() + len(list(Path(folder).iterdir())) + len(list(Path("/").glob("*/escaped")))
    agents = {how: time_agent(how, options.deadline_s) for how in ("ignores", "blocks", "spins")}
    time.sleep(1.0)
    left = [pid for pid in set(descendants(os.getpid())) - before if "tracker" not in _command(pid)]
    slowest = sorted(runs, key=lambda name: -runs[name][0])[:5]
    rows = [["program", "seconds", "verdict"], *([name, f"{runs[name][0]:.2f}", runs[name][1]] for name in slowest)]
    rows += [[f"agent function that {how}", f"{seconds:.2f}", ""] for how, seconds in agents.items()]
    result = {
        "ratio": max(seconds for seconds, _ in runs.values()) / options.deadline_s,
        "ratio_agents": max(agents.values()) / options.deadline_s,
        "processes": len(left),
        "reached": reached,
        "programs": len(runs),
        "verdicts": dict(verdicts),
    }
    limits = {"ratio": MAX_RATIO, "ratio_agents": MAX_RATIO, "processes": 0, "reached": 0}
    return harness.report(rows, result, limits=limits)


class Listener:
    """Sockets of the host that notice every connection and packet."""

    def __enter__(self) -> Listener:
        kinds = ((socket.AF_INET, socket.SOCK_STREAM), (socket.AF_INET, socket.SOCK_DGRAM))
        self._sockets = [socket.socket(*kind) for kind in (*kinds, (socket.AF_UNIX, socket.SOCK_STREAM))]
        self._sockets[0].bind(("127.0.0.1", 0))
        self.port = int(self._sockets[0].getsockname()[1])
        self._sockets[1].bind(("127.0.0.1", self.port))
        self._sockets[2].bind(f"\0grpo-mega-{self.port}")
        for one in (self._sockets[0], self._sockets[2]):
            one.listen()
        return self

    def num_reached(self) -> int:
        """Return how many sockets were reached."""
        number = 0
        for one in self._sockets:
            one.setblocking(False)
            try:
                one.recv(1) if one.type == socket.SOCK_DGRAM else one.accept()
                number += 1
            except BlockingIOError:
                continue
        return number

    def __exit__(self, *_: object) -> None:
        for one in self._sockets:
            one.close()


def time_agent(how: str, deadline_s: float) -> float:
    """Return the seconds until a sample of a hostile agent function ends."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "hostile_agent.py").write_text(AGENTS)
        keys = {"agent": "hostile_agent.py:run", "agent_timeout_s": deadline_s, "tool_timeout_s": 2 * deadline_s}
        with AgentWorkers(RolloutConfig.model_validate(keys), Path(folder)) as workers:
            workers.start("first", "", "", _prompt("ignores"))
            workers.kill(["first"])  # the worker is ready
            start = time.monotonic()
            workers.start("second", "", "", _prompt(how))
            workers.results.get()
            return time.monotonic() - start


def _prompt(text: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], "answer": "", "columns": {}}


def _command(pid: int) -> str:
    path = Path(f"/proc/{pid}/cmdline")
    return path.read_text() if path.exists() else "tracker"


if __name__ == "__main__":
    harness.start(main)
