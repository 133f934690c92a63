"""Describe a checkpoint, as `grpo-mega inspect` does: `python tools/inspect_checkpoint.py PATH`."""

from __future__ import annotations

import sys

from grpo_mega.commands.inspect import run
from grpo_mega.commands.options import InspectOptions
from grpo_mega.commands.script import run_script


def main(arguments: list[str] | None = None) -> int:
    return run_script(__doc__, InspectOptions, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
