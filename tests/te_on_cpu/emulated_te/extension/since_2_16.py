"""Functions and enums of the extension that Transformer Engine 2.16 changed."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch

from tests.te_on_cpu.emulated_te.extension import attention, blocks, casts, micro_blocks, names, optimizers
from tests.te_on_cpu.emulated_te.extension.common import check


def enum_with(before: Any, name: str, *added: str, module: str = __name__) -> Any:
    """Return an enum with the members of `before` and the next numbers."""
    return IntEnum(name, {member: i for i, member in enumerate((*(one.name for one in before), *added))}, module=module)


NVTE_QKV_Format = enum_with(names.NVTE_QKV_Format, "NVTE_QKV_Format", "NVTE_BHSD", "NVTE_QKV_Format_NOT_SET")
NVTE_QKV_Layout = enum_with(names.NVTE_QKV_Layout, "NVTE_QKV_Layout", "NVTE_BHSD_BHSD_BHSD")


def create_empty_quantized_tensor(
    quantizer: Any, shape: list[int], dtype: torch.dtype, device: torch.device, pin_memory: bool
) -> Any:
    """Return a tensor with the buffers that quantization fills. All bytes are 0xFF, a NaN in each format, so that a
    read before a write shows.
    """
    kind, zeros = casts.kind_of(quantizer), torch.zeros(shape, dtype=dtype)
    if kind == "Float8BlockQuantizer":
        buffers, fields = blocks.buffers_of(zeros, quantizer), blocks.fields_of(quantizer)
    elif kind == "MXFP8Quantizer":
        buffers, fields = micro_blocks.buffers_of(zeros, quantizer), micro_blocks.fields_of(quantizer)
    else:
        buffers, fields = casts.buffers_of(zeros, quantizer, torch.ones(1)), {}
    for buffer in buffers.values():
        if buffer is not None:
            buffer.view(torch.uint8).fill_(0xFF)
    return casts.wrap(quantizer, shape, dtype, buffers, **fields)


def fused_attn_fwd(
    max_q: int,
    max_kv: int,
    is_training: bool,
    scale: float,
    dropout: float,
    set_zero: bool,
    layout: Any,
    o_format: Any,
    scale_format: Any,
    bias_type: Any,
    mask: Any,
    softmax: Any,
    window: Any,
    is_bottom_right: bool,
    *others: Any,
) -> list[Any]:
    """Formats of results and of FP8 scales, and the corner in which the diagonal starts, are arguments."""
    _check_format(layout, o_format)
    _check_corner(mask, is_bottom_right)
    head = (max_q, max_kv, is_training, scale, dropout, set_zero, layout)
    return attention.fused_attn_fwd(*head, bias_type, mask, softmax, window, *others)


def fused_attn_bwd(
    max_q: int,
    max_kv: int,
    scale: float,
    dropout: float,
    set_zero: bool,
    layout: Any,
    o_format: Any,
    do_format: Any,
    dqkv_layout: Any,
    scale_format: Any,
    do_scale_format: Any,
    bias_type: Any,
    mask: Any,
    softmax: Any,
    window: Any,
    is_bottom_right: bool,
    deterministic: bool,
    cu_q: Any,
    cu_kv: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    d_o: Any,
    fake_dtype: Any,
    *others: Any,
) -> list[Any]:
    """As in the forward pass. The gradients' dtype is no argument any more."""
    _check_format(layout, o_format)
    _check_format(layout, do_format)
    _check_corner(mask, is_bottom_right)
    if dqkv_layout != layout:
        raise NotImplementedError("fused attention with gradients in another layout is not emulated")
    head = (max_q, max_kv, scale, dropout, set_zero, layout, bias_type, mask, softmax, window, deterministic)
    dtype = names.DType.kBFloat16  # not read
    return attention.fused_attn_bwd(*head, cu_q, cu_kv, q, k, v, o, d_o, fake_dtype, dtype, *others)


def multi_tensor_scale_tensor(
    chunk_size: int, noop: torch.Tensor, lists: optimizers.Lists, scale: torch.Tensor
) -> None:
    """Scale by a number on the device, such as a clipped norm's factor."""
    check(scale.dtype is torch.float32 and scale.numel() == 1, "scale must be one float")
    optimizers.multi_tensor_scale(chunk_size, noop, lists, float(scale))


def _check_format(layout: Any, form: Any) -> None:
    if layout.name.split("_")[1] != form.name.removeprefix("NVTE_"):
        raise NotImplementedError(f"fused attention from {layout.name} to {form.name} is not emulated")


def _check_corner(mask: Any, is_bottom_right: bool) -> None:
    if "CAUSAL" in mask.name and is_bottom_right != ("BOTTOM" in mask.name):
        raise NotImplementedError(f"fused attention with {mask.name} in the other corner is not emulated")
