"""Hostile replacements of a file: a stream that never ends, or JSON that readers must refuse."""

from __future__ import annotations

import os
from pathlib import Path

HANG_S = 300.0  # a process that waits for a pipe never ends
DEEP = "[" * 100_000
DIGITS = '{"step": ' + "9" * 5000 + "}"


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def deep(path: Path) -> None:
    path.write_text(DEEP)


def digits(path: Path) -> None:
    path.write_text(DIGITS)


KINDS = (pipe, folder, device)
