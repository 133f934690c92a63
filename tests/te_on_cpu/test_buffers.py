"""Tensors of Transformer Engine's quantizers have the buffers that csrc/quantizer.cpp allocates, empty or quantized.

The card is a Hopper card, for MXFP8 a Blackwell card. The expected shapes are numbers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformer_engine
import transformer_engine_torch as tex
from packaging.version import Version
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

E4M3 = tex.DType.kFloat8E4M3
ROWS, BLOCKS = (2, 71, 272), (2, 80, 288)  # MXFP8 needs multiples of 32 rows and columns
# quantizer -> shape, and the shapes of the row-wise and the column-wise buffers
SHAPES: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "delayed": (ROWS, {"_data": ROWS}, {"_transpose": (272, 2, 71)}),
    "tensorwise": (ROWS, {"_data": ROWS}, {"_transpose": (272, 2, 71)}),
    "strips": (
        ROWS,
        {"_rowwise_data": ROWS, "_rowwise_scale_inv": (3, 144)},
        {"_columnwise_data": (272, 2, 71), "_columnwise_scale_inv": (2, 272)},
    ),
    "squares": (
        ROWS,
        {"_rowwise_data": ROWS, "_rowwise_scale_inv": (2, 4)},
        {"_columnwise_data": (272, 2, 71), "_columnwise_scale_inv": (3, 4)},
    ),
    "mxfp8": (
        BLOCKS,
        {"_rowwise_data": BLOCKS, "_rowwise_scale_inv": (256, 12)},
        {"_columnwise_data": BLOCKS, "_columnwise_scale_inv": (8, 384)},
    ),
}
IS_NEW = Version("2.16") <= Version(transformer_engine.__version__)  # make_empty is in the extension


def make_quantizer(kind: str) -> Any:
    if kind == "delayed":
        return Float8Quantizer(torch.ones(1), torch.zeros(1), E4M3)
    if kind == "tensorwise":
        return Float8CurrentScalingQuantizer(E4M3, torch.device("cpu"))
    if kind == "mxfp8":
        return MXFP8Quantizer(E4M3)
    return Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1 if kind == "strips" else 2)


def buffers_of(tensor: Any) -> dict[str, torch.Tensor]:
    fields = (
        "data",
        "transpose",
        *(f"{side}wise_{part}" for side in ("row", "column") for part in ("data", "scale_inv")),
    )
    found = {f"_{name}": getattr(tensor, f"_{name}", None) for name in (*fields, "scale_inv")}
    return {name: buffer for name, buffer in found.items() if buffer is not None}


@pytest.mark.parametrize("is_internal", [False, True])
@pytest.mark.parametrize("usage", ["both", "rowwise", "columnwise"])
@pytest.mark.parametrize("kind", SHAPES)
def test_the_buffers_are_those_of_the_usage(kind: str, usage: str, is_internal: bool) -> None:
    shape, by_row, by_column = SHAPES[kind]
    quantizer = make_quantizer(kind)
    quantizer.internal = is_internal
    quantizer.set_usage(rowwise=usage != "columnwise", columnwise=usage != "rowwise")
    expected = (by_row if usage != "columnwise" else {}) | (by_column if usage != "rowwise" else {})
    expected |= {"_scale_inv": (1,)} if kind in ("delayed", "tensorwise") else {}
    made = {"quantized": tex.quantize(torch.ones(shape, dtype=torch.bfloat16), quantizer)}
    if IS_NEW:
        made["empty"] = quantizer.make_empty(shape, dtype=torch.bfloat16, device="cuda")
    for name, tensor in made.items():
        assert {field: tuple(buffer.shape) for field, buffer in buffers_of(tensor).items()} == expected, name
        assert type(tensor).__name__.endswith("Storage") == is_internal, name
        assert not IS_NEW or (tensor._dtype if is_internal else tensor.dtype) is torch.bfloat16, name
        if hasattr(quantizer, "inner_tensor_specs") and kind != "delayed":  # TE's Python mirrors its extension here
            found = {field: (tuple(buffer.shape), buffer.dtype) for field, buffer in buffers_of(tensor).items()}
            assert found == quantizer.inner_tensor_specs(shape), name


@pytest.mark.skipif(not IS_NEW, reason="this version has no such function")
@pytest.mark.parametrize("kind", SHAPES)
def test_an_empty_tensor_is_nan_until_it_is_filled(kind: str) -> None:
    """The quantizer's maximum stays. Filled in place, the tensor has the bits of a new one."""
    shape = SHAPES[kind][0]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    quantizer = make_quantizer(kind)
    empty = quantizer.make_empty(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    assert empty.requires_grad and not empty.dequantize().isfinite().any()
    assert kind != "delayed" or float(quantizer.amax) == 0
    before = {name: buffer.data_ptr() for name, buffer in buffers_of(empty).items()}
    quantizer.update_quantized(values, empty)
    new = buffers_of(quantizer(values))
    for name, buffer in buffers_of(empty).items():
        assert torch.equal(buffer, new[name]) and buffer.data_ptr() == before[name], name
