"""Read files that people name. Never read a pipe or a device, because it may have no end, nor more bytes than expected."""

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
    """Raise OSError unless a path leads to a regular file, not to a folder, a pipe, a socket or a device."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_file(path: Path, max_bytes: int) -> bytes:
    """Return the bytes of a file. Raise OSError if it is not a regular file or is larger than `max_bytes`."""
    check_regular(path)
    with Path(path).open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes:,} bytes", str(path))
    return content


def read_name(path: Path) -> str:
    """Return the one line of a small text file, such as the name of a folder. Raise OSError or ValueError."""
    return read_file(path, MAX_NAME_BYTES).decode("utf-8").strip()


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the value in a UTF-8 JSON file. Raise OSError or ValueError."""
    return parse_json(read_file(path, max_bytes).decode("utf-8"))


def parse_json(text: str | bytes) -> Any:
    """Return the value of JSON. Raise ValueError, also for deeply nested values and numbers with thousands of digits."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
