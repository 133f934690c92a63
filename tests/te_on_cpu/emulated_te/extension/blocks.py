"""Casts to FP8 with one scale per block: 128 x 128 (weights) or 1 x 128 along rows and along columns (activations,
gradients).

Row-wise and column-wise data are each quantized from the original values. Scales have the extension's layout: the last
dimension is padded to a multiple of 4, and scales of 1 x 128 blocks are transposed. In COMPACT form (for all-gathers)
they are neither.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.te_on_cpu.emulated_te.extension.casts import Buffers, cast, scale_of, wrap
from tests.te_on_cpu.emulated_te.extension.common import BLOCK, block_maxima, check, num_blocks, spread, transposed
from tests.te_on_cpu.emulated_te.extension.names import DType, Float8BlockScaleTensorFormat

FIELDS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")


def quantize_blocks(tensor: torch.Tensor, quantizer: Any, output: Any) -> Any:
    """Return `tensor` quantized in blocks, written into `output` if given."""
    x = tensor.detach().contiguous()
    buffers = buffers_of(x, quantizer)
    if output is None:
        return wrap(quantizer, x.shape, x.dtype, buffers, **fields_of(quantizer))
    for name, part in buffers.items():
        held = getattr(output, "_" + name)
        if part is None or held is None:
            setattr(output, "_" + name, part)
        else:
            held.copy_(part.view(held.shape))
    return output


def buffers_of(x: torch.Tensor, quantizer: Any) -> Buffers:
    is_2d, is_compact = quantizer.block_scaling_dim == 2, bool(getattr(quantizer, "all_gather_usage", False))
    check(not (is_2d and is_compact), "2D scaling is always GEMM_READY for now.")
    check(x.shape[-1] % 16 == 0 or not is_2d, "block scaling needs row lengths that are multiples of 16")
    return dict.fromkeys(FIELDS) | (_squares(x, quantizer) if is_2d else _strips(x, quantizer, is_compact))


def fields_of(quantizer: Any) -> dict[str, Any]:
    """Return the fields of the tensor that are no buffers."""
    fields: dict[str, Any] = {"is_2D_scaled": quantizer.block_scaling_dim == 2}
    if hasattr(quantizer, "all_gather_usage"):  # until TE 2.11
        form = Float8BlockScaleTensorFormat
        fields["data_format"] = form.COMPACT if quantizer.all_gather_usage else form.GEMM_READY
    return fields


def _squares(x: torch.Tensor, quantizer: Any) -> Buffers:
    bits, scales = _scaled(x, quantizer, BLOCK, BLOCK)
    parts: Buffers = {}
    if quantizer.rowwise_usage:
        parts |= {"rowwise_data": bits, "rowwise_scale_inv": _padded(scales)}
    if quantizer.columnwise_usage:
        parts |= {"columnwise_data": transposed(bits), "columnwise_scale_inv": _padded(scales.T)}
    return parts


def _strips(x: torch.Tensor, quantizer: Any, is_compact: bool) -> Buffers:
    parts: Buffers = {}
    if quantizer.rowwise_usage:
        bits, scales = _scaled(x, quantizer, 1, BLOCK)  # [rows, blocks]
        parts |= {"rowwise_data": bits, "rowwise_scale_inv": scales if is_compact else _padded(scales.T)}
    if quantizer.columnwise_usage:
        bits, scales = _scaled(x, quantizer, BLOCK, 1)  # [blocks, cols]
        parts["columnwise_data"] = bits if is_compact else transposed(bits)
        parts["columnwise_scale_inv"] = scales if is_compact else _padded(scales)
    return parts


def _scaled(x: torch.Tensor, quantizer: Any, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bits, shaped like `x`, and the inverse scale of every block."""
    fp8 = DType(quantizer.dtype)
    flat = x.view(math.prod(x.shape[:-1]), x.shape[-1]).float()
    amax = block_maxima(flat, height, width)
    scale = scale_of(amax, fp8, quantizer.force_pow_2_scales, quantizer.amax_epsilon, torch.finfo(x.dtype).max)
    bits = cast(flat, spread(scale, height, width, *flat.shape), fp8)
    return bits.view(x.shape), scale.reciprocal()


def _padded(scales: torch.Tensor) -> torch.Tensor:
    """Pad the last dimension of the scales with zeros to a multiple of 4."""
    rows, cols = scales.shape
    result = scales.new_zeros(rows, -(-cols // 4) * 4)
    result[:, :cols] = scales
    return result


def fp8_block_scaling_compute_partial_amax(
    tensor: torch.Tensor, amax: torch.Tensor, h: int, w: int, start_offset: int, block_len: int
) -> None:
    """Write into `amax` the block maxima of this flat shard of an [h, w] matrix."""
    check(block_len == BLOCK and amax.dim() == 2, "amax must be a 2D tensor of blocks of 128")
    flat = torch.zeros(h * w)
    flat[start_offset : start_offset + tensor.numel()] = tensor.float().view(-1)
    amax[: num_blocks(h), : num_blocks(w)] = block_maxima(flat.view(h, w), BLOCK, BLOCK)


def fp8_block_scaling_partial_cast(
    inp: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    h: int,
    w: int,
    start_offset: int,
    block_len: int,
    out_dtype: DType,
) -> None:
    """Cast a flat shard of an [h, w] matrix with the scales of its blocks."""
    check(block_len == BLOCK, "block_len must be 128")
    mine = spread(scale, BLOCK, BLOCK, h, w).reshape(-1)[start_offset : start_offset + inp.numel()]
    out.view(-1).copy_(cast(inp.view(-1), mine, DType(out_dtype)))
