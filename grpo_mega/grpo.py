"""`python -m grpo_mega.grpo FLAGS`: train with the flags of TRL and open-r1, without a YAML file.

This is the same as `grpo-mega grpo FLAGS`; `--help` lists the flags.
"""

from __future__ import annotations

import sys

from grpo_mega.cli import main

if __name__ == "__main__":
    sys.exit(main(["grpo", *sys.argv[1:]]))
