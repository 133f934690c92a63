"""`grpo-mega convert SOURCE OUT`: a Hugging Face folder becomes a Megatron distributed checkpoint, and the reverse;
and `grpo-mega export`.

The direction follows from what SOURCE is: a folder with safetensors (sharded or not) or pytorch_model.bin, or an output
of this command, a run's folder or one of its checkpoints, or any folder with Megatron's .metadata. FP8 weights with
block scales are dequantized, and optimizer state is skipped. Reading and writing in blocks needs little memory for a
model of any size. Everything is read back and compared before OUT appears. After an interruption, the same command
continues. `--dry` only lists every tensor of every rank of --layout, its sources and slices.

`--dry` needs only config.json, neither weights nor torch. Each line is one tensor at one place of the layout. Equal
layers and experts share a template, so a model with tens of thousands of experts takes only a moment.

`export` writes the policy of a run's checkpoint as a Hugging Face folder: only its weights, from any layout, streamed.
No model is built and no optimizer state is read, so even a checkpoint whose optimizer state is refused can be exported.
If RUN_DIR/hf is newer than the last checkpoint, it already is such a folder, so export copies it.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_mega import config as configs
from grpo_mega.checkpoint_io.checkpoints import find_policy, read_manifest
from grpo_mega.checkpoint_io.detect import find_checkpoint
from grpo_mega.checkpoint_io.slices import FROM_TORCH, ITEM_BYTES, TORCH_NAMES, known_dtype
from grpo_mega.cli.commands.eval import describe_policy
from grpo_mega.cli.commands.options import ConvertOptions, ExportOptions
from grpo_mega.errors import EXIT_INTERRUPTED, ConfigError, WeightMappingError, raise_all
from grpo_mega.paths import ADAPTER_DIR, CONFIG_FILE, STATE, check_free, write_atomically
from grpo_mega.weights.families import family_of
from grpo_mega.weights.layout import MegatronLayout, megatron_blocks, megatron_layout_problems
from grpo_mega.weights.spec import Family, ModelShape, read_config

if TYPE_CHECKING:
    from grpo_mega.checkpoint_io.output import Report


UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "B": 1, "": 1}


def run(options: ConvertOptions) -> int:
    """Convert in the direction that the source needs. Raise ConfigError or WeightMappingError."""
    if options.dry:
        return dry(options)
    source, _ = _ends(options)
    checkpoint = find_checkpoint(source, options.config)
    print(f"converting {checkpoint.path} ({checkpoint.kind}) to {options.out}", flush=True)
    # A run whose newest policy is RUN_DIR/hf has a note. It needs no conversion, as to_hf says.
    return to_hf(options) if checkpoint.is_megatron or checkpoint.note else to_mcore(options)


def to_mcore(options: ConvertOptions) -> int:
    """Convert a Hugging Face folder to a Megatron checkpoint."""
    if options.dry:
        return dry(options)
    source, out = _ends(options)
    for name, value in (("--max-shard-size", options.max_shard_size), ("--config", options.config)):
        if value is not None:
            raise ConfigError(f"{name}={value}: must go with a Megatron checkpoint, and {source} is none; leave it out")
    from grpo_mega.checkpoint_io.convert import convert_hf_to_mcore

    return _run_conversion(convert_hf_to_mcore, source, out, options)


def to_hf(options: ConvertOptions) -> int:
    """Convert a Megatron checkpoint to a Hugging Face folder.

    Config, generation config and tokenizer come from the checkpoint's folder, the run's model.path, or --config.
    """
    if options.dry:
        return dry(options)
    source, out = _ends(options)
    max_shard_bytes = num_bytes(options.max_shard_size or "5GB")
    from grpo_mega.checkpoint_io.convert import convert_mcore_to_hf

    convert = partial(convert_mcore_to_hf, max_shard_bytes=max_shard_bytes, config_folder=options.config)
    return _run_conversion(convert, source, out, options)


def dry(options: ConvertOptions) -> int:
    """List the tensors of each rank, and the dtype and size of what a conversion writes."""
    if options.out is not None:
        raise ConfigError(f"{options.out}: must not be given with --dry, because nothing is written; leave it out")
    if (options.source is None) == (options.config is None):
        raise ConfigError("--dry: must have either SOURCE or --config; give one of them")
    folder = options.config or options.source
    assert folder is not None
    if folder.name == "config.json" and not folder.is_dir():
        folder = folder.parent
    elif options.config is not None and not (folder / "config.json").is_file():
        raise ConfigError(f"--config={folder} must be a file config.json, or its folder; name one")
    dry_run(folder, options.layout or "tp=1", known_dtype(options.dtype), stored_dtypes(folder))
    return 0


def stored_dtypes(folder: Path) -> Counter[str]:
    """Return the number of parameters of each dtype (safetensors names). Without weights, config.json names the
    dtype.
    """
    try:
        weights = find_checkpoint(folder).open()
    except WeightMappingError:
        config = read_config(folder)
        name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        return Counter({FROM_TORCH.get(name, "F32"): 1})
    counts: Counter[str] = Counter()
    for name, shape in weights.shapes.items():
        counts[weights.dtype(name)] += prod(shape)
    return counts


def num_bytes(text: str) -> int:
    """Parse a size such as "5GB" or "500MiB". Raise ConfigError."""
    number = text.rstrip("KMGiIBb ")
    unit = text[len(number) :].strip().upper()
    if unit not in UNITS or not number.replace(".", "", 1).isdigit() or float(number) * UNITS[unit] < 1:
        raise ConfigError(f"--max-shard-size={text}: must be a size such as 5GB or 500MiB")
    return int(float(number) * UNITS[unit])


def print_report(report: Report, out: Path) -> None:
    """Print the result of a conversion. Warn about tensors with NaN or infinity by name."""
    written = report.num_bytes - report.resumed_bytes
    speeds = [
        num / max(seconds, 1e-9) / 1e6
        for num, seconds in ((written, report.write_seconds), (report.num_bytes, report.verify_seconds))
    ]
    resumed = f" ({report.resumed_bytes / 1e9:.3f} GB written by an earlier start)" if report.resumed_bytes else ""
    print(f"{out}: {report.num_tensors} tensors, {report.num_bytes / 1e9:.3f} GB{resumed}")
    print(
        f"{written / 1e9:.3f} GB written in {report.write_seconds:.1f} s ({speeds[0]:.0f} MB/s);"
        f" {report.num_bytes / 1e9:.3f} GB read back and verified in {report.verify_seconds:.1f} s"
        f" ({speeds[1]:.0f} MB/s)"
    )
    if report.nonfinite:
        names = "; ".join(report.nonfinite[:8]) + ("; ..." if len(report.nonfinite) > 8 else "")
        print(f"warning: NaN or infinity in {len(report.nonfinite)} tensors: {names}", file=sys.stderr)


def _ends(options: ConvertOptions) -> tuple[Path, Path]:
    """Return source and output. Raise ConfigError if one is missing, or an option does not fit."""
    if options.source is None or options.out is None:
        raise ConfigError("SOURCE OUT: must both be given without --dry; name a checkpoint and a new folder")
    if options.layout is not None:
        raise ConfigError(
            f"--layout={options.layout}: must go with --dry, because a checkpoint loads in any layout; leave it out"
        )
    check_workers(options.workers)
    check_free(options.out)
    return options.source, options.out


def check_workers(workers: int) -> None:
    if workers < 1:
        raise ConfigError(f"--workers={workers}: must be a whole number above 0; leave it out for 2")


def _run_conversion(convert: Callable[..., Report], source: Path, out: Path, options: ConvertOptions) -> int:
    """Convert, print the result, and return the exit code."""
    try:
        print_report(convert(source, out, dtype=options.dtype, workers=options.workers), out)
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


_AXES = ("tp", "pp", "vpp", "dp", "ep", "etp")


@dataclass
class Counts:
    tensors: int = 0
    slices: int = 0
    parameters: int = 0  # parameters of the whole model
    largest: int = 0  # elements of the rank that holds the most


def dry_run(config_folder: Path, layout_text: str, cast: str | None, stored: Mapping[str, int]) -> None:
    """Print a line per tensor, and a summary with the dtype that a conversion would write. Raise ConfigError or
    WeightMappingError.

    `cast`: the dtype to cast to. `stored`: number of parameters of the source in each dtype, or their shares.
    """
    started_at = time.monotonic()
    shape = ModelShape.from_hf_config(read_config(config_folder))
    layout, counts = parse_layout(layout_text), Counts()
    sys.stdout.writelines(f"{line}\n" for line in lines(family_of(shape.model_type), shape, layout, counts))
    written = {cast: 1} if cast else stored
    item_bytes = sum(ITEM_BYTES[name] * count for name, count in written.items()) / sum(written.values())
    total, largest = (number * item_bytes / 1e9 for number in (counts.parameters, counts.largest))
    dtypes = " and ".join(TORCH_NAMES[name] for name in sorted(written, key=lambda name: -written[name]))
    print(
        f"{counts.tensors} tensors of {counts.slices} slices; {counts.parameters / 1e9:.3f} billion parameters in"
        f" {dtypes}: {total:.2f} GB to write, {total:.2f} GB to read back, at most {largest:.2f} GB per rank;"
        f" {time.monotonic() - started_at:.2f} s"
    )


def parse_layout(text: str) -> MegatronLayout:
    """Read a layout as "tp=4,pp=4". dp is at least what ep and etp need. Raise ConfigError."""
    sizes = dict.fromkeys(_AXES, 1)
    for part in filter(None, text.split(",")):
        axis, _, value = part.partition("=")
        if axis not in _AXES or not (value.isascii() and value.isdigit() and int(value) > 0):
            raise ConfigError(f"--layout={text}: {part!r} is not understood; give some of {', '.join(_AXES)} as tp=2")
        sizes[axis] = int(value)
    tp, pp, vpp, dp, ep, etp = sizes.values()
    return MegatronLayout(tp, pp, vpp, max(dp, ep * etp // math.gcd(ep * etp, tp)), ep=ep, etp=etp)


def lines(family: Family, shape: ModelShape, layout: MegatronLayout, counts: Counts) -> Iterator[str]:
    """Yield a line per tensor, and count in `counts`. Raise ConfigError if the layout cannot shard the model."""
    raise_all(megatron_layout_problems(shape, layout))
    counts.parameters = sum(prod(size) for size in family.hf_tensors(shape).values())
    seen = set()
    for rank in range(layout.world_size):
        tp_rank, pp_rank, _ = layout.place(rank)
        place = (pp_rank, layout.ep_rank(rank), tp_rank)
        if place in seen:
            continue  # a data-parallel replica
        seen.add(place)
        label = f"pp{pp_rank} ep{place[1]} tp{tp_rank} " if shape.num_experts else f"pp{pp_rank} tp{tp_rank} "
        held = 0
        for block in megatron_blocks(family, shape, layout, rank, fused_norms=True):
            templates = []  # the line of each tensor; layer and expert numbers are global, in Megatron's names too
            for local, tensor in block.tensors.items():
                chunk, _, name = local.partition(".")
                sources = []
                for piece in tensor.pieces:
                    slices = ", ".join(f"{a}:{b}" for a, b in zip(piece.box.start, piece.box.stop, strict=True))
                    at = f" at {','.join(map(str, piece.offset))}" if any(piece.offset) else ""
                    sources.append(f"{piece.box.tensor}[{slices}]{at}")
                source = "; ".join(sources) or "padding"
                templates.append(f"{label}{chunk} {name} {list(tensor.shape)} <- {source}")
            times = len(block.layers) * len(block.experts)
            counts.tensors += len(templates) * times
            counts.slices += times * sum(len(tensor.pieces) for tensor in block.tensors.values())
            held += times * sum(prod(tensor.shape) for tensor in block.tensors.values())
            yield from (one.format(i=i, e=e) for i in block.layers for e in block.experts for one in templates)
        counts.largest = max(counts.largest, held)


def run_export(options: ExportOptions) -> int:
    """Write the folder and print a line. Raise ResumeError if the checkpoint does not exist or is damaged."""
    from grpo_mega.distributed.versions import installed_set

    run_dir, out, step = options.run_dir, options.out, options.step
    if out.exists():
        raise ConfigError(f"{out} exists; name a folder that does not")
    config = configs.load(run_dir / CONFIG_FILE)
    raise_all(installed_set().problems)
    policy = find_policy(run_dir, step)
    lora = config.model.lora
    if options.is_merged and lora is None:
        raise ConfigError(f"--merged: {run_dir} trains all weights, without model.lora; leave it out")
    print(f"grpo-mega: note: {describe_policy('exporting', policy, '')}", file=sys.stderr, flush=True)
    if policy.note is not None:
        partial = out.with_name(out.name + ".partial")  # `out` appears only when the copy is complete
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(policy.path if lora is None or options.is_merged else run_dir / ADAPTER_DIR, partial)
        os.rename(partial, out)
        print(f"policy after step {policy.step} written to {out}")
        return 0
    checkpoint, manifest = policy.path, read_manifest(policy.path)
    import torch.distributed as dist  # needed only to read a checkpoint

    from grpo_mega.checkpoint_io.convert import convert_mcore_to_hf
    from grpo_mega.trainer.saving import verify_files

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        verify_files(checkpoint, manifest, rank=0, world_size=1)
        if lora is not None:
            from grpo_mega.checkpoint_io import adapter
            from grpo_mega.trainer.inputs import check_base

            if options.is_merged and config.model.init == "random":
                raise ConfigError(
                    "--merged: must not be with model.init=random; finish the run, which writes the model"
                )
            check_base(config, manifest, rank=0, world_size=1)
            adapter.export(checkpoint / STATE, out, config.model, is_merged=options.is_merged)
    finally:
        dist.destroy_process_group()
    if lora is None:
        convert_mcore_to_hf(checkpoint / STATE, out, config_folder=config.model.path, show_progress=config.log.progress)
    if config.algorithm.is_sft and (out / "config.json").exists():
        from grpo_mega.checkpoint_io.model import read_model_files
        from grpo_mega.trainer.export import with_end_token

        for name, content in with_end_token(read_model_files(config.model), config.rollout.stop_token_ids).items():
            write_atomically(out / name, content)
    print(f"policy after step {manifest.step} written to {out}")
    return 0
