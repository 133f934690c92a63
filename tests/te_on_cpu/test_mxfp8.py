"""MXFP8 on an emulated B200: bits of casts, a linear layer's step against a replay, and a policy that trains.

The replay and the oracle are numpy in float64. They share no code with the emulated extension.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common.recipe import Format, MXFP8BlockScaling
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

from grpo_mega.cli.checks.machine import card_of
from grpo_mega.cli.planner.job import PlannedJob
from grpo_mega.cli.planner.memory import _fp8_copies, state_of
from grpo_mega.distributed.device import Device, select
from grpo_mega.distributed.launch import only_rank
from grpo_mega.megatron import runtime as runtimes
from grpo_mega.megatron.precision import in_bf16
from grpo_mega.weights.spec import ModelShape
from tests.gpu.test_checkpoint import train
from tests.helpers.gpu_policies import SIZES, logits_of, make_policy, make_samples, precision_of
from tests.helpers.learning import losses
from tests.helpers.models import VOCAB_SIZE, make_config
from tests.te_on_cpu import fp8_oracle as oracle
from tests.te_on_cpu.emulated_te import machine
from tests.te_on_cpu.fp8_oracle import Bits, Float
from tools.benchmarks.gpu.rank import config_of

DTYPES = {"e4m3": tex.DType.kFloat8E4M3, "e5m2": tex.DType.kFloat8E5M2}
POWERS = 2.0 ** np.arange(-127, 128)  # the scales that E8M0 has


@pytest.fixture(autouse=True)
def blackwell(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Older versions have no deterministic attention on a B200, and tests/gpu asks for it."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
    with machine.played("B200"):
        yield


def micro_blocks(values: Float, form: oracle.Format) -> tuple[Bits, Float]:
    """Return the bits of a matrix, and the scale of each 32 elements of a row: the smallest that does not saturate."""
    rows, cols = values.shape
    blocks = values.reshape(rows, cols // 32, 32)
    wanted = oracle.to_fp32(np.abs(blocks).max(-1) * oracle.to_fp32(np.array(1 / form.largest)))
    scales = POWERS[np.searchsorted(POWERS, wanted).clip(0, 254)]
    return oracle.quantise(blocks, form, 1 / scales[..., None]).reshape(rows, cols), scales


def rounded(values: Float, form: oracle.Format) -> Float:
    """Return the values that a matrix in MXFP8 stands for, with blocks along its rows."""
    bits, scales = micro_blocks(values, form)
    return form.decode(bits) * scales.repeat(32, 1)


def exact(tensor: torch.Tensor) -> Float:
    return np.asarray(tensor.detach().double().numpy())


def values(rows: int, cols: int, dtype: torch.dtype, magnitude: float = 1.0, seed: int = 0) -> torch.Tensor:
    """Return values over six decades by row and column, with a block of zeros and a largest value of 448."""
    random = torch.Generator().manual_seed(seed)
    found = torch.randn(rows, cols, generator=random, dtype=torch.float64)
    found *= torch.logspace(-4, 0, rows)[:, None] * torch.logspace(0, -2, cols) * magnitude
    found[:32, :32] = 0
    found[-1, -1] = 448 * magnitude
    return found.to(dtype)


@pytest.mark.parametrize("form", DTYPES)
@pytest.mark.parametrize("magnitude", [1e-38, 1e-6, 1.0, 2.0**100])
def test_both_copies_have_the_oracles_scales_and_bits(form: str, magnitude: float) -> None:
    """[160, 224] is no multiple of 128 in rows and of 4 scales in columns. The padding is not read."""
    for dtype in (torch.bfloat16, torch.float32):
        tensor = values(160, 224, dtype, magnitude)
        quantised = MXFP8Quantizer(DTYPES[form])(tensor)
        for side, matrix in (("rowwise", exact(tensor)), ("columnwise", exact(tensor).T)):
            bits, scales = micro_blocks(matrix, oracle.FORMATS[form])
            found = getattr(quantised, f"_{side}_data").numpy(), getattr(quantised, f"_{side}_scale_inv").numpy()
            data, exponents = found if side == "rowwise" else (found[0].T, found[1].T)
            assert exponents.shape == (256, 8) if side == "rowwise" else (256, 8)
            assert (data == bits).all()
            assert (2.0 ** (exponents[: len(bits), : scales.shape[1]] - 127.0) == scales).all()
        whole = quantised.dequantize(dtype=torch.float32)
        assert (exact(whole) == oracle.to_fp32(rounded(exact(tensor), oracle.FORMATS[form]))).all()


@pytest.mark.skipif(
    not hasattr(MXFP8Quantizer(DTYPES["e4m3"]), "optimize_for_gemm"), reason="this version has no such function"
)
def test_scales_in_the_order_of_the_products_are_where_cublaslt_reads_them() -> None:
    """Compare with the index of NVIDIA's page on block scaling factors, element by element."""
    quantizer = MXFP8Quantizer(DTYPES["e4m3"], columnwise=False)
    plain = quantizer(values(160, 224, torch.bfloat16))._rowwise_scale_inv
    quantizer.optimize_for_gemm = True
    found = quantizer(values(160, 224, torch.bfloat16))._rowwise_scale_inv.flatten()
    tiles = plain.shape[1] // 4
    for row, col in np.ndindex(160, 7):
        tile = (row // 128) * tiles + col // 4
        assert found[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + col % 4] == plain[row, col]


def test_shapes_that_no_block_of_32_divides_are_refused() -> None:
    for shape in ((48, 64), (64, 48)):
        with pytest.raises((RuntimeError, AssertionError), match="divisible by 32"):
            MXFP8Quantizer(DTYPES["e4m3"])(torch.zeros(shape))


@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
def test_a_step_of_a_linear_layer_is_that_of_the_replay(form: str) -> None:
    """Each product reads operands in blocks along the dimension that it sums over; sums are in higher precision."""
    torch.manual_seed(5)
    layer = te.Linear(96, 160, bias=False, params_dtype=torch.bfloat16)
    x, upstream = values(64, 96, torch.bfloat16, seed=1).requires_grad_(), values(64, 160, torch.bfloat16, 0.1, seed=2)
    with te.fp8_autocast(enabled=True, fp8_recipe=MXFP8BlockScaling(fp8_format=Format[form.upper()])):
        y = layer(x)
    y.backward(upstream)
    e4m3, of_gradients = oracle.FORMATS["e4m3"], oracle.FORMATS["e5m2" if form == "hybrid" else "e4m3"]
    X, W, G = exact(x), exact(layer.weight), exact(upstream)
    expected = {
        "output": rounded(X, e4m3) @ rounded(W, e4m3).T,
        "input": rounded(G, of_gradients) @ rounded(W.T, e4m3).T,
        "weight": rounded(G.T, of_gradients) @ rounded(X.T, e4m3).T,
    }
    assert x.grad is not None and layer.weight.grad is not None
    unquantised = {"output": X @ W.T, "input": G @ W, "weight": G.T @ X}
    for name, found in (("output", y), ("input", x.grad), ("weight", layer.weight.grad)):
        norm = np.linalg.norm(expected[name])
        assert np.linalg.norm(exact(found) - expected[name]) < 3e-3 * norm, name  # rounding to bf16
        assert np.linalg.norm(unquantised[name] - expected[name]) > 5e-3 * norm, f"{name}: FP8 changes too little"


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    """Yield this process's device. If tests/gpu ran first, its process group remains until the session ends."""
    if dist.is_initialized():
        yield select("cpu", local_rank=0)
        return
    with only_rank():
        yield runtimes.join(config_of(Path("unused"), {"path": "unused", "dtype": "bfloat16"}))
        runtimes.stop()


def test_a_policy_learns_in_mxfp8_as_in_bf16(device: Device) -> None:
    """Its Megatron has the recipe, and its guard's levels and reference still compute in bf16."""
    policy = make_policy(device, precision=precision_of("mxfp8"))
    megatron, samples = policy.models[0].config, make_samples(6, VOCAB_SIZE)
    assert (megatron.fp8, megatron.fp8_recipe, megatron.fp8_param) == ("e4m3", "mxfp8", False)
    with in_bf16(megatron):
        in_the_reference = logits_of(policy, samples)
    in_mxfp8 = logits_of(policy, samples)
    in_plain_bf16 = logits_of(make_policy(device), samples)
    for a, b, c in zip(in_the_reference, in_plain_bf16, in_mxfp8, strict=True):
        assert torch.equal(a, b) and 0.01 < (a - c).norm() / a.norm() < 0.25
    found, expected = (losses(device, recipe, steps=20, per_step=4) for recipe in ("mxfp8", None))
    assert found != expected and found[-1] < 0.7 * found[0]
    assert np.mean(found[-5:]) == pytest.approx(np.mean(expected[-5:]), rel=0.2)


def test_a_policy_in_mxfp8_is_restored_and_offloaded(device: Device, tmp_path: Path) -> None:
    """The checkpoint has bf16 weights and fp32 masters, as with any recipe: its files are those of a bf16 policy."""
    sections = {"optimizer": {"lr": 1e-3}, "precision": precision_of("mxfp8")}
    policy, samples = make_policy(device, **sections), make_samples(6, VOCAB_SIZE)
    train(policy, 0)
    policy.save(tmp_path)
    before = logits_of(policy, samples)
    policy.memory.offload_optimizer()
    policy.memory.offload_weights()
    policy.memory.onload()
    assert all(torch.equal(a, b) for a, b in zip(logits_of(policy, samples), before, strict=True))
    expected = train(policy, 1)
    for precision in (precision_of("mxfp8"), {}):
        restored = make_policy(device, **sections | {"precision": precision})
        restored.restore(tmp_path)
        found = train(restored, 1)
        allowed = {"abs": 1e-7} if precision else {"rel": 0.1}
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], **allowed)


def test_the_plan_counts_both_copies_of_the_weights_with_their_scales(device: Device) -> None:
    hf_config = make_config("qwen2", **SIZES)
    policy = make_policy(device, hf_config, precision=precision_of("mxfp8"))
    train(policy, 0)
    copies = [copy for m in policy.models[0].modules() for copy in getattr(m, "_fp8_workspaces", {}).values()]
    parts = [t for copy in copies for t in vars(copy).values() if isinstance(t, torch.Tensor)]
    config = config_of(Path("unused"), {"path": "unused", "dtype": "bfloat16"}, precision=precision_of("mxfp8"))
    shape = ModelShape.from_hf_config(hf_config.to_dict())
    setup = PlannedJob(config, shape, 0, card_of("b200"), 1, 8, 64.0, 256.0)
    [planned] = _fp8_copies(setup, state_of(setup, 0), 0)
    assert len(parts) == 4 * len(copies) > 0
    # The plan counts biases and norms too, 0.4% of the weights. Without scales it would count 3% less.
    assert planned == pytest.approx(sum(t.nbytes for t in parts), rel=0.008)
