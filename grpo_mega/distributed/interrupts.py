"""Answer Ctrl-C at once, whatever the main thread does.

Python calls the handler of a signal in the main thread, after a running call of a library returns. A collective may
wait for minutes. So Python also writes the signal's number to a socket at once, and a thread reads it. The first rank
answers on the terminal. Processes that this process forks do not write to the socket.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import NoReturn

from grpo_mega import processes
from grpo_mega.errors import EXIT_INTERRUPTED

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def handled(handle: Callable[[int], None], numbers: Collection[int] = STOP_SIGNALS) -> Iterator[None]:
    """Call `handle` with the number of each of these signals, in a thread, during the context.

    Only the main thread may enter the context. The signals do not interrupt it.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    earlier_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    # Only a signal with a handler is written to the socket, so each gets one that does nothing.
    earlier = {number: signal.signal(number, lambda *_: None) for number in numbers}

    def read() -> None:
        while caught := reader.recv(1):
            if caught[0] in numbers:
                handle(caught[0])
        reader.close()

    thread = threading.Thread(target=read, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(earlier_fd)
        writer.close()
        thread.join()


def ends_at_first(what: str, numbers: Collection[int] = STOP_SIGNALS) -> AbstractContextManager[None]:
    """Return a context in which the first signal ends the process. `what` tells the user of a Ctrl-C what happens."""

    def end(number: int) -> None:
        if number == signal.SIGINT:
            answer(what)
        end_now()

    return handled(end, numbers)


def answer(text: str) -> None:
    """Print a line on the terminal, if this is the first rank or no rank."""
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            print(f"\ngrpo-mega: {text}", file=sys.stderr, flush=True)


def end_now() -> NoReturn:
    """End this process as if it was killed, but remove its temporary folders. Its child processes end with it."""
    try:
        processes.remove_own_folders()
        show_cursor()
    finally:
        os._exit(EXIT_INTERRUPTED)


def show_cursor() -> None:
    """Show the cursor of the terminal, because a progress bar hides it and may have been killed."""
    with suppress(OSError):
        if os.isatty(sys.stdout.fileno()):
            os.write(sys.stdout.fileno(), b"\x1b[?25h")


def _forget() -> None:
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget)
