"""Fused attention as cuDNN's, computed in fp32 sequence by sequence, and the rules by which TE chooses its backend.

The rules are those of nvte_get_fused_attn_backend that a decoder without bias, window and dropout meets, on the card and with
the cuDNN that `machine` plays. Not emulated: bf16 roundings inside, dropout, windows, sinks, attention in FP8. The statistics
of the softmax are not kept: the backward pass computes the forward again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from emulated_te import machine
from emulated_te.extension.common import check, check_int32
from emulated_te.extension.names import (
    DType,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Softmax_Type,
)

Index = tuple[Any, ...]


def get_cudnn_version() -> int:
    return machine.CUDNN


def get_fused_attn_backend(
    is_training: bool,
    q_dtype: DType,
    kv_dtype: DType,
    layout: Any,
    bias_type: Any,
    mask: Any,
    softmax: Any,
    dropout: float,
    num_heads: int,
    num_groups: int,
    max_q: int,
    max_kv: int,
    dim_qk: int,
    dim_v: int,
    left: int,
    right: int,
    return_max_logit: bool = False,
    cuda_graph: bool = False,
) -> Any:
    capability = machine.card().capability
    is_packed, is_padded = layout.name.removeprefix("NVTE_").startswith("T"), "PADDING" in mask.name
    # Heads up to 256 wide are Hopper's; a backward pass with dim_qk != dim_v from 128 on has a bug in cuDNN 9.11 and later.
    widest = 256 if capability == (9, 0) else 128
    has_bug = is_training and capability == (9, 0) and dim_qk != dim_v and min(dim_qk, dim_v) >= 128
    fits = (
        q_dtype in (DType.kBFloat16, DType.kFloat16)
        and q_dtype == kv_dtype
        and capability >= (8, 0)
        and dim_qk % 8 == dim_v % 8 == 0
        and max(dim_qk, dim_v) <= widest
        and (not has_bug or (dim_qk, dim_v) == (192, 128))
        and bias_type == NVTE_Bias_Type.NVTE_NO_BIAS
        and softmax == NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX
        and left == -1
        and (dropout == 0.0 or not is_padded)
        and ("BOTTOM" not in mask.name or max_q <= max_kv)
        and (not is_packed or (is_padded and capability >= (9, 0)))
    )
    return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen if fits else NVTE_Fused_Attn_Backend.NVTE_No_Backend


def fused_attn_fwd(
    max_q: int,
    max_kv: int,
    is_training: bool,
    scale: float,
    dropout: float,
    set_zero: bool,
    layout: Any,
    bias_type: Any,
    mask: Any,
    softmax: Any,
    window: Any,
    cu_q: torch.Tensor,
    cu_kv: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    fake_dtype: torch.dtype,
    padded_q: torch.Tensor | None,
    padded_kv: torch.Tensor | None,
    page_k: Any,
    page_v: Any,
    s_quantizer: Any,
    o_quantizer: Any,
    bias: Any,
    softmax_offset: Any,
    rng: Any,
    rng_elements: int,
    return_max_logit: bool = False,
    cuda_graph: bool = False,
) -> list[Any]:
    """Return [output], and for training empty statistics and a random state."""
    check(q.dtype in (torch.bfloat16, torch.float16), "Fused attention only supports FP8 and BF16/FP16 data types.")
    if dropout or o_quantizer is not None or return_max_logit or page_k is not None:
        raise NotImplementedError("fused attention with dropout, FP8, maximal logits or pages is not emulated")
    check(int((cu_q[1:] - cu_q[:-1]).max()) <= max_q, "a sequence is longer than max_seqlen_q")
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    for rows, cols in _sequences(layout, cu_q, cu_kv, padded_q, padded_kv):
        out[rows] = _attend(q[rows].float(), k[cols].float(), v[cols].float(), scale, mask).to(out.dtype)
    return [out, torch.zeros(0), torch.zeros(2, dtype=torch.int64)] if is_training else [out]


def fused_attn_bwd(
    max_q: int,
    max_kv: int,
    scale: float,
    dropout: float,
    set_zero: bool,
    layout: Any,
    bias_type: Any,
    mask: Any,
    softmax: Any,
    window: Any,
    deterministic: bool,
    cu_q: torch.Tensor,
    cu_kv: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    d_o: torch.Tensor,
    fake_dtype: torch.dtype,
    dqkv_type: DType,
    aux: list[torch.Tensor],
    padded_q: torch.Tensor | None,
    padded_kv: torch.Tensor | None,
    s_quantizer: Any,
    dp_quantizer: Any,
    dqkv_quantizer: Any,
    cuda_graph: bool = False,
) -> list[Any]:
    """Return the gradients of q, k and v, and None for those of bias and sinks."""
    grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    for rows, cols in _sequences(layout, cu_q, cu_kv, padded_q, padded_kv):
        with torch.enable_grad():
            parts = [x[index].detach().float().requires_grad_() for x, index in ((q, rows), (k, cols), (v, cols))]
            out = _attend(*parts, scale, mask)
        found = torch.autograd.grad(out, parts, d_o[rows].float())
        for grad, index, part in zip(grads, (rows, cols, cols), found, strict=True):
            grad[index] = part.to(grad.dtype)
    return [*grads, None, None]


def _sequences(
    layout: Any, cu_q: torch.Tensor, cu_kv: torch.Tensor, padded_q: torch.Tensor | None, padded_kv: torch.Tensor | None
) -> Iterator[tuple[Index, Index]]:
    """Yield for each sequence where its rows are in q and in k and v, which are sbhd, bshd or thd."""
    for cu in (cu_q, cu_kv):
        check_int32(cu)
    name = layout.name.removeprefix("NVTE_")
    starts_q, starts_kv = (cu_q if padded_q is None else padded_q), (cu_kv if padded_kv is None else padded_kv)
    lengths = ([end - begin for begin, end in pairwise(cu.tolist())] for cu in (cu_q, cu_kv))
    for i, (num_q, num_kv) in enumerate(zip(*lengths, strict=True)):
        if name == "THD_THD_THD":
            begin_q, begin_kv = int(starts_q[i]), int(starts_kv[i])
            yield (slice(begin_q, begin_q + num_q),), (slice(begin_kv, begin_kv + num_kv),)
        elif name == "SBHD_SBHD_SBHD":
            yield (slice(0, num_q), i), (slice(0, num_kv), i)
        elif name == "BSHD_BSHD_BSHD":
            yield (i, slice(0, num_q)), (i, slice(0, num_kv))
        else:
            raise NotImplementedError(f"fused attention in layout {name} is not emulated")


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: Any) -> torch.Tensor:
    """Return [s, h, d] in fp32 of one sequence; each key-value head serves a group of query heads."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if "CAUSAL" in mask.name:
        shift = k.shape[0] - q.shape[0] if "BOTTOM" in mask.name else 0
        is_allowed = torch.ones(scores.shape[1:], dtype=torch.bool).tril(shift)
        scores = scores.masked_fill(~is_allowed, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def convert_thd_to_bshd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, b: int, max_seq_len: int) -> torch.Tensor:
    check_int32(cu_seqlens)
    out = tensor.new_zeros(b, max_seq_len, *tensor.shape[1:])
    for i, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        out[i, : end - begin] = tensor[begin:end]
    return out


def convert_bshd_to_thd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, t: int) -> torch.Tensor:
    check_int32(cu_seqlens)
    out = tensor.new_zeros(t, *tensor.shape[2:])
    for i, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        out[begin:end] = tensor[i, : end - begin]
    return out
