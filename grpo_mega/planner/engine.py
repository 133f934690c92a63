"""The engine's memory on a device: its weights, its KV cache with the tokens that it holds, and what else it keeps."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from math import floor, prod

from grpo_mega.hardware.cards import Card
from grpo_mega.planner.figures import GIB, Figure, Number, formula, product
from grpo_mega.planner.setup import Setup
from grpo_mega.weights.layout import EngineLayout, engine_blocks, hf_blocks
from grpo_mega.weights.spec import Family, ModelShape, num_blocks


@dataclass(frozen=True)
class EngineMemory:
    """Memory of one device of an engine."""

    weights: Figure
    cache: Figure
    cache_tokens: Figure  # that an engine holds at once
    extra: Figure  # beyond these while it generates
    asleep: Figure  # what it keeps while it sleeps
    concurrent: Figure  # sequences of the mean length that it decodes at once
    shortfall: str | None = None  # the reason why it cannot serve


def engine_memory(setup: Setup) -> EngineMemory:
    return _served(setup) if setup.is_served else _embedded(setup)


@dataclass(frozen=True)
class Elements:
    """Numbers of elements that a rank of an engine holds."""

    plain: int
    linear: int  # of the linear layers, which rollout.quantization applies to
    blocks: int  # of FP8, in the linear layers

    @property
    def total(self) -> int:
        return self.plain + self.linear


@functools.cache
def elements_of(family: Family, shape: ModelShape, layout: EngineLayout | None) -> Elements:
    """Return the exact elements of an engine's rank; without a layout, those of whole Hugging Face tensors."""
    linear_names = family.linear_tensors()
    plain = linear = num_scales = 0
    for block in engine_blocks(family, shape, layout, 0) if layout else hf_blocks(family, shape):
        places = len(block.layers) * len(block.experts)
        for tensor in block.tensors.values():
            if any(piece.box.tensor in linear_names for piece in tensor.pieces):
                linear += places * prod(tensor.shape)
                num_scales += places * sum(prod(num_blocks(piece.box.shape)) for piece in tensor.pieces)
            else:
                plain += places * prod(tensor.shape)
    return Elements(plain, linear, num_scales)


def received_weights(setup: Setup, label: str) -> Figure:
    """Return what a rank of the engine is sent in a sync, all of it."""
    layout = EngineLayout(setup.config.rollout.tp, 1) if setup.is_served else None
    held = elements_of(setup.family, setup.shape, layout)
    if setup.config.rollout.quantization is None:
        return product(label, "B", "exact", elements=held.total, b=setup.itemsize)
    return replace(_quantised_weights(held.plain, setup.itemsize, held.linear, held.blocks), label=label)


def cache_bytes_per_token(setup: Setup) -> int:
    """Return the bytes per token on one device; with fewer key-value heads than ranks each rank holds one head."""
    shape, tp = setup.shape, setup.config.rollout.tp if setup.is_served else 1
    heads = max(1, shape.num_kv_heads // tp)
    return 2 * shape.num_layers * heads * shape.head_dim * setup.itemsize


def default_fraction(card: Card, tp: int) -> float:
    """Return SGLang 0.5.21's default of mem_fraction_static (srt/arg_groups/memory_hook.py): what its reserve leaves."""
    capacity = card.memory_gib * 1024
    chunk = 8192 if capacity < 160 * 1024 else 16384
    graph_batch = 256 if tp < 4 and capacity < 160 * 1024 else 512
    reserve = max(512 + 1.5 * chunk + tp / 8 * 1024 + 2 * graph_batch, 10 * 1024)
    return round((capacity - reserve) / capacity, 3)


def _served(setup: Setup) -> EngineMemory:
    rollout, card, assumed, shape = setup.config.rollout, setup.card, setup.assumed, setup.shape
    weights = received_weights(setup, "engine weights")
    per_token = cache_bytes_per_token(setup)
    fraction = rollout.memory_fraction or default_fraction(card, rollout.tp)
    if rollout.cache_tokens is not None:
        cache = product("KV cache", "B", tokens=rollout.cache_tokens, per_token=per_token)
    else:
        cache = _cache_of_what_is_free(fraction, card.memory_gib * GIB, assumed.context_gib * GIB, weights.value)
    tokens = _cached_tokens(cache.value, per_token)
    prefill = 8192 if card.memory_gib < 160 else 16384
    ffn = shape.moe_ffn * setup.experts_per_token or shape.ffn
    extra = _served_work(prefill, shape.hidden, ffn, rollout.tp, setup.itemsize, rollout.max_concurrent, shape.vocab)
    asleep = product("engine's graphs", "B", graphs=assumed.graph_gib * GIB)
    shortfall = None
    if tokens.value < setup.longest_sample:
        shortfall = (
            f"the engine's KV cache holds {int(tokens.value)} tokens, but the longest sample has {setup.longest_sample}; "
            "raise rollout.tp or rollout.memory_fraction"
        )
    return EngineMemory(weights, cache, tokens, extra, asleep, _concurrent_in(setup, tokens), shortfall)


def _embedded(setup: Setup) -> EngineMemory:
    """Return the memory of transformers' model in the trainer's process; its cache lasts while it generates."""
    shape, concurrent = setup.shape, setup.config.rollout.max_concurrent
    elements = elements_of(setup.family, shape, None).total  # never quantised
    weights = product("engine weights", "B", "exact", elements=elements, b=setup.itemsize)
    longest, per_token = setup.longest_sample, cache_bytes_per_token(setup)
    cache = product("KV cache", "B", concurrent=concurrent, longest=longest, per_token=per_token)
    tokens = product("tokens in a KV cache", "tokens", concurrent=concurrent, longest=longest)
    extra = _embedded_work(cache.value, shape.num_layers, concurrent, shape.vocab)
    nothing = product("engine's graphs", "B")
    return EngineMemory(weights, cache, tokens, extra, nothing, _concurrent_in(setup, tokens))


def _concurrent_in(setup: Setup, tokens: Figure) -> Figure:
    limit = setup.config.rollout.max_concurrent
    return _concurrent(limit, tokens.value, setup.mean_sample, sequences_per_engine(setup))


def sequences_per_engine(setup: Setup) -> int:
    """Return the sequences of a step on the engine that gets most; a prompt's group stays together."""
    num_engines = setup.engine_layout.num_engines
    num_begun = setup.config.rollout.num_begun(setup.config.batch.prompts_per_step)
    return -(-num_begun // num_engines) * setup.config.algorithm.group_size


@formula("engine weights", "B", "exact")
def _quantised_weights(plain: int, b: int, linear: int, blocks: int) -> int:
    # FP8 values, and a float32 scale for each block of 128 x 128.
    return plain * b + linear + 4 * blocks


@formula("KV cache", "B")
def _cache_of_what_is_free(fraction: float, capacity: float, context: float, weights: Number) -> float:
    # The server starts before the policy: free is the device less two contexts.
    return max(0, fraction * (capacity - 2 * context) - weights)


@formula("tokens in a KV cache", "tokens")
def _cached_tokens(cache: Number, per_token: int) -> int:
    return floor(cache / per_token)


@formula("engine's working memory", "B")
def _served_work(prefill: int, hidden: int, ffn: int, tp: int, b: int, concurrent: int, vocab: int) -> float:
    return prefill * (4 * hidden + 3 * ffn / tp) * b + 3 * concurrent * vocab * 4


@formula("engine's working memory", "B")
def _embedded_work(cache: Number, layers: int, concurrent: int, vocab: int) -> float:
    # A layer's cache grows by copying.
    return 2 * cache / layers + 2 * concurrent * vocab * 4


@formula("sequences decoded at once")
def _concurrent(limit: int, tokens: Number, mean: float, sequences: int) -> int:
    return max(1, min(limit, floor(tokens / mean), sequences))
