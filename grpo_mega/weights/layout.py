"""Layouts and the shards of each rank: Megatron's (TP, CP, PP, VPP, DP, EP), the engine's, or whole Hugging Face
tensors.

A rank's position in Megatron is (tp_rank, pp_rank, dp_rank). In the default order tp is fastest, then dp, then pp.
Context-parallel ranks hold the same weights, like data-parallel ranks, and come right after tp. Experts have other
axes over all ranks of a pipeline stage: etp (ranks that split an expert) is fastest, then ep. Local names of a Megatron
rank are "chunk<v>.<parameter name>", where v is the model chunk (0 without interleaving). `*_shards` describes all
ranks, `*_rank_shards` one rank tensor by tensor, `*_blocks` one rank in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from grpo_mega.config import LayoutConfig
from grpo_mega.weights.boxes import ONCE, Block, RankShards, alone, expand, whole
from grpo_mega.weights.derived import served_family
from grpo_mega.weights.spec import Family, ModelShape, Row, Shard

RankOrder = Literal["tp-dp-pp", "tp-pp-dp"]


@dataclass(frozen=True)
class MegatronLayout:
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    order: RankOrder = "tp-dp-pp"  # axes, from neighbouring ranks to the farthest ones
    layers_per_chunk: tuple[int, ...] | None = None  # pp * vpp entries in model order; None: as even as possible
    ep: int = 1  # number of parts of a layer's experts, over the tp * cp * dp ranks of a stage
    cp: int = 1  # number of ranks that share each sequence
    etp: int = 1  # number of ranks that split each expert

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.num_replicas

    @property
    def num_replicas(self) -> int:
        """Return the number of ranks that hold the same weights, except experts."""
        return self.cp * self.dp

    @property
    def num_chunks(self) -> int:
        """Return the number of model chunks over all stages."""
        return self.pp * self.vpp

    def place(self, rank: int) -> tuple[int, int, int]:
        """Return (tp_rank, pp_rank, dp_rank) of a global rank."""
        tp_rank, others = rank % self.tp, rank // (self.tp * self.cp)
        if self.order == "tp-dp-pp":
            return tp_rank, others // self.dp, others % self.dp
        return tp_rank, others % self.pp, others // self.pp

    def cp_rank(self, rank: int) -> int:
        """Return the cp_rank of a global rank."""
        return rank // self.tp % self.cp

    @property
    def num_expert_replicas(self) -> int:
        """Return the number of ranks that hold the same part of an expert."""
        return self.tp * self.num_replicas // (self.etp * self.ep)

    @property
    def has_own_expert_groups(self) -> bool:
        """Return True if other ranks hold the same expert than hold the same other weights."""
        return self.etp != self.tp or self.ep > 1

    def etp_rank(self, rank: int) -> int:
        """Return the etp_rank of a global rank."""
        return self.rank_in_stage(rank) % self.etp

    def ep_rank(self, rank: int) -> int:
        """Return the ep_rank of a global rank. Megatron orders ranks as etp, ep, dp, pp for experts and as tp, cp, dp,
        pp otherwise.
        """
        return self.rank_in_stage(rank) // self.etp % self.ep

    def rank_in_stage(self, rank: int) -> int:
        """Return the index of a global rank among the ranks of its pipeline stage."""
        tp_rank, _, dp_rank = self.place(rank)
        return (dp_rank * self.cp + self.cp_rank(rank)) * self.tp + tp_rank

    def chunk_sizes(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers per chunk, in model order. The first chunks take a remainder, because the last has the
        output layer.
        """
        if self.layers_per_chunk is not None:
            return self.layers_per_chunk
        base, extra = divmod(num_layers, self.num_chunks)
        return tuple(base + (i < extra) for i in range(self.num_chunks))

    def layers_of(self, num_layers: int, pp_rank: int, chunk: int) -> range:
        """Return the global layers of a rank's model chunk. Chunk v of stage p is chunk v * pp + p of the model."""
        sizes = self.chunk_sizes(num_layers)
        index = chunk * self.pp + pp_rank
        first = sum(sizes[:index])
        return range(first, first + sizes[index])


@dataclass(frozen=True)
class EngineLayout:
    """Rank r of the world serves engine r // tp as tensor-parallel rank r % tp. Ranks beyond the engines serve none.

    `ep`: the ranks of an engine form this many runs of neighbours. Each run holds a part of the experts, split over its
    ranks.
    """

    tp: int = 1
    num_engines: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.num_engines


def megatron_layout(layout: LayoutConfig, world_size: int) -> MegatronLayout:
    """Return Megatron's layout of `world_size` ranks. Data parallelism gets the ranks that tp, cp and pp leave."""
    return MegatronLayout(
        tp=layout.tp,
        pp=layout.pp,
        vpp=layout.vpp or 1,
        dp=world_size // (layout.tp * layout.cp * layout.pp),
        cp=layout.cp,
        ep=layout.ep,
        etp=layout.etp,
        order=layout.order,
        layers_per_chunk=layout.layers_per_chunk,
    )


def megatron_layout_problems(shape: ModelShape, layout: MegatronLayout) -> Iterator[str]:
    """Yield the reasons why Megatron cannot split the model like this: one line with the remedy per broken rule."""
    obstacle = _training_obstacle(shape, layout.tp)
    if obstacle:
        yield f"tp={layout.tp} {obstacle}; use {_legal(shape, _training_obstacle)}"
    if layout.tp % layout.etp:
        yield f"etp={layout.etp}: must divide tp={layout.tp}; use 1, or a divisor of it"
    elif shape.moe_ffn % layout.etp:
        yield f"etp={layout.etp} does not divide the model's {shape.moe_ffn} rows of an expert; use 1"
    if layout.etp > 1 and not shape.num_experts:
        yield f"etp={layout.etp} splits experts, but the model is dense; use etp=1"
    if layout.vpp > 1 and layout.pp == 1:
        yield f"vpp={layout.vpp} interleaves pipeline stages, but pp=1; use vpp=1 or a larger pp"
    if layout.num_chunks > shape.num_layers:
        yield (
            f"pp={layout.pp} with vpp={layout.vpp} makes {layout.num_chunks} model chunks, "
            f"but the model has {shape.num_layers} layers; use fewer"
        )
    if layout.ep > 1 and not shape.num_experts:
        yield f"ep={layout.ep} spreads experts, but the model is dense; use ep=1"
    ranks = layout.tp * layout.num_replicas // layout.etp
    for size, parts in ((ranks, "ranks (tp * cp * dp / etp)"), (shape.num_experts, "experts of a layer")):
        if size % layout.ep:
            yield f"ep={layout.ep} does not divide the {size} {parts}; use a divisor of them"
    if layout.pp > 1 and layout.order != "tp-dp-pp":
        if layout.cp > 1:
            yield (
                f"order={layout.order}: must be tp-dp-pp, Megatron's only order for cp={layout.cp} with"
                f" pp={layout.pp}; change it"
            )
        elif shape.num_experts and layout.ep * layout.etp != layout.tp:
            yield (
                f"order={layout.order}: must be tp-dp-pp with pp={layout.pp} unless ep * etp = tp={layout.tp}, found"
                f" ep={layout.ep}, etp={layout.etp}; change one of them"
            )


def engine_layout_problems(shape: ModelShape, tp: int, ep: int = 1) -> Iterator[str]:
    """Yield the reasons, with remedies, why SGLang cannot split the model into `tp` parts and its experts into `ep`
    runs.
    """
    if ep > 1 and not shape.num_experts:
        yield f"ep={ep} spreads experts, but the model is dense; use ep=1"
    if shape.num_experts % ep:
        yield f"ep={ep} does not divide the {shape.num_experts} experts of a layer; use a divisor of them"
    obstacle = _obstacle(shape, tp, ep)
    if obstacle:
        yield f"tp={tp} {obstacle}; use {_legal(shape, partial(_obstacle, ep=ep))}"


def _legal(shape: ModelShape, obstacle: Callable[[ModelShape, int], str | None]) -> str:
    return ", ".join(str(size) for size in range(1, shape.num_heads + 1) if not obstacle(shape, size))


def _training_obstacle(shape: ModelShape, tp: int) -> str | None:
    """Return the reason why Megatron cannot split the model into `tp` parts; None if it can.

    Megatron splits the fused rows of queries, keys and values evenly, so a part may start within a head. SGLang assigns
    whole heads to each rank, and repeats some keys and values.
    """
    rows = shape.q + 2 * shape.kv if not shape.kv_lora else shape.q
    fused = f"does not divide the {rows} fused rows of queries, keys and values" if rows % tp else None
    if shape.linear_layers and shape.num_kv_heads % tp:  # Megatron would not split the gates
        return f"does not divide the model's {shape.num_kv_heads} key-value heads"
    return _obstacle_of_others(shape, tp) or fused


def _obstacle(shape: ModelShape, tp: int, ep: int = 1) -> str | None:
    """Return the reason why a tensor-parallel size fits neither Megatron nor SGLang with `ep`; None if it fits
    SGLang.
    """
    if tp % ep:
        return f"is no multiple of ep={ep}"
    others = _obstacle_of_others(shape, tp)
    if others is None and shape.moe_ffn % (tp // ep):
        return f"does not divide the model's {shape.moe_ffn} rows of an expert"
    return others


def _obstacle_of_others(shape: ModelShape, tp: int) -> str | None:
    """Return the same for all weights but the experts."""
    rows = [(shape.shared_ffn, "rows of the shared experts")] if shape.num_experts else []
    if shape.num_dense or not shape.num_experts:
        rows.append((shape.ffn, "rows of the MLP"))
    rows += [(shape.linear_k_heads, "key heads of linear attention")]
    for size, what in ((shape.num_heads, "attention heads"), *rows):
        if size % tp:
            return f"does not divide the model's {size} {what}"
    kv = shape.num_kv_heads
    return f"is neither a multiple nor a divisor of the model's {kv} key-value heads" if kv % tp and tp % kv else None


@dataclass(frozen=True)
class ShardLayout:
    """The shards of every rank of the world, before or after a movement of weights.

    A rank holds a few blocks, and ranks with the same shards share them. So the layout of hundreds of ranks takes
    milliseconds for any number of layers.
    """

    blocks: tuple[tuple[Block, ...], ...]  # indexed by rank
    quantised: frozenset[str] = frozenset()  # Hugging Face tensors, with {i} and {e}, that arrive as FP8 blocks

    @classmethod
    def of_ranks(cls, shards: Sequence[RankShards]) -> ShardLayout:
        """Return the layout of ranks with these shards, with all layers and experts written out."""
        return cls(tuple((Block("model", ONCE, ONCE, tensors),) for tensors in shards))

    @property
    def world_size(self) -> int:
        return len(self.blocks)

    def after(self, num_ranks: int) -> ShardLayout:
        """Return the same layout shifted by `num_ranks` ranks, which hold no shards."""
        return replace(self, blocks=((),) * num_ranks + self.blocks)

    def rank_shards(self, rank: int) -> RankShards:
        return expand(self.blocks[rank])

    def quantised_shards(self, rank: int) -> RankShards:
        """Return the tensors of a rank that arrive as FP8 blocks."""

        def quantised(tensors: RankShards) -> RankShards:
            return {name: t for name, t in tensors.items() if any(p.box.tensor in self.quantised for p in t.pieces)}

        return expand(replace(block, tensors=quantised(block.tensors)) for block in self.blocks[rank])


def megatron_shards(
    family: Family,
    shape: ModelShape,
    layout: MegatronLayout,
    *,
    fused_norms: bool = False,
    grouped_experts: bool = False,
) -> ShardLayout:
    """Return the trainer's layout.

    `fused_norms`: use the names of Transformer Engine's layer spec. `grouped_experts`: use its names for a layer's
    experts in one module.
    """
    names = {"fused_norms": fused_norms, "grouped_experts": grouped_experts}
    places = [
        (*layout.place(rank)[:2], layout.ep_rank(rank), layout.etp_rank(rank)) for rank in range(layout.world_size)
    ]
    blocks = {
        place: tuple(megatron_blocks(family, shape, layout, places.index(place), **names))
        for place in dict.fromkeys(places)
    }
    return ShardLayout(tuple(blocks[place] for place in places))


def engine_shards(
    family: Family, shape: ModelShape, layout: EngineLayout, world_size: int, *, quantise: bool = False
) -> ShardLayout:
    """Return the layout of SGLang servers on the first ranks of the world. `quantise`: linear layers arrive as FP8
    blocks.
    """
    assert layout.world_size <= world_size, (layout, world_size)
    shards = [tuple(engine_blocks(family, shape, layout, tp_rank)) for tp_rank in range(layout.tp)]
    blocks = tuple(shards[rank % layout.tp] if rank < layout.world_size else () for rank in range(world_size))
    return ShardLayout(blocks, family.linear_tensors(shape) if quantise else frozenset())


def hf_shards(
    family: Family, shape: ModelShape, world_size: int, *, tp: int = 1, quantise: bool = False
) -> ShardLayout:
    """Return the layout of the embedded engine, or of an adapter on engines of `tp` ranks: all whole Hugging Face
    tensors on the first rank of each engine.
    """
    blocks = tuple(hf_blocks(family, shape))
    quantised = family.linear_tensors(shape) if quantise else frozenset[str]()
    return ShardLayout(tuple(() if rank % tp else blocks for rank in range(world_size)), quantised)


def hf_rank_shards(family: Family, shape: ModelShape, names: Iterable[str] | None = None) -> RankShards:
    """Return whole Hugging Face tensors under their own names, all or the given ones, to write a checkpoint."""
    tensors = family.hf_tensors(shape)
    return {name: alone(whole(name, tensors[name]), name) for name in (tensors if names is None else names)}


def megatron_blocks(
    family: Family,
    shape: ModelShape,
    layout: MegatronLayout,
    rank: int,
    *,
    fused_norms: bool = False,
    grouped_experts: bool = False,
) -> list[Block]:
    """Return the shards of a trainer's rank. Names are as in `megatron_shards`."""
    tp_rank, pp_rank, _ = layout.place(rank)
    width = shape.num_experts // layout.ep
    experts = range(width * layout.ep_rank(rank), width * (layout.ep_rank(rank) + 1))

    def tensors(chunk: int, rows: Iterable[Row]) -> RankShards:
        shards: RankShards = {}
        for row in rows:
            local = f"chunk{chunk}.{row.megatron_te if fused_norms and row.megatron_te else row.megatron}"
            if grouped_experts and row.kind == "expert":
                local = local.replace("local_experts.{e}.", "") + "{e}"
            parts, part = (layout.etp, layout.etp_rank(rank)) if row.kind == "expert" else (layout.tp, tp_rank)
            shards[local] = row.op.megatron(Shard(_hf_names(family, shape, row), local, shape, parts, part))
        return shards

    blocks = []
    for chunk in range(layout.vpp):
        layers = layout.layers_of(shape.num_layers, pp_rank, chunk)
        is_first = pp_rank == 0 and chunk == 0
        is_last = pp_rank == layout.pp - 1 and chunk == layout.vpp - 1
        once = [family.embedding] if is_first and family.has_heads else []
        once += [row for row in family.rows if (row.where == "first" and is_first) or (row.where == "last" and is_last)]
        if (
            is_last and family.has_heads and not (shape.tied and is_first)
        ):  # otherwise the embedding serves as the output layer
            once.append(family.output)
        blocks += _blocks(family, shape, once, partial(tensors, chunk), layers, experts)
    return blocks


def engine_blocks(family: Family, shape: ModelShape, layout: EngineLayout, rank: int) -> list[Block]:
    """Return the shards of a rank's SGLang process, under its names; empty if the rank serves no engine."""
    if rank >= layout.world_size:
        return []
    family = served_family(family, shape)
    once = [family.embedding, *family.rows_of("model", shape)]
    if not (shape.tied and family.engine_ties):
        once.append(family.output)
    tp_rank, width = rank % layout.tp, layout.tp // layout.ep  # width: number of ranks that split an expert
    first = shape.num_experts // layout.ep * (tp_rank // width)

    def tensors(rows: Iterable[Row]) -> RankShards:
        shards: RankShards = {}
        for row in rows:
            local, parts = row.engine or row.hf[0], width if row.kind == "expert" else layout.tp
            tensor = row.op.engine(Shard(_hf_names(family, shape, row), local, shape, parts, tp_rank % parts))
            shards[local] = shards[local].above(tensor) if local in shards else tensor
        return shards

    experts = range(first, first + shape.num_experts // layout.ep)
    return _blocks(family, shape, once, tensors, range(shape.num_layers), experts)


def hf_blocks(family: Family, shape: ModelShape) -> list[Block]:
    """Return whole Hugging Face tensors under their own names."""

    def tensors(rows: Iterable[Row]) -> RankShards:
        pairs = (pair for row in rows for pair in zip(row.hf, row.op.hf_shapes(shape), strict=True))
        return {name: alone(whole(name, size), name) for name, size in pairs}

    once = [*family.heads(shape), *family.rows_of("model", shape)]
    return _blocks(family, shape, once, tensors, range(shape.num_layers), range(shape.num_experts))


def _blocks(
    family: Family,
    shape: ModelShape,
    once: list[Row],
    tensors: Callable[[Iterable[Row]], RankShards],
    layers: range,
    experts: range,
) -> list[Block]:
    """Return the blocks of `tensors(rows)`: once per model, once per layer, and once per expert."""
    blocks = [Block("model", ONCE, ONCE, tensors(once))]
    for span, run in shape.spans(layers):
        blocks.append(Block("layer", run, ONCE, tensors(family.rows_of("layer", shape, span)), layers.start))
        blocks.append(Block("expert", run, experts, tensors(family.rows_of("expert", shape, span)), layers.start))
    return [block for block in blocks if block.tensors]


def _hf_names(family: Family, shape: ModelShape, row: Row) -> tuple[str, ...]:
    """Return the names of a row's Hugging Face tensors. A tied output layer uses the embedding's."""
    return family.embedding.hf if row is family.output and shape.tied else row.hf
