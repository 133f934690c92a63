"""The subject of a plan: the config, the model's shape and the machine, and figures derived from them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, floor
from typing import Any, Literal, NamedTuple

from grpo_mega.checkpoint_io.slices import item_bytes
from grpo_mega.cli.checks.machine import ASSUMED, Assumptions, Card, Machine
from grpo_mega.cli.checks.model import Model
from grpo_mega.cli.planner.state import unseen_pairs
from grpo_mega.config import Config, PrecisionConfig
from grpo_mega.config.base import tokens_on_rank
from grpo_mega.distributed.kernels import length_multiple
from grpo_mega.weights.derived import adapter_family, sends_adapter
from grpo_mega.weights.families import family_of
from grpo_mega.weights.layout import EngineLayout, MegatronLayout, megatron_layout
from grpo_mega.weights.spec import Family, ModelShape, round_up


class Batch(NamedTuple):
    samples: Figure  # per step
    tokens: Figure  # per step, prompts included
    micro_batches: Figure  # per rank and optimizer step, if samples have mean length
    most_micro_batches: Figure  # per rank and optimizer step, if all samples have the maximum length
    micro_batch_tokens: Figure  # mean per rank
    bubble: Figure  # share of an update in which a pipeline stage is idle


@dataclass(frozen=True)
class PlannedJob:
    """A config that breaks no rule, on a number of GPUs."""

    config: Config
    shape: ModelShape
    experts_per_token: int  # 0 for a dense model
    card: Card
    world_size: int  # all ranks: trainers first, then engines
    gpus_per_node: int
    mean_prompt: float  # tokens
    mean_response: float
    uses_te: bool = True  # Transformer Engine's layers; if False, or on a CPU, Megatron's local layers
    assumed: Assumptions = ASSUMED
    teachers: tuple[tuple[ModelShape, int], ...] = ()  # teachers in the policy's layout, as (shape, experts per token)

    def __post_init__(self) -> None:
        if self.card.is_cpu:
            object.__setattr__(self, "uses_te", False)

    @property
    def groups_experts(self) -> bool:
        """Return True if one module computes all experts of a layer."""
        return self.uses_te and self.config.model.grouped_experts is not False

    @property
    def family(self) -> Family:
        return family_of(self.shape.model_type)

    @property
    def trained_family(self) -> Family:
        """Return the table of what trains: the model, or with model.lora its adapter."""
        lora = self.config.model.lora
        return self.family if lora is None else adapter_family(self.family, self.shape, lora.rank, lora.targets)

    @property
    def sends_adapter(self) -> bool:
        """Return True if syncs send only the adapter of model.lora."""
        return sends_adapter(self.config.model.lora, self.config.sync, self.config.rollout, self.shape)

    @property
    def is_separate(self) -> bool:
        return self.config.rollout.is_separate

    @property
    def num_engine_ranks(self) -> int:
        """Return the number of ranks that generate. With colocated engines all ranks do."""
        return self.config.layout.engine_ranks or self.world_size

    @property
    def first_engine_rank(self) -> int:
        return self.world_size - self.num_engine_ranks

    @cached_property
    def layout(self) -> MegatronLayout:
        """Return the layout of the ranks that train."""
        return megatron_layout(self.config.layout, self.world_size - self.config.layout.engine_ranks)

    def chunks(self, pp_rank: int) -> list[range]:
        """Return the layers of each model chunk of a pipeline stage."""
        layout = self.layout
        return [layout.layers_of(self.shape.num_layers, pp_rank, chunk) for chunk in range(layout.vpp)]

    def num_layers(self, pp_rank: int) -> int:
        """Return the number of layers of a pipeline stage."""
        return sum(map(len, self.chunks(pp_rank)))

    def num_moe_layers(self, pp_rank: int) -> int:
        """Return the number of a stage's layers with experts."""
        has_experts = bool(self.shape.num_experts)
        return has_experts * sum(layer >= self.shape.num_dense for c in self.chunks(pp_rank) for layer in c)

    @property
    def engine_layout(self) -> EngineLayout:
        rollout = self.config.rollout
        return EngineLayout(rollout.tp, self.num_engine_ranks // rollout.tp, rollout.ep)

    @property
    def itemsize(self) -> int:
        """Return the bytes per weight."""
        return item_bytes(self.config.model.resolved_dtype)

    @property
    def engine_itemsize(self) -> int:
        """Return the bytes per weight and per cache element of an engine."""
        return item_bytes(self.config.engine_dtype)

    @property
    def num_nodes(self) -> int:
        return -(-self.world_size // self.gpus_per_node)

    @property
    def machine(self) -> Machine:
        """Return the machines for the rules of a job."""
        return Machine(self.world_size, self.gpus_per_node, None if self.card.is_cpu else self.card)

    @property
    def ranks_per_node(self) -> int:
        return min(self.world_size, self.gpus_per_node)

    @property
    def is_served(self) -> bool:
        """Return True if the engine is SGLang, in separate processes."""
        return self.config.rollout.is_served

    @property
    def takes_turns(self) -> bool:
        """Return True if policy and engine take turns on the device's memory; sleep=auto ends this once both fit."""
        return not self.card.is_cpu and self.is_served and not self.is_separate and self.config.rollout.sleep != "never"

    @property
    def keeps_host_copies(self) -> bool:
        """Return True if the policy's weights and optimizer state move to the host. The embedded engine stays on the
        device.
        """
        is_asked = self.config.rollout.sleep == "always" and not self.is_separate
        return self.takes_turns or (is_asked and not self.card.is_cpu)

    def of_teachers(self) -> list[PlannedJob]:
        """Return one setup per teacher, for its forward pass."""
        setups = []
        for shape, experts in self.teachers:
            changes: dict[str, object] = {"layers_per_chunk": None, "dp": self.layout.dp}
            changes |= {} if shape.num_experts else {"ep": 1, "etp": 1}
            layout = self.config.layout.model_copy(update=changes)
            whole = self.config.model.model_copy(update={"lora": None})
            config = self.config.model_copy(update={"precision": PrecisionConfig(), "layout": layout, "model": whole})
            setups.append(replace(self, shape=shape, experts_per_token=experts, teachers=(), config=config))
        return setups

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Return the parts of a layer that selective recomputation recomputes."""
        return self.config.model.recomputed(uses_te=self.uses_te)

    @property
    def share_recomputed(self) -> float:
        """Return the share of the largest stage's layers that are recomputed whole."""
        if self.config.model.recompute != "full":
            return 0.0
        pp_rank = max(range(self.layout.pp), key=self.num_layers)
        return sum(map(self.num_recomputed, self.chunks(pp_rank))) / self.num_layers(pp_rank)

    def num_recomputed(self, chunk: range) -> int:
        """Return the number of a chunk's layers that are recomputed whole."""
        model = self.config.model
        return min(len(chunk), model.recompute_num_layers or len(chunk)) if model.recompute == "full" else 0

    @property
    def has_reference(self) -> bool:
        return self.config.algorithm.kl_beta > 0

    @property
    def copies_reference(self) -> bool:
        """Return True if the reference has separate weights. With model.lora it is the base."""
        return self.has_reference and self.config.model.lora is None

    @property
    def layers_in_fp8(self) -> range:
        """Return the model's layers that compute in FP8."""
        precision = self.config.precision
        end = self.shape.num_layers - precision.last_layers_bf16 if precision.fp8 else 0
        return range(precision.first_layers_bf16, end)

    @property
    def sequence_parts(self) -> int:
        """Return the number of parts into which sequence parallelism splits the tensors between layers."""
        return self.layout.tp if self.config.layout.sequence_parallel else 1

    @property
    def micro_batch_tokens(self) -> int:
        """Return the tokens of the longest micro-batch on one rank."""
        multiple = math.lcm(length_multiple(self.config.precision, self.config.layout), 1 if self.layout.cp == 1 else 2)
        return round_up(self.config.batch.tokens_per_micro_batch, multiple)

    @property
    def longest_sample(self) -> int:
        return self.config.data.max_prompt_length + self.config.rollout.max_response_length

    @property
    def longest_on_rank(self) -> int:
        """Return the tokens of the longest sample on one rank."""
        return tokens_on_rank(self.longest_sample, self.layout.cp)

    @property
    def keys_and_values(self) -> int:
        """Return the elements per token of a layer's keys and values on one rank; for latents, after the
        up-projection.
        """
        shape, tp = self.shape, self.layout.tp
        keys = max(shape.kv // tp, shape.head_dim)
        return keys + (shape.v // tp if shape.kv_lora else keys)

    @property
    def mean_sample(self) -> float:
        return self.mean_prompt + self.mean_response

    @property
    def mean_seen(self) -> float:
        """Return the number of tokens that a token sees on average: half of its sample, fewer with sliding windows."""
        return self.mean_sample / 2 - unseen_pairs(self.shape, self.mean_sample) / self.mean_sample

    @property
    def num_passes(self) -> tuple[int, int]:
        """Return the number of forward and backward passes (updates) and of forward-only passes (log-probs) per
        step.
        """
        return self.config.batch.epochs, int(self.config.needs_old_logprobs) + int(self.has_reference)

    @cached_property
    def batch(self) -> Batch:
        config, pp, vpp, dp, cp = self.config, self.layout.pp, self.layout.vpp, self.layout.dp, self.layout.cp
        mean_prompt, mean_response, longest = self.mean_prompt, self.mean_response, self.longest_on_rank
        mini_batches, budget, fill = (
            config.batch.mini_batches,
            config.batch.tokens_per_micro_batch,
            self.assumed.packing_fill,
        )
        rounds = pp if vpp > 1 else 1
        samples = config.batch.prompts_per_step * config.algorithm.group_size
        tokens = samples * (mean_prompt + mean_response)
        micro_batches = ceil(max(tokens / mini_batches / (dp * cp * budget * fill), 1e-9) / rounds) * rounds
        most = ceil(ceil(samples / mini_batches) / (dp * floor(budget / longest)) / rounds) * rounds
        return Batch(
            Figure("samples per step", samples, ""),
            Figure("tokens per step", tokens, "tokens"),
            Figure("micro-batches per rank", micro_batches, ""),
            Figure("micro-batches per rank, at most", most, ""),
            Figure("tokens per micro-batch", tokens / (mini_batches * dp * cp * micro_batches), "tokens"),
            Figure("pipeline bubble", (pp - 1) / (vpp * micro_batches + pp - 1), ""),
        )


def plan_on(card: Card, config: Config, model: Model, machine: Machine) -> PlannedJob:
    """Return a job with assumed mean lengths. Its config must break no rule."""
    return PlannedJob(
        config=config,
        shape=model.shape,
        experts_per_token=model.experts_per_token,
        card=card,
        world_size=machine.world_size,
        gpus_per_node=machine.ranks_per_node,
        mean_prompt=ASSUMED.prompt_fill * config.data.max_prompt_length,
        mean_response=ASSUMED.response_fill * config.rollout.max_response_length,
    )


Unit = Literal["B", "s", "tokens", ""]  # "": a plain number
GIB = 2**30


class Figure(float):
    """A number with the label and the unit under which a plan shows it."""

    label: str
    unit: Unit

    def __new__(cls, label: str, value: float = 0, unit: Unit = "B") -> Figure:
        figure = super().__new__(cls, value)
        figure.label, figure.unit = label, unit
        return figure

    @property
    def gib(self) -> float:
        return self / GIB

    def as_json(self) -> dict[str, Any]:
        return {"label": self.label, "value": float(self), "unit": self.unit}


def total(label: str, parts: Iterable[Figure], unit: Unit = "B") -> Figure:
    """Return the sum of the parts."""
    return Figure(label, sum(parts), unit)
