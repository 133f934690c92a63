"""Make the fork server the guardian of its workers. Only the fork server may import this module, before any other.

The guardian leaves the trainer's session, so an interrupt or a signal to the trainer's process group reaches neither
the guardian nor its workers. It adopts orphans among its descendants. When the pool or its process ends, the guardian
kills the workers and every process that their checks started, in any session. It learns of the end by SIGTERM from the
pool or the kernel. If the kernel cannot send one, it learns by the end of file that makes every fork server exit. Only
a daemonized process escapes, on kernels that assign it another parent.
"""

import atexit
import contextlib
import os
import signal
import warnings

from grpo_mega.processes import adopt_orphans, die_with_parent, kill_descendants
from grpo_mega.text import filter_output

_SERVER = os.getpid()


def end(*_: object) -> None:
    """Kill all workers and what they started, then exit. A forked worker only exits."""
    if os.getpid() == _SERVER:
        kill_descendants()
    os._exit(0)


# Later imports must not start threads, because a fork of several threads can hang.
os.environ.setdefault("OMP_NUM_THREADS", "1")
with contextlib.suppress(OSError):
    os.setsid()
os.dup2(2, 1)  # output of reward functions must not mix with the trainer's output
filter_output()  # for functions that print responses
# Harmless: an adopted orphan has ended.
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")
atexit.register(end)
signal.signal(signal.SIGTERM, end)
with contextlib.suppress(OSError):
    adopt_orphans()
with contextlib.suppress(OSError):
    die_with_parent(os.getppid(), signal.SIGTERM)
