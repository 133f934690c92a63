"""What is changed of SGLang 0.5.21, in its own processes only. A test tells when a change is no longer needed."""

from __future__ import annotations

import logging
import multiprocessing
import sys
import warnings
from typing import Any


def hide_megatron() -> None:
    """SGLang's debug dumper imports Megatron-core where it is installed, for nothing here: a second, and on a GPU memory."""
    sys.modules["megatron"] = None  # type: ignore[assignment]  # what makes an import of it fail


def fork_children() -> None:
    """SGLang insists on spawning its processes, each of which then imports all again.

    Without CUDA they can be forked: it does so before it starts a thread or an event loop.
    """
    set_start_method = multiprocessing.set_start_method

    def fork_instead(*_: Any, **__: Any) -> None:
        set_start_method("fork", force=True)

    multiprocessing.set_start_method = fork_instead


def drop_idle_warnings() -> None:
    """Keeps pages of no interest out of the log, in which a person looks for the reason of a failure.

    One warning for each endpoint that answers to GET and POST, whenever the list of endpoints is asked for; and a traceback,
    since a server that skips its warm-up asks itself to freeze its collector before it listens. server.py asks for that.
    """
    warnings.filterwarnings("ignore", message="Duplicate Operation ID")
    logging.getLogger("sglang.srt.entrypoints.http_server").addFilter(_is_of_interest)


def _is_of_interest(record: logging.LogRecord) -> bool:
    return "freeze_gc failed" not in record.getMessage()
