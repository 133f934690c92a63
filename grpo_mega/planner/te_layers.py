"""Memory that a Transformer Engine layer keeps for its backward pass, by recipe and recompute, measured without a GPU.

The formulas count elements of `b` bytes per token. Each term is a tensor that Transformer Engine's Python kept when it ran on
fake tensors without a GPU. MEASURED holds results for dense layers; tests/planner measures them and others again. MXFP8 cannot
be measured like this. Its formula is a tensorwise layer with the scales of blocks of 32.
"""

from __future__ import annotations

from grpo_mega.config import PrecisionConfig
from grpo_mega.planner.figures import TracedNumber, figure
from grpo_mega.planner.job import PlannedJob
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

# Inputs. h: hidden size; q, kv, f: a rank's part of queries, keys and MLP rows; heads: the rank's query heads; d: width of a
# head; s: tp, or 1 if the sequence is not split; r: tokens on this rank's experts relative to the micro-batch; x: bytes per
# element that a linear layer keeps of its input, scales included; o: bytes per element that the layer after attention keeps in
# FP8 instead of its input, 0 if it keeps the input.


def layer(
    setup: PlannedJob, q: int, kv: int, f: int, r: float, layers_in_fp8: float
) -> tuple[list[TracedNumber], TracedNumber, TracedNumber]:
    """Return the parts that one layer keeps, and its total without recompute and with selective recompute."""
    h, b, s, d = setup.shape.hidden, setup.itemsize, setup.sequence_parts, setup.shape.head_dim
    heads, is_moe = setup.shape.num_heads // setup.layout.tp, setup.shape.num_experts > 0
    x, o = kept_bytes(setup.config.precision, b, layers_in_fp8)
    # The norm's input, its output as the linear layer keeps it, and statistics in fp32.
    one_norm = figure("a norm keeps, per token", "", lambda: (1 + x / b) * h / s + 4 / (b * s))
    has_qk = int(setup.family.qk_norm)
    # The inputs of both norms, and statistics per head.
    both_norms = figure("norms of queries and keys keep, per token", "", lambda: has_qk * (1 + 4 / (d * b)) * (q + kv))
    norm, qk_norms = one_norm.value, both_norms.value
    # The last term is the softmax statistics in fp32.
    first = figure("attention keeps, per token", "", lambda: norm + qk_norms + (2 + o / b) * q + 2 * kv + 4 * heads / b)
    # Rotated queries and keys; the values are a view that keeps the whole qkv product.
    again = figure("attention keeps, recomputed, per token", "", lambda: norm + qk_norms + (2 + (o or b) / b) * q + 3 * kv)
    attention, recomputed = first.value, again.value
    label = "a layer keeps without recompute, per token"
    # The input of the MLP. With experts, the input and output of the norm before it; router and experts share the output.
    inputs = 2 * h / s + 4 / (b * s) if is_moe else h / s
    if is_moe:
        router = router_elements(setup)
        whole = figure(label, "", lambda: attention + inputs + router + r * (x / b * h + (2 + x / b) * f + 4 / b))
    else:
        # The MLP keeps both halves of its first product, and their gated product in the form that the second linear layer
        # keeps.
        whole = figure(label, "", lambda: attention + norm + (2 + x / b) * f)
    selective = figure("a layer keeps with selective recompute, per token", "", lambda: recomputed + inputs)
    parts = [one_norm, both_norms, first]
    return [*parts, again] if setup.config.model.recompute == "selective" else parts, whole, selective


def router_elements(setup: PlannedJob) -> float:
    """Return the elements that routing keeps per token: indices and weights of its experts, and a mask over all experts."""
    return (20 * setup.experts_per_token + 5 * setup.shape.num_experts) / (setup.itemsize * setup.sequence_parts)


def recipe_of(precision: PrecisionConfig) -> str:
    return precision.fp8_recipe if precision.fp8 else "bf16"


def is_measured(precision: PrecisionConfig) -> bool:
    return any(recipe == recipe_of(precision) for recipe, _ in MEASURED)


def kept_bytes(precision: PrecisionConfig, itemsize: int, layers_in_fp8: float) -> tuple[float, float]:
    """Return x and o of the formulas, averaged over layers; `layers_in_fp8` is the share of layers in FP8."""
    if precision.fp8 is None:
        return float(itemsize), 0.0
    x = KEPT_BYTES[precision.fp8_recipe] * layers_in_fp8 + itemsize * (1 - layers_in_fp8)
    return x, 1.0 if precision.fp8_recipe == "delayed" else 0.0
