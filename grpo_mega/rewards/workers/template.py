"""The process that workers are forked from: `python -m grpo_mega.rewards.workers.template FD`, started by process.py.

It imports what takes long once (math-verify and its parser's tables, if the accuracy reward is asked for), so that a worker
which replaces a killed one is at work within milliseconds. It never imports or runs anything of the user's, and has one thread,
since a fork of more could hang; user functions are imported by each worker.

It is also the workers' guardian. It adopts the orphans below it, and when the pool closes the socket or its process is gone,
it kills the workers with all that their checks have started, in sessions of their own or not: a check that hangs in C code
cannot keep any of them alive. The kernel tells it of the pool's end by SIGTERM, and where it cannot, the socket does; only a
process that has made itself a daemon escapes where the kernel gives it another parent.

Over the socket FD: to the pool READY or FAILED once; then from the pool FORK or FORK_AGAIN, each with the two pipe ends of a
worker, which is answered with its process id. END and a process id kills a worker and all it started, and is answered with
its exit status; LEAVE and a process id does the same without waiting, and has no answer. Until then the process id is the
worker's, though it may have ended. Its standard input is one frame, the pickled Setup.
"""

import contextlib
import gc
import io
import os
import pickle
import signal
import socket
import sys
import traceback
from typing import NoReturn

from grpo_mega.processes import adopt_orphans, descendants, die_with_parent, kill_descendants
from grpo_mega.rewards.math import accuracy
from grpo_mega.rewards.workers.protocol import END, FAILED, FORK, FORK_AGAIN, LEAVE, READY, Setup, read_frame
from grpo_mega.rewards.workers.worker import describe, work

_MAX_REQUEST = 64


def main() -> None:
    """Forks workers until the pool closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle: it closes the pool
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a function that prints a text must not fail because of it
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    setup = _take_setup()
    if setup is None:
        return
    signal.signal(signal.SIGTERM, _end)
    with contextlib.suppress(OSError):
        adopt_orphans()
    with contextlib.suppress(OSError):
        die_with_parent(setup.parent_pid, signal.SIGTERM)
    sys.path[:] = setup.sys_path
    try:
        if "accuracy" in setup.functions:
            accuracy.warm_up()
    except BaseException as error:
        control.send(pickle.dumps((FAILED, describe(error))))
        return
    gc.collect()
    gc.freeze()  # a worker's collections leave the pages of what is here shared
    with contextlib.suppress(ConnectionError):  # the pool is gone
        control.send(pickle.dumps((READY,)))
        _serve(control, setup)
    _end()


def _serve(control: socket.socket, setup: Setup) -> None:
    workers: set[int] = set()
    while True:
        _collect(workers)
        request, fds, _, _ = socket.recv_fds(control, _MAX_REQUEST, 2)
        if not request:
            return
        if request in (FORK, FORK_AGAIN):
            pid = _fork(control, setup, fds, is_replacement=request == FORK_AGAIN)
            workers.add(pid)
            control.send(pickle.dumps(pid))
            continue
        pid = int(request.removeprefix(END).removeprefix(LEAVE))
        _kill(pid)
        workers.discard(pid)
        if request.startswith(END):
            control.send(pickle.dumps(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))


def _kill(worker: int) -> None:
    """Kills a worker that is not yet collected, and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGSTOP)  # so that it starts nothing meanwhile
    for pid in (*descendants(worker), worker):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # orphans of one that has ended by itself
        os.killpg(worker, signal.SIGKILL)


def _collect(workers: set[int]) -> None:
    """Frees what has ended, adopted orphans too, but for the workers, of which the pool is yet to speak."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in workers:
            os.waitpid(ended.si_pid, 0)


def _end(*_: object) -> NoReturn:
    """Ends this process and everything below it."""
    kill_descendants()
    os._exit(0)


def _fork(control: socket.socket, setup: Setup, fds: list[int], is_replacement: bool) -> int:
    """The worker's process id; the worker itself never returns from here."""
    template = os.getpid()
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        return pid
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        control.close()
        os.setsid()
        with contextlib.suppress(OSError):
            die_with_parent(template)
        for fd in fds:
            os.set_inheritable(fd, False)
        with os.fdopen(fds[0], "rb") as requests, os.fdopen(fds[1], "wb") as replies:
            work(setup, requests, replies, is_replacement)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _take_setup() -> Setup | None:
    """From standard input; which is then empty, as standard output is standard error, since functions may read and print."""
    with os.fdopen(os.dup(0), "rb") as stream:
        first = read_frame(stream)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return None if first is None else pickle.loads(first)


if __name__ == "__main__":
    main()
