"""Memory of the engine on a device: weights, KV cache with its number of tokens, and working memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from math import floor, prod

from grpo_mega.planner.figures import GIB, Number, TracedNumber, figure, product
from grpo_mega.planner.job import PlannedJob
from grpo_mega.preflight.cards import Card
from grpo_mega.weights.layout import EngineLayout, engine_blocks, hf_blocks
from grpo_mega.weights.spec import Family, ModelShape, num_blocks


@dataclass(frozen=True)
class EngineMemory:
    """Memory of one device of an engine."""

    weights: TracedNumber
    cache: TracedNumber
    cache_tokens: TracedNumber  # tokens that one engine's cache holds
    extra: TracedNumber  # working memory while the engine generates
    asleep: TracedNumber  # memory that stays while the engine sleeps
    concurrent: TracedNumber  # sequences of mean length that an engine decodes at once
    shortfall: str | None = None  # reason why the engine cannot serve the longest sample


def engine_memory(setup: PlannedJob) -> EngineMemory:
    return _served(setup) if setup.is_served else _embedded(setup)


@dataclass(frozen=True)
class Elements:
    """Numbers of elements that a rank of an engine holds."""

    plain: int
    linear: int  # elements of linear layers; rollout.quantization applies to them
    blocks: int  # number of FP8 blocks in the linear layers

    @property
    def total(self) -> int:
        return self.plain + self.linear


@functools.cache
def elements_of(family: Family, shape: ModelShape, layout: EngineLayout | None) -> Elements:
    """Return the exact number of elements on an engine's rank; without a layout, of all Hugging Face tensors."""
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


def received_weights(setup: PlannedJob, label: str) -> TracedNumber:
    """Return all bytes that a rank of the engine receives in a sync."""
    layout = replace(setup.engine_layout, num_engines=1) if setup.is_served else None
    held = elements_of(setup.family, setup.shape, layout)
    if setup.config.rollout.quantization is None:
        return product(label, "B", "exact", elements=held.total, b=setup.engine_itemsize)
    plain, b, linear, blocks = held.plain, setup.engine_itemsize, held.linear, held.blocks
    # FP8 values, and a float32 scale for each block of 128 x 128.
    return figure(label, "B", lambda: plain * b + linear + 4 * blocks, "exact")


def cache_bytes_per_token(setup: PlannedJob) -> int:
    """Return the bytes per token on one device. If ranks outnumber key-value heads, each rank holds one head.

    With multi-latent attention SGLang caches the latents, all of them on every rank.
    """
    shape, tp = setup.shape, setup.config.rollout.tp if setup.is_served else 1
    if shape.kv_lora and setup.is_served:
        return shape.num_layers * shape.kv_down * setup.engine_itemsize
    heads = max(1, shape.num_kv_heads // tp)
    return shape.num_layers * heads * (shape.head_dim + (shape.v_dim or shape.head_dim)) * setup.engine_itemsize


def default_fraction(card: Card, tp: int) -> float:
    """Return SGLang 0.5.21's default of mem_fraction_static (srt/arg_groups/memory_hook.py): the share without its reserve."""
    capacity = card.memory_gib * 1024
    chunk = 8192 if capacity < 160 * 1024 else 16384
    graph_batch = 256 if tp < 4 and capacity < 160 * 1024 else 512
    reserve = max(512 + 1.5 * chunk + tp / 8 * 1024 + 2 * graph_batch, 10 * 1024)
    return round((capacity - reserve) / capacity, 3)


def _served(setup: PlannedJob) -> EngineMemory:
    rollout, card, b = setup.config.rollout, setup.card, setup.engine_itemsize
    hidden, vocab = setup.shape.hidden, setup.shape.vocab
    held, per_token = received_weights(setup, "engine weights"), cache_bytes_per_token(setup)
    tp, concurrent = rollout.tp, rollout.max_concurrent
    if rollout.cache_tokens is not None:
        cached = product("KV cache", "B", tokens=rollout.cache_tokens, per_token=per_token)
    else:
        fraction = rollout.memory_fraction or default_fraction(card, tp)
        capacity, context, weights = card.memory_gib * GIB, setup.assumed.context_gib * GIB, held.value
        # The server starts before the policy, so the free memory is the device less two contexts.
        cached = figure("KV cache", "B", lambda: max(0, fraction * (capacity - 2 * context) - weights))
    cache = cached.value
    tokens = figure("tokens in a KV cache", "tokens", lambda: floor(cache / per_token))
    prefill = 8192 if card.memory_gib < 160 else 16384
    ffn = setup.shape.moe_ffn * setup.experts_per_token or setup.shape.ffn
    extra = figure(
        "engine's working memory",
        "B",
        lambda: prefill * (4 * hidden + 3 * ffn / tp) * b + 3 * concurrent * vocab * 4,
    )
    asleep = product("engine's graphs", "B", graphs=setup.assumed.graph_gib * GIB)
    shortfall = None
    if tokens.value < setup.longest_sample:
        shortfall = (
            f"the engine's KV cache holds {int(tokens.value)} tokens, but the longest sample has {setup.longest_sample}; "
            "raise rollout.tp or rollout.memory_fraction"
        )
    return EngineMemory(held, cached, tokens, extra, asleep, _concurrent(setup, tokens.value), shortfall)


def _embedded(setup: PlannedJob) -> EngineMemory:
    """Return the memory of transformers' model in the trainer's process. Its cache exists only while it generates."""
    layers, vocab, concurrent = setup.shape.num_layers, setup.shape.vocab, setup.config.rollout.max_concurrent
    elements = elements_of(setup.family, setup.shape, None).total  # the embedded engine is never quantised
    weights = product("engine weights", "B", "exact", elements=elements, b=setup.engine_itemsize)
    longest, per_token = setup.longest_sample, cache_bytes_per_token(setup)
    cached = product("KV cache", "B", concurrent=concurrent, longest=longest, per_token=per_token)
    cache = cached.value
    tokens = product("tokens in a KV cache", "tokens", concurrent=concurrent, longest=longest)
    # The cache of a layer grows by copying, so a second copy exists for a moment.
    extra = figure("engine's working memory", "B", lambda: 2 * cache / layers + 2 * concurrent * vocab * 4)
    nothing = product("engine's graphs", "B")
    return EngineMemory(weights, cached, tokens, extra, nothing, _concurrent(setup, tokens.value))


def _concurrent(setup: PlannedJob, tokens: Number) -> TracedNumber:
    limit, mean, sequences = setup.config.rollout.max_concurrent, setup.mean_sample, sequences_per_engine(setup)
    return figure("sequences decoded at once", "", lambda: max(1, min(limit, floor(tokens / mean), sequences)))


def sequences_per_engine(setup: PlannedJob) -> int:
    """Return the sequences per step on the busiest engine; a prompt's group stays on one engine."""
    num_engines = setup.engine_layout.num_engines
    num_started = setup.config.rollout.num_started(setup.config.batch.prompts_per_step)
    return -(-num_started // num_engines) * setup.config.algorithm.group_size
