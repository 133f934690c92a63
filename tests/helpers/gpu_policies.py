"""Policies of one rank for tests/gpu, with sizes that suit Transformer Engine's kernels, or tiny sizes in a rehearsal.

FP8 needs multiples of 16. Its blockwise recipe needs multiples of 128.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_mega.batching.pack import pack_mini_batches
from grpo_mega.checkpoint_io.reader import random_reader
from grpo_mega.config import Config
from grpo_mega.distributed import kernels
from grpo_mega.distributed.device import Device
from grpo_mega.megatron import runtime as runtimes
from grpo_mega.megatron.model import output_weight
from grpo_mega.megatron.policy import Policy
from grpo_mega.trainer.batches import attach_routes
from grpo_mega.types import PackedBatch, Prompt, Sample
from grpo_mega.weights.boxes import Box
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import Family, ModelShape
from tests.helpers.models import make_config
from tools.benchmarks.gpu.rank import config_of

IS_EMULATED = not torch.cuda.is_available() and kernels.choose_kernels(is_cuda=False).transformer_engine
IS_REHEARSAL = not torch.cuda.is_available() and not IS_EMULATED
GPU_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.05,
}
SIZES = {} if IS_REHEARSAL else GPU_SIZES
TOKEN_BUDGET = 4096


class MadePolicy(Policy):
    """A policy that shows the config, shape and runtime it was made from."""

    def __init__(
        self, config: Config, shape: ModelShape, family: Family, hf_config: Any, runtime: runtimes.Runtime
    ) -> None:
        super().__init__(config, shape, family, hf_config, runtime)
        self.config, self.shape, self.runtime = config, shape, runtime


def make_policy(
    device: Device,
    hf_config: Any = None,
    read: Callable[[Box], Tensor] | None = None,
    *,
    recompute: str = "none",
    dtype: str = "bfloat16",
    model: Mapping[str, Any] = MappingProxyType({}),
    **sections: Any,
) -> MadePolicy:
    """Return a policy with weights from `read`, or with the same random weights each time. It replaces earlier
    policies.
    """
    hf_config = hf_config or make_config("qwen2", **SIZES)
    sections = {"batch": {"tokens_per_micro_batch": TOKEN_BUDGET}} | sections
    config = config_of(
        Path("unused"), {"path": "unused", "dtype": dtype, "recompute": recompute} | dict(model), **sections
    )
    runtime = runtimes.arrange(config, device)
    shape = ModelShape.from_hf_config(hf_config.to_dict())
    family = family_of(shape.model_type)
    policy = MadePolicy(config, shape, family, hf_config, runtime)
    policy.load(read or random_reader(family.hf_tensors(shape), seed=3, std=0.05))
    return policy


def make_samples(num_samples: int, vocab: int, *, seed: int = 0) -> list[Sample]:
    """Return samples of different lengths with random tokens. Half of them have advantage 1, the others -1."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for number in range(num_samples):
        tokens = torch.randint(2, vocab, (20 + 7 * number,), generator=generator).tolist()
        samples.append(make_sample(number, tokens[:5], tokens[5:], 1.0 if number % 2 else -1.0))
    return samples


def make_sample(number: int, prompt_ids: Sequence[int], response_ids: list[int], advantage: float) -> Sample:
    """Return a sample with rollout log-probs of 0, so that the mean mismatch is minus the trainer's mean log-prob."""
    prompt = Prompt(number, "", tuple(prompt_ids), "")
    sample = Sample(prompt, 0, response_ids, [0.0] * len(response_ids), "stop", reward=1.0)
    sample.advantages = torch.full((len(response_ids),), advantage)
    return sample


def packed(policy: MadePolicy, samples: Sequence[Sample], token_budget: int = TOKEN_BUDGET) -> list[list[PackedBatch]]:
    """Pack one mini-batch whose loss is a mean over tokens, with the routes of the samples."""
    weight = 1 / sum(s.response_len for s in samples)
    batches = pack_mini_batches(
        [samples],
        [[weight] * len(samples)],
        replace(policy.packing, token_budget=token_budget),
    )
    attach_routes(batches, samples, policy.runtime)
    return batches


def logits_of(policy: MadePolicy, samples: Sequence[Sample]) -> list[Tensor]:
    """Return logits [tokens, vocab] per sample in fp32 on the host, from packed micro-batches. The matmul is in
    fp32.
    """
    found: dict[int, Tensor] = {}

    def keep(hidden_TH: Tensor, batch: PackedBatch) -> None:
        logits_TV = (hidden_TH.float() @ output_weight(policy.models[-1]).float().t()).cpu()
        cuts = batch.cu_seqlens.tolist()
        for index, start, end in zip(batch.sample_indices, cuts, cuts[1:], strict=False):
            found[index] = logits_TV[start:end, : policy.shape.vocab]

    [batches] = policy.attach_logprobs(packed(policy, samples))
    policy.pipeline.forward(batches, keep)
    return [found[index] for index in range(len(samples))]


def gradients_of(policy: MadePolicy, samples: Sequence[Sample], token_budget: int = TOKEN_BUDGET) -> dict[str, Tensor]:
    """Return fp32 gradients on the host, keyed by parameter. The weights do not change."""
    [batches] = policy.attach_logprobs(packed(policy, samples, token_budget))
    policy.pipeline.forward_backward(batches, policy._loss)
    return {name: _gradient(p).float().cpu() for name, p in policy.parameters.items() if p.requires_grad}


def _gradient(parameter: Tensor) -> Tensor:
    gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return gradient


def use_local_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build later policies without Transformer Engine."""
    monkeypatch.setattr(kernels, "choose_kernels", lambda **_: kernels.Kernels(False, False, False, "none is wanted"))


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], allowed: float) -> None:
    """Compare tensors with the same names: `allowed` is the largest error relative to a tensor's norm."""
    assert found.keys() == expected.keys()
    wrong = {name: float((found[name] - e).norm() / e.norm()) for name, e in expected.items()}
    assert all(error < allowed for error in wrong.values()), {n: e for n, e in wrong.items() if not e < allowed}


def supported_precisions(device: Device) -> dict[str, str]:
    """Return per FP8 recipe why this machine cannot run it, or "" if it can."""
    from grpo_mega.config import PrecisionConfig
    from grpo_mega.distributed.kernels import RECIPES, card_problems, transformer_engine_problems

    found: dict[str, str] = {}
    for recipe in RECIPES:
        precision = PrecisionConfig(**precision_of(recipe))
        version = kernels.transformer_engine_version()
        problems = (
            *card_problems(precision, device.capability, device.name),
            *transformer_engine_problems(precision, version),
        )
        found[recipe] = problems[0] if problems else ""
    return found


def precision_of(recipe: str) -> dict[str, Any]:
    """Return the precision section for a recipe, with its FP8 format."""
    more = {"fp8_reference": True} if recipe == "delayed" else {}
    return {"fp8": "e4m3" if recipe in ("blockwise", "mxfp8") else "hybrid", "fp8_recipe": recipe, **more}
