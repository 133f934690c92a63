"""Streams that run their copies late: only when somebody waits for the stream.

The stand-in for CUDA's streams in megatron/compat.py runs every copy at once, so it cannot show a missing wait. After
`install()` a non-blocking copy inside `torch.cuda.stream(side)` is queued, and runs when the main stream, the host or
an event waits for `side`. Work on the main stream runs at once. A copy from memory that was freed meanwhile yields
bytes of 255, as another owner of the memory might leave them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import grpo_mega.megatron  # noqa: F401  # installs the stand-in that this module replaces

COPY = Tensor.copy_


class Stream:
    """A stream, and also the event that it records."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.queue: list[Callable[[], None]] = []

    def synchronize(self) -> None:
        queue, self.queue = self.queue, []
        for work in queue:
            work()

    def wait_stream(self, other: Stream) -> None:
        """Run the other stream's work first: at once on the main stream, and otherwise before this stream's next
        work.
        """
        if self is MAIN:
            other.synchronize()
        else:
            self.queue.append(other.synchronize)

    wait_event = wait_stream

    def record_event(self, *args: Any) -> Stream:
        return self


MAIN = Stream()
_current = [MAIN]


def install() -> None:
    """Replace the stand-in's streams in this process, for good."""
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = Stream
    cuda.current_stream = cuda.default_stream = lambda *args: _current[-1]
    cuda.stream = _on_stream
    Tensor.copy_ = _copy  # type: ignore[assignment, method-assign]


@contextmanager
def _on_stream(stream: Stream) -> Iterator[None]:
    _current.append(stream)
    try:
        yield
    finally:
        _current.pop()


def _copy(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    stream = _current[-1]
    if stream is MAIN or not non_blocking:
        return COPY(self, source, non_blocking)

    def copy() -> None:
        if self.untyped_storage().nbytes():
            COPY(self, source if source.untyped_storage().nbytes() else torch.full_like(self, 255))

    stream.queue.append(copy)
    return self
