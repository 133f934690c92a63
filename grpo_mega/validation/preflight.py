"""Checks a config against the files that it names, before any process or device is taken; never imports torch.

Whatever is wrong with the layout for this model, or with a path or name, with the model's files (from their headers), with the
tokenizer or with a row of the data, is a ConfigError or WeightMappingError of one line with the remedy. What needs the
tokenizer itself, the weights' values or the user's code is told by the ranks, before the first step.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from grpo_mega.config import Config, LayoutConfig, ModelConfig, RolloutConfig
from grpo_mega.config.rewards import RewardFunctionConfig, RewardsConfig
from grpo_mega.data.load import check_data
from grpo_mega.errors import ConfigError
from grpo_mega.formats.dcp_read import is_distributed_checkpoint
from grpo_mega.formats.hf_files import check_folder, check_tied
from grpo_mega.formats.megatron_weights import MegatronWeights
from grpo_mega.hardware.fp8 import (
    bf16_layer_problems,
    check_blocks,
    check_cuda,
    check_moments,
    check_transformer_engine,
    rollout_block_problems,
)
from grpo_mega.hardware.kernels import FUSED_PACKED, check_apex, check_attention, cuda_version, transformer_engine_version
from grpo_mega.paths import CONFIG_FILE, FINISHED
from grpo_mega.rewards import registry
from grpo_mega.validation.architecture import check_architecture, position_problem
from grpo_mega.validation.tokenizer import check_tokenizer_files
from grpo_mega.weights.families import family_of
from grpo_mega.weights.layout import MegatronLayout, check_engine_layout, megatron_layout_problems
from grpo_mega.weights.spec import ModelShape, read_config


def check(config: Config) -> None:
    """Raises ConfigError or WeightMappingError in one line for the first thing that cannot work."""
    check_rewards(config.rewards)
    shape = check_model(config.model)
    for problem in position_problems(config, read_config(config.model.path)):
        raise ConfigError(problem)
    check_layout(config.layout, shape)
    check_apex()
    check_transformer_engine(config.precision, transformer_engine_version())
    check_cuda(config.precision, cuda_version())
    check_moments(config.optimizer, transformer_engine_version())
    for problem in bf16_layer_problems(config.precision, config.layout, shape.num_layers):
        raise ConfigError(problem)
    if config.device == "cuda":  # what its card lacks only the ranks can tell
        check_attention(
            config.model.dtype,
            FUSED_PACKED,
            "cuda",
            transformer_engine=transformer_engine_version(),
            flash_attn=None,
        )
    check_blocks(config.precision, config.layout, shape)
    check_engine(config.rollout, config.layout, shape)
    check_tokenizer_files(config.model.path, shape.vocab)
    check_data(config.data, config.batch.prompts_per_step, config.rollout)


def check_model(model: ModelConfig) -> ModelShape:
    """The shape of the model, whose files are all there and whole. Raises ConfigError or WeightMappingError."""
    shape = check_model_config(model)
    if model.init == "checkpoint":
        check_weights(model.path, shape)
    return shape


def check_model_config(model: ModelConfig) -> ModelShape:
    """The shape that config.json states, of a model that can be trained. Raises ConfigError or WeightMappingError."""
    if not model.path.is_dir():
        raise ConfigError(f"model.path={model.path} is not a folder; name the folder of a Hugging Face checkpoint")
    if not (model.path / "config.json").is_file():
        raise ConfigError(f"model.path={model.path} holds no config.json; {_what_to_name(model.path)}")
    return check_fields(read_config(model.path))


def _what_to_name(folder: Path) -> str:
    """In place of a folder that is no model's; a run's leads to one."""
    if not (folder / CONFIG_FILE).is_file():
        return "name the folder of a Hugging Face checkpoint"
    if (folder / FINISHED / "config.json").is_file():
        return f"it is a run's folder, so name its policy, {folder / FINISHED}"
    return f"it is a run's folder, so write its policy to a folder by `grpo-mega export {folder} OUT`, and name that"


def check_fields(fields: dict[str, Any]) -> ModelShape:
    """The same, of the contents of a config.json."""
    shape = ModelShape.from_hf_config(fields)
    family_of(shape.model_type)
    check_architecture(fields)
    return shape


def position_problems(config: Config, fields: dict[str, Any]) -> Iterator[str]:
    """Yield why the model has no positions for the longest sample."""
    problem = position_problem(fields, config.data.max_prompt_length + config.rollout.max_response_length)
    if problem is not None:
        yield problem


def check_weights(folder: Path, shape: ModelShape) -> None:
    """Raises WeightMappingError for a folder whose weights are not whole, or not the model's."""
    family = family_of(shape.model_type)
    if is_distributed_checkpoint(folder):
        MegatronWeights(folder, family, shape).close()
    else:
        check_folder(folder, family.hf_tensors(shape))
        if shape.tied:
            check_tied(folder, family.output.hf[0], family.embedding.hf[0])


def check_rewards(rewards: RewardsConfig) -> None:
    """Raises ConfigError for a reward function that is not known or whose module cannot be found, and for options that a
    built-in one does not take; imports nothing of the user's."""
    for function in rewards.functions:
        check_reward(function, rewards)


def check_reward(function: RewardFunctionConfig, rewards: RewardsConfig) -> None:
    """The same, of one function."""
    name = function.name
    registry.check(name, function.options, rewards.step_splitter, rewards.deadline_s)
    if name not in registry.BUILT_IN:
        module = name.rpartition(".")[0]
        if not _can_find(module):
            raise ConfigError(
                f"reward function {name!r}: there is no module {module} to import; "
                "check the name, and set PYTHONPATH to the folder that holds it"
            )


def check_layout(layout: LayoutConfig, shape: ModelShape) -> None:
    """Raises ConfigError for a layout into which the model cannot be cut."""
    for problem in layout_problems(layout, shape):
        raise ConfigError(problem)


def layout_problems(layout: LayoutConfig, shape: ModelShape) -> Iterator[str]:
    """Every rule that the layout breaks, a line each with its remedy."""
    yield from megatron_layout_problems(
        shape,
        MegatronLayout(
            tp=layout.tp, pp=layout.pp, vpp=layout.vpp or 1, dp=layout.dp or layout.ep, ep=layout.ep, order=layout.order
        ),
    )
    if shape.num_experts and layout.tp > 1 and not layout.sequence_parallel:
        yield f"layout.tp={layout.tp} with a mixture of experts needs layout.sequence_parallel=true; set it"
    sizes = layout.layers_per_chunk
    if sizes is not None and sum(sizes) != shape.num_layers:
        yield (
            f"layout.layers_per_chunk={list(sizes)} adds up to {sum(sizes)}, but the model has {shape.num_layers} layers; "
            "change an entry or leave it out"
        )


def world_size_problems(layout: LayoutConfig, world_size: int) -> Iterator[str]:
    """Why so many ranks cannot be arranged as the layout says."""
    unit = layout.tp * layout.pp * layout.ep
    if layout.dp is not None and world_size != layout.world_size:
        yield (
            f"WORLD_SIZE={world_size} contradicts layout.tp={layout.tp}, pp={layout.pp}, dp={layout.dp}; "
            f"start {layout.world_size} processes, or leave layout.dp out"
        )
    elif world_size == 0 or world_size % unit:
        more = (world_size // unit + 1) * unit
        experts = f" times layout.ep={layout.ep}" if layout.ep > 1 else ""
        fewer = f"{more - unit} or " if more > unit else ""
        yield (
            f"WORLD_SIZE={world_size} is not a multiple of layout.tp={layout.tp} times layout.pp={layout.pp}{experts}; "
            f"start {fewer}{more} processes, or change the layout"
        )


def check_engine(rollout: RolloutConfig, layout: LayoutConfig, shape: ModelShape) -> None:
    """Raises ConfigError for an engine that is not installed, or into which model and ranks cannot be cut."""
    if rollout.engine == "sglang" and importlib.util.find_spec("sglang") is None:
        raise ConfigError(
            "rollout.engine='sglang', but SGLang is not installed; see grpo_mega/rollout/sglang/README.md, or use embedded"
        )
    for problem in engine_problems(rollout, layout, shape):
        raise ConfigError(problem)


def engine_problems(rollout: RolloutConfig, layout: LayoutConfig, shape: ModelShape) -> Iterator[str]:
    """Every rule that the engine's own layout, and what it is sent, breaks, a line each with its remedy."""
    yield from rollout_block_problems(rollout, layout, shape)
    if rollout.engine == "embedded":
        return
    try:
        check_engine_layout(shape, rollout.tp)
    except ConfigError as error:
        yield str(error)
    if layout.dp is not None and layout.world_size % rollout.tp:
        yield (
            f"rollout.tp={rollout.tp} does not divide the job's {layout.world_size} ranks; use {_divisors(layout.world_size)}"
        )


def engine_rank_problems(tp: int, world_size: int, ranks_per_node: int) -> Iterator[str]:
    """Why engines of `tp` ranks do not fill the job, or would lie across nodes."""
    for ranks, what in ((world_size, "the job's"), (ranks_per_node, "each node's")):
        if ranks % tp:
            yield f"rollout.tp={tp} does not divide {what} {ranks} ranks; use a divisor of it"


def _can_find(module: str) -> bool:
    """Whether a module could be imported, without importing anything of it."""
    path: list[str] | None = None
    parts = module.split(".")
    for number, part in enumerate(parts):
        # By its last name: for folders without __init__.py a full one is looked up among what was imported.
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            # Another finder, such as that of an editable installation, may know a top-level module.
            return number == 0 and importlib.util.find_spec(part) is not None
        if spec.submodule_search_locations is None:
            return number == len(parts) - 1
        path = list(spec.submodule_search_locations)
    return True


def _divisors(n: int) -> str:
    small = [str(d) for d in range(1, min(n, 64) + 1) if n % d == 0]
    return f"one of {', '.join(small)}"
