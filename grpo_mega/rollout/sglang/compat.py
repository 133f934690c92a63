"""Changes to SGLang 0.5.21, in its own processes only. A test fails once a change is no longer needed."""

from __future__ import annotations

import logging
import multiprocessing
import sys
import warnings
from typing import Any


def hide_megatron() -> None:
    """Keep SGLang's debug dumper from importing Megatron-core, which would take a second, and memory on a GPU."""
    sys.modules["megatron"] = None  # type: ignore[assignment]  # makes the import fail


def fork_children() -> None:
    """Have SGLang fork its processes. It spawns them, and each then imports everything again.

    Forking is safe without CUDA: SGLang starts its processes before it starts a thread or an event loop.
    """
    set_start_method = multiprocessing.set_start_method

    def fork_instead(*_: Any, **__: Any) -> None:
        set_start_method("fork", force=True)

    multiprocessing.set_start_method = fork_instead


def drop_idle_warnings() -> None:
    """Keep irrelevant pages out of the log, in which users look for the cause of a failure.

    These are a warning per endpoint that answers to GET and POST, whenever the list of endpoints is read; and a traceback,
    because a server that skips its warm-up calls its own /freeze_gc before it listens. server.py makes that call.
    """
    warnings.filterwarnings("ignore", message="Duplicate Operation ID")
    logging.getLogger("sglang.srt.entrypoints.http_server").addFilter(_is_of_interest)


def _is_of_interest(record: logging.LogRecord) -> bool:
    return "freeze_gc failed" not in record.getMessage()
