"""Run one SGLang server below a guardian: `python -m grpo_mega.rollout.sglang.server_main PID FOLDER LOCK
SGLANG-ARGUMENT ...`.

PID is the process that owns the server, FOLDER is its temporary folder, and LOCK is the descriptor that locks the
folder for all processes that inherit it. The server's key is in the environment.

The process forks. The child is SGLang. The parent, the guardian, imports nothing heavy and adopts every orphan below
it. When SGLang ends, the owner is gone or a signal arrives, the guardian kills all processes below it, removes their
files and exits, with SGLang's exit code, or with 0 if the owner or a signal ended it. When the guardian dies, the
kernel kills SGLang, and then its children.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from grpo_mega import processes
from grpo_mega.distributed.environment import CORES_VARIABLE
from grpo_mega.processes import adopt_orphans, die_with_parent, kill_descendants
from grpo_mega.rollout.sglang import compat

KEY_VARIABLE = "GRPO_MEGA_SERVER_KEY"  # not an argument, because all users can see the arguments of a process
SECONDS_BETWEEN_LOOKS = 0.2
SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_PREFIXES = ("sglang_loads_", "sgl_shm_")  # SGLang's load snapshots and message queues

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(owner: int, folder: str, lock: int, arguments: Sequence[str]) -> int:
    watched = {*_STOP_SIGNALS, signal.SIGCHLD}
    if cores := os.environ.pop(CORES_VARIABLE, None):  # the owner is bound to the cores of one of the server's GPUs
        os.sched_setaffinity(0, map(int, cores.split(",")))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)  # blocked signals stay pending until sigtimedwait
    adopt_orphans()
    remove_unused()
    key = os.environ.pop(KEY_VARIABLE, None)
    guardian = os.getpid()
    server = os.fork()
    if server == 0:
        die_with_parent(guardian)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        # Otherwise torch's store would listen on all addresses, on the port --nccl-port.
        os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{folder}/store"
        _serve_and_exit([*arguments, f"--api-key={key}"] if key else arguments)
    code = _wait_for_end(server, owner, watched)
    kill_descendants()
    os.close(lock)
    remove_unused()
    return code


def remove_unused() -> None:
    """Remove the temporary folders and the shared memory of servers that are gone.

    SGLang ends its processes with SIGKILL even without an error, so it never cleans up. Each server has a folder of
    processes.py. While any of its processes lives, the folder is locked and the server's shared memory is open. An
    unlocked folder, or memory that no process has open, belongs to a dead server, so no record of servers is needed.
    """
    processes.remove_unused_folders()
    segments = [path for path in SHARED_MEMORY.glob("*") if path.name.startswith(SHARED_MEMORY_PREFIXES)]
    in_use = set()
    for link in glob.iglob("/proc/[0-9]*/fd/*") if segments else ():
        with contextlib.suppress(OSError):
            in_use.add(os.readlink(link))
    for segment in segments:
        if str(segment) not in in_use:
            with contextlib.suppress(OSError):
                segment.unlink()


def serve(arguments: Sequence[str]) -> None:
    """Run SGLang until it ends."""
    prepare_server()
    sys.argv = ["sglang", *arguments]  # SGLang's error messages start with this name
    gc.disable()  # imports leave no garbage, but the collector takes a seventh of their time
    from sglang.launch_server import run_server
    from sglang.srt.entrypoints import http_server  # noqa: F401  # otherwise imported in run_server, with the collector on
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    patch_sglang(arguments)
    gc.enable()
    gc.freeze()
    try:
        run_server(prepare_server_args(list(arguments)))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def prepare_server() -> None:
    """Patch a process of SGLang before its first import of SGLang. Every spawned process needs this."""
    compat.hide_megatron()
    compat.drop_idle_warnings()
    if _is_on_cpu():
        compat.install_stubs()
        compat.fork_children()


def patch_sglang(arguments: Sequence[str]) -> None:
    """Patch what these arguments of the server need, after the first import of SGLang."""
    compat.read_hybrid_configs()
    if "--enable-return-routed-experts" in arguments and _is_on_cpu():
        compat.allow_routes_on_cpu()
    if "--enable-lora" in arguments:
        compat.serve_adapters()
        if _is_on_cpu():
            compat.unpin_memory()


def _is_on_cpu() -> bool:
    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"


def _serve_and_exit(arguments: Sequence[str]) -> NoReturn:
    """Run SGLang, then exit without the interpreter's clean-up, because some libraries write pages to the log there."""
    code = 1
    try:
        serve(arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        with contextlib.suppress(OSError):  # the log's disk may be full
            traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait_for_end(server: int, owner: int, watched: set[signal.Signals]) -> int:
    while os.getppid() == owner:
        received = signal.sigtimedwait(watched, SECONDS_BETWEEN_LOOKS)
        if received is not None and received.si_signo in _STOP_SIGNALS:
            return 0
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if ended[0] == server:
                    code = os.waitstatus_to_exitcode(ended[1])
                    return code if code >= 0 else 128 - code
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:]))
if __name__ == "__mp_main__":  # a process that SGLang spawned; SGLang itself calls prctl only seconds later
    die_with_parent(os.getppid())
    prepare_server()
    patch_sglang(sys.argv)
