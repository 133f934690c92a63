"""Casts to FP8 with one scale per tensor: given (delayed scaling) or from the tensor's maximum (current scaling).

The bits equal the bits of the real kernels: the scale is fp32, the product saturates and rounds to nearest even.
Quantization fills the buffers that a Hopper card fills: its FP8 products are TN only, so "column-wise" data is a
transposed copy. Only MXFP8 has the buffers of a Blackwell card.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from tests.te_on_cpu.emulated_te.extension.common import check, is_plain, transposed
from tests.te_on_cpu.emulated_te.extension.names import TORCH_OF, DType

F32_MAX = torch.finfo(torch.float32).max
# quantizer -> module and class of its tensors
TENSORS = {
    "Float8Quantizer": ("float8_tensor", "Float8Tensor"),
    "Float8CurrentScalingQuantizer": ("float8_tensor", "Float8Tensor"),
    "Float8BlockQuantizer": ("float8_blockwise_tensor", "Float8BlockwiseQTensor"),
    "MXFP8Quantizer": ("mxfp8_tensor", "MXFP8Tensor"),
}
Buffers = dict[str, torch.Tensor | None]


def cast(values: torch.Tensor, scale: torch.Tensor, fp8: DType) -> torch.Tensor:
    """Return the uint8 bits of values * scale, saturated."""
    dtype = TORCH_OF[fp8]
    limit = torch.finfo(dtype).max
    return (values.float() * scale).clamp(-limit, limit).to(dtype).view(torch.uint8)


def value_of(bits: torch.Tensor, fp8: DType) -> torch.Tensor:
    """Return the fp32 values of FP8 bits."""
    return bits.contiguous().view(TORCH_OF[fp8]).float()


def scale_of(amax: torch.Tensor, fp8: DType, pow_2: bool, epsilon: float, at_infinity: float = F32_MAX) -> torch.Tensor:
    """Return the scale that maps `amax` to the largest FP8 value, as compute_scale_from_amax of recipe_common.cuh
    does.
    """
    amax = torch.where(amax < epsilon, torch.full_like(amax, epsilon), amax)
    # Divide tensors: torch computes `number / tensor` through a reciprocal, which differs by one unit in the last
    # place.
    scale = torch.full_like(amax, torch.finfo(TORCH_OF[fp8]).max).div_(amax)
    scale = torch.where(scale.isinf(), at_infinity, scale)
    if pow_2:
        scale = (scale.view(torch.int32) & torch.tensor(0x7F800000, dtype=torch.int32)).view(torch.float32)
    return torch.where(amax.isfinite() & (amax != 0), scale, 1.0)


def kind_of(quantizer: Any) -> str:
    """Return the name of a quantizer's class. Raise NotImplementedError for NVFP4."""
    name = type(quantizer).__name__
    if name not in TENSORS:
        raise NotImplementedError(f"quantization by {name} is not emulated")
    return name


def wrap(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, buffers: Buffers, **others: Any) -> Any:
    """Return TE's tensor around the buffers, or only its storage if the quantizer is internal."""
    module, name = TENSORS[kind_of(quantizer)]
    package = "transformer_engine.pytorch.tensor"
    fields: dict[str, Any] = {**buffers, **others, "fp8_dtype": DType(quantizer.dtype), "quantizer": quantizer}
    if not quantizer.internal:
        return getattr(importlib.import_module(f"{package}.{module}"), name)(shape=shape, dtype=dtype, **fields)
    storage = getattr(importlib.import_module(f"{package}.storage.{module}_storage"), f"{name}Storage")
    if "fake_dtype" in inspect.signature(storage.__new__).parameters:  # since TE 2.16
        fields["fake_dtype"] = dtype
    return storage(**fields)


def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: torch.Tensor | None = None) -> Any:
    """Return `tensor` quantized, written into `output` if given. With noop = 1 `output` stays unchanged."""
    if quantizer is None:
        return tensor
    kind = kind_of(quantizer)
    if noop is not None and noop.numel() and float(noop) == 1.0 and output is not None:
        return output
    if kind == "Float8BlockQuantizer":
        from tests.te_on_cpu.emulated_te.extension.blocks import quantize_blocks

        return quantize_blocks(tensor, quantizer, output)
    if kind == "MXFP8Quantizer":
        from tests.te_on_cpu.emulated_te.extension.micro_blocks import quantize_micro_blocks

        return quantize_micro_blocks(tensor, quantizer, output)
    check(quantizer.rowwise_usage or quantizer.columnwise_usage, "Invalid usages for Float8Quantizer.")
    x = tensor.detach().contiguous()
    if kind == "Float8Quantizer":
        _note_maximum(x, quantizer)
        return _filled(x, quantizer, quantizer.scale, output)
    return _filled(x, quantizer, _scale_to_maximum(x, quantizer), output)


def _note_maximum(x: torch.Tensor, quantizer: Any) -> None:
    """Raise the delayed quantizer's amax to this tensor's maximum. It has no amax if master weights are cast with a
    known scale."""
    if quantizer.amax.numel() and x.numel():
        quantizer.amax.copy_(torch.maximum(quantizer.amax, x.float().abs().amax()))


def _scale_to_maximum(x: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """Return the scale. Only quantizers before TE 2.16 keep it and the maximum, or can be given a maximum."""
    amax = quantizer.amax if hasattr(quantizer, "amax") else torch.zeros(1)
    if not getattr(quantizer, "use_existing_amax", False):
        amax.copy_(x.float().abs().amax() if x.numel() else torch.zeros(1))
    if quantizer.with_amax_reduction:
        group = quantizer._canonicalized_amax_reduction_group()
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
    scale = scale_of(amax, DType(quantizer.dtype), quantizer.force_pow_2_scales, quantizer.amax_epsilon)
    return quantizer.scale.copy_(scale) if hasattr(quantizer, "scale") else scale


def buffers_of(x: torch.Tensor, quantizer: Any, scale: torch.Tensor) -> Buffers:
    bits = cast(x, scale, DType(quantizer.dtype))
    return {
        "data": bits if quantizer.rowwise_usage else None,
        "data_transpose": transposed(bits) if quantizer.columnwise_usage else None,
        "fp8_scale_inv": scale.reciprocal().reshape(1),
    }


def _filled(x: torch.Tensor, quantizer: Any, scale: torch.Tensor, output: Any) -> Any:
    buffers = buffers_of(x, quantizer, scale)
    if output is None:
        return wrap(quantizer, x.shape, x.dtype, buffers)
    data, transpose, scale_inv = buffers.values()
    for name, found in (("_data", data), ("_transpose", transpose)):
        held = getattr(output, name)
        if found is None or held is None:
            setattr(output, name, found)
        else:  # in place, as the kernel does, because other tensors may be views of the buffer
            held.view(torch.uint8).copy_(found.view(held.shape))
    output._transpose_invalid = transpose is None
    output._fp8_dtype = quantizer.dtype
    assert scale_inv is not None
    output._scale_inv.copy_(scale_inv.view_as(output._scale_inv))
    return output


def dequantize(input: Any, otype: DType) -> torch.Tensor:
    """Return the values of per-tensor FP8 and MXFP8. TE's Python dequantizes blocks of 128."""
    if not hasattr(input, "_data"):
        from tests.te_on_cpu.emulated_te.extension.micro_blocks import dequantize_micro_blocks

        return dequantize_micro_blocks(input, otype)
    data = input._data
    if data is None:
        check(input._transpose is not None and not input._transpose_invalid, "tensor has no data")
        data = input._transpose.movedim(0, -1)
    return (value_of(data, DType(input._fp8_dtype)) * input._scale_inv).to(TORCH_OF[DType(otype)])


def multi_tensor_quantize(tensor_list: list[torch.Tensor], quantizer_list: list[Any]) -> list[Any]:
    return [quantize(t, q) for t, q in zip(tensor_list, quantizer_list, strict=True)]


def split_quantize(
    tensor: torch.Tensor, split_sections: list[int], quantizer_list: list[Any], disable_bulk_allocation: bool = False
) -> list[Any]:
    return [quantize(t, q) for t, q in zip(tensor.split(split_sections), quantizer_list, strict=True)]


def bgrad_quantize(input: torch.Tensor, quantizer: Any) -> list[Any]:
    """Return the gradient of the bias and the quantized input."""
    check(is_plain(input), "the gradient is already quantized")
    return [input.reshape(-1, input.shape[-1]).float().sum(0).to(input.dtype), quantize(input.contiguous(), quantizer)]


def fp8_transpose(input: torch.Tensor, dtype: DType, *, out: torch.Tensor | None) -> torch.Tensor:
    result = transposed(input)
    return result if out is None else out.copy_(result.view(out.shape))


def swap_first_dims(tensor: torch.Tensor, *, out: torch.Tensor | None) -> torch.Tensor:
    result = tensor.transpose(0, 1).contiguous()
    return result if out is None else out.copy_(result)


def compute_amax(input: torch.Tensor, amax: torch.Tensor) -> None:
    check(amax.dtype is torch.float32 and amax.numel() == 1, "amax must be one float")
    amax.copy_(input.float().abs().amax() if input.numel() else torch.zeros(()))


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: torch.Tensor,
    amax_histories: list[torch.Tensor],
    scales: list[torch.Tensor],
    amax_compute_algo: str,
    fp8_dtype: DType,
    margin: float,
) -> None:
    """Shift the histories of maxima [history, tensors] and set the next scales, as kernel_bulk of delayed_scaling.cu
    does.
    """
    scaled_max = torch.finfo(TORCH_OF[DType(fp8_dtype)]).max * 2.0**-margin
    offset = 0
    for history, scale in zip(amax_histories, scales, strict=True):
        reduced = amax_reduction_buffer[offset : offset + scale.numel()]
        offset += scale.numel()
        last = torch.where(reduced != 0, reduced, history[0])
        rolled = torch.cat((history[1:], last[None]))
        amax = rolled.amax(0) if amax_compute_algo == "max" else last
        rolled[0] = 0
        history.copy_(torch.where(last != 0, rolled, history))
        is_known = amax.isfinite() & (amax > 0)
        wanted = torch.where(is_known, torch.full_like(amax, scaled_max).div_(amax), scale)
        scale.copy_(torch.where(wanted.isinf(), F32_MAX, wanted))
