"""SGLang's operators of linear attention (gated delta net, arXiv 2412.06464) in plain torch, for servers on a CPU.

SGLang takes these operators from its kernel package, which does not exist for a CPU-only torch. They compute in
float32. Operators have SGLang's names and arguments, and change states in place. Shapes: T tokens of all sequences, one
sequence after the other; B sequences; H heads of queries and keys of width K; G heads of values of width V. A pool has
one state [G, V, K] and one window [channels, taps - 1] of the convolution per slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 64  # tokens that are computed together
EPSILON = 1e-6  # keeps the norm of queries and keys away from 0


def install() -> None:
    """Give SGLang these operators. Call this before the first import of its models and attention backends."""
    mamba: Any = import_module("sgl_kernel.mamba")
    operators: dict[Any, tuple[Any, ...]] = {
        mamba: (causal_conv1d_fn, causal_conv1d_update, chunk_gated_delta_rule),
        torch.ops.sgl_kernel: (
            *(fused_gdn_gating, fused_sigmoid_gating_delta_rule_update, fused_sigmoid_mul),
            *(fused_qk_gemma_rmsnorm, fused_qk_gemma_rmsnorm_with_gate, fused_qkvzba_split_reshape_cat_contiguous),
        ),
    }
    for namespace, functions in operators.items():
        for function in functions:
            setattr(namespace, f"{function.__name__}_cpu", function)
    layers: Any = import_module("sglang.kernels.ops.attention.fla.layernorm_gated")
    layers.RMSNorm.forward = gated_norm


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    seq_lens_cpu: Sequence[int],
    **_: Any,
) -> Tensor:
    """Return SiLU of the causal convolution of x [channels, T] with weight [channels, taps].

    Store the last windows. A sequence without an initial state starts with zeros.
    """
    assert activation == "silu", activation
    windows = torch.where(has_initial_state[:, None, None], conv_states[cache_indices], 0).to(x.dtype)
    pieces = [torch.cat(pair, 1) for pair in zip(windows, x.split(list(seq_lens_cpu), 1), strict=True)]
    conv_states[cache_indices] = torch.stack([piece[:, -windows.shape[-1] :] for piece in pieces]).to(conv_states.dtype)
    found = [functional.conv1d(piece[None], weight[:, None], bias, groups=len(weight))[0] for piece in pieces]
    return functional.silu(torch.cat(found, 1))


def causal_conv1d_update(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    *,
    conv_state_indices: Tensor,
) -> Tensor:
    """Return the same for one more token per sequence, x [B, channels]."""
    assert activation == "silu" and bias is None, (activation, bias)
    window = torch.cat((conv_states[conv_state_indices].to(x.dtype), x[..., None]), -1)
    conv_states[conv_state_indices] = window[..., 1:].to(conv_states.dtype)
    return functional.silu((window * weight).sum(-1))


def fused_gdn_gating(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithm of each token's decay, and its learning rate, both [1, T, G]."""
    decay = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """Return the outputs [1, T, G, V] of whole sequences, and store their last states.

    q, k [1, T, H, K]; v [1, T, G, V]; g, beta [1, T, G]. Sequences are padded to rows of equal length. A padded token
    has the decay 1 and the learning rate 0, so it changes no state.
    """
    assert use_qk_l2norm_in_kernel
    lengths = cu_seqlens.diff()
    width = -(-int(lengths.max()) // CHUNK) * CHUNK
    is_token = torch.arange(width) < lengths[:, None]

    def rows(values: Tensor) -> Tensor:
        padded = torch.zeros(len(lengths), width, *values.shape[2:], dtype=torch.float32)
        padded[is_token] = values[0].float()
        return padded.transpose(1, 2)

    chunks = (rows(values).split(CHUNK, 2) for values in (*_normed(q, k, v.shape[2]), v, g, beta))
    state, found = initial_state[initial_state_indices].float(), []
    for inputs in zip(*chunks, strict=True):
        state, outputs = _chunk(state, *inputs)
        found.append(outputs)
    initial_state[initial_state_indices] = state.to(initial_state.dtype)
    return torch.cat(found, 2).transpose(1, 2)[is_token][None].to(v.dtype), None, None


def _chunk(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state [B, G, V, K] after one chunk, and its outputs [B, G, C, V].

    Inside a chunk each token's update depends on the updates before it. So the updates solve a triangular system.
    """
    total = decay.cumsum(-1)  # from the chunk's start to each token
    between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    weighted = k * rate[..., None]
    system = ((weighted @ k.mT) * between).tril(-1)
    known = torch.cat((v * rate[..., None], weighted * total.exp()[..., None]), -1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    updates = solved[..., : v.shape[-1]] - solved[..., v.shape[-1] :] @ state.mT
    outputs = (q * total.exp()[..., None]) @ state.mT + ((q @ k.mT) * between) @ updates
    left = total[..., -1:, None]
    return state * left.exp() + updates.mT @ (k * (left - total[..., None]).exp()), outputs


def fused_sigmoid_gating_delta_rule_update(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool,
    **_: Any,
) -> Tensor:
    """Return the outputs [1, B, G, V] of one more token per sequence, and store the states."""
    assert use_qk_l2norm_in_kernel
    decay, rate = (part[0] for part in fused_gdn_gating(A_log, a, b, dt_bias))
    query, key = (heads[0, ..., None] for heads in _normed(q, k, v.shape[2]))
    state = initial_state_source[initial_state_indices].float() * decay.exp()[..., None, None]
    update = (v[0].float()[..., None] - state @ key) * rate[..., None, None]
    state = state + update * key.mT
    initial_state_source[initial_state_indices] = state.to(initial_state_source.dtype)
    return (state @ query)[None, ..., 0].to(v.dtype)


def _normed(q: Tensor, k: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Return scaled queries and keys of length 1 in float32 for each head of values."""

    def unit(heads: Tensor) -> Tensor:
        heads = heads.float()
        heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + EPSILON)
        return heads.repeat_interleave(num_heads // heads.shape[2], 2)

    return unit(q) * q.shape[-1] ** -0.5, unit(k)


def fused_qkvzba_split_reshape_cat_contiguous(
    qkvz: Tensor, ba: Tensor, num_k_heads: int, num_v_heads: int, k_dim: int, v_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys and values [T, channels], gates [T, G, V], and the inputs [T, G] of rates and of decays."""
    qkv, z = qkvz.split([2 * num_k_heads * k_dim + num_v_heads * v_dim, num_v_heads * v_dim], -1)
    b, a = ba.chunk(2, -1)
    return qkv, z.reshape(-1, num_v_heads, v_dim), b, a


def gated_norm(layer: Any, x: Tensor, z: Tensor) -> Tensor:
    """Return norm(x) * SiLU(z), the forward pass of linear attention's norm. Its weight is not zero-centred."""
    normed = functional.rms_norm(x.float(), x.shape[-1:], None, layer.eps)
    return (layer.weight * normed.to(x.dtype) * functional.silu(z.float())).to(x.dtype)


def fused_sigmoid_mul(x: Tensor, gate: Tensor) -> None:
    """Multiply x by the sigmoid of its gate in place."""
    x.mul_(gate.reshape(x.shape).sigmoid())


def fused_qk_gemma_rmsnorm(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Return the normed heads of queries and keys, [T * heads, head_dim]. Weights are zero-centred."""

    def normed(heads: Tensor, weight: Tensor) -> Tensor:
        values = functional.rms_norm(heads.reshape(-1, head_dim).float(), (head_dim,), None, eps)
        return (values * (1 + weight.float())).to(heads.dtype)

    return normed(q, q_weight), normed(k, k_weight)


def fused_qk_gemma_rmsnorm_with_gate(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same, and the output gates. q_gate [T, ...] has for each head its query, then its gate."""
    q, gate = q_gate.reshape(len(q_gate), num_heads, 2 * head_dim).chunk(2, -1)
    return *fused_qk_gemma_rmsnorm(q, k, q_weight, k_weight, eps, head_dim), gate.reshape(len(gate), -1)
