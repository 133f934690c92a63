"""Convert a Megatron distributed checkpoint, saved in any layout, to a Hugging Face folder.

`python tools/convert_mcore_to_hf.py CKPT OUT [--max-shard-size 5GB] [--dtype D] [--workers 2] [--config HF_DIR]`: CKPT
is an output of convert_hf_to_mcore.py, a run's folder or one of its checkpoints, or any folder with Megatron's
.metadata. Optimizer state is skipped. The tool first checks the CRC32 that torch.save stores for every saved piece.
Config, generation config and tokenizer come from the checkpoint's folder, from the run's model.path, or from --config.
The tool streams, resumes and verifies like convert_hf_to_mcore.py. If CKPT cannot be converted, it prints the reason in
one line and exits with 2.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from convert_options import Parser, count, num_bytes, print_report, run


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    return run(lambda: convert(options))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("checkpoint", type=Path, metavar="CKPT")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--max-shard-size", default="5GB")
    parser.add_argument("--dtype", help="cast all weights to float32, bfloat16 or float16; default: each keeps its own")
    parser.add_argument("--workers", type=count, default=2, help="tensors to convert at once")
    parser.add_argument("--config", type=Path, help="folder with config.json and tokenizer")
    return parser.parse_args(arguments)


def convert(options: argparse.Namespace) -> int:
    from grpo_mega.formats.convert import convert_mcore_to_hf

    report = convert_mcore_to_hf(
        options.checkpoint,
        options.out,
        max_shard_bytes=num_bytes(options.max_shard_size),
        dtype=options.dtype,
        workers=options.workers,
        config_folder=options.config,
    )
    print_report(report, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
