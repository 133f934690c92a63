"""Make the fork server the guardian of the workers that it forks. It alone may import this module, and does so first.

The guardian leaves the trainer's session, so that neither an interrupt nor a signal to the trainer's process group reaches it
or its workers. It adopts the orphans below it. When the pool or its process ends, it kills the workers and all processes that
their checks have started, in sessions of their own or not. It learns of that end by SIGTERM, which the pool or the kernel
sends, or, where the kernel cannot, by the end of file on which every fork server exits; only a process that has made itself a
daemon escapes where the kernel gives it another parent.
"""

import atexit
import contextlib
import os
import signal
import warnings

from grpo_mega import console
from grpo_mega.processes import adopt_orphans, die_with_parent, kill_descendants


def _guard() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for what is imported later: a fork of more than one thread could hang
    with contextlib.suppress(OSError):
        os.setsid()
    os.dup2(2, 1)  # what a reward function prints must not mix with the trainer's output
    console.install()  # a function may print a response
    warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")  # an adopted orphan has ended
    server = os.getpid()

    def end(*_: object) -> None:
        if os.getpid() == server:
            kill_descendants()
        os._exit(0)

    atexit.register(end)
    signal.signal(signal.SIGTERM, end)
    with contextlib.suppress(OSError):
        adopt_orphans()
    with contextlib.suppress(OSError):
        die_with_parent(os.getppid(), signal.SIGTERM)


_guard()
