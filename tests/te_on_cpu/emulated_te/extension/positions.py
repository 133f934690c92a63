"""Rotary positions: halves are paired, values beyond the angles pass; in sbhd, bshd and packed (thd) form."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from emulated_te.extension.common import check, check_int32
from emulated_te.extension.names import NVTE_QKV_Format


def fused_rope_forward(
    x: torch.Tensor,
    freqs: torch.Tensor,
    start_positions: Any,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Any,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    return _rope(x, freqs, start_positions, qkv_format, interleaved, cu_seqlens, cp_size, sign=1.0)


def fused_rope_backward(x: torch.Tensor, freqs: torch.Tensor, *rest: Any) -> torch.Tensor:
    """`rest` is the forward's; TE 2.9 leaves out the start positions."""
    start, qkv_format, interleaved, cu_seqlens, cp_size, _ = rest if len(rest) == 6 else (None, *rest)
    return _rope(x, freqs, start, qkv_format, interleaved, cu_seqlens, cp_size, sign=-1.0)


def _rope(
    x: torch.Tensor,
    freqs: torch.Tensor,
    start: Any,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Any,
    cp_size: int,
    *,
    sign: float,
) -> torch.Tensor:
    if interleaved or cp_size != 1 or start is not None:
        raise NotImplementedError("rope that is interleaved, over context-parallel ranks or from a start is not emulated")
    check(freqs.dim() == 4 and freqs.shape[1] == freqs.shape[2] == 1, "expected freqs [s, 1, 1, d]")
    check(freqs.dtype is torch.float32, "Dtype of the freqs tensor must be float")
    if qkv_format == NVTE_QKV_Format.NVTE_THD:
        return _rope_packed(x, freqs, cu_seqlens, sign)
    check(x.dim() == 4, "expected 4D tensor")
    is_sbhd = qkv_format == NVTE_QKV_Format.NVTE_SBHD
    length = x.shape[0] if is_sbhd else x.shape[1]
    check(length <= freqs.shape[0], "expected freqs tensor has a longer sequence length than input")
    return _rotated(x, freqs[:length] if is_sbhd else freqs[:length].transpose(0, 1), sign)


def _rope_packed(x: torch.Tensor, freqs: torch.Tensor, cu_seqlens: torch.Tensor, sign: float) -> torch.Tensor:
    check(x.dim() == 3, "expected 3D tensor")
    check_int32(cu_seqlens)
    lengths = [end - begin for begin, end in pairwise(cu_seqlens.tolist())]
    longest = max(lengths, default=0)
    check(longest <= freqs.shape[0], f"a segment of {longest} reads past the end of {freqs.shape[0]} angles")
    places = torch.cat([torch.arange(length) for length in lengths])
    result = torch.zeros_like(x, memory_format=torch.contiguous_format)  # a GPU leaves rows beyond the segments unset
    result[: len(places)] = _rotated(x[: len(places)], freqs[places, 0], sign)
    return result


def _rotated(x: torch.Tensor, angles: torch.Tensor, sign: float) -> torch.Tensor:
    """Return x [..., heads, d] turned by angles [..., 1, d2], or with sign -1 multiplied by the transpose of that matrix."""
    width = angles.shape[-1]
    turned, rest = x[..., :width].float(), x[..., width:]
    cos, sin = angles.cos(), angles.sin()
    if sign > 0:
        first, second = turned.chunk(2, dim=-1)
        out = turned * cos + torch.cat((-second, first), -1) * sin
    else:  # sin belongs to the row that is written
        first, second = (turned * sin).chunk(2, dim=-1)
        out = turned * cos + torch.cat((second, -first), -1)
    return torch.cat((out.to(x.dtype), rest), -1)
