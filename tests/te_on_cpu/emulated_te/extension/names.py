"""Enums and empty classes that Transformer Engine's Python reads from its extension, with the values of TE 2.9 to
2.11.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch


class DType(IntEnum):
    kByte = 0
    kInt16 = 1
    kInt32 = 2
    kInt64 = 3
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat8E8M0 = 9
    kFloat4E2M1 = 10


TORCH_OF = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kInt64: torch.int64,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}


def _enum(name: str, members: str) -> Any:
    return IntEnum(name, {member: number for number, member in enumerate(members.split())})


def _nvte(name: str, members: str, suffix: str = "") -> Any:
    return _enum(name, " ".join(f"NVTE_{member}{suffix}" for member in members.split()))


FP8FwdTensors = _enum(
    "FP8FwdTensors", " ".join(f"GEMM{i}_{kind}" for i in (1, 2, 3) for kind in ("INPUT", "WEIGHT", "OUTPUT"))
)
FP8BwdTensors = _enum("FP8BwdTensors", " ".join(f"GRAD_{kind}{i}" for i in (1, 2, 3) for kind in ("OUTPUT", "INPUT")))
NVTE_Bias_Type = _nvte("NVTE_Bias_Type", "NO_BIAS PRE_SCALE_BIAS POST_SCALE_BIAS ALIBI")
NVTE_Mask_Type = _nvte(
    "NVTE_Mask_Type",
    "NO PADDING CAUSAL PADDING_CAUSAL CAUSAL_BOTTOM_RIGHT PADDING_CAUSAL_BOTTOM_RIGHT",
    "_MASK",
)
NVTE_Softmax_Type = _nvte("NVTE_Softmax_Type", "VANILLA OFF_BY_ONE LEARNABLE", "_SOFTMAX")
NVTE_QKV_Format = _nvte("NVTE_QKV_Format", "SBHD BSHD THD BSHD_2SBHD SBHD_2BSHD THD_2BSHD THD_2SBHD")
NVTE_QKV_Layout = _nvte(
    "NVTE_QKV_Layout",
    "SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D BSHD_BSHD_BSHD "
    "T3HD TH3D THD_T2HD THD_TH2D THD_THD_THD SBHD_BSHD_BSHD BSHD_SBHD_SBHD THD_BSHD_BSHD THD_SBHD_SBHD "
    "Paged_KV_BSHD_BSHD_BSHD Paged_KV_BSHD_SBHD_SBHD Paged_KV_SBHD_BSHD_BSHD Paged_KV_SBHD_SBHD_SBHD "
    "Paged_KV_THD_BSHD_BSHD Paged_KV_THD_SBHD_SBHD",
)
NVTE_Fused_Attn_Backend = IntEnum(
    "NVTE_Fused_Attn_Backend",
    {"NVTE_No_Backend": -1, "NVTE_F16_max512_seqlen": 0, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2},
)
Float8BlockScaleTensorFormat = _enum("Float8BlockScaleTensorFormat", "GEMM_READY COMPACT")
CommOverlapType = _enum("CommOverlapType", "RS AG")
CommOverlapAlgo = _enum(
    "CommOverlapAlgo",
    "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS SPLIT_PIPELINED_RS_P2P ATOMIC_GEMM_RS "
    "ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P EXTERNAL_BULK_OVERLAP_AG",
)


class CommOverlapHelper: ...


class CommOverlap: ...


class CommOverlapP2P: ...


class FP8TensorMeta:
    scale = scale_inv = amax_history = None
