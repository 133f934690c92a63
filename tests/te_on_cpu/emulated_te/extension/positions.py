"""Rotary positions: halves are paired, values beyond the angles stay unchanged; in sbhd, bshd and packed (thd) form.

With context parallelism only packed sequences are emulated. Their `cu_seqlens` are then the whole batch's.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from tests.te_on_cpu.emulated_te.extension.common import check, check_int32
from tests.te_on_cpu.emulated_te.extension.names import NVTE_QKV_Format


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
    return _rope(x, freqs, start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank, sign=1.0)


def fused_rope_backward(x: torch.Tensor, freqs: torch.Tensor, *rest: Any) -> torch.Tensor:
    """`rest` is the rest of the forward's arguments; TE 2.9 omits the start positions."""
    return _rope(x, freqs, *(rest if len(rest) == 6 else (None, *rest)), sign=-1.0)


def _rope(
    x: torch.Tensor,
    freqs: torch.Tensor,
    start: Any,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Any,
    cp_size: int,
    cp_rank: int,
    *,
    sign: float,
) -> torch.Tensor:
    is_packed = qkv_format == NVTE_QKV_Format.NVTE_THD
    if interleaved or start is not None or (cp_size != 1 and not is_packed):
        raise NotImplementedError("rope that is interleaved, from a start, or unpacked over ranks is not emulated")
    check(freqs.dim() == 4 and freqs.shape[1] == freqs.shape[2] == 1, "expected freqs [s, 1, 1, d]")
    check(freqs.dtype is torch.float32, "Dtype of the freqs tensor must be float")
    if is_packed:
        return _rope_packed(x, freqs, cu_seqlens, cp_size, cp_rank, sign)
    check(x.dim() == 4, "expected 4D tensor")
    is_sbhd = qkv_format == NVTE_QKV_Format.NVTE_SBHD
    length = x.shape[0] if is_sbhd else x.shape[1]
    check(length <= freqs.shape[0], "expected freqs tensor has a longer sequence length than input")
    return _rotated(x, freqs[:length] if is_sbhd else freqs[:length].transpose(0, 1), sign)


def _rope_packed(
    x: torch.Tensor, freqs: torch.Tensor, cu_seqlens: torch.Tensor, cp_size: int, cp_rank: int, sign: float
) -> torch.Tensor:
    check(x.dim() == 3, "expected 3D tensor")
    check_int32(cu_seqlens)
    lengths = [end - start for start, end in pairwise(cu_seqlens.tolist())]
    longest = max(lengths, default=0)
    check(longest <= freqs.shape[0], f"a segment of {longest} reads past the end of {freqs.shape[0]} angles")
    places = torch.cat([_places(length, cp_size, cp_rank) for length in lengths])
    result = torch.zeros_like(x, memory_format=torch.contiguous_format)  # a GPU leaves rows beyond the segments unset
    result[: len(places)] = _rotated(x[: len(places)], freqs[places, 0], sign)
    return result


def _places(length: int, cp_size: int, cp_rank: int) -> torch.Tensor:
    """Return the positions of a rank's two chunks of a sequence. The second chunk is counted from the end of the
    sequence.
    """
    if cp_size == 1:
        return torch.arange(length)
    half = length // cp_size // 2
    return torch.cat((torch.arange(half) + cp_rank * half, torch.arange(half) + length - (cp_rank + 1) * half))


def _rotated(x: torch.Tensor, angles: torch.Tensor, sign: float) -> torch.Tensor:
    """Return x [..., heads, d] rotated by angles [..., 1, d2]; with sign -1 multiplied by the transpose of the
    rotation.
    """
    width = angles.shape[-1]
    turned, rest = x[..., :width].float(), x[..., width:]
    cos, sin = angles.cos(), angles.sin()
    if sign > 0:
        first, second = turned.chunk(2, dim=-1)
        out = turned * cos + torch.cat((-second, first), -1) * sin
    else:  # use sin of the output row
        first, second = (turned * sin).chunk(2, dim=-1)
        out = turned * cos + torch.cat((second, -first), -1)
    return torch.cat((out.to(x.dtype), rest), -1)
