"""Layouts, and what each rank of one holds: Megatron's (TP, PP, VPP, DP), or whole Hugging Face tensors.

A rank's place is (tp_rank, pp_rank, dp_rank), in Megatron's default order tp fastest, then dp, then pp. Local names of a
Megatron rank are "chunk<v>.<parameter name>", v being the model chunk (0 without interleaving).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from grpo_mega.weights.boxes import Box, Holding, LocalTensor, Piece
from grpo_mega.weights.spec import Family, ModelShape, Row

RankOrder = Literal["tp-dp-pp", "tp-pp-dp"]


@dataclass(frozen=True)
class MegatronLayout:
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    order: RankOrder = "tp-dp-pp"  # axes from the one whose ranks are neighbours to the one farthest apart
    layers_per_chunk: tuple[int, ...] | None = None  # in model order, pp * vpp of them; None: as even as can be

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def num_chunks(self) -> int:
        """Of the whole model, over all stages."""
        return self.pp * self.vpp

    def place(self, rank: int) -> tuple[int, int, int]:
        """(tp_rank, pp_rank, dp_rank) of a global rank."""
        index = {}
        for axis in self.order.split("-"):
            size = getattr(self, axis)
            index[axis], rank = rank % size, rank // size
        return index["tp"], index["pp"], index["dp"]

    def chunk_sizes(self, num_layers: int) -> tuple[int, ...]:
        """Layers of each chunk, in model order. A remainder goes to the first ones: the last carries the output layer."""
        if self.layers_per_chunk is not None:
            return self.layers_per_chunk
        base, extra = divmod(num_layers, self.num_chunks)
        return tuple(base + (i < extra) for i in range(self.num_chunks))

    def layers_of(self, num_layers: int, pp_rank: int, chunk: int) -> range:
        """Global layers of a rank's model chunk: chunks go round the stages, so chunk v of stage p is the (v * pp + p)-th."""
        sizes = self.chunk_sizes(num_layers)
        index = chunk * self.pp + pp_rank
        first = sum(sizes[:index])
        return range(first, first + sizes[index])


def megatron_holding(
    family: Family, shape: ModelShape, layout: MegatronLayout, rank: int, *, fused_norms: bool = False
) -> Holding:
    """What a rank of the trainer holds. `fused_norms`: names as Transformer Engine's layer spec gives them."""
    tp_rank, pp_rank, _ = layout.place(rank)
    holding: Holding = {}

    def add(row: Row, chunk: int, local_layer: int, layer: int, hf: tuple[str, ...]) -> None:
        name = row.megatron_te if fused_norms and row.megatron_te else row.megatron
        local = f"chunk{chunk}.{name.format(i=local_layer)}"
        names = tuple(n.format(i=layer) for n in hf)
        holding[local] = row.op.megatron(names, local, shape, layout.tp, tp_rank)

    for chunk in range(layout.vpp):
        is_first = pp_rank == 0 and chunk == 0
        is_last = pp_rank == layout.pp - 1 and chunk == layout.vpp - 1
        if is_first:
            add(family.embedding, chunk, 0, 0, family.embedding.hf)
        for row in family.rows:
            if row.where == "layer":
                for local_layer, layer in enumerate(layout.layers_of(shape.num_layers, pp_rank, chunk)):
                    add(row, chunk, local_layer, layer, row.hf)
            elif (row.where == "first" and is_first) or (row.where == "last" and is_last):
                add(row, chunk, 0, 0, row.hf)
        if is_last and not shape.tied:
            add(family.output, chunk, 0, 0, family.output.hf)
        elif is_last and not is_first:  # a tied output layer on a stage of its own holds a copy of the embedding
            add(family.output, chunk, 0, 0, family.embedding.hf)
    return holding


def hf_holding(family: Family, shape: ModelShape, names: Iterable[str] | None = None) -> Holding:
    """Whole Hugging Face tensors under their own names: a checkpoint's writer, or an engine at TP1 (all, or those named)."""
    tensors = family.hf_tensors(shape)
    return {name: _whole(name, tensors[name]) for name in (tensors if names is None else names)}


def _whole(name: str, shape: tuple[int, ...]) -> LocalTensor:
    zeros = (0,) * len(shape)
    return LocalTensor(shape, (Piece(Box(name, zeros, shape), name, zeros),))
