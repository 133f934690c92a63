"""Rules for `layout` and `rollout`: the number of ranks, and how the model is split over trainer and engines."""

from collections.abc import Iterator

from grpo_mega.cli.checks.precision import rollout_block_problems
from grpo_mega.config import Config, LayoutConfig, RolloutConfig
from grpo_mega.config.base import divisors
from grpo_mega.weights.layout import engine_layout_problems, megatron_layout, megatron_layout_problems
from grpo_mega.weights.spec import ModelShape


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
            others += f" times {layout.least_dp} for layout.ep={layout.ep}"
        fewer = f"{more - unit} or " if more > unit + num_engines else ""
        less = f" less layout.engine_ranks={num_engines}" if num_engines else ""
        yield (
            f"WORLD_SIZE={world_size}{less} is not a multiple of layout.tp={layout.tp} times"
            f" layout.pp={layout.pp}{others}; start {fewer}{more} processes, or change the layout"
        )


def layout_problems(layout: LayoutConfig, shape: ModelShape) -> Iterator[str]:
    """Yield the reasons why the model cannot be split into the layout."""
    for problem in megatron_layout_problems(shape, megatron_layout(layout, layout.num_trainers)):
        yield f"layout.{problem}"
    heads = shape.num_kv_heads // layout.tp
    if layout.cp_comm_type == "a2a" and heads % layout.cp:
        yield (
            f"layout.cp_comm_type=a2a: must have a cp that divides the {heads} key-value heads of a tensor-parallel"
            f" rank, found layout.cp={layout.cp}; use p2p, or another cp or tp"
        )
    sizes = layout.layers_per_chunk
    if sizes is not None and sum(sizes) != shape.num_layers:
        yield (
            f"layout.layers_per_chunk={list(sizes)} adds up to {sum(sizes)}, but the model has {shape.num_layers}"
            " layers; change an entry or leave it out"
        )


def recompute_problems(config: Config, shape: ModelShape) -> Iterator[str]:
    """Yield the reasons why the model's layers cannot be recomputed as the config says."""
    number, layout = config.model.recompute_num_layers, megatron_layout(config.layout, config.layout.num_trainers)
    if number is not None and not any(megatron_layout_problems(shape, layout)):
        largest = max(layout.chunk_sizes(shape.num_layers))
        if number > largest:
            yield (
                f"model.recompute_num_layers={number}: must be at most the {largest} layers of a model chunk; lower it,"
                " or leave it out to recompute all layers"
            )
    lacking = [part for part in config.model.recompute_modules or () if part.startswith("moe")]
    if lacking and not shape.num_experts:
        yield (
            f"model.recompute_modules={list(config.model.recompute_modules or ())}: {lacking[0]} must be left out for"
            f" {shape.model_type}, which has no experts; remove it"
        )
    precision, kept = config.precision, {"layernorm", "moe_act"} & set(config.model.recompute_modules or ())
    if kept and precision.fp8 is not None and precision.fp8_recipe == "delayed":
        yield (
            f"model.recompute_modules={list(config.model.recompute_modules or ())}: {min(kept)} cannot be recomputed"
            " with precision.fp8_recipe=delayed; use mlp or moe, or another recipe"
        )


def engine_problems(rollout: RolloutConfig, layout: LayoutConfig, shape: ModelShape) -> Iterator[str]:
    """Yield problems of the engine's layout and of the weights that it receives."""
    yield from rollout_block_problems(rollout, layout, shape)
    if not rollout.is_served:
        return
    for problem in engine_layout_problems(shape, rollout.tp, rollout.ep):
        yield f"rollout.{problem}"


def engine_rank_problems(tp: int, world_size: int, ranks_per_node: int, engine_ranks: int = 0) -> Iterator[str]:
    """Yield problems if engines of `tp` ranks do not fill the last `engine_ranks` ranks (0: all), or would span two
    nodes.
    """
    first, owner = (world_size - engine_ranks, "engine ranks") if engine_ranks else (0, "ranks")
    if (size := world_size - first) % tp:
        legal = ", ".join(str(divisor) for divisor in divisors(size) if divisor <= 64)
        yield f"rollout.tp={tp} does not divide the job's {size} {owner}; use one of {legal}"
    elif any(
        leader // ranks_per_node != (leader + tp - 1) // ranks_per_node for leader in range(first, world_size, tp)
    ):
        if not first:
            yield f"rollout.tp={tp} does not divide each node's {ranks_per_node} ranks; use a divisor of it"
            return
        yield (
            f"rollout.tp={tp}: an engine of {tp} ranks would span two nodes of {ranks_per_node} ranks, since it comes"
            f" after {first} trainer ranks; use a smaller rollout.tp, or another number of trainer ranks"
        )
