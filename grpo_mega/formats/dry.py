"""What each rank of a layout would hold of a model: every tensor, its sources and its slices, from config.json alone.

Needs neither weights nor torch. A line is one tensor of one place of the layout; lines of layers and experts that are alike are
made from one template, so that a model with tens of thousands of experts takes a moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from grpo_mega.errors import ConfigError
from grpo_mega.weights.boxes import Block, LocalTensor, Piece
from grpo_mega.weights.layout import MegatronLayout, check_megatron_layout, megatron_blocks
from grpo_mega.weights.spec import Family, ModelShape

_AXES = ("tp", "pp", "vpp", "dp", "ep")


@dataclass
class Dry:
    """`parameters`: of the model. `largest`: elements of the place that holds most."""

    tensors: int = 0
    slices: int = 0
    parameters: int = 0
    largest: int = 0


def parse_layout(text: str) -> MegatronLayout:
    """From "tp=4,pp=4". dp is at least ep. Raises ConfigError."""
    sizes = dict.fromkeys(_AXES, 1)
    for part in filter(None, text.split(",")):
        axis, _, value = part.partition("=")
        if axis not in _AXES or not (value.isascii() and value.isdigit() and int(value) > 0):
            raise ConfigError(f"--layout={text}: {part!r} is not understood; give some of {', '.join(_AXES)} as tp=2")
        sizes[axis] = int(value)
    tp, pp, vpp, dp, ep = sizes.values()
    return MegatronLayout(tp, pp, vpp, max(dp, ep), ep=ep)


def lines(family: Family, shape: ModelShape, layout: MegatronLayout, found: Dry) -> Iterator[str]:
    """Yield a line for each tensor, counting them in `found`. Raise WeightMappingError unless the model can be cut so."""
    check_megatron_layout(shape, layout)
    found.parameters = sum(prod(size) for size in family.hf_tensors(shape).values())
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
            templates = [_line(label, local, tensor) for local, tensor in block.tensors.items()]
            times = len(block.layers) * len(block.experts)
            found.tensors += len(templates) * times
            found.slices += times * sum(len(tensor.pieces) for tensor in block.tensors.values())
            held += times * sum(prod(tensor.shape) for tensor in block.tensors.values())
            yield from _filled(block, templates)
        found.largest = max(found.largest, held)


def _filled(block: Block, templates: list[str]) -> Iterator[str]:
    for i in block.layers:
        for e in block.experts:
            for template in templates:
                yield template.format(i=i, e=e)


def _line(label: str, local: str, tensor: LocalTensor) -> str:
    """The numbers in names are the model's, on both sides."""
    chunk, _, name = local.partition(".")
    sources = "; ".join(_source(piece) for piece in tensor.pieces) or "padding"
    return f"{label}{chunk} {name} {list(tensor.shape)} <- {sources}"


def _source(piece: Piece) -> str:
    slices = ", ".join(f"{a}:{b}" for a, b in zip(piece.box.start, piece.box.stop, strict=True))
    place = f" at {','.join(map(str, piece.offset))}" if any(piece.offset) else ""
    return f"{piece.box.tensor}[{slices}]{place}"
