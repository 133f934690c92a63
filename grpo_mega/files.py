"""Read files that people name, but never a pipe or a device, which may have no end, nor more bytes than the reader expects."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 256 << 20  # the largest tokenizer.json have tens of MB
MAX_NAME_BYTES = 4096


def check_regular(path: Path) -> None:
    """Raise OSError unless a path leads to a file: not a folder, a pipe, a socket or a device."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_file(path: Path, max_bytes: int) -> bytes:
    """Return the bytes of a file. Raise OSError if it is none, or larger than `max_bytes`."""
    check_regular(path)
    with Path(path).open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes:,} bytes", str(path))
    return content


def read_name(path: Path) -> str:
    """Return the one line in a small text file, such as the name of a folder. Raise OSError or ValueError."""
    return read_file(path, MAX_NAME_BYTES).decode("utf-8").strip()


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the value in a file of JSON in UTF-8. Raise OSError or ValueError."""
    return parse_json(read_file(path, max_bytes).decode("utf-8"))


def parse_json(text: str | bytes) -> Any:
    """Return the value of JSON. Raise ValueError, also for what is nested too deeply or has numbers of thousands of digits."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
