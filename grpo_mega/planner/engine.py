"""The engine's side of a device: its weights, its KV cache and how many tokens that holds, and what else it keeps."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from grpo_mega.hardware.cards import Card
from grpo_mega.planner.figures import GIB, Figure, figure
from grpo_mega.planner.setup import Setup
from grpo_mega.weights.layout import EngineLayout, engine_blocks, hf_blocks
from grpo_mega.weights.spec import Family, ModelShape, num_blocks

MIB = 2**20


@dataclass(frozen=True)
class EngineMemory:
    """Of one device."""

    weights: Figure
    cache: Figure
    cache_tokens: Figure  # that an engine holds at once
    extra: Figure  # beyond these while it samples
    asleep: Figure  # what it keeps while it sleeps
    concurrent: Figure  # sequences of the mean length that it decodes at once
    fraction: float  # of the device, for weights and cache; 0 where it does not apply
    shortfall: str | None  # why it cannot serve


def engine_memory(setup: Setup) -> EngineMemory:
    return _served(setup) if setup.is_served else _embedded(setup)


@dataclass(frozen=True)
class Elements:
    """Of an engine's rank."""

    plain: int
    linear: int  # of the linear layers, which rollout.quantization is for
    blocks: int  # of FP8, in the linear layers


@functools.cache
def elements_of(family: Family, shape: ModelShape, layout: EngineLayout | None) -> Elements:
    """Exact; without a layout of whole Hugging Face tensors."""
    linear_names = family.linear_tensors()
    plain = linear = num_scales = 0
    for block in engine_blocks(family, shape, layout, 0) if layout else hf_blocks(family, shape):
        places = len(block.layers) * len(block.experts)
        for tensor in block.tensors.values():
            if any(piece.box.tensor in linear_names for piece in tensor.pieces):
                linear += places * math.prod(tensor.shape)
                num_scales += places * sum(math.prod(num_blocks(piece.box.shape)) for piece in tensor.pieces)
            else:
                plain += places * math.prod(tensor.shape)
    return Elements(plain, linear, num_scales)


def received_weights(setup: Setup, label: str) -> Figure:
    """What a rank of the engine is sent in a sync, all of it."""
    layout = EngineLayout(setup.config.rollout.tp, 1) if setup.is_served else None
    found = elements_of(setup.family, setup.shape, layout)
    if setup.config.rollout.quantization is None:
        return figure(label, "B", "elements * b", trust="exact", elements=found.plain + found.linear, b=setup.itemsize)
    return figure(
        label,
        "B",
        "plain * b + linear + 4 * blocks",  # FP8 values, and a float32 scale for each block of 128 x 128
        trust="exact",
        plain=found.plain,
        b=setup.itemsize,
        linear=found.linear,
        blocks=found.blocks,
    )


def weight_elements(family: Family, shape: ModelShape, layout: EngineLayout | None) -> int:
    """Of one rank of the engine, exact; None: whole Hugging Face tensors."""
    found = elements_of(family, shape, layout)
    return found.plain + found.linear


def cache_bytes_per_token(setup: Setup) -> int:
    """On one device; with fewer key-value heads than ranks each holds one."""
    shape, tp = setup.shape, setup.config.rollout.tp if setup.is_served else 1
    heads = max(1, shape.num_kv_heads // tp)
    return 2 * shape.num_layers * heads * shape.head_dim * setup.itemsize


def default_fraction(card: Card, tp: int) -> float:
    """SGLang 0.5.21's own mem_fraction_static (srt/arg_groups/memory_hook.py): what its reserve leaves."""
    capacity = card.memory_gib * 1024
    chunk = 8192 if capacity < 160 * 1024 else 16384
    graph_batch = 256 if tp < 4 and capacity < 160 * 1024 else 512
    reserve = max(512 + 1.5 * chunk + tp / 8 * 1024 + 2 * graph_batch, 10 * 1024)
    return round((capacity - reserve) / capacity, 3)


def _served(setup: Setup) -> EngineMemory:
    rollout, card, assumed = setup.config.rollout, setup.card, setup.assumed
    weights = received_weights(setup, "engine weights")
    per_token = cache_bytes_per_token(setup)
    fraction = rollout.memory_fraction or default_fraction(card, rollout.tp)
    if rollout.cache_tokens is not None:
        cache = figure("KV cache", "B", "tokens * per_token", tokens=rollout.cache_tokens, per_token=per_token)
    else:
        # It starts before the policy: what it finds free is the device less two contexts.
        cache = figure(
            "KV cache",
            "B",
            "max(0, fraction * (capacity - 2 * context) - weights)",
            fraction=fraction,
            capacity=card.memory_gib * GIB,
            context=assumed.context_gib * GIB,
            weights=weights,
        )
    tokens = figure("tokens in a KV cache", "tokens", "floor(cache / per_token)", cache=cache, per_token=per_token)
    extra = figure(
        "engine's working memory",
        "B",
        "prefill * (4 * hidden + 3 * ffn / tp) * b + 3 * concurrent * vocab * 4",
        prefill=8192 if card.memory_gib < 160 else 16384,
        hidden=setup.shape.hidden,
        ffn=setup.shape.moe_ffn * setup.experts_per_token or setup.shape.ffn,
        tp=rollout.tp,
        b=setup.itemsize,
        concurrent=rollout.max_concurrent,
        vocab=setup.shape.vocab,
    )
    asleep = figure("engine's graphs", "B", "graphs", graphs=assumed.graph_gib * GIB)
    shortfall = None
    if tokens.value < setup.longest_sample:
        shortfall = (
            f"the engine's KV cache holds {int(tokens.value)} tokens, but the longest sample has {setup.longest_sample}; "
            "raise rollout.tp or rollout.memory_fraction"
        )
    return EngineMemory(weights, cache, tokens, extra, asleep, _concurrent(setup, tokens), fraction, shortfall)


def _embedded(setup: Setup) -> EngineMemory:
    """transformers' model in the trainer's process; its cache lasts while it samples."""
    weights = figure(
        "engine weights",
        "B",
        "elements * b",
        trust="exact",
        elements=weight_elements(setup.family, setup.shape, None),
        b=setup.itemsize,
    )
    cache = figure(
        "KV cache",
        "B",
        "concurrent * longest * per_token",
        concurrent=setup.config.rollout.max_concurrent,
        longest=setup.longest_sample,
        per_token=cache_bytes_per_token(setup),
    )
    tokens = figure(
        "tokens in a KV cache",
        "tokens",
        "concurrent * longest",
        concurrent=setup.config.rollout.max_concurrent,
        longest=setup.longest_sample,
    )
    extra = figure(
        "engine's working memory",
        "B",
        "2 * cache / layers + 2 * concurrent * vocab * 4",  # a layer's cache grows by copying
        cache=cache,
        layers=setup.shape.num_layers,
        concurrent=setup.config.rollout.max_concurrent,
        vocab=setup.shape.vocab,
    )
    nothing = figure("engine's graphs", "B", "0")
    return EngineMemory(weights, cache, tokens, extra, nothing, _concurrent(setup, tokens), 0.0, None)


def _concurrent(setup: Setup, tokens: Figure) -> Figure:
    return figure(
        "sequences decoded at once",
        "",
        "max(1, min(limit, floor(tokens / mean), sequences))",
        limit=setup.config.rollout.max_concurrent,
        tokens=tokens,
        mean=setup.mean_sample,
        sequences=sequences_per_engine(setup),
    )


def sequences_per_engine(setup: Setup) -> int:
    """Of a step, on the engine that gets most; a prompt's group stays together."""
    num_engines = setup.engine_layout.num_engines
    num_begun = setup.config.rollout.num_begun(setup.config.batch.prompts_per_step)
    return -(-num_begun // num_engines) * setup.config.algorithm.group_size
