"""The process that workers are forked from: `python -m grpo_mega.rewards.template FD`, started by the pool (see `process`).

It imports what takes long once (math-verify and its parser's tables, if the accuracy reward is asked for), so that a worker
which replaces a killed one is at work within milliseconds. It never imports or runs anything of the user's, and has one thread,
since a fork of more could hang; user functions are imported by each worker. It dies with the pool's process, and the workers
with it.

Over the socket FD: to the pool READY or FAILED once; then from the pool FORK or FORK_AGAIN, each with the two pipe ends of a
worker, which is answered with its process id, END and a process id, which is answered with its exit status once it has ended,
or LEAVE and a process id, which has no answer. Its standard input is one frame, the pickled Setup.
"""

import gc
import os
import pickle
import signal
import socket
import sys
import traceback

from grpo_mega.rewards import accuracy
from grpo_mega.rewards.protocol import END, FAILED, FORK, FORK_AGAIN, LEAVE, READY, Setup, read_frame
from grpo_mega.rewards.worker import describe, die_with_parent, work

_MAX_REQUEST = 64


def main() -> None:
    """Forks workers until the pool closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle: it closes the pool
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    setup = _take_setup()
    if setup is None:
        return
    die_with_parent(setup.parent_pid)
    sys.path[:] = setup.sys_path
    try:
        if "accuracy" in setup.functions:
            accuracy.warm_up()
    except BaseException as error:
        control.send(pickle.dumps((FAILED, describe(error))))
        return
    gc.collect()
    gc.freeze()  # a worker's collections leave the pages of what is here shared
    control.send(pickle.dumps((READY,)))
    left: set[int] = set()  # killed, and to be collected when they have ended
    while True:
        left = {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == 0}
        request, fds, _, _ = socket.recv_fds(control, _MAX_REQUEST, 2)
        if not request:
            return
        if request.startswith(END):
            status = os.waitpid(int(request.removeprefix(END)), 0)[1]
            control.send(pickle.dumps(os.waitstatus_to_exitcode(status)))
        elif request.startswith(LEAVE):
            left.add(int(request.removeprefix(LEAVE)))
        else:
            assert request in (FORK, FORK_AGAIN)
            pid = _fork(control, setup, fds, is_replacement=request == FORK_AGAIN)
            control.send(pickle.dumps(pid))


def _fork(control: socket.socket, setup: Setup, fds: list[int], is_replacement: bool) -> int:
    """The worker's process id; the worker itself never returns from here."""
    template = os.getpid()
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        return pid
    try:
        control.close()
        os.setsid()
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
