"""Convert a Hugging Face folder to a Megatron distributed checkpoint that loads in any layout.

`python tools/convert_hf_to_mcore.py HF_DIR OUT [--dtype bfloat16] [--workers 2]`: HF_DIR has safetensors (sharded or
not) or pytorch_model.bin. FP8 weights with block scales are dequantized. The tool reads and writes in blocks, so its
memory does not depend on the model's size. It reads back and compares everything before OUT appears. After an
interruption, the same command continues. OUT also has the folder's config and tokenizer, and can be the model.path of a
run.

`--dry --layout tp=4,pp=4 [HF_DIR | --config config.json]` only lists every tensor of every rank, its sources and
slices. If the folder cannot be converted, the tool prints the reason in one line and exits with 2.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from convert_options import Parser, count, print_report, run

from grpo_mega.errors import ConfigError


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    return run(lambda: dry(options) if options.dry else convert(options))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("hf_dir", type=Path, nargs="?", metavar="HF_DIR")
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT")
    parser.add_argument("--dtype", help="cast all weights to float32, bfloat16 or float16; default: each keeps its own")
    parser.add_argument("--workers", type=count, default=2, help="tensors to convert at once")
    parser.add_argument(
        "--dry", action="store_true", help="list what each rank of --layout would hold; needs no weights"
    )
    parser.add_argument("--layout", default="tp=1", help="with --dry, for example tp=4,pp=4,ep=2")
    parser.add_argument("--config", type=Path, help="with --dry: a config.json instead of HF_DIR")
    options = parser.parse_args(arguments)
    if not options.dry and options.out is None:
        parser.error("give HF_DIR and OUT")
    if options.dry and (options.hf_dir is None) == (options.config is None):
        parser.error("with --dry, give either HF_DIR or --config")
    return options


def convert(options: argparse.Namespace) -> int:
    from grpo_mega.formats.convert import convert_hf_to_mcore

    report = convert_hf_to_mcore(options.hf_dir, options.out, dtype=options.dtype, workers=options.workers)
    print_report(report, options.out)
    return 0


def dry(options: argparse.Namespace) -> int:
    from convert_dry_run import dry_run

    if options.config is not None and options.config.name != "config.json":
        raise ConfigError(f"--config={options.config} must be the path of a file config.json")
    dry_run(options.config.parent if options.config else options.hf_dir, options.layout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
