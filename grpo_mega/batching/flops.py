"""Count the floating-point operations of a training step by formulas, for the model FLOPs utilisation (MFU).

A matrix product of [m, k] and [k, n] counts 2 m k n; nothing else counts. In a forward pass over segments of n tokens:

  linear     2 x tokens x weights that multiply a token, in each layer: hidden x (q + 2 kv) + q x hidden for attention
             (or the matrices to and from its latents), and 3 x hidden x ffn for a gated MLP, or hidden x experts for
             the router and 3 x hidden x moe_ffn for each chosen expert, and the same for shared ones (+ their gate)
  attention  2 x (q + v) for each pair of a query and a key that it sees, n (n + 1) / 2 of them in a segment, in each
             layer with full attention; in a layer with a sliding window of w < n tokens, w (w + 1) / 2 + (n - w) w;
             linear attention counts as linear, with 4 products of a head's state per token
  output     2 x hidden x vocab for each token that needs a log-prob

A backward pass counts twice the forward. Recomputation (activations, logits) and lookups do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_mega.errors import ConfigError
from grpo_mega.weights.spec import ModelShape


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one forward pass, by part."""

    linear: float  # float, because counts may be means
    attention: float
    output: float

    @property
    def forward(self) -> float:
        return self.linear + self.attention + self.output

    @property
    def training(self) -> float:
        """Return the operations of forward and backward."""
        return 3 * self.forward


def count(
    shape: ModelShape, lengths: Sequence[int], *, experts_per_token: int = 0, num_outputs: int | None = None
) -> Flops:
    """Count a pass over segments of `lengths` tokens, with `num_outputs` tokens (None: all) through the output layer.

    Raise ConfigError for an MoE model without its number of experts per token.
    """
    num_tokens = sum(lengths)
    num_pairs = sum(n * (n + 1) // 2 - unseen_pairs(shape, n) for n in lengths)
    return of_totals(
        shape,
        num_tokens,
        num_pairs,
        num_tokens if num_outputs is None else num_outputs,
        experts_per_token=experts_per_token,
    )


def of_totals(
    shape: ModelShape, num_tokens: float, num_pairs: float, num_outputs: float, *, experts_per_token: int = 0
) -> Flops:
    """Count a pass from totals: tokens, pairs of a query and a key that it sees (the mean over layers), and tokens
    through the output layer.
    """
    return Flops(
        linear=2 * num_tokens * shape.num_layers * layer_weights(shape, experts_per_token),
        attention=2 * (shape.q + shape.v) * num_pairs * shape.num_full_layers,
        output=2 * shape.hidden * shape.vocab * num_outputs,
    )


def unseen_pairs(shape: ModelShape, length: float) -> float:
    """Return the pairs of a segment that sliding windows hide from causal attention, as a mean over the layers."""
    beyond = [max(0, length - window) if window else 0 for window in shape.windows]
    return sum(n * (n + 1) / 2 for n in beyond) / shape.num_layers if any(beyond) else 0


def tokens_per_pair(shape: ModelShape, experts_per_token: int = 0) -> float:
    """Return the work of attention for a query and a key that it sees, relative to all other work for a token."""
    weights = shape.num_layers * layer_weights(shape, experts_per_token) + shape.hidden * shape.vocab
    return shape.num_full_layers * (shape.q + shape.v) / weights


def layer_weights(shape: ModelShape, experts_per_token: int = 0) -> float:
    """Return the mean number of weights per layer that multiply a token. Raise ConfigError like `count`."""
    attention: float = shape.hidden * (shape.q + 2 * shape.kv) + shape.q * shape.hidden
    if shape.kv_lora:
        queries = shape.q_lora * (shape.hidden + shape.q) if shape.q_lora else shape.hidden * shape.q
        attention = queries + shape.hidden * shape.kv_down + shape.kv_lora * shape.kv_up + shape.v * shape.hidden
    if shape.linear_layers:
        attention += shape.hidden * shape.q  # the output gate
        share = len(shape.linear_layers) / shape.num_layers
        projections = shape.hidden * (2 * shape.linear_k + 3 * shape.linear_v + 2 * shape.linear_v_heads)
        convolution = (2 * shape.linear_k + shape.linear_v) * shape.linear_conv
        state = 4 * shape.linear_v * shape.linear_k_dim  # decay, reading and update of the state
        attention = share * (projections + convolution + state) + (1 - share) * attention
    if not shape.num_experts:
        return attention + 3 * shape.hidden * shape.ffn
    if not 1 <= experts_per_token <= shape.num_experts:
        raise ConfigError(
            f"experts_per_token={experts_per_token}: must be in 1 .. {shape.num_experts} for an MoE model; "
            "give the config's num_experts_per_tok"
        )
    chosen = shape.hidden * (shape.num_experts + shape.shared_gates) + 3 * shape.hidden * (
        experts_per_token * shape.moe_ffn + shape.shared_ffn
    )
    return attention + chosen + shape.num_dense * (3 * shape.hidden * shape.ffn - chosen) / shape.num_layers
