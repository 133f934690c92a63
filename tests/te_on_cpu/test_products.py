"""Matrix products on emulated kernels against float64, and inputs that TE and cuBLASLt refuse on a Hopper card."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformer_engine_torch as tex
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

E4M3, CPU = tex.DType.kFloat8E4M3, torch.device("cpu")
# Shapes of A and B per layout, for an output of [tokens, out]. The product sums over the third size.
SHAPES = {
    "TN": lambda tokens, out, inner: ((out, inner), (tokens, inner)),
    "NN": lambda tokens, out, inner: ((inner, out), (tokens, inner)),
    "NT": lambda tokens, out, inner: ((inner, out), (inner, tokens)),
}


def operands(layout: str, tokens: int, out: int, inner: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(tokens)
    a, b = SHAPES[layout](tokens, out, inner)
    return tuple(torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype) for shape in (a, b))  # type: ignore


def expected(layout: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = a.double(), b.double()
    return (b.t() if layout[1] == "T" else b) @ (a.t() if layout[0] == "T" else a)


def tensorwise(*, rowwise: bool = True, columnwise: bool = True) -> Any:
    return Float8CurrentScalingQuantizer(E4M3, CPU, rowwise=rowwise, columnwise=columnwise)


def blockwise(dim: int) -> Any:
    return Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=dim)


def close(found: torch.Tensor, wanted: torch.Tensor, rounding: float) -> None:
    assert (found.double() - wanted).norm() <= rounding * wanted.norm()


@pytest.mark.parametrize("layout", SHAPES)
def test_plain_products_round_once(layout: str) -> None:
    """With a bias, in fp32 and bf16, at odd sizes."""
    for dtype, rounding in ((torch.float32, 1e-6), (torch.bfloat16, 2**-8)):
        a, b = operands(layout, 7, 13, 29, dtype)
        bias = torch.arange(13, dtype=dtype)
        close(general_gemm(a, b, dtype, layout=layout)[0], expected(layout, a, b), rounding)
        close(general_gemm(a, b, dtype, layout=layout, bias=bias)[0], expected(layout, a, b) + bias, rounding)


@pytest.mark.parametrize("kinds", ["tensorwise", "2d 1d", "1d 2d", "1d 1d"])
@pytest.mark.parametrize("layout", SHAPES)
def test_fp8_products_are_those_of_the_numbers_that_the_bits_stand_for(layout: str, kinds: str) -> None:
    """Products read the row-wise or the transposed copy. With 1 x 128 blocks the two copies encode different
    numbers.
    """
    a, b = operands(layout, 48, 176, 272, torch.bfloat16)
    if kinds == "tensorwise":
        a8, b8 = tensorwise()(a), tensorwise()(b)
        values = [x.dequantize(dtype=torch.float32) for x in (a8, b8)]
    else:
        dims = [int(kind[0]) for kind in kinds.split()]
        a8, b8 = (blockwise(dim)(x) for dim, x in zip(dims, (a, b), strict=True))
        is_transposed = (layout[0] == "N", layout[1] == "T")
        values = [read(blockwise(dim), x, turned) for dim, x, turned in zip(dims, (a, b), is_transposed, strict=True)]
    close(general_gemm(a8, b8, torch.float32, layout=layout)[0], expected(layout, *values), 1e-6)
    close(general_gemm(a8, b8, torch.bfloat16, layout=layout)[0], expected(layout, a, b), 0.06)


def read(quantizer: Any, x: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    """Dequantize one copy with TE: the numbers that a product reads."""
    quantizer.set_usage(rowwise=not is_transposed, columnwise=is_transposed)
    return quantizer(x).dequantize(dtype=torch.float32)


def test_weight_gradients_accumulate() -> None:
    a, b = operands("NT", 32, 48, 64, torch.bfloat16)
    total = torch.full((32, 48), 5.0)
    general_gemm(a, b, torch.float32, layout="NT", accumulate=True, out=total)
    close(total, expected("NT", a, b) + 5, 1e-6)


def test_leading_dimensions_of_fp8_must_be_multiples_of_16() -> None:
    """The leading dimension of a weight gradient is the number of tokens, so micro-batches are padded."""
    for tokens in (24, 20):
        a, b = operands("NT", 48, 64, tokens, torch.bfloat16)
        with pytest.raises(RuntimeError, match=r"Leading dimension requirement on A for FP8 GEMM\. Caller must pad"):
            general_gemm(tensorwise()(a), tensorwise()(b), torch.bfloat16, layout="NT")
    a, b = operands("TN", 24, 64, 48, torch.bfloat16)
    # In the forward pass it need not be a multiple.
    general_gemm(tensorwise()(a), tensorwise()(b), torch.bfloat16, layout="TN")


def test_blocks_need_16_inside_and_8_outside() -> None:
    a, b = operands("NT", 48, 64, 24, torch.bfloat16)
    with pytest.raises(RuntimeError, match="Leading dimension requirement on NVTE_BLOCK_SCALING GEMM"):
        general_gemm(blockwise(1)(a), blockwise(1)(b), torch.bfloat16, layout="NT")
    a, b = operands("TN", 12, 64, 48, torch.bfloat16)
    with pytest.raises(RuntimeError, match="Outer dimension requirement on B"):
        general_gemm(blockwise(2)(a), blockwise(1)(b), torch.bfloat16, layout="TN")


def test_two_operands_in_square_blocks_and_mixed_scalings_are_refused() -> None:
    a, b = operands("TN", 32, 64, 48, torch.bfloat16)
    with pytest.raises(RuntimeError, match="Only 1D by 1D, 1D by 2D, and 2D by 1D block scaling supported"):
        general_gemm(blockwise(2)(a), blockwise(2)(b), torch.bfloat16, layout="TN")
    with pytest.raises(RuntimeError, match="need to have compatible scaling modes"):
        general_gemm(tensorwise()(a), b, torch.bfloat16, layout="TN")


@pytest.mark.parametrize(("layout", "operand"), [("TN", "A"), ("NN", "A"), ("TN", "B"), ("NT", "B")])
def test_a_missing_copy_is_reported(layout: str, operand: str) -> None:
    a, b = operands(layout, 48, 64, 32, torch.bfloat16)
    is_columnwise = layout[0] == "N" if operand == "A" else layout[1] == "T"
    poor = tensorwise(rowwise=is_columnwise, columnwise=not is_columnwise)
    a8, b8 = (poor if operand == "A" else tensorwise())(a), (poor if operand == "B" else tensorwise())(b)
    with pytest.raises(RuntimeError, match=f"{operand} is missing {'column' if is_columnwise else 'row'}-wise usage"):
        general_gemm(a8, b8, torch.bfloat16, layout=layout)


def test_a_product_that_is_not_emulated_says_so() -> None:
    a, b = operands("TN", 32, 64, 48, torch.bfloat16)
    with pytest.raises(NotImplementedError, match="gelu epilogue"):
        general_gemm(a, b, torch.bfloat16, layout="TN", gelu=True)
