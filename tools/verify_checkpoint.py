"""Compare two checkpoints, each a Hugging Face folder or a Megatron checkpoint: `python tools/verify_checkpoint.py A
B`.

The tool compares config, names, shapes, dtypes and the bits of every tensor, in blocks. If the model fits into memory,
it also compares the outputs of every layer on fixed prompts and names the first layer that differs. transformers runs a
Hugging Face folder and Megatron-core runs a Megatron checkpoint, so a mapping that is wrong in both directions is found
too. --no-logits leaves out the outputs. --config-a and --config-b are folders with config.json, for a checkpoint
without one. Exit code 0 if the checkpoints are the same, 1 if not, 2 if one of them cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from convert_options import Parser, count, run

from grpo_mega.errors import ConfigError
from grpo_mega.formats.detect import Checkpoint, FileDifference, compare_checkpoints, find_checkpoint

_SHOWN = 10  # largest number of names to print per kind


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("a", type=Path, metavar="A")
    parser.add_argument("b", type=Path, metavar="B")
    parser.add_argument("--no-logits", action="store_true")
    parser.add_argument("--workers", type=count, default=2)
    parser.add_argument("--config-a", type=Path)
    parser.add_argument("--config-b", type=Path)
    options = parser.parse_args(arguments)
    return run(lambda: verify(options))


def verify(options: argparse.Namespace) -> int:
    a, b = find_checkpoint(options.a, options.config_a), find_checkpoint(options.b, options.config_b)
    print(f"A: {a.path} ({a.kind})\nB: {b.path} ({b.kind})")
    for note in (a.note, b.note):
        if note is not None:
            print(note)
    difference = compare_checkpoints(a, b, options.workers)
    print_difference(difference)
    is_same = not difference
    can_run = not (difference.missing or difference.extra or difference.other)
    if options.no_logits or not can_run:
        print("logits: not computed")
    else:
        is_same = compare_logits(a, b) and is_same
    print("the same" if is_same else "NOT the same")
    return 0 if is_same else 1


def print_difference(difference: FileDifference) -> None:
    for name, ours, theirs in difference.config:
        print(f"config: {name} is {ours!r} in A and {theirs!r} in B")
    kinds = {
        "missing in B": difference.missing,
        "extra in B": difference.extra,
        "other": difference.other,
        "bits differ": difference.bits,
    }
    for kind, names in kinds.items():
        for name in names[:_SHOWN]:
            print(f"{kind}: {name}")
        if len(names) > _SHOWN:
            print(f"{kind}: {len(names) - _SHOWN} more")
    print(f"{difference.num_equal} tensors equal bit for bit")


def compare_logits(a: Checkpoint, b: Checkpoint) -> bool:
    import verify_logits

    if not (verify_logits.fits(a) and verify_logits.fits(b)):
        print("logits: not computed, the model does not fit into memory")
        return True
    try:
        ours, theirs = verify_logits.outputs(a), verify_logits.outputs(b)
    except ConfigError as error:
        print(f"logits: not computed ({error})")
        return True
    different = verify_logits.first_difference(ours, theirs)
    if different is None:
        print(f"logits: all {len(ours) - 1} layers and the logits agree on {len(verify_logits.PROMPT_LENGTHS)} prompts")
        return True
    print(f"logits: {different[0]} is the first that differs, by {different[1]:.2g} of its largest number")
    return False


if __name__ == "__main__":
    sys.exit(main())
