"""Memory that a Transformer Engine layer keeps for its backward pass, by recipe and recompute, measured without a GPU.

The formulas count elements of `b` bytes for one token. Each of their terms is a tensor that Transformer Engine's own Python
kept when it ran on fake tensors without a GPU; MEASURED holds results for dense layers, and tests/planner measures these again,
and others.
MXFP8 cannot be measured so: its formula is that of a tensorwise layer with the scales of blocks of 32.
"""

from __future__ import annotations

from grpo_mega.config import PrecisionConfig
from grpo_mega.planner.figures import Figure, figure
from grpo_mega.planner.setup import Setup
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
# 1 where the sequence is not cut; r: tokens on this rank's experts, to those of the micro-batch; x: bytes of an element that a
# linear layer keeps of its input, scales included; o: bytes of an element that the layer after attention keeps in FP8 in place
# of its input, 0 where it keeps that itself.


def layer(setup: Setup, q: int, kv: int, f: int, r: float, layers_in_fp8: float) -> tuple[list[Figure], Figure, Figure]:
    """Return the parts of what one layer keeps, and all it keeps without and with selective recompute."""
    h, b, s, d = setup.shape.hidden, setup.itemsize, setup.sequence_parts, setup.shape.head_dim
    heads, is_moe = setup.shape.num_heads // setup.layout.tp, setup.shape.num_experts > 0
    x, o = kept_bytes(setup.config.precision, b, layers_in_fp8)
    # Its input, its output as the linear layer keeps it, and statistics in fp32.
    one_norm = figure("a norm keeps, per token", "", lambda: (1 + x / b) * h / s + 4 / (b * s))
    has_qk = int(setup.family.qk_norm)
    # Their inputs, and statistics by head.
    both_norms = figure("norms of queries and keys keep, per token", "", lambda: has_qk * (1 + 4 / (d * b)) * (q + kv))
    norm, qk_norms = one_norm.value, both_norms.value
    # The last term is the statistics of the softmax, in fp32.
    first = figure("attention keeps, per token", "", lambda: norm + qk_norms + (2 + o / b) * q + 2 * kv + 4 * heads / b)
    # Queries and keys after the rotation, and as values a view of the whole qkv product.
    again = figure("attention keeps, recomputed, per token", "", lambda: norm + qk_norms + (2 + (o or b) / b) * q + 3 * kv)
    attention, recomputed = first.value, again.value
    label = "a layer keeps without recompute, per token"
    # The input of the MLP; that of the norm before it and its output, which router and experts have in common.
    inputs = 2 * h / s + 4 / (b * s) if is_moe else h / s
    if is_moe:
        router = router_elements(setup)
        whole = figure(label, "", lambda: attention + inputs + router + r * (x / b * h + (2 + x / b) * f + 4 / b))
    else:
        # The MLP keeps both halves of its first product, and their gated product as the second linear layer keeps it.
        whole = figure(label, "", lambda: attention + norm + (2 + x / b) * f)
    selective = figure("a layer keeps with selective recompute, per token", "", lambda: recomputed + inputs)
    parts = [one_norm, both_norms, first]
    return [*parts, again] if setup.config.model.recompute == "selective" else parts, whole, selective


def router_elements(setup: Setup) -> float:
    """Return the elements that routing keeps of one token: indices and weights of its experts, and a mask of all."""
    return (20 * setup.experts_per_token + 5 * setup.shape.num_experts) / (setup.itemsize * setup.sequence_parts)


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
