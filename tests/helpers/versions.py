"""Packages that pretend to be installed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def fake_packages(folder: Path, versions: Mapping[str, str]) -> str:
    """Make `folder` a place of packages with these versions, for the front of Python's path, and return it.

    They keep the entry points of the real packages, because torch 2.14 finds gloo by its own.
    """
    for name, version in versions.items():
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        with suppress(PackageNotFoundError):
            if points := distribution(name).read_text("entry_points.txt"):
                (info / "entry_points.txt").write_text(points)
    return str(folder)
