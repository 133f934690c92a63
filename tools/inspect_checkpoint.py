"""Describe a checkpoint, as `grpo-mega inspect` does: `python tools/inspect_checkpoint.py PATH`."""

from __future__ import annotations

import sys

from grpo_mega.cli import run_script
from grpo_mega.cli.commands.options import InspectOptions
from grpo_mega.cli.commands.verify import run_inspect


def main(arguments: list[str] | None = None) -> int:
    return run_script(__doc__, InspectOptions, run_inspect, arguments)


if __name__ == "__main__":
    sys.exit(main())
