"""MXFP8: one power of two (E8M0, 8 bits) per 32 elements, along rows and along columns, as Blackwell cards multiply.

Row-wise and column-wise data are each quantized from the original values and have the tensor's shape. Scales are padded
to multiples of [128, 4]. With `optimize_for_gemm` they have the order that cuBLASLt reads.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.te_on_cpu.emulated_te.extension.casts import Buffers, cast, value_of, wrap
from tests.te_on_cpu.emulated_te.extension.common import block_maxima, check, spread
from tests.te_on_cpu.emulated_te.extension.names import TORCH_OF, DType

SIZE = 32
FIELDS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")


def quantize_micro_blocks(tensor: torch.Tensor, quantizer: Any, output: Any) -> Any:
    """Return `tensor` quantized, written into `output` if given."""
    x = tensor.detach().contiguous()
    buffers, fields = buffers_of(x, quantizer), fields_of(quantizer)
    if output is None:
        return wrap(quantizer, x.shape, x.dtype, buffers, **fields)
    for name, part in {f"_{name}": part for name, part in buffers.items()}.items():
        held = getattr(output, name)
        setattr(output, name, part if part is None or held is None else held.copy_(part.view(held.shape)))
    output._fp8_dtype = quantizer.dtype
    for name, value in fields.items():
        setattr(output, f"_{name}", value)
    return output


def buffers_of(x: torch.Tensor, quantizer: Any) -> Buffers:
    if getattr(quantizer, "with_2d_quantization", False):
        raise NotImplementedError("MXFP8 in blocks of 32 x 32 is not emulated")
    rows, cols = math.prod(x.shape[:-1]), x.shape[-1]
    check(rows % SIZE == cols % SIZE == 0, f"MXFP8 requires tensor dims that are divisible by 32 (got {x.shape})")
    parts: Buffers = dict.fromkeys(FIELDS)
    wanted = {"rowwise": quantizer.rowwise_usage, "columnwise": quantizer.columnwise_usage}
    for side in [side for side, is_wanted in wanted.items() if is_wanted]:
        bits, exponents = _scaled(x.view(rows, cols).float(), DType(quantizer.dtype), side)
        parts[f"{side}_data"] = bits.view(x.shape)
        parts[f"{side}_scale_inv"] = _padded(exponents, side, bool(getattr(quantizer, "optimize_for_gemm", False)))
    return parts


def fields_of(quantizer: Any) -> dict[str, Any]:
    """Return the fields of the tensor that are no buffers."""
    if not hasattr(quantizer, "optimize_for_gemm"):
        return {}
    return {"with_gemm_swizzled_scales": bool(quantizer.optimize_for_gemm)}


def values_of(x: Any, side: str) -> torch.Tensor:
    """Return the fp32 values [rows, cols] of the row-wise or column-wise copy."""
    bits, scales = getattr(x, f"_{side}_data"), getattr(x, f"_{side}_scale_inv")
    bits = bits.reshape(-1, bits.shape[-1])
    rows, cols = bits.shape
    height, width = _block(side)
    if getattr(x, "_with_gemm_swizzled_scales", False):
        scales = _unswizzled(scales) if side == "rowwise" else _unswizzled(scales.view(scales.shape[::-1])).T
    factors = torch.exp2(scales[: rows // height, : cols // width].double() - 127)
    return (value_of(bits, DType(x._fp8_dtype)).double() * spread(factors, height, width, rows, cols)).float()


def dequantize_micro_blocks(x: Any, otype: DType) -> torch.Tensor:
    side = "rowwise" if x._rowwise_data is not None else "columnwise"
    return values_of(x, side).view(getattr(x, f"_{side}_data").shape).to(TORCH_OF[DType(otype)])


def _block(side: str) -> tuple[int, int]:
    return (1, SIZE) if side == "rowwise" else (SIZE, 1)


def _scaled(values: torch.Tensor, fp8: DType, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bits and the biased exponents of the blocks' scales, which round up."""
    height, width = _block(side)
    largest = 1 / torch.tensor(torch.finfo(TORCH_OF[fp8]).max)  # the kernel multiplies by the rounded reciprocal
    wanted = block_maxima(values, height, width) * largest
    fraction, exponent = torch.frexp(wanted)  # fraction in [0.5, 1)
    exponents = (exponent - (fraction == 0.5).int() + 127).clamp(0, 254)
    exponents = torch.where(wanted == 0, 0, torch.where(wanted.isinf(), 254, exponents))
    inverse = spread(torch.exp2(127.0 - exponents), height, width, *values.shape)
    return cast(values, inverse, fp8), exponents.to(torch.uint8)


def _padded(exponents: torch.Tensor, side: str, is_swizzled: bool) -> torch.Tensor:
    """Pad to a multiple of [128, 4] for rows and [4, 128] for columns. A GPU leaves the padding unset; here it is 0."""
    by_row = exponents if side == "rowwise" else exponents.T
    rows, cols = by_row.shape
    padded = by_row.new_zeros(-(-rows // 128) * 128, -(-cols // 4) * 4)
    padded[:rows, :cols] = by_row
    if is_swizzled:
        padded = padded.view(-1, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4).reshape(padded.shape)
        return padded if side == "rowwise" else padded.view(padded.shape[::-1])
    return padded if side == "rowwise" else padded.T.contiguous()


def _unswizzled(scales: torch.Tensor) -> torch.Tensor:
    rows, cols = scales.shape
    return scales.reshape(rows // 128, cols // 4, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(rows, cols)
