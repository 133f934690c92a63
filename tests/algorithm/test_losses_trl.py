"""Our loss and TRL's: the real GRPOTrainer._compute_loss on the same log-probabilities, which are not on-policy.

(On-policy the value is 0 whatever the formula, and proves nothing.)
"""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from grpo_mega.algorithm.aggregate import token_weights
from grpo_mega.algorithm.losses import LossInputs, finalize, grpo_loss

AGGREGATIONS = {"grpo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm", "dapo": "token-mean"}
MAX_LENGTH = 16
CLIP_LOW, CLIP_HIGH, KL_BETA = 0.2, 0.28, 0.05


def make_batch(seed, dtype):
    """Padded [B, MAX_LENGTH] tensors with responses of 1 to MAX_LENGTH tokens and ratios of 0.5 to 2."""
    generator = torch.Generator().manual_seed(seed)
    shape = (6, MAX_LENGTH)

    def uniform(low, high):
        return torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low

    lengths = torch.randint(1, MAX_LENGTH + 1, shape[:1], generator=generator)
    old_logprobs = uniform(-4, -0.7)
    logprobs = old_logprobs + uniform(-math.log(2), math.log(2))
    return SimpleNamespace(
        lengths=lengths.tolist(),
        mask=(torch.arange(MAX_LENGTH) < lengths[:, None]).long(),
        old_logprobs=old_logprobs.to(dtype),
        logprobs=logprobs.to(dtype).requires_grad_(),
        ref_logprobs=(logprobs + uniform(-1, 1)).to(dtype),
        entropy=uniform(0, 3).to(dtype),
        advantages=torch.randn(shape[0], generator=generator, dtype=torch.float64).to(dtype),
    )


def trl_loss(batch, loss_type):
    """TRL's own code on a trainer that has only what that code reads. Returns (loss, TRL's metrics)."""
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    trainer.__dict__.update(
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=KL_BETA,
        loss_type=loss_type,
        epsilon_low=CLIP_LOW,
        epsilon_high=CLIP_HIGH,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_LENGTH,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
    )
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (batch.logprobs, batch.entropy, None)
    prompts = torch.ones(len(batch.lengths), 2, dtype=torch.int64)
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": prompts,
        "completion_ids": torch.ones_like(batch.mask),
        "completion_mask": batch.mask,
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old_logprobs,
        "ref_per_token_logps": batch.ref_logprobs,
        "num_items_in_batch": batch.mask.sum(),
    }
    loss = trainer._compute_loss(trainer.model, inputs)
    return loss, {name: values[0] for name, values in trainer._metrics["train"].items()}


def our_outputs(batch, loss_type):
    """Ours on the padded batch laid flat, padding masked."""
    weights = token_weights(
        batch.lengths,
        AGGREGATIONS[loss_type],
        max_response_length=MAX_LENGTH,
        num_samples=len(batch.lengths),
        num_tokens=sum(batch.lengths),
    )
    dtype = batch.logprobs.dtype
    inputs = LossInputs(
        logprobs=batch.logprobs.flatten(),
        old_logprobs=batch.old_logprobs.flatten(),
        ref_logprobs=batch.ref_logprobs.flatten(),
        rollout_logprobs=batch.old_logprobs.flatten(),
        advantages=batch.advantages[:, None].expand_as(batch.logprobs).flatten(),
        loss_mask=batch.mask.flatten().to(dtype),
        loss_weights=(torch.tensor(weights, dtype=dtype)[:, None] * batch.mask).flatten(),
        entropy=batch.entropy.flatten(),
    )
    return grpo_loss(
        inputs,
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
        kl_beta=KL_BETA,
        kl_penalty_type="low_var_kl",
        entropy_bonus=0.0,
    )


def mean_absolute_term(batch):
    """The scale that errors are relative to: the value itself may cancel to nearly 0."""
    ratio = (batch.logprobs.detach() - batch.old_logprobs).exp()
    return ((ratio * batch.advantages[:, None]).abs() * batch.mask).sum().item() / sum(batch.lengths)


@pytest.mark.parametrize("loss_type", AGGREGATIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_equal_trls(loss_type, dtype, tolerance, seed):
    batch = make_batch(seed, dtype)
    scale = mean_absolute_term(batch)
    expected, _ = trl_loss(batch, loss_type)
    (expected_gradient,) = torch.autograd.grad(expected, batch.logprobs)
    actual = our_outputs(batch, loss_type).loss
    (gradient,) = torch.autograd.grad(actual, batch.logprobs)
    assert abs(actual.item() - expected.item()) <= tolerance * scale
    assert (gradient - expected_gradient).abs().max().item() <= tolerance * scale
    assert abs(expected.item()) > 1e-3 * scale


@pytest.mark.parametrize("seed", range(3))
def test_clip_fractions_kl_and_entropy_are_the_numbers_that_trl_logs(seed):
    batch = make_batch(seed, torch.float64)
    _, theirs = trl_loss(batch, "grpo")
    outputs = our_outputs(batch, "grpo")
    ours = finalize(outputs.sums, outputs.maxima)
    names = {
        "clip/fraction_low": "clip_ratio/low_mean",
        "clip/fraction_high": "clip_ratio/high_mean",
        "clip/fraction": "clip_ratio/region_mean",
        "kl/mean": "kl",
        "entropy/mean": "entropy",
    }
    # TRL counts tokens in float32.
    assert {name: ours[name] for name in names} == pytest.approx({n: theirs[t] for n, t in names.items()}, rel=1e-6)
    assert ours["clip/fraction_low"] > 0 and ours["clip/fraction_high"] > 0
