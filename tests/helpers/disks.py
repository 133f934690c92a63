"""Small file systems, and full ones."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system of this size at `folder`. Skip the test if mounting is not allowed."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no file system can be mounted here ({done.stderr.strip()})")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Fill the file system of `folder` with the file `filler`."""
    with pytest.raises(OSError, match="No space left"), (folder / "filler").open("ab", buffering=0) as file:
        while True:
            file.write(b"x" * 512)
