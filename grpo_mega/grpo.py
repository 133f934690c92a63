"""`python -m grpo_mega.grpo FLAGS`: trains as the flags say that users of TRL and open-r1 know, without a YAML file.

The same as `grpo-mega grpo FLAGS`; `--help` lists the flags.
"""

from __future__ import annotations

import sys

from grpo_mega.cli import main

if __name__ == "__main__":
    sys.exit(main(["grpo", *sys.argv[1:]]))
