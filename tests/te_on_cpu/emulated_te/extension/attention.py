"""Fused attention like cuDNN's, computed in fp32 sequence by sequence, and TE's rules for the choice of a backend.

The rules are the part of nvte_get_fused_attn_backend that applies to a decoder without bias and dropout, on the card
and cuDNN of `machine`. Not emulated: bf16 roundings inside, dropout, sinks, FP8 attention. As in cuDNN,
the backward pass starts from the output and statistics passed to it. With context parallelism they cover the keys of
all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from tests.te_on_cpu.emulated_te import machine
from tests.te_on_cpu.emulated_te.extension.common import check, check_int32
from tests.te_on_cpu.emulated_te.extension.names import (
    DType,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Softmax_Type,
)

Index = tuple[Any, ...]


def get_cudnn_version() -> int:
    return machine.CUDNN


class Question(NamedTuple):
    """The question before TE chooses fused attention, in the order of its arguments before 2.20."""

    is_training: bool
    q_dtype: DType
    kv_dtype: DType
    qkv_layout: Any
    bias_type: Any
    attn_mask_type: Any
    softmax_type: Any
    dropout: float
    num_attn_heads: int
    num_gqa_groups: int
    max_seqlen_q: int
    max_seqlen_kv: int
    head_dim_qk: int
    head_dim_v: int
    window_size_left: int
    window_size_right: int
    return_max_logit: bool = False
    cuda_graph: bool = False
    deterministic: bool = False


def get_fused_attn_backend(*arguments: Any) -> Any:
    question = Question(*arguments)
    fits = refusal(question, question.q_dtype, question.kv_dtype) == ""
    return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen if fits else NVTE_Fused_Attn_Backend.NVTE_No_Backend


def refusal(question: Any, q_dtype: DType, kv_dtype: DType) -> str:
    """Return the first rule of fused attention that is broken; "" if it fits. `question` has a Question's fields."""
    capability, mask = machine.card().capability, question.attn_mask_type.name
    dim_qk, dim_v = question.head_dim_qk, question.head_dim_v
    is_short = question.max_seqlen_q <= question.max_seqlen_kv
    is_packed, is_padded = question.qkv_layout.name.removeprefix("NVTE_").startswith("T"), "PADDING" in mask
    # Only Hopper has heads up to 256 wide. cuDNN 9.11 and later has a bug in backward passes with dim_qk != dim_v from
    # 128 on.
    widest = 256 if capability == (9, 0) else 128
    has_bug = question.is_training and capability == (9, 0) and dim_qk != dim_v and min(dim_qk, dim_v) >= 128
    is_causal = question.window_size_right == 0 and "CAUSAL" in mask and is_short
    rules = {
        "Q, K and V are not all in FP16 or BF16": q_dtype in (DType.kBFloat16, DType.kFloat16) and q_dtype == kv_dtype,
        "the compute capability is below 8.0": capability >= (8, 0),
        "a head dimension is no multiple of 8": dim_qk % 8 == dim_v % 8 == 0,
        f"a head dimension is above {widest}": max(dim_qk, dim_v) <= widest,
        "the head dimensions differ": not has_bug or (dim_qk, dim_v) == (192, 128),
        "there is a bias": question.bias_type == NVTE_Bias_Type.NVTE_NO_BIAS,
        "there is a softmax offset": question.softmax_type == NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX,
        "the sliding window has another mask": question.window_size_left == -1 or is_causal,
        "dropout with padding": question.dropout == 0.0 or not is_padded,
        "a bottom-right mask has more queries than keys": "BOTTOM" not in mask or is_short,
        "packed sequences need compute capability 9.0": not is_packed or (is_padded and capability >= (9, 0)),
    }
    return next((reason for reason, holds in rules.items() if not holds), "")


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
    """Return [output]; in training also the statistics (log-sum-exps in fp32, packed [T, heads, 1]) and a random
    state.
    """
    check(q.dtype in (torch.bfloat16, torch.float16), "Fused attention only supports FP8 and BF16/FP16 data types.")
    if dropout or o_quantizer is not None or return_max_logit or page_k is not None:
        raise NotImplementedError("fused attention with dropout, FP8, maximal logits or pages is not emulated")
    check(int((cu_q[1:] - cu_q[:-1]).max()) <= max_q, "a sequence is longer than max_seqlen_q")
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    statistics = torch.full((*q.shape[:-1], 1), -torch.inf)
    for rows, cols in _sequences(layout, cu_q, cu_kv, padded_q, padded_kv):
        scores, values = _scores(q[rows], k[cols], scale, mask, window[0]), _by_head(v[cols], q.shape[-2])
        statistics[rows] = scores.logsumexp(-1).t()[..., None]
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(out.dtype)
    return [out, statistics, torch.zeros(2, dtype=torch.int64)] if is_training else [out]


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
    """Return the gradients of q, k and v, and None for the gradients of bias and sinks."""
    statistics, num_heads = aux[0], q.shape[-2]
    check(
        statistics.shape == (*q.shape[:-1], 1) and statistics.dtype is torch.float32,
        "expected statistics [T, heads, 1]",
    )
    grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    for rows, cols in _sequences(layout, cu_q, cu_kv, padded_q, padded_kv):
        scores = _scores(q[rows], k[cols], scale, mask, window[0])  # [h, q, k]
        shares = (scores - statistics[rows][..., 0].t()[..., None]).exp()
        upstream = d_o[rows].float()
        d_shares = torch.einsum("qhd,khd->hqk", upstream, _by_head(v[cols], num_heads))
        d_scores = shares * (d_shares - (upstream * o[rows].float()).sum(-1).t()[..., None]) * scale
        found = (
            torch.einsum("hqk,khd->qhd", d_scores, _by_head(k[cols], num_heads)),
            torch.einsum("hqk,qhd->khd", d_scores, q[rows].float()),
            torch.einsum("hqk,qhd->khd", shares, upstream),
        )
        for grad, index, part in zip(grads, (rows, cols, cols), found, strict=True):
            grad[index] = part.unflatten(1, (grad.shape[-2], -1)).sum(2).to(grad.dtype)
    return [*grads, None, None]


def _sequences(
    layout: Any, cu_q: torch.Tensor, cu_kv: torch.Tensor, padded_q: torch.Tensor | None, padded_kv: torch.Tensor | None
) -> Iterator[tuple[Index, Index]]:
    """Yield per sequence the indices of its rows in q, and in k and v. The layout is sbhd, bshd or thd."""
    for cu in (cu_q, cu_kv):
        check_int32(cu)
    name = layout.name.removeprefix("NVTE_")
    starts_q, starts_kv = (cu_q if padded_q is None else padded_q), (cu_kv if padded_kv is None else padded_kv)
    lengths = ([end - start for start, end in pairwise(cu.tolist())] for cu in (cu_q, cu_kv))
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


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, mask: Any, left: int) -> torch.Tensor:
    """Return [h, q, k] in fp32 for one sequence; -inf at masked entries. -1: no window on the left."""
    scores = torch.einsum("qhd,khd->hqk", q.float(), _by_head(k, q.shape[1])) * scale
    if "CAUSAL" in mask.name:
        shift = k.shape[0] - q.shape[0] if "BOTTOM" in mask.name else 0
        is_allowed = torch.ones(scores.shape[1:], dtype=torch.bool).tril(shift)
        is_allowed = is_allowed if left == -1 else is_allowed.triu(shift - left)
        scores = scores.masked_fill(~is_allowed, -torch.inf)
    return scores


def _by_head(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return keys or values [s, heads, d] in fp32, repeated for the query heads of each group."""
    return x.float().repeat_interleave(num_heads // x.shape[1], 1)


def convert_thd_to_bshd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, b: int, max_seq_len: int) -> torch.Tensor:
    check_int32(cu_seqlens)
    out = tensor.new_zeros(b, max_seq_len, *tensor.shape[1:])
    for i, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        out[i, : end - start] = tensor[start:end]
    return out


def convert_bshd_to_thd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, t: int) -> torch.Tensor:
    check_int32(cu_seqlens)
    out = tensor.new_zeros(t, *tensor.shape[2:])
    for i, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        out[start:end] = tensor[i, : end - start]
    return out
