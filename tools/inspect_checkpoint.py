"""Describe a checkpoint: `python tools/inspect_checkpoint.py PATH [--config HF_DIR] [--json]`.

PATH is a Hugging Face folder, a converted checkpoint, or a run's folder or one of its checkpoints. The tool reads only
headers. If PATH is none of these, or damaged, it exits with 2.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from convert_options import Parser, run


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("path", type=Path, metavar="PATH")
    parser.add_argument("--config", type=Path, help="folder with config.json, for a checkpoint without one")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    return run(lambda: inspect(options))


def inspect(options: argparse.Namespace) -> int:
    from grpo_mega.formats.detect import describe

    description = describe(options.path, options.config)
    if options.json:
        print(json.dumps(description))
        return 0
    for name, value in description.items():
        if value is not None:
            print(f"{name.replace('_', ' '):<16} {formatted(name, value)}")
    return 0


def formatted(name: str, value: Any) -> str:
    if name == "bytes":
        return f"{value} ({value / 1e9:.2f} GB)"
    if name == "parameters":
        return f"{value} ({value / 1e9:.3f} billion)"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    sys.exit(main())
