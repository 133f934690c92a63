"""Sides: what every rank of the world holds before a movement of weights, or after it.

A plan leads from one side to another. A rank's part is a few blocks, and ranks that hold the same share them, so a side of
hundreds of ranks is made in milliseconds whatever the number of layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from grpo_mega.weights.boxes import Block, Holding, LocalTensor, expand
from grpo_mega.weights.layout import EngineLayout, MegatronLayout, engine_blocks, hf_blocks, megatron_blocks
from grpo_mega.weights.spec import Family, ModelShape


@dataclass(frozen=True)
class Side:
    blocks: tuple[tuple[Block, ...], ...]  # by rank
    quantised: frozenset[str] = frozenset()  # Hugging Face tensors, layer and expert left open, that are to come as FP8 blocks

    @property
    def world_size(self) -> int:
        return len(self.blocks)

    def holding(self, rank: int) -> Holding:
        """What a rank holds, tensor by tensor."""
        return expand(self.blocks[rank])

    def quantised_holding(self, rank: int) -> Holding:
        """Of it, the tensors that come as FP8 blocks."""
        return expand(
            replace(block, tensors={name: t for name, t in block.tensors.items() if self._is_quantised(t)})
            for block in self.blocks[rank]
        )

    def _is_quantised(self, tensor: LocalTensor) -> bool:
        return any(piece.box.tensor in self.quantised for piece in tensor.pieces)


def megatron_side(family: Family, shape: ModelShape, layout: MegatronLayout, *, fused_norms: bool = False) -> Side:
    """The trainer. `fused_norms`: names as Transformer Engine's layer spec gives them."""
    of_place: dict[tuple[int, int, int], tuple[Block, ...]] = {}
    blocks = []
    for rank in range(layout.world_size):
        place = (*layout.place(rank)[:2], layout.ep_rank(rank))
        if place not in of_place:
            of_place[place] = tuple(megatron_blocks(family, shape, layout, rank, fused_norms=fused_norms))
        blocks.append(of_place[place])
    return Side(tuple(blocks))


def engine_side(family: Family, shape: ModelShape, layout: EngineLayout, world_size: int, *, quantise: bool = False) -> Side:
    """SGLang servers on the first ranks of the world. `quantise`: linear layers come as FP8 blocks."""
    assert layout.world_size <= world_size, (layout, world_size)
    shards = [tuple(engine_blocks(family, shape, layout, tp_rank)) for tp_rank in range(layout.tp)]
    blocks = tuple(shards[rank % layout.tp] if rank < layout.world_size else () for rank in range(world_size))
    return Side(blocks, _quantised(family, quantise))


def hf_side(family: Family, shape: ModelShape, world_size: int, *, quantise: bool = False) -> Side:
    """Whole Hugging Face tensors on every rank: the embedded engine. `quantise`: linear layers come as FP8 blocks."""
    return Side((tuple(hf_blocks(family, shape)),) * world_size, _quantised(family, quantise))


def _quantised(family: Family, quantise: bool) -> frozenset[str]:
    return family.linear_tensors() if quantise else frozenset()
