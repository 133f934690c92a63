"""Our loss compared with TRL's: the real GRPOTrainer._compute_loss on the same off-policy log-probs.

On-policy the value is 0 for every formula, so a comparison would verify nothing.
"""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from grpo_mega.algorithm.inputs import LossInputs
from grpo_mega.algorithm.losses import finalize
from grpo_mega.algorithm.token_weights import token_weights
from tests.helpers.losses import loss_of

# (TRL's loss_type, importance_sampling_level) -> our (loss_type, aggregation)
OURS = {
    ("grpo", "token"): ("actor", "seq-mean-token-mean"),
    ("dr_grpo", "token"): ("actor", "seq-mean-token-sum-norm"),
    ("dapo", "token"): ("actor", "token-mean"),
    ("bnpo", "token"): ("actor", "token-mean"),
    ("grpo", "sequence"): ("gspo", "seq-mean-token-mean"),
    ("dr_grpo", "sequence"): ("gspo", "seq-mean-token-sum-norm"),
    ("dapo", "sequence"): ("gspo", "token-mean"),
    ("luspo", "sequence"): ("gspo", "seq-mean-token-sum"),
    ("cispo", "token"): ("cispo", "token-mean"),
    ("sapo", "token"): ("sapo", "seq-mean-token-mean"),
}
MAX_LENGTH = 16
CLIP_LOW, CLIP_HIGH, KL_BETA = 0.2, 0.28, 0.05
TAU_POSITIVE, TAU_NEGATIVE = 1.0, 1.5


def make_batch(seed, dtype):
    """Return padded [B, MAX_LENGTH] tensors with responses of 1 to MAX_LENGTH tokens and ratios of 0.5 to 2."""
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


def trl_loss(batch, loss_type, level="token", *, is_kl_weighted=False, engine_ratio=None, off_policy=None):
    """Run TRL's code on a trainer with only the attributes that it reads. Return (loss, TRL's metrics)."""
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    trainer.__dict__.update(
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None if off_policy is None else off_policy[0],
        importance_sampling_level=level,
        beta=KL_BETA,
        loss_type=loss_type,
        epsilon_low=CLIP_LOW,
        epsilon_high=1 + CLIP_HIGH if loss_type == "cispo" else CLIP_HIGH,  # for CISPO, TRL expects the ratio
        use_vllm=engine_ratio is not None,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_LENGTH,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(
            use_bias_correction_kl=is_kl_weighted,
            delta=None,
            steps_per_generation=1,
            sapo_temperature_pos=TAU_POSITIVE,
            sapo_temperature_neg=TAU_NEGATIVE,
        ),
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
        "importance_sampling_ratio": engine_ratio,
    }
    if off_policy is not None:
        inputs["sampling_per_token_logps"] = off_policy[1]
    loss = trainer._compute_loss(trainer.model, inputs)
    return loss, {name: values[0] for name, values in trainer._metrics["train"].items()}


def our_outputs(batch, loss_type, aggregation, *, rollout_logprobs=None, **options):
    """Run our loss on the flattened batch with padding masked."""
    weights = token_weights(
        batch.lengths,
        aggregation,
        max_response_length=MAX_LENGTH,
        num_samples=len(batch.lengths),
        num_tokens=sum(batch.lengths),
    )
    dtype = batch.logprobs.dtype
    inputs = LossInputs(
        logprobs=batch.logprobs.flatten(),
        old_logprobs=batch.old_logprobs.flatten(),
        ref_logprobs=batch.ref_logprobs.flatten(),
        rollout_logprobs=(batch.old_logprobs if rollout_logprobs is None else rollout_logprobs).flatten(),
        advantages=batch.advantages[:, None].expand_as(batch.logprobs).flatten(),
        loss_mask=batch.mask.flatten().to(dtype),
        loss_weights=(torch.tensor(weights, dtype=dtype)[:, None] * batch.mask).flatten(),
        segments=torch.arange(len(batch.lengths)).repeat_interleave(MAX_LENGTH),
        num_segments=len(batch.lengths),
        entropy=batch.entropy.flatten(),
    )
    settings = {
        "loss_type": loss_type,
        "clip_low": 1.0 if loss_type == "cispo" else CLIP_LOW,  # CISPO has only an upper limit
        "clip_high": CLIP_HIGH,
        "tau_positive": TAU_POSITIVE,
        "tau_negative": TAU_NEGATIVE,
        "kl_beta": KL_BETA,
    }
    return loss_of(inputs, **settings | options)


def mean_absolute_term(batch):
    """Return the scale for relative errors. The loss itself may cancel to nearly 0."""
    ratio = (batch.logprobs.detach() - batch.old_logprobs).exp()
    return ((ratio * batch.advantages[:, None]).abs() * batch.mask).sum().item() / sum(batch.lengths)


@pytest.mark.parametrize(("loss_type", "level"), OURS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_equal_trl(loss_type, level, dtype, tolerance, seed):
    batch = make_batch(seed, dtype)
    expected, _ = trl_loss(batch, loss_type, level)
    assert_same(batch, our_outputs(batch, *OURS[loss_type, level]).loss, expected, tolerance)


@pytest.mark.parametrize("seed", range(3))
def test_a_kl_weighted_by_the_importance_ratio_equals_trl(seed):
    batch = make_batch(seed, torch.float64)
    expected, _ = trl_loss(batch, "grpo", is_kl_weighted=True)
    assert_same(batch, our_outputs(batch, *OURS["grpo", "token"], kl_penalty_type="low_var_kl_weighted").loss, expected)


@pytest.mark.parametrize(("loss_type", "level"), [("grpo", "token"), ("cispo", "token"), ("dapo", "sequence")])
@pytest.mark.parametrize("importance", ["token", "sequence", "icepop"])
@pytest.mark.parametrize("seed", range(3))
def test_importance_weights_the_policy_term_as_in_trl(loss_type, level, importance, seed):
    """The test computes the ratios like other TRL code. TRL's loss applies them to the policy term but not to the
    KL.
    """
    batch = make_batch(seed, torch.float64)
    rollout_logprobs = batch.old_logprobs + 0.3 * torch.sin(torch.arange(6 * MAX_LENGTH).double()).view(6, MAX_LENGTH)
    log_ratio = (batch.old_logprobs - rollout_logprobs) * batch.mask
    if importance == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True)
    engine_ratio, correction = log_ratio.exp().clamp(max=1.1), {"importance": importance, "max_importance": 1.1}
    if importance == "icepop":
        is_outside = (log_ratio.exp() < 0.8) | (log_ratio.exp() > 1.1)
        engine_ratio = log_ratio.exp().masked_fill(is_outside, 0.0)
        correction = {"importance": "icepop", "mask_low": 0.8, "mask_high": 1.1}
    expected, _ = trl_loss(batch, loss_type, level, engine_ratio=engine_ratio)
    options = {"rollout_logprobs": rollout_logprobs, "correction": correction}
    assert_same(batch, our_outputs(batch, *OURS[loss_type, level], **options).loss, expected)


@pytest.mark.parametrize("seed", range(3))
def test_off_policy_masking_equals_trl(seed):
    batch = make_batch(seed, torch.float64)
    rollout_logprobs = batch.old_logprobs + 0.3 * torch.sin(torch.arange(6 * MAX_LENGTH).double()).view(6, MAX_LENGTH)
    without, _ = trl_loss(batch, "grpo")
    expected, _ = trl_loss(batch, "grpo", off_policy=(0.03, rollout_logprobs))
    assert (expected - without).abs() > 1e-3
    options = {"rollout_logprobs": rollout_logprobs, "correction": {"off_policy_threshold": 0.03}}
    assert_same(batch, our_outputs(batch, *OURS["grpo", "token"], **options).loss, expected)


def assert_same(batch, actual, expected, tolerance=1e-12):
    """Compare values and gradients."""
    scale = mean_absolute_term(batch)
    (expected_gradient,) = torch.autograd.grad(expected, batch.logprobs)
    (gradient,) = torch.autograd.grad(actual, batch.logprobs)
    assert abs(actual.item() - expected.item()) <= tolerance * scale
    assert (gradient - expected_gradient).abs().max().item() <= tolerance * scale
    assert abs(expected.item()) > 1e-4 * scale


@pytest.mark.parametrize("seed", range(3))
def test_clip_fractions_kl_and_entropy_equal_the_metrics_of_trl(seed):
    batch = make_batch(seed, torch.float64)
    _, theirs = trl_loss(batch, "grpo")
    outputs = our_outputs(batch, *OURS["grpo", "token"])
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
