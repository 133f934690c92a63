"""FP8 casts by Transformer Engine's quantizers on emulated kernels have the bits of a float64 oracle."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

from tests.te_on_cpu import fp8_oracle as oracle

DTYPES = {"e4m3": tex.DType.kFloat8E4M3, "e5m2": tex.DType.kFloat8E5M2}
CPU = torch.device("cpu")


def exact(tensor: torch.Tensor) -> Any:
    return tensor.double().numpy()


def every_bf16() -> torch.Tensor:
    """Return all finite bf16 numbers as [rows, 16]."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = patterns[patterns.isfinite()]
    return finite[: len(finite) // 16 * 16].view(-1, 16)


def ragged(rows: int, cols: int, dtype: torch.dtype, magnitude: float = 1.0, seed: int = 0) -> torch.Tensor:
    """Return values over six decades by row and column, with a row of zeros and, among several blocks, one of zeros."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, cols, generator=random, dtype=torch.float64)
    values *= torch.logspace(-4, 0, rows)[:, None] * torch.logspace(0, -2, cols) * magnitude
    values[rows // 2] = 0
    if rows > 128:
        values[:128, :128] = 0
    return values.to(dtype)


def test_the_oracles_formats_are_those_of_the_standard() -> None:
    """Compare with table 1 of the OCP 8-bit floating point specification."""
    for name, smallest, smallest_normal in (("e4m3", 2**-9, 2**-6), ("e5m2", 2**-16, 2**-14)):
        form = oracle.FORMATS[name]
        assert (
            form.magnitudes[1] == smallest
            and smallest_normal in form.magnitudes
            and form.magnitudes[-1] == form.largest
        )
        assert (np.diff(form.magnitudes) > 0).all() and len(form.magnitudes) == (127 if name == "e4m3" else 124)
        bits = np.arange(len(form.magnitudes), dtype=np.uint8)
        assert (form.encode(form.decode(bits)) == bits).all()


@pytest.mark.parametrize("form", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 3.7e-3, 448 / 3.0, 2.0**-40, 1.1e30])
def test_a_cast_with_a_given_scale_has_the_oracles_bits(form: str, scale: float) -> None:
    """Cast every finite bf16 number and random fp32 numbers. The transposed copy has the same bits; the maximum is
    recorded.
    """
    for values in (every_bf16(), ragged(48, 160, torch.float32, magnitude=1e3)):
        scales, amax = torch.tensor([scale]), torch.zeros(1)
        quantised = Float8Quantizer(scales, amax, DTYPES[form])(values)
        expected = oracle.quantise(exact(values), oracle.FORMATS[form], float(scales))
        assert (quantised._data.numpy() == expected).all()
        assert (quantised._transpose.numpy() == expected.T).all()
        assert float(quantised._scale_inv) == oracle.to_fp32(np.array(1 / float(scales)))
        assert float(amax) == np.abs(exact(values)).max()
        if scale == 1.0:
            assert (exact(quantised.dequantize(dtype=torch.float32)) == oracle.FORMATS[form].decode(expected)).all()


@pytest.mark.parametrize("form", DTYPES)
@pytest.mark.parametrize("pow_2", [False, True])
@pytest.mark.parametrize("magnitude", [1e-38, 1e-6, 1.0, 777.7, 1e33])
def test_current_scaling_has_the_oracles_scale_and_bits(form: str, pow_2: bool, magnitude: float) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        values = ragged(33, 80, dtype, magnitude)
        quantised = Float8CurrentScalingQuantizer(DTYPES[form], CPU, force_pow_2_scales=pow_2)(values)
        scale = oracle.scale_of(float(np.abs(exact(values)).max()), oracle.FORMATS[form], pow_2=pow_2)
        assert (quantised._data.numpy() == oracle.quantise(exact(values), oracle.FORMATS[form], scale)).all()
        assert float(quantised._scale_inv) == oracle.to_fp32(np.array(1 / scale))


def test_zeros_and_infinities_are_scaled_by_one() -> None:
    for values in (torch.zeros(16, 16), torch.full((16, 16), torch.inf)):
        quantised = Float8CurrentScalingQuantizer(DTYPES["e4m3"], CPU)(values)
        assert float(quantised._scale_inv) == 1.0
        assert set(quantised._data.flatten().tolist()) == {0 if not values.any() else 0x7E}  # 0x7e encodes 448


@pytest.mark.parametrize(("history", "algorithm", "margin"), [(1, "max", 0), (3, "max", 0), (4, "most_recent", 1)])
def test_delayed_scales_follow_the_history_of_maxima(history: int, algorithm: str, margin: int) -> None:
    """The first step is cast with a scale of 1, each later step with largest / 2^margin / the maximum of the
    history.
    """
    recipe = DelayedScaling(amax_history_len=history, amax_compute_algo=algorithm, margin=margin)
    layer = te.Linear(64, 32, bias=False, params_dtype=torch.bfloat16)
    maxima: list[float] = []
    for step in range(6):
        values = ragged(16, 64, torch.bfloat16, magnitude=10.0 ** (step % 3), seed=step)
        if maxima:
            seen = maxima[-history:] if algorithm == "max" else maxima[-1:]
            expected = oracle.to_fp32(np.array(448.0 * 2**-margin / max(seen)))
            assert float(layer.fp8_meta["scaling_fwd"].scale[0]) == expected, step
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            layer(values).sum().backward()
        maxima.append(float(values.float().abs().max()))
    assert float(layer.fp8_meta["scaling_bwd"].scale[0]) == 57344 * 2**-margin  # all gradients are 1


@pytest.mark.parametrize("pow_2", [False, True])
@pytest.mark.parametrize("magnitude", [1e-38, 0.02, 1e30])
@pytest.mark.parametrize("dim", [1, 2])
def test_blocks_have_the_oracles_scales_and_bits(dim: int, magnitude: float, pow_2: bool) -> None:
    """[140, 272] is no multiple of 128. Scales are padded to a multiple of 4; scales of 1 x 128 blocks have rows
    last.
    """
    for form, dtype in itertools.product(DTYPES, (torch.bfloat16, torch.float32)):
        values = ragged(140, 272, dtype, magnitude)
        quantizer = Float8BlockQuantizer(
            DTYPES[form], rowwise=True, columnwise=True, force_pow_2_scales=pow_2, block_scaling_dim=dim
        )
        quantised = quantizer(values)
        limits = {"pow_2": pow_2, "at_infinity": float(torch.finfo(dtype).max)}
        rows = oracle.quantise_blocks(exact(values), oracle.FORMATS[form], 128 if dim == 2 else 1, 128, **limits)
        cols = oracle.quantise_blocks(exact(values), oracle.FORMATS[form], 128, 128 if dim == 2 else 1, **limits)
        assert (quantised._rowwise_data.numpy() == rows[0]).all()
        assert (quantised._columnwise_data.numpy() == cols[0].T).all()
        by_row = rows[1] if dim == 2 else rows[1].T
        by_col = cols[1].T if dim == 2 else cols[1]
        for found, expected in ((quantised._rowwise_scale_inv, by_row), (quantised._columnwise_scale_inv, by_col)):
            assert found.shape[1] % 4 == 0 and not found[:, expected.shape[1] :].any()
            assert (exact(found[:, : expected.shape[1]]) == expected).all()


@pytest.mark.parametrize("dim", [1, 2])
def test_blocks_stand_for_the_numbers_that_transformer_engine_reads(dim: int) -> None:
    """Dequantize both copies with TE's Python."""
    values = ragged(160, 272, torch.bfloat16)
    quantizer = Float8BlockQuantizer(DTYPES["e4m3"], rowwise=True, columnwise=True, block_scaling_dim=dim)
    form, limits = oracle.FORMATS["e4m3"], {"pow_2": True, "at_infinity": float(torch.finfo(torch.bfloat16).max)}
    bits, inverses = oracle.quantise_blocks(exact(values), form, 128 if dim == 2 else 1, 128, **limits)
    spread = inverses.repeat(128 if dim == 2 else 1, 0)[:160].repeat(128, 1)[:, :272]
    assert (
        exact(quantizer(values).dequantize(dtype=torch.float32)) == oracle.to_fp32(form.decode(bits) * spread)
    ).all()


def test_shards_of_a_matrix_cast_with_common_scales_make_the_whole() -> None:
    """The distributed optimizer casts fp32 masters this way: each rank has a flat part."""
    values = ragged(200, 144, torch.float32)
    form = oracle.FORMATS["e4m3"]
    bits, inverses = oracle.quantise_blocks(exact(values), form, 128, 128, pow_2=False, at_infinity=float("inf"))
    amax, out, flat = torch.zeros(2, 2), torch.zeros(200 * 144, dtype=torch.uint8), values.view(-1)
    cuts = (0, 77, 13_000, 13_001, 200 * 144)
    for start, end in itertools.pairwise(cuts):
        part = torch.zeros(2, 2)
        tex.fp8_block_scaling_compute_partial_amax(flat[start:end], part, 200, 144, start, 128)
        amax = torch.maximum(amax, part)
    scale, scale_inv = torch.zeros(2, 2), torch.zeros(2, 2)
    tex.multi_tensor_compute_scale_and_scale_inv(
        65536, torch.zeros(1), [[amax], [scale], [scale_inv]], 448.0, False, 0.0
    )
    assert (exact(scale_inv) == inverses).all()
    for start, end in itertools.pairwise(cuts):
        tex.fp8_block_scaling_partial_cast(
            flat[start:end], out[start:end], scale, 200, 144, start, 128, tex.DType.kFloat8E4M3
        )
    assert (out.view(200, 144).numpy() == bits).all()
