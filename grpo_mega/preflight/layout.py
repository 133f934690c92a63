"""Rules for `layout` and `rollout`: the number of ranks, how the model is split over trainer and engines, and agents.

A child process imports the functions of rollout.agent and rollout.tools, because user code never runs in the process of
a command or a rank. It also returns the schemas that describe tools to the model.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_mega import user_code
from grpo_mega.config import Config, LayoutConfig, RolloutConfig
from grpo_mega.config.base import divisors
from grpo_mega.config.rollout import BUILT_IN_TOOLS
from grpo_mega.distributed.kernels import Version
from grpo_mega.errors import ConfigError, UserError
from grpo_mega.preflight.precision import SERVED_CAPABILITY, rollout_block_problems
from grpo_mega.rewards.worker import ask_child
from grpo_mega.weights.layout import engine_layout_problems, megatron_layout, megatron_layout_problems
from grpo_mega.weights.spec import ModelShape

CPU_ROWS = 32  # on a CPU SGLang pads the MLP's rows to a multiple of this (DEFAULT_MOE_PADDING_SIZE)


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
    if shape.num_experts and layout.tp > 1 and not layout.sequence_parallel:
        yield f"layout.tp={layout.tp} with an MoE model needs layout.sequence_parallel=true; set it"
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


def window_problems(config: Config, shape: ModelShape) -> Iterator[str]:
    """Yield settings that attention with a sliding window does not support."""
    model = f"for {shape.model_type} with sliding_window={max(shape.windows, default=0)}"
    if shape.windows and config.layout.cp > 1:
        yield f"layout.cp={config.layout.cp}: must be 1 {model}; raise layout.tp or layout.pp instead"
    if shape.windows and config.batch.share_prompts:
        yield f"batch.share_prompts=true: must be left out {model}; remove it"


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
    if rollout.routing_replay and not shape.num_experts:
        yield f"rollout.routing_replay={str(rollout.routing_replay).lower()} needs a model with experts; leave it out"
    if not rollout.is_served:
        return
    for problem in engine_layout_problems(shape, rollout.tp, rollout.ep):
        yield f"rollout.{problem}"
    size, owner = (layout.engine_ranks, "engine ranks") if layout.engine_ranks else (layout.world_size, "ranks")
    if (layout.dp is not None or layout.engine_ranks) and size % rollout.tp:
        legal = ", ".join(str(d) for d in divisors(size) if d <= 64)
        yield f"rollout.tp={rollout.tp} does not divide the job's {size} {owner}; use one of {legal}"


def compiler_problems(rollout: RolloutConfig, compiler: Path | None) -> Iterator[str]:
    """Yield a problem if SGLang on a GPU lacks the compiler that it calls."""
    if rollout.is_served and compiler is None:
        yield (
            "rollout.engine='sglang' needs nvcc on every node, with which SGLang compiles kernels when it starts;"
            " install the CUDA toolkit, or set CUDA_HOME to where it is"
        )


def engine_rank_problems(tp: int, world_size: int, ranks_per_node: int, engine_ranks: int = 0) -> Iterator[str]:
    """Yield problems if engines of `tp` ranks do not fill the last `engine_ranks` ranks (0: all), or would span two
    nodes.
    """
    first, owner = (world_size - engine_ranks, "engine ranks") if engine_ranks else (0, "ranks")
    if (world_size - first) % tp:
        yield f"rollout.tp={tp} does not divide the job's {world_size - first} {owner}; use a divisor of it"
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


def served_card_problems(rollout: RolloutConfig, dtype: str, capability: Version, name: str) -> Iterator[str]:
    """Yield problems of a server on a GPU called `name` that cannot store FP8 blocks as they are sent."""
    if rollout.quantization is None:
        return
    if capability < SERVED_CAPABILITY:
        yield (
            f"rollout.quantization={rollout.quantization!r} needs an L40, H100, H200 or later, found {name}; "
            "leave rollout.quantization out"
        )
    if dtype != "bfloat16":
        yield (
            f"rollout.quantization={rollout.quantization!r} needs rollout.dtype=bfloat16 on a GPU, not {dtype}; set it"
        )


def padding_problems(shape: ModelShape, tp: int) -> Iterator[str]:
    """Yield problems if SGLang would pad the model on a CPU, because a checkpoint's tensors would then not fit."""
    for rows in {shape.moe_ffn or shape.ffn, shape.ffn if shape.num_dense else 0}:
        if rows % (CPU_ROWS * tp):
            yield (
                f"SGLang pads an MLP of {rows} rows on a CPU, where rollout.tp={tp} wants a multiple of"
                f" {CPU_ROWS * tp}; use rollout.engine=embedded, or another model"
            )
    if shape.num_kv_heads % tp:
        yield (
            f"SGLang pads {shape.num_kv_heads} key-value heads on a CPU, where rollout.tp={tp} does not divide them; "
            "use a divisor of them, or rollout.engine=embedded"
        )


def agent_problems(rollout: RolloutConfig, code_dir: Path | None) -> Iterator[str]:
    """Yield problems of the names, modules, signatures and docstrings of the agent function and the tools."""
    problems = list(_name_problems(rollout, code_dir))
    yield from problems
    if rollout.has_agents and not problems:
        _ask(rollout.agent, rollout.tools, code_dir)


def tool_schemas(rollout: RolloutConfig, code_dir: Path | None) -> list[dict[str, Any]]:
    """Return the JSON schemas of rollout.tools, in order. Raise ConfigError if there is a problem."""
    return _ask(rollout.agent, rollout.tools, code_dir) if rollout.tools else []


def _name_problems(rollout: RolloutConfig, code_dir: Path | None) -> Iterator[str]:
    keys = {name: "rollout.tools" for name in rollout.tools if name not in BUILT_IN_TOOLS}
    for name, key in (keys | ({} if rollout.agent is None else {rollout.agent: "rollout.agent"})).items():
        if not user_code.is_user_name(name):
            built_in = f", or of {', '.join(BUILT_IN_TOOLS)}" if key == "rollout.tools" else ""
            yield f"{key}={name!r}: must be the name of a function{built_in}; write it like {user_code.FORMS}"
            continue
        try:
            user_code.check_exists(name, code_dir)
        except UserError as error:
            yield from (f"{key}={line}" for line in error.lines)


@functools.cache
def _ask(agent: str | None, tools: tuple[str, ...], code_dir: Path | None) -> list[dict[str, Any]]:
    """Return the schemas of the tools. Raise ConfigError with all problems of the agent function and the tools."""
    key, names = "rollout.tools", ", ".join(map(repr, tools))
    if agent is not None:
        key, names = "rollout.agent", repr(agent)
    given = {"agent": agent, "tools": list(tools)}
    answer = ask_child(__name__, given, code_dir, f"{key}={names}")
    if answer["problems"]:
        raise ConfigError(*answer["problems"])
    return list(answer["schemas"])


def report(request: dict[str, Any]) -> None:
    """Import the functions, and print problems and schemas as JSON. What their modules print goes to stderr."""
    output, sys.stdout = sys.stdout, sys.stderr
    code_dir = None if request["code_dir"] is None else Path(request["code_dir"])
    problems: list[str] = []
    schemas: list[dict[str, Any]] = []
    if request["agent"] is not None:
        problems += _problems_of(lambda: check_agent(request["agent"], code_dir), "rollout.agent=")
    for name in request["tools"]:
        problems += _problems_of(lambda name=name: schemas.append(schema_of(name, code_dir)), "rollout.tools=")
    known = [schema["function"]["name"] for schema in schemas]
    problems += [f"rollout.tools: two functions are called {one}; rename one" for one in known if known.count(one) > 1]
    print(json.dumps({"problems": list(dict.fromkeys(problems)), "schemas": schemas}), file=output, flush=True)
    os._exit(0)  # threads of a module must not keep the command waiting


def check_agent(name: str, code_dir: Path | None) -> None:
    """Raise ConfigError unless this is a coroutine function of chat and prompt."""
    function = user_code.load_function(name, code_dir)
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"{name!r}: must be a coroutine function; write `async def run(chat, prompt)`")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"{name!r}: must take chat and prompt ({error}); correct its arguments") from None


def schema_of(name: str, code_dir: Path | None) -> dict[str, Any]:
    """Return the JSON schema of a tool, without its return value. Raise ConfigError if the function has none."""
    from transformers.utils import get_json_schema  # slow

    function = user_code.load_function(BUILT_IN_TOOLS.get(name, name), code_dir)
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # transformers has an exception for each kind of problem
        problem = " ".join(str(error).split())
        raise ConfigError(
            f"{name!r}: has no JSON schema ({problem}); give it type hints, and a docstring with a line per argument"
            " below `Args:`"
        ) from None
    schema["function"].pop("return", None)
    return schema


def _problems_of(check: Any, key: str) -> list[str]:
    try:
        check()
    except UserError as error:
        return [f"{key}{line}" for line in error.lines]
    return []
