"""Log-probs at the sizes of real runs: bf16 values and gradients on a GPU against float64, and their memory."""

from __future__ import annotations

import pytest
import torch

from grpo_mega.distributed.device import Device
from tools.benchmarks.gpu.logprobs import EXTRA_TARGET_GIB
from tools.benchmarks.gpu.rank import extra_gib
from tools.benchmarks.logprobs import TEMPERATURE, Inputs, max_error, step

pytestmark = pytest.mark.rehearsed

BIG, SMALL = (32_768, 152_064, 4096), (96, 1000, 32)


def make_inputs(device: Device) -> Inputs:
    return Inputs(*(BIG if device.is_cuda else SMALL), device.torch_device, is_ours=True, dtype=torch.bfloat16)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_32k_tokens_of_152k_vocabulary_take_at_most_1_gib_more(with_entropy: bool, device: Device) -> None:
    """The limit includes the 256 MiB gradient of the hidden states."""
    inputs = make_inputs(device)
    step("ours", inputs, with_entropy=with_entropy)
    inputs.hidden_TH.grad = None
    gib = extra_gib(lambda: step("ours", inputs, with_entropy=with_entropy), device.torch_device)
    assert gib is None or gib <= EXTRA_TARGET_GIB, f"{gib:.3f} GiB"


def test_log_probs_of_32k_tokens_equal_float64s(device: Device) -> None:
    """Products of bf16 numbers are exact in fp32, and the sums are in fp32, so errors are far below 1e-4."""
    inputs = make_inputs(device)
    assert max_error(inputs, *step("ours", inputs)) < 1e-4


@torch.no_grad()
def test_gradients_of_32k_tokens_equal_float64s(device: Device) -> None:
    """Compute the gradients of hidden states and weight by definition, with the logits' gradient rounded to bf16."""
    inputs = make_inputs(device)
    with torch.enable_grad():
        step("ours", inputs)
    assert inputs.hidden_TH.grad is not None
    sample_N = torch.arange(0, len(inputs.targets_T), max(1, len(inputs.targets_T) // 8), device=device.torch_device)
    weight_VH = inputs.weight_VH
    hidden_NH = inputs.hidden_TH[sample_N].double() / TEMPERATURE
    logits_NV = torch.cat([hidden_NH @ rows.double().t() for rows in weight_VH.split(8192)], dim=1)
    p_NV = logits_NV.softmax(dim=1)
    mean_NH = sum(p @ rows.double() for p, rows in zip(p_NV.split(8192, dim=1), weight_VH.split(8192), strict=True))
    targets_NH = weight_VH[inputs.targets_T[sample_N]].double()
    expected_NH = (targets_NH - mean_NH) * inputs.upstream_T[sample_N, None].double() / TEMPERATURE
    difference = (inputs.hidden_TH.grad[sample_N].double() - expected_NH).norm() / expected_NH.norm()
    assert difference < 0.01, difference

    rows_v = torch.arange(0, len(weight_VH), max(1, len(weight_VH) // 8), device=device.torch_device)
    column_Tv = torch.zeros(len(inputs.targets_T), len(rows_v), dtype=torch.float64, device=device.torch_device)
    exact_VH = weight_VH.float()
    for start in range(0, len(column_Tv), 2048):
        logits_nV = inputs.hidden_TH[start : start + 2048].float() @ exact_VH.t() / TEMPERATURE
        column_Tv[start : start + 2048] = -logits_nV.log_softmax(dim=1)[:, rows_v].exp().double()
    column_Tv += (inputs.targets_T[:, None] == rows_v).double()
    column_Tv *= inputs.upstream_T[:, None].double() / TEMPERATURE
    expected_vH = column_Tv.t() @ inputs.hidden_TH.double()
    difference = (inputs.sink_VH[rows_v].double() - expected_vH).norm() / expected_vH.norm()
    assert difference < 0.01, difference
