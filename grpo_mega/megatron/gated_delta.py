"""Linear attention of packed sequences: Megatron's gated delta net (arXiv 2412.06464), and the norm of its output.

Megatron's own forward pass supports no packed rows in 0.16.1, and only with FLA in 0.19.2. Here the segments of a row
are gathered into right-padded batches, as in attention.py. Convolution and recurrence are causal, so padding changes
nothing. On a GPU with flash-linear-attention (FLA) its kernels read the segments as they are.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm import gated_delta_net
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

FLOAT32 = ("A_log", "dt_bias")  # parameters that stay float32 for any dtype of the model
CHUNK = 64  # tokens that delta_rule computes together


def gated_delta_spec(in_proj: type, out_proj: type) -> ModuleSpec:
    """Return the spec of a layer with these linear layers."""
    parts = GatedDeltaNetSubmodules(in_proj=in_proj, out_norm=GatedNorm, out_proj=out_proj)
    return ModuleSpec(module=GatedDelta, submodules=parts)


class GatedDelta(GatedDeltaNet):
    """Megatron's layer for packed rows. `packed_seq_params` has the stacks of attention.py, and cu_seqlens for FLA."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for name in FLOAT32:
            parameter = torch.nn.Parameter(getattr(self, name).data.float())
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
            setattr(self, name, parameter)

    def _apply(self, fn: Any, recurse: bool = True) -> GatedDelta:
        """Move or cast the module. Weights are loaded after the last cast, so float32 loses nothing."""
        super()._apply(fn, recurse)
        for name in FLOAT32:
            parameter = getattr(self, name)
            parameter.data = parameter.data.float()
        return self

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *, packed_seq_params: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [T / sp, 1, hidden] of hidden states of the same shape, and Megatron's bias, which is
        None.
        """
        rows, _ = self.in_proj(hidden_states)  # [T, 1, rows of q, k, v, gate, beta, alpha / tp]
        heads = self.num_value_heads // self.tp_size
        widths = [self.conv_dim_local_tp, heads * self.value_head_dim, heads, heads]
        qkv_TC, gate_TV, beta_TN, alpha_TN = rows.squeeze(1).split(widths, dim=-1)
        beta_TN = beta_TN.float().sigmoid()
        decay_TN = -self.A_log.exp() * F.softplus(alpha_TN.float() + self.dt_bias)  # log of the decay per token
        if gated_delta_net.chunk_gated_delta_rule is not None and rows.is_cuda:
            out = self._by_kernels(qkv_TC, beta_TN, decay_TN, packed_seq_params.cu_seqlens_q)
        else:
            outs = []
            for stack in packed_seq_params.stacks:
                qkv_BTC, beta_BTN, decay_BTN = (
                    x.index_select(0, stack.queries.view(-1)).view(*stack.queries.shape, -1)
                    for x in (qkv_TC, beta_TN, decay_TN)
                )
                qkv = self._split(self._convolve(qkv_BTC))
                outs.append(delta_rule(*qkv, decay_BTN, beta_BTN).flatten(0, 1))
            out = torch.cat(outs).index_select(0, packed_seq_params.restore).to(rows.dtype)
        out = self.out_norm(out, gate_TV.view(out.shape))
        return self.out_proj(out.reshape(len(out), 1, -1))

    def _convolve(self, qkv_BTC: Tensor) -> Tensor:
        """Return SiLU of the causal convolution in float32. In bfloat16 torch's rounding depends on T."""
        weight, padding = self.conv1d.weight.float(), self.conv_kernel_dim - 1
        found = F.conv1d(qkv_BTC.transpose(1, 2).float(), weight, padding=padding, groups=len(weight))
        return self.act_fn(found[..., : qkv_BTC.shape[1]].transpose(1, 2).contiguous())

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return normalized queries and keys [batch, tokens, value heads, key_dim], and values, in this rank's
        heads.
        """
        widths = [self.qk_dim // self.tp_size] * 2 + [self.v_dim // self.tp_size]
        query, key, value = qkv.split(widths, dim=-1)
        repeats = self.num_value_heads // self.num_key_heads
        query, key = (
            gated_delta_net.l2norm(x.unflatten(-1, (-1, self.key_head_dim)).contiguous()).repeat_interleave(repeats, 2)
            for x in (query, key)
        )
        return query, key, value.unflatten(-1, (-1, self.value_head_dim)).contiguous()

    def _by_kernels(self, qkv_TC: Tensor, beta_TN: Tensor, decay_TN: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Compute all segments with FLA's kernels. Return [T, value heads, value_dim]."""
        convolution: Any = importlib.import_module("fla.modules.convolution")
        weight, cuts = self.conv1d.weight.squeeze(1), cu_seqlens.long()
        qkv, _ = convolution.causal_conv1d(qkv_TC[None], weight, activation="silu", cu_seqlens=cuts)
        query, key, value = self._split(qkv)
        rule = gated_delta_net.chunk_gated_delta_rule
        out, _ = rule(query, key, value, g=decay_TN[None], beta=beta_TN[None], cu_seqlens=cuts)
        return out[0]


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay_BTN: Tensor, beta_BTN: Tensor) -> Tensor:
    """Return the outputs [B, T, N, value_dim] of the gated delta rule, computed in float32.

    Queries and keys are [B, T, N, key_dim], values [B, T, N, value_dim]. A head's state S starts at 0. Each token does
    S = exp(decay) S, S = S + beta key (value - key S), output = query S / sqrt(key_dim). Inside a chunk the updates of
    S depend on earlier updates, so they solve a triangular system. Megatron's and transformers' loops over its rows
    take 2 to 8 times as long.
    """
    num_tokens, padding = key.shape[1], -key.shape[1] % CHUNK
    q, k, v, decay, beta = (  # [B, N, chunks, CHUNK, ...]; padding changes no state
        F.pad(x.float(), (0, 0) * (x.dim() - 2) + (0, padding)).transpose(1, 2).unflatten(2, (-1, CHUNK))
        for x in (query * query.shape[-1] ** -0.5, key, value, decay_BTN, beta_BTN)
    )
    decay = decay.cumsum(-1)  # since the chunk's start
    between = (decay[..., :, None] - decay[..., None, :]).tril().exp().tril()  # from one token to a later one
    weighted, since_start = k * beta[..., None], decay.exp()[..., None]
    known = torch.cat((v * beta[..., None], weighted * since_start), -1)
    system = ((weighted @ k.mT) * between).tril(-1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    updates, from_state = solved.split((v.shape[-1], k.shape[-1]), -1)
    inside, outside = (q @ k.mT) * between, q * since_start
    to_end, whole = (k * (decay[..., -1:] - decay).exp()[..., None]).mT, since_start[..., -1:, :]
    state, outs = v.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]), []
    for i in range(k.shape[2]):
        new = updates[:, :, i] - from_state[:, :, i] @ state
        outs.append(outside[:, :, i] @ state + inside[:, :, i] @ new)
        state = state * whole[:, :, i] + to_end[:, :, i] @ new
    return torch.cat(outs, 2)[:, :, :num_tokens].transpose(1, 2).to(value.dtype)


class GatedNorm(torch.nn.Module):
    """RMS norm of each head's output, times SiLU of its gate. Its weight is not zero-centred, unlike other norms.

    The weight is the same on all tensor-parallel ranks, and each rank has other heads, so gradients are summed here.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # [T, heads, value_dim] each
        weight = copy_to_tensor_model_parallel_region(self.weight)
        normed = F.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype) * weight
        return (normed * F.silu(gate.float())).to(x.dtype)
