"""Rules for `layout`: the number of ranks, and how the model is split over them."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_mega.config import Config, LayoutConfig
from grpo_mega.preflight.kernels import PACKED_A2A, as_text, as_version
from grpo_mega.weights.layout import MegatronLayout, megatron_layout_problems
from grpo_mega.weights.spec import ModelShape


def megatron_layout(layout: LayoutConfig, world_size: int) -> MegatronLayout:
    """Return Megatron's layout of `world_size` ranks. Data parallelism gets the ranks that tp, cp and pp leave."""
    return MegatronLayout(
        tp=layout.tp,
        pp=layout.pp,
        vpp=layout.vpp or 1,
        dp=world_size // (layout.tp * layout.cp * layout.pp),
        cp=layout.cp,
        ep=layout.ep,
        order=layout.order,
        layers_per_chunk=layout.layers_per_chunk,
    )


def world_size_problems(layout: LayoutConfig, world_size: int) -> Iterator[str]:
    """Yield the reasons why `world_size` ranks cannot form the layout."""
    unit, num_engines = layout.tp * layout.cp * layout.pp * layout.least_dp, layout.engine_ranks
    cut = f"layout.tp={layout.tp}, pp={layout.pp}" + (f", cp={layout.cp}" if layout.cp > 1 else "")
    num_trainers = world_size - num_engines
    engines = f", engine_ranks={num_engines}" if num_engines else ""
    if layout.dp is not None and world_size != layout.world_size:
        yield (
            f"WORLD_SIZE={world_size} contradicts {cut}, dp={layout.dp}{engines}; "
            f"start {layout.world_size} processes, or leave layout.dp out"
        )
    elif num_trainers <= 0 or num_trainers % unit:
        more = (max(0, num_trainers) // unit + 1) * unit + num_engines
        others = f" times layout.cp={layout.cp}" if layout.cp > 1 else ""
        if layout.least_dp > 1:
            others += (
                f" times layout.ep={layout.ep}" if layout.cp == 1 else f" times {layout.least_dp} for layout.ep={layout.ep}"
            )
        fewer = f"{more - unit} or " if more > unit + num_engines else ""
        less = f" less layout.engine_ranks={num_engines}" if num_engines else ""
        yield (
            f"WORLD_SIZE={world_size}{less} is not a multiple of layout.tp={layout.tp} times layout.pp={layout.pp}{others}; "
            f"start {fewer}{more} processes, or change the layout"
        )


def context_problems(config: Config) -> Iterator[str]:
    """Yield problems of features that Transformer Engine's layers do not compute. Plans for GPUs use these layers, too."""
    if config.layout.cp > 1 and config.model.dtype == "float32":
        yield (
            f"layout.cp={config.layout.cp}: must be 1 with model.dtype=float32 on GPUs with Transformer Engine, whose "
            "context-parallel attention supports only bfloat16; use bfloat16, or raise layout.tp or layout.pp instead"
        )
    if config.batch.share_prompts:
        yield "batch.share_prompts=true: must be left out on GPUs with Transformer Engine; its attention has no such mask"


def exchange_problems(layout: LayoutConfig, version: str | None) -> Iterator[str]:
    """Yield a problem if Transformer Engine of `version` (None: not installed) cannot exchange packed samples like this."""
    if layout.cp > 1 and layout.cp_comm_type == "a2a" and version is not None and as_version(version) < PACKED_A2A:
        yield (
            f"layout.cp_comm_type=a2a: must have Transformer Engine {as_text(PACKED_A2A)} or later for packed samples, found "
            f"{version}; install a newer one, or use p2p"
        )


def layout_problems(layout: LayoutConfig, shape: ModelShape) -> Iterator[str]:
    """Yield the reasons why the model cannot be split into the layout."""
    for problem in megatron_layout_problems(shape, megatron_layout(layout, layout.num_trainers)):
        yield f"layout.{problem}"
    if shape.num_experts and layout.tp > 1 and not layout.sequence_parallel:
        yield f"layout.tp={layout.tp} with an MoE model needs layout.sequence_parallel=true; set it"
    heads = shape.num_kv_heads // layout.tp
    if layout.cp_comm_type == "a2a" and heads % layout.cp:
        yield (
            f"layout.cp_comm_type=a2a: must have a cp that divides the {heads} key-value heads of a tensor-parallel rank, "
            f"found layout.cp={layout.cp}; use p2p, or another cp or tp"
        )
    sizes = layout.layers_per_chunk
    if sizes is not None and sum(sizes) != shape.num_layers:
        yield (
            f"layout.layers_per_chunk={list(sizes)} adds up to {sum(sizes)}, but the model has {shape.num_layers} layers; "
            "change an entry or leave it out"
        )
