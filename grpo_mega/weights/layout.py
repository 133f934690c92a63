"""Layouts, and what each rank of one holds: Megatron's (TP, PP, VPP, DP, EP), the engine's, or whole Hugging Face tensors.

A rank's place in Megatron is (tp_rank, pp_rank, dp_rank), in its default order tp fastest, then dp, then pp; expert-parallel
ranks are neighbours within dp. Local names of a Megatron rank are "chunk<v>.<parameter name>", v being the model chunk (0
without interleaving). Each `*_blocks` says what a rank holds in a few blocks, `*_holding` the same tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from grpo_mega.errors import WeightMappingError
from grpo_mega.weights.boxes import ONCE, Block, Box, Holding, Kind, LocalTensor, Piece, expand
from grpo_mega.weights.spec import Family, ModelShape, Row, kind_of

RankOrder = Literal["tp-dp-pp", "tp-pp-dp"]


@dataclass(frozen=True)
class MegatronLayout:
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    order: RankOrder = "tp-dp-pp"  # axes from the one whose ranks are neighbours to the one farthest apart
    layers_per_chunk: tuple[int, ...] | None = None  # in model order, pp * vpp of them; None: as even as can be
    ep: int = 1  # ranks, of dp, over which experts are spread; an expert is cut along tp as the rest is

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

    def ep_rank(self, rank: int) -> int:
        """Of a global rank: Megatron orders experts' ranks tp, ep, dp, pp, where the dense ones are tp, dp, pp."""
        return self.place(rank)[2] % self.ep

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

    def experts_of(self, num_experts: int, ep_rank: int) -> range:
        width = num_experts // self.ep
        return range(width * ep_rank, width * (ep_rank + 1))


@dataclass(frozen=True)
class EngineLayout:
    """Rank r of the world serves engine r // tp at its tensor-parallel rank r % tp; those beyond the engines serve none."""

    tp: int = 1
    num_engines: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.num_engines


def check_megatron_layout(shape: ModelShape, layout: MegatronLayout) -> None:
    """Raise WeightMappingError unless Megatron can cut the model into the layout."""
    for problem in megatron_layout_problems(shape, layout):
        raise WeightMappingError(problem)


def megatron_layout_problems(shape: ModelShape, layout: MegatronLayout) -> Iterator[str]:
    """Yield why Megatron cannot cut the model into the layout: a line for each rule that it breaks, with the remedy."""
    obstacle = _training_obstacle(shape, layout.tp)
    if obstacle:
        yield f"tp={layout.tp} {obstacle}; use {_legal(shape, _training_obstacle)}"
    if layout.vpp > 1 and layout.pp == 1:
        yield f"vpp={layout.vpp} interleaves pipeline stages, but pp=1; use vpp=1 or a larger pp"
    if layout.num_chunks > shape.num_layers:
        yield (
            f"pp={layout.pp} with vpp={layout.vpp} makes {layout.num_chunks} model chunks, "
            f"but the model has {shape.num_layers} layers; use fewer"
        )
    if layout.ep > 1 and not shape.num_experts:
        yield f"ep={layout.ep} spreads experts, but the model is dense; use ep=1"
    for size, parts in ((layout.dp, "data-parallel ranks"), (shape.num_experts, "experts of a layer")):
        if size % layout.ep:
            yield f"ep={layout.ep} does not divide the {size} {parts}; use a divisor of them"
    if layout.ep > 1 and layout.pp > 1 and layout.order != "tp-dp-pp":
        yield f"order={layout.order}: must be tp-dp-pp, Megatron's only order for ep={layout.ep} with pp={layout.pp}; change it"


def check_engine_layout(shape: ModelShape, tp: int) -> None:
    """Raise WeightMappingError unless SGLang can cut the model into `tp` parts."""
    for problem in engine_layout_problems(shape, tp):
        raise WeightMappingError(problem)


def engine_layout_problems(shape: ModelShape, tp: int) -> Iterator[str]:
    """Yield why SGLang cannot cut the model into `tp` parts, with the remedy."""
    obstacle = _obstacle(shape, tp)
    if obstacle:
        yield f"tp={tp} {obstacle}; use {_legal(shape, _obstacle)}"


def _legal(shape: ModelShape, obstacle: Callable[[ModelShape, int], str | None]) -> str:
    return ", ".join(str(size) for size in range(1, shape.num_heads + 1) if not obstacle(shape, size))


def _training_obstacle(shape: ModelShape, tp: int) -> str | None:
    """Return why Megatron cannot cut the model into `tp` parts; None if it can.

    It cuts the fused rows of queries, keys and values evenly, so that a part may begin within a head; SGLang gives each rank
    whole heads, and has some keys and values twice.
    """
    rows = shape.q + 2 * shape.kv
    fused = f"does not divide the {rows} fused rows of queries, keys and values" if rows % tp else None
    return _obstacle(shape, tp) or fused


def _obstacle(shape: ModelShape, tp: int) -> str | None:
    """Return why a tensor-parallel size fits neither Megatron nor SGLang; None if it fits SGLang."""
    rows = (shape.moe_ffn, "rows of an expert") if shape.num_experts else (shape.ffn, "rows of the MLP")
    for size, what in ((shape.num_heads, "attention heads"), rows):
        if size % tp:
            return f"does not divide the model's {size} {what}"
    kv = shape.num_kv_heads
    return f"is neither a multiple nor a divisor of the model's {kv} key-value heads" if kv % tp and tp % kv else None


def megatron_blocks(
    family: Family, shape: ModelShape, layout: MegatronLayout, rank: int, *, fused_norms: bool = False
) -> list[Block]:
    """What a rank of the trainer holds. `fused_norms`: names as Transformer Engine's layer spec gives them."""
    tp_rank, pp_rank, _ = layout.place(rank)
    experts = layout.experts_of(shape.num_experts, layout.ep_rank(rank))

    def tensors(rows: Iterable[Row], chunk: int) -> Holding:
        found: Holding = {}
        for row in rows:
            name = row.megatron_te if fused_norms and row.megatron_te else row.megatron
            # A tied output layer holds a copy of the embedding.
            hf = family.embedding.hf if row is family.output and shape.tied else row.hf
            local = f"chunk{chunk}.{name}"
            found[local] = row.op.megatron(hf, local, shape, layout.tp, tp_rank)
        return found

    blocks = []
    for chunk in range(layout.vpp):
        is_first = pp_rank == 0 and chunk == 0
        is_last = pp_rank == layout.pp - 1 and chunk == layout.vpp - 1
        once = [family.embedding] if is_first else []
        once += [row for row in family.rows if (row.where == "first" and is_first) or (row.where == "last" and is_last)]
        if is_last and not (shape.tied and is_first):  # else the embedding itself serves
            once.append(family.output)
        layers = layout.layers_of(shape.num_layers, pp_rank, chunk)
        blocks.append(Block("model", ONCE, ONCE, tensors(once, chunk)))
        blocks.append(Block("layer", layers, ONCE, tensors(_rows(family, "layer"), chunk)))
        blocks.append(Block("expert", layers, experts, tensors(_rows(family, "expert"), chunk)))
    return [block for block in blocks if block.tensors]


def megatron_holding(
    family: Family, shape: ModelShape, layout: MegatronLayout, rank: int, *, fused_norms: bool = False
) -> Holding:
    return expand(megatron_blocks(family, shape, layout, rank, fused_norms=fused_norms))


def engine_blocks(family: Family, shape: ModelShape, layout: EngineLayout, rank: int) -> list[Block]:
    """What SGLang's process of a rank holds, under its names; nothing on a rank that serves no engine."""
    if rank >= layout.world_size:
        return []
    once = [family.embedding, *_rows(family, "model")]
    if not (shape.tied and family.engine_ties):
        once.append(family.output)

    def tensors(rows: Iterable[Row]) -> Holding:
        found: Holding = {}
        for row in rows:
            hf = family.embedding.hf if row is family.output and shape.tied else row.hf
            local = row.engine or row.hf[0]
            found[local] = row.op.engine(hf, local, shape, layout.tp, rank % layout.tp)
        return found

    return _blocks(shape, tensors(once), tensors(_rows(family, "layer")), tensors(_rows(family, "expert")))


def engine_holding(family: Family, shape: ModelShape, layout: EngineLayout, rank: int) -> Holding:
    return expand(engine_blocks(family, shape, layout, rank))


def hf_blocks(family: Family, shape: ModelShape) -> list[Block]:
    """Whole Hugging Face tensors under their own names."""
    heads = [family.embedding] if shape.tied else [family.embedding, family.output]

    def tensors(rows: Sequence[Row]) -> Holding:
        pairs = (pair for row in rows for pair in zip(row.hf, row.op.hf_shapes(shape), strict=True))
        return {name: _whole(name, size) for name, size in pairs}

    model, layer, expert = (_rows(family, kind) for kind in ("model", "layer", "expert"))
    return _blocks(shape, tensors([*heads, *model]), tensors(layer), tensors(expert))


def hf_holding(family: Family, shape: ModelShape, names: Iterable[str] | None = None) -> Holding:
    """Whole Hugging Face tensors under their own names: a checkpoint's writer, or an engine at TP1 (all, or those named)."""
    tensors = family.hf_tensors(shape)
    return {name: _whole(name, tensors[name]) for name in (tensors if names is None else names)}


def _blocks(shape: ModelShape, model: Holding, layer: Holding, expert: Holding) -> list[Block]:
    layers = range(shape.num_layers)
    blocks = [
        Block("model", ONCE, ONCE, model),
        Block("layer", layers, ONCE, layer),
        Block("expert", layers, range(shape.num_experts), expert),
    ]
    return [block for block in blocks if block.tensors]


def _rows(family: Family, kind: Kind) -> list[Row]:
    return [row for row in family.rows if kind_of(row) == kind]


def _whole(name: str, shape: tuple[int, ...]) -> LocalTensor:
    zeros = (0,) * len(shape)
    return LocalTensor(shape, (Piece(Box(name, zeros, shape), name, zeros),))
