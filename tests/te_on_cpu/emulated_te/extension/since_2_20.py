"""Functions and enums of the extension that Transformer Engine 2.20 changed.

Fused attention reads the parameters of one object and says why it refuses. In a ring of ranks each step's output is
merged into a running one, which was the sum of shares until 2.18.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch

from tests.te_on_cpu.emulated_te.extension import attention, context, names, since_2_16
from tests.te_on_cpu.emulated_te.extension.common import check

_TYPES = "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1"
_BACKENDS = {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
_SCALINGS = "DELAYED_TENSOR_SCALING MXFP8_1D_SCALING BLOCK_SCALING_1D BLOCK_SCALING_2D NVFP4_1D_SCALING"
# TE's Python has copies of the first two enums, and checks at import that it knows all members.
DType = IntEnum("DType", {name: int(names.DType[name]) for name in _TYPES.split()}, module=__name__)
NVTE_Fused_Attn_Backend = IntEnum("NVTE_Fused_Attn_Backend", _BACKENDS, module=__name__)
NVTEScalingMode = IntEnum(
    "NVTEScalingMode", {f"NVTE_{name}": i for i, name in enumerate(_SCALINGS.split())}, module=__name__
)
NVTERoutingMapFormat = IntEnum("NVTERoutingMapFormat", {"BYTEMAP": 0, "BITMAP_U8": 1}, module=__name__)
NVTEQBHistogramMode = IntEnum("NVTEQBHistogramMode", {"TWO_KERNEL": 0, "FUSED_ATOMIC": 1}, module=__name__)
NVTE_QKV_Layout = since_2_16.enum_with(
    since_2_16.NVTE_QKV_Layout, "NVTE_QKV_Layout", "NVTE_QKV_Layout_NOT_SET", module=__name__
)


def get_fused_attn_backend(params: Any) -> tuple[Any, str]:
    """Return the backend, and the reason if there is none."""
    dtype = names.DType(int(params.qkv_dtype))
    reason = attention.refusal(params, dtype, dtype)
    backend = NVTE_Fused_Attn_Backend
    return (backend.NVTE_No_Backend if reason else backend.NVTE_F16_arbitrary_seqlen), reason


def thd_out_correction(
    out: torch.Tensor,
    out_per_step: torch.Tensor,
    lse_before: torch.Tensor,
    lse: torch.Tensor,
    lse_per_step: torch.Tensor,
    cu_seqlens: torch.Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    """Merge the output of more keys into the output of the keys so far, whose statistics are `lse_before`, in place."""
    check(out.dtype == out_per_step.dtype, "out and out_per_step must have the same dtype")
    context.check_packed(lse_packed)
    rows = context.rows_of(cu_seqlens, only_second_half)
    kept = context.share_of(lse_before[:, rows], lse[:, rows])
    share = context.share_of(lse_per_step[:, : len(rows)], lse[:, rows])
    merged = out[rows].float() * kept + out_per_step[: len(rows)].float() * share
    out[rows] = merged.to(out.dtype)


def thd_sequence_order_to_cp_rank_order(
    tensor: torch.Tensor, cu_seqlens: torch.Tensor, world_size: int, total_tokens: int
) -> torch.Tensor:
    """Return the rows of all ranks, rank by rank."""
    return tensor.index_select(0, _rank_order(cu_seqlens, world_size, total_tokens))


def thd_cp_rank_order_to_sequence_order(
    tensor: torch.Tensor, cu_seqlens: torch.Tensor, world_size: int, total_tokens: int
) -> torch.Tensor:
    """Put the rows of all ranks, rank by rank, in the order of the sequences."""
    rows = _rank_order(cu_seqlens, world_size, total_tokens)
    return torch.empty_like(tensor).index_copy_(0, rows, tensor)


def thd_copy_valid_tokens_from_per_split_to_rank_local(
    out: torch.Tensor, inp: torch.Tensor, cu_seqlens_padded: torch.Tensor, cu_seqlens: torch.Tensor
) -> None:
    """Copy the tokens of each sequence, which starts at its padded place, to the same rows of `out`."""
    starts, lengths = cu_seqlens_padded.tolist(), (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    for i, length in enumerate(lengths):
        end = min(starts[i] + length, starts[i + 1])
        out[starts[i] : end] = inp[starts[i] : end]


def _rank_order(cu_seqlens: torch.Tensor, world_size: int, total_tokens: int) -> torch.Tensor:
    """Return the rows of the ranks, concatenated."""
    ranks = range(world_size)
    parts = [context.thd_get_partitioned_indices(cu_seqlens, total_tokens, world_size, rank) for rank in ranks]
    rows = torch.cat(parts).long()
    check(len(rows) == total_tokens, "rows beyond the last sequence have no rank")
    return rows
