"""Record the last collective of this rank. Each function of torch.distributed records its start and its end.

`recorder()` wraps the functions once and permanently. It must run before a library imports them by name, as Megatron
does. A record costs about a microsecond.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

NAMES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "_all_gather_base", "all_gather_object"),
    *("reduce_scatter_tensor", "_reduce_scatter_base", "all_to_all", "all_to_all_single", "broadcast"),
    *("barrier", "send", "recv", "isend", "irecv", "batch_isend_irecv"),
)


class Recorder:
    def __init__(self) -> None:
        self.last_beat = time.monotonic()  # time of the last progress
        self._on_beat: Callable[[str], None] | None = None
        self._name, self._arguments, self._is_done = "nothing yet", "", True

    def beat(self, kind: str = "") -> None:
        """Record progress without a collective, such as the start of a "forward" pass. `kind` is for listeners.

        Only the main thread may call it, or a thread of autograd while the main thread waits for it. Work of a
        background thread counts as progress only if the main thread waits for the work and calls this. Otherwise the
        work would hide a stuck collective.
        """
        self.last_beat = time.monotonic()
        if self._on_beat is not None:
            self._on_beat(kind)

    @contextlib.contextmanager
    def heard(self, on_beat: Callable[[str], None]) -> Iterator[None]:
        """Call `on_beat(kind)` at every beat during the context."""
        self._on_beat = on_beat
        try:
            yield
        finally:
            self._on_beat = None

    def last(self) -> str:
        """Describe the last collective: "in all_reduce of 16 float32 over 4 ranks", or "after ..." if it has
        returned.
        """
        return f"{'after' if self._is_done else 'in'} {self._name}{self._arguments}"

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__

        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            values = (*args, *kwargs.values())
            tensor = next((v for v in values if isinstance(v, torch.Tensor)), None)
            group = next((v for v in values if isinstance(v, dist.ProcessGroup)), None)
            of = f" of {tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}" if tensor is not None else ""
            over = f" over {group.size() if group is not None else 'all'} ranks"
            self._name, self._arguments, self._is_done = name, of + over, False
            self.last_beat = time.monotonic()
            result = function(*args, **kwargs)
            self._is_done = True
            return result

        return noted


@functools.cache
def recorder() -> Recorder:
    """Return the recorder of this process. The first call wraps torch.distributed's functions."""
    result = Recorder()
    for name in NAMES:
        setattr(dist, name, result.wrap(getattr(dist, name)))
    for name in ("isend", "irecv"):  # P2POp compares with the functions of its module
        setattr(dist.distributed_c10d, name, getattr(dist, name))
    return result
