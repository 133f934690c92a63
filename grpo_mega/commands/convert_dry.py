"""`grpo-mega convert --dry`: list every tensor that each rank of a layout would hold, its sources and its slices.

Needs only config.json, neither weights nor torch. Each line is one tensor at one place of the layout. Equal layers and
experts share a template, so a model with tens of thousands of experts takes only a moment.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from grpo_mega.errors import ConfigError, raise_all
from grpo_mega.formats.slices import ITEM_BYTES, TORCH_NAMES
from grpo_mega.weights.families import family_of
from grpo_mega.weights.layout import MegatronLayout, megatron_blocks, megatron_layout_problems
from grpo_mega.weights.spec import Family, ModelShape, read_config

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
    batch: list[str] = []
    for line in lines(family_of(shape.model_type), shape, layout, counts):
        batch.append(line)
        if len(batch) == 4096:
            print("\n".join(batch))
            batch.clear()
    print("\n".join(batch))
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
