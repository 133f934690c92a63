"""Convert a Hugging Face folder to a Megatron distributed checkpoint, as `grpo-mega convert` does:
`python tools/convert_hf_to_mcore.py HF_DIR OUT`.
"""

from __future__ import annotations

import sys

from grpo_mega.cli import run_script
from grpo_mega.cli.commands.convert import to_mcore
from grpo_mega.cli.commands.options import ConvertOptions


def main(arguments: list[str] | None = None) -> int:
    return run_script(__doc__, ConvertOptions, to_mcore, arguments)


if __name__ == "__main__":
    sys.exit(main())
