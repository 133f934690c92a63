"""How the pool and its workers talk: frames over pipes, each a length (8 bytes, little endian) and so many bytes.

Pool to template: one frame with the pickled `Setup`, then requests over a socket (see `template`). Pool to worker: for each
check a frame with the function's name and one with the pickled (prompt, response, answer, extras). Worker to pool: one frame a
message, a pickled tuple whose first element is READY, FAILED (text), SCORED (value, verdict, steps as (end, value) pairs) or
RAISED (text, value that the check then has).
End of file at either end means: stop.
"""

import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

READY, FAILED, SCORED, RAISED = "ready", "failed", "scored", "raised"
FORK, FORK_AGAIN, END, LEAVE = b"fork", b"fork again", b"end ", b"leave "  # requests to the template
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Setup:
    """What the template and its workers need before the first check."""

    functions: Mapping[str, Mapping[str, Any]]  # the options of each function
    step_splitter: str
    sys_path: tuple[str, ...]
    memory_limit_bytes: int | None
    parent_pid: int  # of the pool's process


def frame(payload: bytes) -> bytes:
    """`payload` with its length in front."""
    return _LENGTH.pack(len(payload)) + payload


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame's payload from a blocking stream; None at its end."""
    header = _read_exactly(stream, _LENGTH.size)
    return None if header is None else _read_exactly(stream, _LENGTH.unpack(header)[0])


class FrameBuffer:
    """Collects what a non-blocking pipe gives, and hands out whole messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[tuple[Any, ...]]:
        """The messages that `data` completes."""
        self._data += data
        messages = []
        while len(self._data) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._data)[0]
            if len(self._data) < end:
                break
            messages.append(pickle.loads(bytes(self._data[_LENGTH.size : end])))
            del self._data[:end]
        return messages


def _read_exactly(stream: BinaryIO, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = stream.read(size - len(data))
        if not part:
            return None
        data += part
    return bytes(data)
