"""The clipped objective: worked examples, an oracle, numeric gradients, masked tokens, extreme values, metrics."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch

from grpo_mega.algorithm.advantages import ADVANTAGES
from grpo_mega.algorithm.inputs import LossInputs
from grpo_mega.algorithm.losses import OBJECTIVES, accumulate, finalize
from grpo_mega.config import AlgorithmConfig
from tests.helpers.losses import loss_of

OPTIONS = {"clip_low": 0.2, "clip_high": 0.2, "kl_beta": 0.0, "kl_penalty_type": "low_var_kl", "entropy_bonus": 0.0}


def make_inputs(num_tokens=12, seed=0, dtype=torch.float64, **changes):
    """Return random tokens with ratios of 0.5 to 2. About a quarter of the tokens are masked."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low, high):
        return torch.rand(num_tokens, generator=generator, dtype=torch.float64).mul(high - low).add(low).to(dtype)

    logprobs = uniform(-3.0, -0.1)
    mask = (uniform(0, 1) < 0.75).to(dtype)
    inputs = LossInputs(
        logprobs=logprobs.clone().requires_grad_(),
        old_logprobs=logprobs - uniform(-math.log(2), math.log(2)),
        ref_logprobs=logprobs + uniform(-1, 1),
        rollout_logprobs=logprobs + uniform(-0.3, 0.3),
        advantages=uniform(-2, 2),
        loss_mask=mask,
        loss_weights=uniform(0, 0.1) * mask,
        segments=torch.zeros(num_tokens, dtype=torch.int64),
        num_segments=1,
        entropy=uniform(0, 3).requires_grad_(),
    )
    return replace(inputs, **changes)


def one_token(ratio, advantage):
    zero = torch.zeros(1, dtype=torch.float64)
    return LossInputs(
        logprobs=zero.clone().requires_grad_(),
        old_logprobs=zero - math.log(ratio),
        ref_logprobs=None,
        rollout_logprobs=zero,
        advantages=zero + advantage,
        loss_mask=zero + 1,
        loss_weights=zero + 1,
        segments=torch.zeros(1, dtype=torch.int64),
        num_segments=1,
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "has_gradient"),
    [
        (1.8, 1.0, 1.2, False),
        (1.4, 1.0, 1.2, False),
        (0.4, 1.0, 0.4, True),
        (1.8, -1.0, -1.8, True),
        (0.4, -1.0, -0.8, False),
        (1.1, 1.0, 1.1, True),
        (1.1, -1.0, -1.1, True),
    ],
)
def test_ratios_are_clipped_only_if_that_lowers_the_objective(ratio, advantage, objective, has_gradient):
    inputs = one_token(ratio, advantage)
    outputs = loss_of(inputs, **OPTIONS)
    outputs.loss.backward()
    assert -outputs.loss.item() == pytest.approx(objective)
    assert -inputs.logprobs.grad.item() == pytest.approx(objective if has_gradient else 0.0)
    metrics = finalize(outputs.sums, outputs.maxima)
    assert metrics["clip/fraction_high"] == float(not has_gradient and advantage > 0)
    assert metrics["clip/fraction_low"] == float(not has_gradient and advantage < 0)


def test_each_side_of_the_clip_has_its_own_range():
    outputs = [loss_of(one_token(r, a), **(OPTIONS | {"clip_high": 0.28})) for r, a in [(1.8, 1.0), (0.4, -1.0)]]
    assert [-o.loss.item() for o in outputs] == pytest.approx([1.28, -0.8])


def naive_loss(inputs, clip_low, clip_high, kl_beta, kl_penalty_type, entropy_bonus):
    """Compute the loss token by token in Python floats from the published formulas."""
    total = 0.0
    logprobs = inputs.logprobs.detach()
    entropy = inputs.entropy.detach()
    for t in range(len(logprobs)):
        if inputs.loss_mask[t] == 0:
            continue
        cur, ref = float(logprobs[t]), float(inputs.ref_logprobs[t])
        advantage = float(inputs.advantages[t])
        ratio = math.exp(cur - float(inputs.old_logprobs[t]))
        clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
        kl = {
            "kl": cur - ref,
            "abs": abs(cur - ref),
            "mse": (cur - ref) ** 2 / 2,
            "low_var_kl": math.exp(ref - cur) - (ref - cur) - 1,
            "low_var_kl_weighted": ratio * (math.exp(ref - cur) - (ref - cur) - 1),
        }[kl_penalty_type]
        value = -min(ratio * advantage, clipped * advantage) + kl_beta * kl - entropy_bonus * float(entropy[t])
        total += float(inputs.loss_weights[t]) * value
    return total


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl", "low_var_kl_weighted"])
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_equals_the_oracle(kind, seed):
    options = {"clip_low": 0.2, "clip_high": 0.28, "kl_beta": 0.3, "kl_penalty_type": kind, "entropy_bonus": 0.1}
    inputs = make_inputs(50, seed)
    assert loss_of(inputs, **options).loss.item() == pytest.approx(naive_loss(inputs, **options), rel=1e-12)


def test_float32_stays_close_to_the_oracle_relative_to_the_mean_term():
    inputs = make_inputs(500, 1, torch.float32)
    options = OPTIONS | {"kl_beta": 0.1}
    scale = (inputs.loss_weights * inputs.advantages.abs()).sum().item()
    assert abs(loss_of(inputs, **options).loss.item() - naive_loss(inputs, **options)) < 1e-6 * scale


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl", "low_var_kl_weighted"])
def test_gradients_equal_numeric_gradients(kind):
    inputs = make_inputs(20, 3)
    options = {"clip_low": 0.2, "clip_high": 0.28, "kl_beta": 0.3, "kl_penalty_type": kind, "entropy_bonus": 0.1}

    def function(logprobs, entropy):
        return loss_of(replace(inputs, logprobs=logprobs, entropy=entropy), **options).loss

    assert torch.autograd.gradcheck(function, (inputs.logprobs, inputs.entropy))


def test_on_policy_the_gradient_is_the_papers_coefficient():
    """DeepSeekMath eq. 21: the gradient of a token's log-prob is multiplied by A + beta (pi_ref / pi - 1)."""
    inputs = make_inputs(20, 4)
    inputs = replace(inputs, old_logprobs=inputs.logprobs.detach())
    outputs = loss_of(inputs, **(OPTIONS | {"kl_beta": 0.3}))
    outputs.loss.backward()
    ref_ratio = (inputs.ref_logprobs - inputs.logprobs.detach()).exp()
    expected = -inputs.loss_weights * (inputs.advantages + 0.3 * (ref_ratio - 1))
    torch.testing.assert_close(inputs.logprobs.grad, expected, rtol=1e-12, atol=1e-14)
    metrics = finalize(outputs.sums, outputs.maxima)
    assert metrics["ratio/mean"] == 1.0 and metrics["ratio/max"] == 1.0 and metrics["clip/fraction"] == 0.0


def test_icepop_equals_slime_and_nemo_rl():
    """Both multiply the clipped term by exp(old - rollout) inside the band and by 0 outside, but not KL and entropy."""
    inputs = make_inputs(211, 5)
    old, rollout, mask = inputs.old_logprobs, inputs.rollout_logprobs, inputs.loss_mask
    mismatch = (old - rollout).exp()
    band = (float(mismatch.quantile(0.2)), float(mismatch.quantile(0.7)))
    weight = torch.where((mismatch >= band[0]) & (mismatch <= band[1]), mismatch, torch.zeros_like(mismatch))
    ratio, advantages = (inputs.logprobs - old).exp(), inputs.advantages
    policy = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - 0.2, 1 + 0.28))
    kl = (inputs.ref_logprobs - inputs.logprobs).exp() - 1 - (inputs.ref_logprobs - inputs.logprobs)
    per_token = weight * policy + 0.3 * kl - 0.1 * inputs.entropy
    is_trained = mask > 0
    expected = (inputs.loss_weights * per_token)[is_trained].sum()
    correction = {"importance": "icepop", "mask_low": band[0], "mask_high": band[1]}
    options = {"clip_low": 0.2, "clip_high": 0.28, "kl_beta": 0.3, "entropy_bonus": 0.1}
    outputs = loss_of(inputs, correction=correction, **options)
    leaves = (inputs.logprobs, inputs.entropy)
    gradients, wanted = torch.autograd.grad(outputs.loss, leaves), torch.autograd.grad(expected, leaves)
    for given, other in zip((outputs.loss, *gradients), (expected, *wanted), strict=True):
        torch.testing.assert_close(given, other, rtol=1e-12, atol=1e-15)
    metrics = finalize(outputs.sums, outputs.maxima)
    assert metrics["correction/masked"] == pytest.approx(float((weight == 0)[is_trained].double().mean()))
    assert metrics["correction/importance"] == pytest.approx(float(weight[is_trained].mean()))
    # Masking also drops KL and entropy of the tokens. Other tokens keep weight 1.
    masked = loss_of(inputs, correction=correction | {"importance": "none", "mask": "token"}, **options)
    (gradient,) = torch.autograd.grad(masked.loss, inputs.logprobs)
    assert gradient[weight == 0].eq(0).all()
    assert gradients[0][is_trained & (weight == 0)].ne(0).all()


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_tokens_contribute_exactly_nothing_for_any_values(garbage):
    options = OPTIONS | {"kl_beta": 0.3, "entropy_bonus": 0.1}
    inputs = make_inputs(20, 5)
    is_masked = inputs.loss_mask == 0
    assert is_masked.any()

    def spoilt(values):
        return torch.where(is_masked, garbage, values.detach())

    names = ["logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages", "loss_weights", "entropy"]
    dirty = replace(inputs, **{name: spoilt(getattr(inputs, name)) for name in names})
    dirty.logprobs.requires_grad_()
    dirty.entropy.requires_grad_()
    expected, actual = loss_of(inputs, **options), loss_of(dirty, **options)
    expected.loss.backward()
    actual.loss.backward()
    assert actual.loss.item() == expected.loss.item()
    assert torch.equal(dirty.logprobs.grad, inputs.logprobs.grad) and dirty.logprobs.grad[is_masked].eq(0).all()
    assert torch.equal(dirty.entropy.grad, inputs.entropy.grad)
    assert finalize(actual.sums, actual.maxima) == finalize(expected.sums, expected.maxima)


def test_a_micro_batch_without_trained_tokens_has_zero_loss_and_gradient():
    inputs = make_inputs(8, 6)
    inputs = replace(inputs, loss_mask=torch.zeros(8))
    outputs = loss_of(inputs, **(OPTIONS | {"kl_beta": 0.3, "entropy_bonus": 0.1}))
    outputs.loss.backward()
    assert outputs.loss.item() == 0.0 and inputs.logprobs.grad.eq(0).all()
    assert set(finalize(outputs.sums, outputs.maxima).values()) == {0.0}


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_infinite_ratios_stay_finite(advantage):
    inputs = one_token(1.0, advantage)
    inputs = replace(inputs, old_logprobs=torch.tensor([-1e4]), logprobs=torch.tensor([0.0], requires_grad=True))
    outputs = loss_of(inputs, **OPTIONS)
    outputs.loss.backward()
    assert outputs.loss.isfinite() and inputs.logprobs.grad.isfinite().all()
    assert all(map(math.isfinite, finalize(outputs.sums, outputs.maxima).values()))


def test_the_parts_of_the_loss_add_up_to_its_total():
    outputs = loss_of(make_inputs(30, 7), **(OPTIONS | {"kl_beta": 0.3, "entropy_bonus": 0.1}))
    metrics = finalize(outputs.sums, outputs.maxima)
    assert metrics["loss/total"] == pytest.approx(outputs.loss.item(), rel=1e-12)
    assert metrics["loss/total"] == pytest.approx(sum(metrics[f"loss/{part}"] for part in ["policy", "kl", "entropy"]))


def test_metrics_are_means_over_the_trained_tokens():
    inputs = make_inputs(30, 8)
    outputs = loss_of(inputs, **(OPTIONS | {"kl_beta": 0.3}))
    metrics = finalize(outputs.sums, outputs.maxima)
    kept = inputs.loss_mask > 0
    logprobs = inputs.logprobs.detach()[kept]
    ratio = (logprobs - inputs.old_logprobs[kept]).exp()
    advantages = inputs.advantages[kept]
    ref_gap = inputs.ref_logprobs[kept] - logprobs
    gap = inputs.old_logprobs[kept] - inputs.rollout_logprobs[kept]
    low, high = (ratio < 0.8) & (advantages < 0), (ratio > 1.2) & (advantages > 0)
    expected = {
        "num_tokens": kept.sum(),
        "ratio/mean": ratio.mean(),
        "ratio/max": ratio.max(),
        "clip/fraction": (low | high).double().mean(),
        "clip/fraction_low": low.double().mean(),
        "clip/fraction_high": high.double().mean(),
        "kl/mean": (ref_gap.exp() - 1 - ref_gap).mean(),
        "entropy/mean": inputs.entropy.detach()[kept].mean(),
        "mismatch/k1": -gap.mean(),
        "mismatch/k3": (gap.exp() - 1 - gap).mean(),
        "mismatch/abs_mean": gap.abs().mean(),
        "mismatch/abs_max": gap.abs().max(),
    }
    assert {k: v for k, v in metrics.items() if not k.startswith("loss/")} == pytest.approx(
        {k: float(v) for k, v in expected.items()}, rel=1e-10
    )
    assert expected["clip/fraction_low"] > 0 and expected["clip/fraction_high"] > 0


@pytest.mark.parametrize("kl_clamp", [0.31, 10.0, 47.0, None])
def test_the_mean_kl_is_the_loss_part_over_beta_for_any_clamp(kl_clamp):
    """With token-mean and low_var_kl. kl_target controls beta by the mean, so loss and mean must have the same
    bound.
    """
    inputs = make_inputs(41, 11)
    gaps = torch.linspace(-4.4, 4.4, 41, dtype=torch.float64)  # k3 reaches 76
    weights = inputs.loss_mask / inputs.loss_mask.sum()
    inputs = replace(inputs, ref_logprobs=inputs.logprobs.detach() + gaps, loss_weights=weights)
    metrics = finalize(*accumulate([loss_of(inputs, kl_beta=0.37, kl_clamp=kl_clamp, loss_agg_func="token-mean")]))
    kept = gaps[inputs.loss_mask > 0].tolist()
    expected = [min(math.exp(gap) - 1 - gap, math.inf if kl_clamp is None else kl_clamp) for gap in kept]
    assert metrics["kl/mean"] == pytest.approx(sum(expected) / len(expected), rel=1e-9)
    assert metrics["loss/kl"] == pytest.approx(0.37 * metrics["kl/mean"], rel=1e-12)
    assert kl_clamp is None or max(math.exp(gap) - 1 - gap for gap in kept) > kl_clamp  # at least one token is clamped


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl_weighted"])
def test_the_mean_kl_is_the_same_for_every_penalty(kind):
    inputs = make_inputs(30, 12)
    options = OPTIONS | {"kl_beta": 0.3, "kl_clamp": 0.2}
    expected, found = (loss_of(inputs, **(options | {"kl_penalty_type": name})) for name in ("low_var_kl", kind))
    assert found.sums["kl/mean"] == expected.sums["kl/mean"] and found.sums["loss/kl"] != expected.sums["loss/kl"]
    in_reward = loss_of(inputs, **(options | {"kl_penalty_type": kind, "kl_in": "reward"}))
    assert in_reward.sums["kl/mean"] == expected.sums["kl/mean"]


def test_metrics_that_are_not_computed_are_omitted():
    inputs = replace(make_inputs(), ref_logprobs=None, entropy=None)
    outputs = loss_of(inputs, **OPTIONS)
    names = set(finalize(outputs.sums, outputs.maxima))
    assert names.isdisjoint({"kl/mean", "entropy/mean", "loss/kl", "loss/entropy"})


def test_micro_batches_accumulate_to_the_metrics_of_the_whole():
    inputs = make_inputs(30, 9)
    options = OPTIONS | {"kl_beta": 0.3, "entropy_bonus": 0.1}
    parts = [
        loss_of(replace(inputs, **{k: v[s] for k, v in vars(inputs).items() if isinstance(v, torch.Tensor)}), **options)
        for s in [slice(0, 7), slice(7, 19), slice(19, 30)]
    ]
    whole = loss_of(inputs, **options)
    assert finalize(*accumulate(parts)) == pytest.approx(finalize(whole.sums, whole.maxima), rel=1e-12)
    assert list(accumulate(parts)[0]) == list(whole.sums)


def test_a_config_accepts_exactly_the_existing_losses_and_advantages():
    fields = AlgorithmConfig.model_fields
    assert set(get_args(fields["loss_type"].annotation)) == set(OBJECTIVES)
    assert set(get_args(fields["adv_type"].annotation)) == set(ADVANTAGES)
