"""FP8 blocks made on a GPU have the bits of the CPU oracle and of Transformer Engine's block quantizer."""

from __future__ import annotations

import pytest
import torch

from grpo_mega.weights import apply as blockwise_fp8
from tests.oracles import fp8_blocks as oracle

pytestmark = pytest.mark.gpu

SHAPES = [(128, 128), (256, 384), (1024, 4096)] + [(4096, 14336)] * torch.cuda.is_available()


def weight_of(rows: int, cols: int, dtype: torch.dtype, magnitude: float = 0.02) -> torch.Tensor:
    """Return a weight on the CPU whose blocks differ in magnitude."""
    random = torch.Generator().manual_seed(rows + cols)
    weight = torch.randn(rows, cols, generator=random) * magnitude
    return (weight * torch.linspace(1e-3, 1, weight.numel()).view(rows, cols)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("magnitude", [1e-38, 1e-20, 0.02, 1e30])
def test_a_gpu_gives_the_bits_of_the_naive_twin(dtype: torch.dtype, magnitude: float) -> None:
    weight = weight_of(300, 500, dtype, magnitude)
    weight[:128, :128] = 0
    values, scales = blockwise_fp8.quantise(weight.cuda())
    expected_values, expected_scales = oracle.quantise(weight)
    assert torch.equal(values.cpu().view(torch.uint8), expected_values.view(torch.uint8))
    assert torch.equal(scales.cpu(), expected_scales)
    found = blockwise_fp8.dequantise(values, scales, dtype)
    assert torch.equal(found.cpu(), oracle.dequantise(expected_values, expected_scales, dtype))


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_transformer_engine_gives_the_same_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Compare with float32 scales, because Transformer Engine pads its scales for its products."""
    tex = pytest.importorskip("transformer_engine_torch")
    blockwise = pytest.importorskip("transformer_engine.pytorch.tensor.float8_blockwise_tensor")
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("Transformer Engine quantizes blocks from Hopper on")
    quantizer = blockwise.Float8BlockQuantizer(
        fp8_dtype=tex.DType.kFloat8E4M3,
        rowwise=True,
        columnwise=False,
        amax_epsilon=0.0,
        force_pow_2_scales=False,
        block_scaling_dim=2,
    )
    weight = weight_of(*shape, dtype).cuda()
    weight[:128, :128] = 0
    theirs = quantizer(weight)
    values, scales = blockwise_fp8.quantise(weight)
    assert torch.equal(theirs._rowwise_data.view(torch.uint8), values.view(torch.uint8))
    rows, cols = scales.shape
    assert torch.equal(theirs._rowwise_scale_inv[:rows, :cols], scales)
    torch.testing.assert_close(
        theirs.dequantize(dtype=torch.float32), blockwise_fp8.dequantise(values, scales, torch.float32)
    )


def test_no_more_than_a_few_copies_of_a_step_are_alive_at_once() -> None:
    weight = weight_of(4096, 14336, torch.bfloat16).cuda()
    blockwise_fp8.quantise(weight)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    values, scales = blockwise_fp8.quantise(weight)
    extra = torch.cuda.max_memory_allocated() - before - values.nbytes - scales.nbytes
    assert extra < 128 << 20, extra
