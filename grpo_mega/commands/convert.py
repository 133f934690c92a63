"""`grpo-mega convert SOURCE OUT`: a Hugging Face folder becomes a Megatron distributed checkpoint, and the reverse.

The direction follows from what SOURCE is: a folder with safetensors (sharded or not) or pytorch_model.bin, or an output
of this command, a run's folder or one of its checkpoints, or any folder with Megatron's .metadata. FP8 weights with
block scales are dequantized, and optimizer state is skipped. Reading and writing in blocks needs little memory for a
model of any size. Everything is read back and compared before OUT appears. After an interruption, the same command
continues. `--dry` only lists every tensor of every rank of --layout, its sources and slices.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_mega.commands.options import ConvertOptions
from grpo_mega.errors import EXIT_INTERRUPTED, ConfigError, WeightMappingError
from grpo_mega.paths import check_free

if TYPE_CHECKING:
    from grpo_mega.formats.output import Report

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "B": 1, "": 1}


def run(options: ConvertOptions) -> int:
    """Convert in the direction that the source needs. Raise ConfigError or WeightMappingError."""
    from grpo_mega.formats.detect import find_checkpoint

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
    from grpo_mega.formats.convert import convert_hf_to_mcore

    try:
        print_report(convert_hf_to_mcore(source, out, dtype=options.dtype, workers=options.workers), out)
    except KeyboardInterrupt:
        return _interrupted()
    return 0


def to_hf(options: ConvertOptions) -> int:
    """Convert a Megatron checkpoint to a Hugging Face folder.

    Config, generation config and tokenizer come from the checkpoint's folder, the run's model.path, or --config.
    """
    if options.dry:
        return dry(options)
    source, out = _ends(options)
    max_shard_bytes = num_bytes(options.max_shard_size or "5GB")
    from grpo_mega.formats.convert import convert_mcore_to_hf

    try:
        report = convert_mcore_to_hf(
            source,
            out,
            max_shard_bytes=max_shard_bytes,
            dtype=options.dtype,
            workers=options.workers,
            config_folder=options.config,
        )
    except KeyboardInterrupt:
        return _interrupted()
    print_report(report, out)
    return 0


def dry(options: ConvertOptions) -> int:
    """List the tensors of each rank, and the dtype and size of what a conversion writes."""
    from grpo_mega.commands.convert_dry import dry_run
    from grpo_mega.formats.slices import known_dtype

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
    cast = known_dtype(options.dtype)
    dry_run(folder, options.layout or "tp=1", cast, stored_dtypes(folder))
    return 0


def stored_dtypes(folder: Path) -> Counter[str]:
    """Return the number of parameters of each dtype (safetensors names). Without weights, config.json names the
    dtype.
    """
    from math import prod

    from grpo_mega.formats.detect import find_checkpoint
    from grpo_mega.formats.slices import FROM_TORCH
    from grpo_mega.weights.spec import read_config

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


def _interrupted() -> int:
    print("interrupted; run the same command again to continue", file=sys.stderr)
    return EXIT_INTERRUPTED
