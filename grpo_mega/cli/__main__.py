"""Run `python -m grpo_mega.cli COMMAND` like grpo-mega COMMAND."""

import sys

from grpo_mega.cli import main

if __name__ == "__main__":
    sys.exit(main())
