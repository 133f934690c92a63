"""A real Slurm cluster on this machine: slurmctld and three slurmd, n0 to n2. If root may mount, each has a separate
/dev/shm.

All state is in one folder. The processes end with the context: `with Cluster(folder) as cluster`. `sbatch` submits
jobs.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from grpo_mega.distributed.launch import die_with_launcher, free_port, num_cores

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol")
NODES = ("n0", "n1", "n2")
SECONDS_TO_START = 60.0
CONF = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
MailProg=/bin/true
SlurmdTimeout=90
KillWait=10
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=2
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if which(name) is None]


def which(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        self.environ = kept | {"SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop()

    def run(self, *command: str, check: bool = True) -> str:
        """Run a Slurm command. Return its output."""
        result = subprocess.run(command, env=self.environ, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0 or not check, f"{command}: {result.stderr}"
        return result.stdout

    def start_node(self, node: str) -> None:
        daemon = [str(which("slurmd")), "-D", "-N", node]
        if _may_mount():  # nodes share no memory, like separate machines
            script = 'mount -t tmpfs -o size=2g tmpfs /dev/shm && exec "$@"'
            daemon = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *daemon]
        self._daemons[node] = self._spawn(daemon)

    def lose_node(self, node: str) -> None:
        """Kill the daemons of a node, as if it had lost power. Processes that they started continue."""
        for process in self.processes(lambda line, environ: line.startswith("slurmstepd:")):
            if node in self._node_of(process):
                _kill(process)
        self._daemons[node].kill()
        self._daemons[node].wait()

    def processes(self, is_wanted: Callable[[str, dict[str, str]], bool]) -> list[int]:
        """Return the cluster's processes, filtered by command line and environment."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                environ = _environ(path)
            except OSError:
                continue
            if environ.get("SLURM_CONF", self.environ["SLURM_CONF"]) == self.environ["SLURM_CONF"] and is_wanted(
                line, environ
            ):
                found.append(int(path.name))
        return found

    def state_of(self, job: str) -> dict[str, str]:
        """Return the fields of a job from scontrol, keyed by name. Values are cut at blanks."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", job, check=False)))

    def _node_of(self, stepd: int) -> set[str]:
        """Return the node names of the tasks below a slurmstepd."""
        names = set()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if int((path / "stat").read_text().rpartition(")")[2].split()[1]) == stepd:
                    names.add(_environ(path).get("SLURMD_NODENAME", ""))
            except OSError:
                continue
        return names

    def _start(self) -> None:
        (self.folder / "state").mkdir(parents=True)
        self.folder.chmod(0o755)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        host = os.uname().nodename.split(".")[0]
        node = f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs={num_cores()} RealMemory=1000 State=UNKNOWN"
        lines = [f"NodeName={name} Port={free_port()} {node}" for name in NODES]
        user = pwd.getpwuid(os.getuid()).pw_name
        text = CONF.format(host=host, port=free_port(), folder=self.folder, user=user, nodes="\n".join(lines))
        (self.folder / "slurm.conf").write_text(text)
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self._spawn([str(which("munged")), "--foreground", "--force", f"--socket={self.folder}/munge.sock", *files])
        wait_for(lambda: (self.folder / "munge.sock").exists(), SECONDS_TO_START, self._logs)
        self._spawn([str(which("slurmctld")), "-D"])
        for name in NODES:
            self.start_node(name)
        wait_for(lambda: self.idle_nodes() == len(NODES), SECONDS_TO_START, self._logs)

    def idle_nodes(self) -> int:
        return self.run("sinfo", "--noheader", "--Node", "--format=%T", check=False).split().count("idle")

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / "daemons.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                preexec_fn=partial(die_with_launcher, os.getpid()),  # daemons also end if the tests are killed
            )
        self._daemons.setdefault(f"{Path(command[0]).name} {process.pid}", process)
        return process

    def _stop(self) -> None:
        """Kill the daemons and all remaining processes of jobs, found by this cluster's configuration."""
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        while found := self.processes(lambda line, environ: "SLURM_CONF" in environ):
            for process in found:
                _kill(process)
            time.sleep(0.1)

    def _logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.log"))


def wait_for(condition: Callable[[], object], seconds: float, explain: Callable[[], str] = str) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, explain()
        time.sleep(0.1)


def _may_mount() -> bool:
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


def _environ(process: Path) -> dict[str, str]:
    pairs = (process / "environ").read_bytes().decode(errors="replace").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
