"""Matrix products: dequantized values, summed in fp32, rounded once to the output's dtype.

Refuses inputs that TE and cuBLASLt refuse on Hopper: a missing row-wise or column-wise copy; leading dimensions that
are not multiples of 16; for blocks, outer dimensions that are not multiples of 8; operands of different scaling; two
operands in blocks of 128 x 128. Not emulated: the order of additions, and the 14-bit accumulator with
use_split_accumulator=False.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.te_on_cpu.emulated_te.extension import micro_blocks
from tests.te_on_cpu.emulated_te.extension.casts import quantize, value_of
from tests.te_on_cpu.emulated_te.extension.common import BLOCK, check, is_plain, num_blocks
from tests.te_on_cpu.emulated_te.extension.names import TORCH_OF, DType


def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: torch.Tensor | None,
    quantizer: Any,
    output_dtype: DType | None,
    bias: torch.Tensor | None,
    bias_type: DType,
    gelu: bool,
    gelu_in: torch.Tensor | None,
    grad: bool,
    workspace: torch.Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:
    """Return [op(B) op(A), gradient of the bias, None, extra output]: TN forward, NN data gradient, NT weight
    gradient.
    """
    if gelu or comm_overlap is not None:
        raise NotImplementedError("generic_gemm with a gelu epilogue or communication overlap is not emulated")
    a, kind_a = _operand(A, "A", is_columnwise=not transA)
    b, kind_b = _operand(B, "B", is_columnwise=transB)
    _check_kinds(kind_a, kind_b)
    left, right = (b.T if transB else b), (a.T if transA else a)
    check(left.shape[1] == right.shape[0], f"GEMM inputs have invalid dims {tuple(left.shape)}, {tuple(right.shape)}")
    result = torch.mm(left, right)
    if alpha != 1.0:
        result = result * alpha
    bias_grad = None
    if bias is not None and grad:
        bias_grad = b.sum(0).to(bias.dtype)
    elif bias is not None:
        result = result + bias.float()
    shape = (result.shape[0],) if transB else tuple(B.shape if isinstance(B, torch.Tensor) else B.size())[:-1]
    if D is None:
        D = result.to(_output_dtype(A, output_dtype)).view(*shape, result.shape[1])
        return [quantize(D, quantizer), bias_grad, None, extra_output]
    check(D.numel() == result.numel(), "GEMM output has invalid dims")
    check(output_dtype is None or TORCH_OF[DType(output_dtype)] is D.dtype, "GEMM output has invalid dtype")
    flat = D.view(result.shape)
    flat.copy_(flat.float() + result if accumulate else result)
    return [D, bias_grad, None, extra_output]


def te_general_grouped_gemm(
    A: list[Any],
    transA: bool,
    B: list[Any],
    transB: bool,
    D: list[torch.Tensor],
    output_dtype: DType,
    m_splits: list[int],
    bias: list[torch.Tensor],
    bias_type: DType,
    single_output: bool,
    pre_gelu_out: list[torch.Tensor],
    grad: bool,
    workspace: list[torch.Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> list[torch.Tensor]:
    """Write the products of pairs, [op(B) op(A)], into `D`: one tensor per pair, or one tensor with the rows of all
    pairs.
    """
    if any(x.numel() for x in (*bias, *pre_gelu_out)):
        raise NotImplementedError("te_general_grouped_gemm with a bias or gelu is not emulated")
    outputs = D[0].split(m_splits) if single_output else D
    for a, b, out, num_rows in zip(A, B, outputs, m_splits, strict=True):
        check(out.dtype is TORCH_OF[DType(output_dtype)], "GEMM output has invalid dtype")
        if num_rows == 0:
            out.mul_(float(accumulate))
            continue
        (a, kind_a), (b, kind_b) = (
            _operand(a, "A", is_columnwise=not transA),
            _operand(b, "B", is_columnwise=transB),
        )
        _check_kinds(kind_a, kind_b)
        result = torch.mm(b.T if transB else b, a.T if transA else a)
        out.copy_(out.float() + result if accumulate else result)
    return bias


def fused_multi_row_padding(
    input: torch.Tensor, output: torch.Tensor, input_row_list: list[int], padded_input_row_list: list[int]
) -> None:
    """Write each expert's rows to `output`, and rows of zeros after them."""
    output.zero_()
    for rows, wanted in zip(output.split(padded_input_row_list), input.split(input_row_list), strict=True):
        rows[: len(wanted)] = wanted


def fused_multi_row_unpadding(
    input: torch.Tensor, output: torch.Tensor, input_row_list: list[int], unpadded_input_row_list: list[int]
) -> None:
    for rows, found in zip(output.split(unpadded_input_row_list), input.split(input_row_list), strict=True):
        rows.copy_(found[: len(rows)])


def _output_dtype(A: Any, output_dtype: DType | None) -> torch.dtype:
    if output_dtype is not None:
        return TORCH_OF[DType(output_dtype)]
    check(isinstance(A, torch.Tensor), "an FP8 product needs an output dtype")
    return A.dtype


def _check_kinds(a: str, b: str) -> None:
    check(
        a == b or {a, b} == {"1D", "2D"},
        f"Inputs A and B to GEMM need to have compatible scaling modes, but got {a}, {b}",
    )
    check(a != "2D" or b != "2D", "Only 1D by 1D, 1D by 2D, and 2D by 1D block scaling supported")


def _operand(x: Any, name: str, *, is_columnwise: bool) -> tuple[torch.Tensor, str]:
    """Return the fp32 values [rows, cols] that a product reads, and the kind of scaling.

    With `is_columnwise` it reads the transposed copy, because cuBLASLt on Hopper multiplies FP8 in TN form only. MXFP8
    is multiplied on Blackwell in any form; its column-wise copy has the tensor's shape.
    """
    if is_plain(x):
        return x.reshape(-1, x.shape[-1]).float(), "none"
    if hasattr(x, "_data"):
        return _scaled_by_tensor(x, name, is_columnwise)
    if hasattr(x, "_is_2D_scaled"):
        return _scaled_by_block(x, name, is_columnwise)
    side = "columnwise" if is_columnwise else "rowwise"
    check(getattr(x, f"_{side}_data") is not None, f"Input {name} is missing {side.removesuffix('wise')}-wise usage")
    return micro_blocks.values_of(x, side), "MX"


def _scaled_by_tensor(x: Any, name: str, is_columnwise: bool) -> tuple[torch.Tensor, str]:
    fp8 = DType(x._fp8_dtype)
    if is_columnwise:
        check(x._transpose is not None and not x._transpose_invalid, f"Input {name} is missing column-wise usage")
        data = x._transpose.reshape(x._transpose.shape[0], -1)
    else:
        check(x._data is not None, f"Input {name} is missing row-wise usage")
        data = x._data.reshape(-1, x._data.shape[-1])
    lead = data.shape[1]
    check(lead % 16 == 0, f"Leading dimension requirement on {name} for FP8 GEMM. Caller must pad. ({lead})")
    values = value_of(data, fp8) * x._scale_inv
    return (values.T if is_columnwise else values), "tensor"


def _scaled_by_block(x: Any, name: str, is_columnwise: bool) -> tuple[torch.Tensor, str]:
    is_2d = x._is_2D_scaled
    if is_columnwise:
        data, scales = x._columnwise_data, x._columnwise_scale_inv
    else:
        data, scales = x._rowwise_data, x._rowwise_scale_inv
    check(data is not None, f"Input {name} is missing {'column' if is_columnwise else 'row'}-wise usage")
    data = data.reshape(data.shape[0], -1) if is_columnwise else data.reshape(-1, data.shape[-1])
    outer, inner = data.shape  # the product sums over the inner dimension
    check(
        inner % 16 == 0, f"Leading dimension requirement on NVTE_BLOCK_SCALING GEMM. Caller must pad. ({name}: {inner})"
    )
    is_free = is_2d and name == "B"  # cuBLASLt checks the outer dimension of A, and of B if B is in 1 x 128 blocks
    check(
        outer % 8 == 0 or is_free,
        f"Outer dimension requirement on {name} for NVTE_BLOCK_SCALING GEMM. Caller must pad. ({outer})",
    )
    by_row = scales[:, : num_blocks(inner)].repeat_interleave(BLOCK, 0)[:outer] if is_2d else scales[:, :outer].T
    values = value_of(data, DType(x._fp8_dtype)) * by_row.repeat_interleave(BLOCK, 1)[:, :inner]
    return (values.T if is_columnwise else values), "2D" if is_2d else "1D"
