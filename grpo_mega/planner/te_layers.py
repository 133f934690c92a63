"""Memory that a Transformer Engine layer keeps for its backward pass, by recipe and recompute, measured without a GPU.

The formulas count elements of `b` bytes for one token. Each of their terms is a tensor that Transformer Engine's own Python
kept when it ran on fake tensors without a GPU; MEASURED holds the results for dense layers, and tests/planner measures again.
MXFP8 cannot be measured so: its formula is that of a tensorwise layer with the scales of blocks of 32.
"""

from __future__ import annotations

from grpo_mega.config import PrecisionConfig
from grpo_mega.planner.figures import Number, formula
from grpo_mega.weights.spec import BLOCK

KEPT_BYTES = {"delayed": 1.0, "tensorwise": 1.0, "blockwise": 1 + 4 / BLOCK, "mxfp8": 1 + 1 / 32}

# 2026-11-22, Transformer Engine 2.11.0, Megatron-core 0.16.1: MiB of a layer of Llama-3-70B on a rank of TP4 with sequence
# parallelism, 16,384 tokens.
MEASURED = {
    ("bf16", "none"): 1073.03,
    ("bf16", "selective"): 408.02,
    ("bf16", "full"): 64.0,
    ("delayed", "none"): 929.03,
    ("delayed", "selective"): 344.02,
    ("tensorwise", "none"): 897.03,
    ("tensorwise", "selective"): 376.02,
    ("tensorwise", "full"): 64.0,
    ("blockwise", "none"): 902.53,
    ("blockwise", "selective"): 377.02,
}

# Inputs: h, q, kv, f: hidden, a rank's part of queries, keys and MLP rows; heads: its query heads; d: a head's width; s: tp, or
# 1 where the sequence is not cut; r: tokens on this rank's experts, to those of the micro-batch; k: experts per token; x: bytes
# of an element that a linear layer keeps of its input, scales included; o: bytes of an element that the layer after attention
# keeps in FP8 in place of its input, 0 where it keeps that itself.


@formula("a norm keeps, per token")
def norm(h: int, x: float, b: int, s: int) -> float:
    # Its input, its output as the linear layer keeps it, and statistics in fp32.
    return (1 + x / b) * h / s + 4 / (b * s)


@formula("norms of queries and keys keep, per token")
def qk_norms(qk_norms: int, d: int, b: int, q: int, kv: int) -> float:
    # Their inputs, and statistics by head.
    return qk_norms * (1 + 4 / (d * b)) * (q + kv)


@formula("attention keeps, per token")
def attention(norm: Number, qk_norms: Number, o: float, b: int, q: int, kv: int, heads: int) -> float:
    # The last term is the statistics of the softmax, in fp32.
    return norm + qk_norms + (2 + o / b) * q + 2 * kv + 4 * heads / b


@formula("attention keeps, recomputed, per token")
def recomputed_attention(norm: Number, qk_norms: Number, o: float, b: int, q: int, kv: int) -> float:
    # Queries and keys after the rotation, and as values a view of the whole qkv product.
    return norm + qk_norms + (2 + (o or b) / b) * q + 3 * kv


@formula("a layer keeps without recompute, per token")
def dense_layer(attention: Number, norm: Number, x: float, b: int, f: int) -> float:
    # The MLP keeps both halves of its first product, and their gated product as the second linear layer keeps it.
    return attention + norm + (2 + x / b) * f


@formula("a layer keeps without recompute, per token")
def moe_layer(attention: Number, h: int, s: int, r: float, f: int, k: int) -> float:
    return attention + 2 * h / s + r * (2 * h + 3 * f) + k * h / s


@formula("a layer keeps with selective recompute, per token")
def recomputed_layer(attention: Number, inputs: int, h: int, s: int) -> float:
    # The input of the MLP; that of the router and of the experts.
    return attention + inputs * h / s


def recipe_of(precision: PrecisionConfig) -> str:
    return precision.fp8_recipe if precision.fp8 else "bf16"


def is_measured(precision: PrecisionConfig) -> bool:
    return any(recipe == recipe_of(precision) for recipe, _ in MEASURED)


def kept_bytes(precision: PrecisionConfig, itemsize: int, layers_in_fp8: float) -> tuple[float, float]:
    """Return x and o of the formulas, as means over layers of which the share `layers_in_fp8` computes in FP8."""
    if precision.fp8 is None:
        return float(itemsize), 0.0
    x = KEPT_BYTES[precision.fp8_recipe] * layers_in_fp8 + itemsize * (1 - layers_in_fp8)
    return x, 1.0 if precision.fp8_recipe == "delayed" else 0.0
