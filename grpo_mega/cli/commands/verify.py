"""`grpo-mega verify A B`: compare two checkpoints, and `grpo-mega inspect PATH`: describe one.

`inspect` reads only headers, and imports no torch. PATH is a Hugging Face folder, a converted checkpoint, or a run's
folder or checkpoint.

`verify` compares config, names, shapes, dtypes and the bits of every tensor, in blocks. If the model fits into memory,
it also compares the outputs of every layer on fixed prompts and names the first layer that differs. transformers runs a
Hugging Face folder and Megatron-core runs a Megatron checkpoint, so a mapping that is wrong in both directions is found
too. --no-logits leaves out the outputs. --config-a and --config-b are folders with config.json, for a checkpoint
without one. Exit code 0 if the checkpoints are the same, 1 if not, 2 if one of them cannot be read.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from grpo_mega.cli.commands.convert import check_workers
from grpo_mega.cli.commands.options import InspectOptions, VerifyOptions
from grpo_mega.errors import ConfigError, raise_all
from grpo_mega.tracking.progress import phase

if TYPE_CHECKING:
    from grpo_mega.checkpoint_io.detect import Checkpoint, FileDifference


_SHOWN = 10  # largest number of names to print per kind


def run(options: VerifyOptions) -> int:
    """Print the differences. Return 0 if there are none, 1 otherwise. Raise WeightMappingError for another folder."""
    from grpo_mega.checkpoint_io.detect import compare_checkpoints, find_checkpoint

    if options.logits:
        from grpo_mega.distributed.versions import installed_set

        raise_all(installed_set().problems)
    check_workers(options.workers)
    a, b = find_checkpoint(options.a, options.config_a), find_checkpoint(options.b, options.config_b)
    print(f"A: {a.path} ({a.kind})\nB: {b.path} ({b.kind})", flush=True)
    for note in (a.note, b.note):
        if note is not None:
            print(note)
    with phase("comparing configs and tensors"):
        difference = compare_checkpoints(a, b, options.workers)
    print_difference(difference)
    is_same = not difference
    can_run = not (difference.missing or difference.extra or difference.other)
    if not options.logits or not can_run:
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
    print(f"{difference.num_equal} tensors equal bit for bit", flush=True)


def compare_logits(a: Checkpoint, b: Checkpoint) -> bool:
    with phase("importing torch and Megatron-core to run both models"):
        from grpo_mega.cli.commands import verify_outputs

    if not (verify_outputs.fits(a) and verify_outputs.fits(b)):
        print("logits: not computed, the model does not fit into memory")
        return True
    try:
        with phase(f"computing the outputs of A, {a.path}"):
            ours = verify_outputs.outputs(a)
        with phase(f"computing the outputs of B, {b.path}"):
            theirs = verify_outputs.outputs(b)
    except ConfigError as error:
        print(f"logits: not computed ({error})")
        return True
    different = verify_outputs.first_difference(ours, theirs)
    if different is None:
        print(
            f"logits: all {len(ours) - 1} layers and the logits agree on {len(verify_outputs.PROMPT_LENGTHS)} prompts"
        )
        return True
    print(f"logits: {different[0]} is the first that differs, by {different[1]:.2g} of its largest number")
    return False


def run_inspect(options: InspectOptions) -> int:
    """Print the description. Raise WeightMappingError if PATH is no checkpoint, or damaged."""
    from grpo_mega.checkpoint_io.detect import describe

    description = describe(options.path, options.config)
    if options.is_json:
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
