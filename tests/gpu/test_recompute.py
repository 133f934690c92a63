"""Recomputed activations give the gradients of stored activations."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_mega.distributed.device import Device
from grpo_mega.megatron.loaded_kernels import in_use
from tests.helpers.gpu_policies import SIZES, gradients_of, make_policy, make_samples, packed
from tests.helpers.models import VOCAB_SIZE, make_config

pytestmark = pytest.mark.rehearsed

# Both runs use the same kernels on the same numbers. On a GPU the blocks of a kernel may add in another order, and bf16
# has 8 bits. On a CPU the results are equal.
ALLOWED = 2**-8
CHOICES: list[dict[str, Any]] = [
    {"recompute": "selective"},
    {"recompute": "full"},
    {"recompute": "full", "recompute_num_layers": 1},
    {"recompute": "selective", "recompute_modules": ["mlp"]},
]


@pytest.fixture(scope="module")
def kept(device: Device) -> dict[str, Tensor]:
    return gradients_of(make_policy(device), make_samples(6, VOCAB_SIZE), token_budget=128)


@pytest.mark.emulated
@pytest.mark.parametrize("model", CHOICES, ids=str)
def test_recomputed_activations_give_the_same_gradients(
    model: dict[str, Any], kept: dict[str, Tensor], device: Device
) -> None:
    found = gradients_of(make_policy(device, model=model), make_samples(6, VOCAB_SIZE), token_budget=128)
    assert_same(found, kept, device)


@pytest.mark.emulated
@pytest.mark.parametrize("parts", [["layernorm"], ["layernorm", "moe_act"], ["moe"]], ids=str)
def test_parts_of_experts_can_be_recomputed_alone(parts: list[str], device: Device) -> None:
    is_grouped = in_use(device).transformer_engine
    if parts != ["moe"] and not is_grouped:
        pytest.skip("needs Transformer Engine")
    hf_config = make_config("qwen3_moe", **(SIZES | {"moe_intermediate_size": 128}))
    samples, grouped = make_samples(6, hf_config.vocab_size), {"grouped_experts": is_grouped}
    kept = gradients_of(make_policy(device, hf_config, model=grouped), samples)
    chosen = {"recompute": "selective", "recompute_modules": parts} | grouped
    assert_same(gradients_of(make_policy(device, hf_config, model=chosen), samples), kept, device)


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("model", "is_again"),
    [
        ({}, [0, 0]),
        ({"recompute": "selective"}, None),
        ({"recompute": "selective", "recompute_modules": ["core_attn"]}, [1, 1]),
        ({"recompute": "selective", "recompute_modules": ["mlp"]}, [0, 0]),
        ({"recompute": "full"}, [1, 1]),
        ({"recompute": "full", "recompute_num_layers": 1}, [1, 0]),
    ],
    ids=str,
)
def test_attention_runs_again_only_where_it_is_recomputed(
    model: dict[str, Any], is_again: list[int] | None, device: Device
) -> None:
    """By default Transformer Engine's attention, which keeps no scores, does not."""
    if is_again is None:
        is_again = [0, 0] if in_use(device).transformer_engine else [1, 1]
    policy = make_policy(device, model=model)
    layers, samples = policy.models[0].decoder.layers, make_samples(6, VOCAB_SIZE)
    calls = [0] * len(layers)

    def count(index: int, *arguments: Any) -> None:
        calls[index] += 1

    for index, layer in enumerate(layers):
        layer.self_attention.core_attention.register_forward_pre_hook(partial(count, index))
    gradients_of(policy, samples, token_budget=128)
    num_batches = len(packed(policy, samples, 128)[0])
    assert num_batches > 1 and calls[:2] == [num_batches * (1 + again) for again in is_again]


def assert_same(found: dict[str, Tensor], kept: dict[str, Tensor], device: Device) -> None:
    assert found.keys() == kept.keys()
    for name, expected in kept.items():
        difference = (found[name] - expected).norm()
        assert difference <= (ALLOWED if device.is_cuda else 0) * expected.norm(), (name, difference)
    assert sum(bool(expected.any()) for expected in kept.values()) > 0.9 * len(kept)


@pytest.mark.emulated
def test_gradients_do_not_depend_on_the_micro_batches(kept: dict[str, Tensor], device: Device) -> None:
    """Compare with one micro-batch. At another length other kernels may run, and bf16 rounds their sums differently."""
    found = gradients_of(make_policy(device), make_samples(6, VOCAB_SIZE))
    for name, expected in kept.items():
        assert (found[name] - expected).norm() <= 0.03 * expected.norm() + 1e-6, name


def test_recomputing_everything_needs_less_memory(device: Device) -> None:
    if not device.is_cuda:
        pytest.skip("needs a GPU")
    peaks = {}
    choices = {"none": {}, "selective": CHOICES[0], "full": CHOICES[1], "half": CHOICES[2]}
    for recompute, model in choices.items():
        policy = make_policy(device, model=model)
        gradients_of(policy, make_samples(6, VOCAB_SIZE))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients_of(policy, make_samples(24, VOCAB_SIZE))
        peaks[recompute] = torch.cuda.max_memory_allocated() - before
    assert peaks["full"] < peaks["selective"] < peaks["none"], peaks
    assert peaks["full"] < peaks["half"] < peaks["none"], peaks
