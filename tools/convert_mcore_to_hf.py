"""Convert a Megatron distributed checkpoint to a Hugging Face folder, as `grpo-mega convert` does:
`python tools/convert_mcore_to_hf.py CKPT OUT`.
"""

from __future__ import annotations

import sys

from grpo_mega.cli import run_script
from grpo_mega.cli.commands.convert import to_hf
from grpo_mega.cli.commands.options import ConvertOptions


def main(arguments: list[str] | None = None) -> int:
    return run_script(__doc__, ConvertOptions, to_hf, arguments)


if __name__ == "__main__":
    sys.exit(main())
