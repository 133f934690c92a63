"""Converts a Hugging Face folder to a Megatron distributed checkpoint that loads in any layout.

`python tools/convert_hf_to_mcore.py HF_DIR OUT [--dtype bfloat16] [--workers 2]`: safetensors, sharded or not,
pytorch_model.bin, or FP8 with block scales, which is dequantised. Reads and writes in blocks, so that memory does not depend on
the model's size. Everything is read back and compared before OUT appears; interrupted, the same command goes on where it was.
OUT has the folder's config and tokenizer too, and is a model.path for training.

`--dry --layout tp=4,pp=4 [HF_DIR | --config config.json]` lists instead every tensor of every rank, its sources and slices.
Exit code 2 for what cannot be converted, with one line that says why.
"""

from __future__ import annotations

import argparse
import sys
import time
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
    parser.add_argument("--workers", type=count, default=2, help="tensors at once")
    parser.add_argument("--dry", action="store_true", help="list what each rank of --layout would hold; needs no weights")
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
    from grpo_mega.formats.dry import Dry, lines, parse_layout
    from grpo_mega.weights.families import family_of
    from grpo_mega.weights.spec import ModelShape, read_config

    began = time.monotonic()
    if options.config is not None and options.config.name != "config.json":
        raise ConfigError(f"--config={options.config} must be the path of a file config.json")
    shape = ModelShape.from_hf_config(read_config(options.config.parent if options.config else options.hf_dir))
    layout, found = parse_layout(options.layout), Dry()
    batch: list[str] = []
    for line in lines(family_of(shape.model_type), shape, layout, found):
        batch.append(line)
        if len(batch) == 4096:
            print("\n".join(batch))
            batch.clear()
    print("\n".join(batch))
    print(
        f"{found.tensors} tensors of {found.slices} slices; {found.parameters / 1e9:.3f} billion parameters, at most "
        f"{found.largest * 2 / 1e9:.2f} GB a rank in bfloat16; {time.monotonic() - began:.2f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
