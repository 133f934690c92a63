"""Parse arguments of the conversion tools, print their reports, and print errors as one line with exit code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from grpo_mega import console
from grpo_mega.errors import ConfigError, UserError
from grpo_mega.paths import user_path

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "B": 1, "": 1}


class Parser(argparse.ArgumentParser):
    def __init__(self, doc: str | None) -> None:
        console.filter_output()
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.register("type", Path, user_path)  # arguments with type=Path expand ~

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{message}; see --help\n")


def run(act: Callable[[], int]) -> int:
    """Call `act` and return its exit code; return 2 after an error that the user can fix, 130 if interrupted."""
    try:
        return act()
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue", file=sys.stderr)
        return 130


def count(text: str) -> int:
    """Parse an argument that must be a whole number above 0."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number above 0")
    return int(text)


def num_bytes(text: str) -> int:
    """Parse a size such as "5GB" or "500MiB". Raise ConfigError."""
    number = text.rstrip("KMGiIBb ")
    unit = text[len(number) :].strip().upper()
    if unit not in _UNITS or not number.replace(".", "", 1).isdigit() or float(number) * _UNITS[unit] < 1:
        raise ConfigError(f"--max-shard-size={text}: must be a size such as 5GB or 500MiB")
    return int(float(number) * _UNITS[unit])


def print_report(report: Any, out: Any) -> None:
    """Print the result of a conversion. Warn about tensors with NaN or infinity by name."""
    written = report.num_bytes - report.resumed_bytes
    speed = written / max(report.write_seconds, 1e-9) / 1e6
    resumed = f" ({report.resumed_bytes / 1e9:.3f} GB written by an earlier start)" if report.resumed_bytes else ""
    print(f"{out}: {report.num_tensors} tensors, {report.num_bytes / 1e9:.3f} GB{resumed}")
    print(
        f"written in {report.write_seconds:.1f} s ({speed:.0f} MB/s); read back and verified in"
        f" {report.verify_seconds:.1f} s"
    )
    if report.nonfinite:
        names = "; ".join(report.nonfinite[:8]) + ("; ..." if len(report.nonfinite) > 8 else "")
        print(f"warning: NaN or infinity in {len(report.nonfinite)} tensors: {names}", file=sys.stderr)
