"""Compare two checkpoints, as `grpo-mega verify` does: `python tools/verify_checkpoint.py A B`."""

from __future__ import annotations

import sys

from grpo_mega.cli import run_script
from grpo_mega.cli.commands.options import VerifyOptions
from grpo_mega.cli.commands.verify import run


def main(arguments: list[str] | None = None) -> int:
    return run_script(__doc__, VerifyOptions, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
