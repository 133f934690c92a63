"""Floating-point operations of a training step, counted by hand: what a model's utilisation (MFU) is a share of.

A matrix product of [m, k] and [k, n] counts 2 m k n; nothing else counts. Of a forward pass over segments of n tokens:
 linear     2 x tokens x weights that multiply a token, in each layer: hidden x (q + 2 kv) + q x hidden for attention, and
            3 x hidden x ffn for a gated MLP, or hidden x experts for the router and 3 x hidden x moe_ffn for each chosen expert
 attention  4 x q for each pair of a query and a key that it sees, n (n + 1) / 2 of them in a segment, in each layer
 output     2 x hidden x vocab for each token whose log-prob is wanted
A backward pass is twice the forward. What is computed again (activations, logits) does not count, nor do lookups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from grpo_mega.errors import ConfigError


class Sizes(Protocol):
    """Of a decoder-only transformer; weights.spec.ModelShape is one."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def ffn(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def moe_ffn(self) -> int: ...


@dataclass(frozen=True)
class Flops:
    """Of one forward pass, by where they arise."""

    linear: float  # whole numbers, except where they are means
    attention: float
    output: float

    @property
    def forward(self) -> float:
        return self.linear + self.attention + self.output

    @property
    def backward(self) -> float:
        return 2 * self.forward

    @property
    def training(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


def count(sizes: Sizes, lengths: Sequence[int], *, experts_per_token: int = 0, num_outputs: int | None = None) -> Flops:
    """Count segments of `lengths` tokens, of which `num_outputs` tokens (None: all) go through the output layer.

    Raise ConfigError for an MoE model without its number of experts per token.
    """
    num_tokens = sum(lengths)
    num_pairs = sum(n * (n + 1) // 2 for n in lengths)
    return of_totals(
        sizes, num_tokens, num_pairs, num_tokens if num_outputs is None else num_outputs, experts_per_token=experts_per_token
    )


def of_totals(sizes: Sizes, num_tokens: float, num_pairs: float, num_outputs: float, *, experts_per_token: int = 0) -> Flops:
    """Count tokens, of which `num_outputs` go through the output layer, and the pairs of a query and a key that it sees."""
    q = sizes.num_heads * sizes.head_dim
    return Flops(
        linear=2 * num_tokens * sizes.num_layers * layer_weights(sizes, experts_per_token),
        attention=4 * q * num_pairs * sizes.num_layers,
        output=2 * sizes.hidden * sizes.vocab * num_outputs,
    )


def layer_weights(sizes: Sizes, experts_per_token: int = 0) -> int:
    """Weights of one layer that multiply a token. Raises ConfigError likewise."""
    q, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    attention = sizes.hidden * (q + 2 * kv) + q * sizes.hidden
    if not sizes.num_experts:
        return attention + 3 * sizes.hidden * sizes.ffn
    if not 1 <= experts_per_token <= sizes.num_experts:
        raise ConfigError(
            f"experts_per_token={experts_per_token} is not a number of a mixture's {sizes.num_experts} experts; "
            "give the config's num_experts_per_tok"
        )
    return attention + sizes.hidden * sizes.num_experts + experts_per_token * 3 * sizes.hidden * sizes.moe_ffn


def per_token(sizes: Sizes, length: int, *, experts_per_token: int = 0) -> float:
    """Of training, forward and backward, on each token of full segments of `length` tokens that all go to the output layer."""
    return count(sizes, [length], experts_per_token=experts_per_token).training / length
