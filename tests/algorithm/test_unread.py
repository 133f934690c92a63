"""Every key of the section `algorithm` is read by a method, refused with it, or named by a note at the start."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_mega.algorithm.advantages import assign_advantages
from grpo_mega.algorithm.inputs import LossInputs
from grpo_mega.algorithm.kl import adapted_beta, kl_penalty
from grpo_mega.algorithm.losses import policy_loss
from grpo_mega.algorithm.token_weights import mini_batch_weights
from grpo_mega.cli.checks.violations import unread_keys
from grpo_mega.config import AlgorithmConfig, Config
from grpo_mega.config.aliases import RECIPES
from grpo_mega.errors import ConfigError
from grpo_mega.types import Group, Prompt, Sample

LENGTHS, MAX_LENGTH = (3, 9, 5, 10), 10
# Other values of keys that change a formula. The remaining keys decide what the trainer runs: how many samples it
# draws, when it skips an update or refreshes the reference, and which tokens clip_cov and kl_cov choose.
OTHER = {
    "normalize_by_std": False,
    "std_ddof": 0,
    "std_eps": 0.25,
    "normalize_advantages": True,
    "overlong_buffer": 0.7,
    "overlong_penalty": 0.125,
    "overlong_filter": True,
    "ratio_clip_eps": 0.0625,
    "ratio_clip_eps_low": 0.0625,
    "ratio_clip_eps_high": 0.0625,
    "ratio_clip_c": 1.0625,
    "sapo_tau_positive": 3.0,
    "sapo_tau_negative": 3.0,
    "loss_agg_func": "seq-mean-token-sum",
    "use_valid_token_scale": True,
    "kl_beta": 0.375,
    "kl_in": "reward",
    "kl_penalty_type": "abs",
    "kl_clamp": 0.001,
    "kl_target": 0.29,
    "kl_horizon": 5.0,
    "pass_k": 2,
    "std_over": "batch",
    "positive_nll": 0.5,
    "cov_kl": 2.0,
    "distill_beta": 0.5,
    "distill_kl": "reverse",
}
INSIDE = {
    "importance": "token",
    "min_importance": 0.9375,
    "max_importance": 1.0625,
    "mask": "token",
    "mask_low": 0.9375,
    "mask_high": 1.0625,
    "veto_below": 0.9375,
    "off_policy_threshold": 0.001,
}
# Settings that make other keys of a recipe read.
BASES = (
    *({"recipe": name} for name in RECIPES if name != "sft"),
    *({"kl_beta": 0.5, "kl_in": kl_in, "kl_target": 0.31} for kl_in in ("loss", "reward")),
    {"loss_type": "dual_clip", "overlong_buffer": 0.5},
    {"loss_type": "reinforce", "distill_beta": 0.5},
    {"adv_type": "grpo_leave_one_out", "normalize_by_std": False, "correction": {"importance": "sequence"}},
    {"loss_agg_func": "token-mean", "correction": {"mask": "geometric"}},
    {"recipe": "gdpo", "normalize_by_std": False},
)
# Advantages of pass_at_k are never negative; Config refuses normalize_advantages with adv_type=none.
EXCEPT = {("pass_at_k", "ratio_clip_eps_low"), ("opd", "normalize_advantages")}


def groups() -> list[Group]:
    """Return two groups of four samples with rewards for steps, responses and two functions."""
    rewards = ((1.0, 0.0, 0.5, 0.25), (0.0, 2.0, 0.75, 0.5))
    found = []
    for number, of_group in enumerate(rewards):
        prompt = Prompt(id=number, text="q", token_ids=[1], answer="a")
        samples = []
        for index, (reward, length) in enumerate(zip(of_group, LENGTHS, strict=True)):
            finish = "length" if length == MAX_LENGTH else "stop"
            sample = Sample(prompt, index, list(range(length)), [-1.0] * length, finish)
            sample.reward, sample.scores = reward, {"f": reward, "g": float(index == 1)}
            sample.step_ends, sample.step_rewards = [0, length - 1], [0.5 * index, reward]
            samples.append(sample)
        found.append(Group(prompt, samples))
    return found


def numbers(a: AlgorithmConfig) -> list[torch.Tensor]:
    """Return what a step computes with `a`: advantages, weights, loss, its gradient, metrics, and the next kl_beta."""
    generator = torch.Generator().manual_seed(3)
    of_step = groups()
    num_tokens = 2 * sum(LENGTHS)

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.rand(num_tokens, generator=generator, dtype=torch.float64) * (high - low) + low

    logprobs = uniform(-3.0, -0.1)
    old, ref = logprobs + uniform(-1.4, 1.4), logprobs + uniform(-1.0, 1.0)
    penalties = kl_penalty(old, ref, a.kl_penalty_type, old_logprobs=old, kl_clamp=a.kl_clamp).split([*LENGTHS] * 2)
    samples = assign_advantages(
        of_step,
        a,
        max_response_length=MAX_LENGTH,
        kl_penalties=penalties if a.has_kl_reward else None,
        reward_weights={"f": 1.0, "g": 0.5},
    )
    halves = [group.samples for group in of_step]
    halves[1] = halves[1][:3]
    weights = mini_batch_weights(halves, a, max_response_length=MAX_LENGTH)
    rows = [
        torch.full((s.response_len,), w).double()
        for half, of in zip(halves, weights, strict=True)
        for s, w in zip(half, of, strict=True)
    ]
    rows.append(torch.zeros(LENGTHS[-1], dtype=torch.float64))
    teacher = logprobs + uniform(-0.5, 0.5)
    inputs = LossInputs(
        logprobs=logprobs.clone().requires_grad_(),
        old_logprobs=old,
        ref_logprobs=ref if a.kl_beta else None,
        rollout_logprobs=old + uniform(-1.9, 1.9),
        advantages=torch.cat([s.advantages for s in samples if s.advantages is not None]).double(),
        loss_mask=torch.ones_like(logprobs),
        loss_weights=torch.cat(rows),
        segments=torch.arange(8).repeat_interleave(torch.tensor([*LENGTHS] * 2)),
        num_segments=8,
        covariance_mask=(uniform(0, 1) < 0.5).double(),
        nll_weights=uniform(0, 1),
        teacher_logprobs=teacher if a.distill_beta else None,
        teacher_kl=uniform(0, 1) if a.has_vocab_kl else None,
    )
    outputs = policy_loss(inputs, a)
    (gradient,) = torch.autograd.grad(outputs.loss, inputs.logprobs)
    beta = torch.tensor(adapted_beta(a.kl_beta, 0.3, 64, a), dtype=torch.float64)
    metrics = [*outputs.sums.values(), *outputs.maxima.values()]
    return [inputs.advantages, inputs.loss_weights, outputs.loss.detach(), gradient, beta, torch.stack(metrics)]


def changed(base: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    section, _, leaf = key.rpartition(".")
    return {**base, key: value} if not section else {**base, section: {**base.get(section, {}), leaf: value}}


def with_algorithm(keys: dict[str, Any]) -> Config:
    """Return a config with these keys in the section `algorithm`. Raise ConfigError."""
    raw = {"run_dir": "run", "steps": 1, "model": {"path": "m"}, "data": {"train": "d"}, "batch": {"mini_batches": 2}}
    teachers = {"teachers": {"a": {"path": "t"}}} if AlgorithmConfig.model_validate(keys).distill_beta else {}
    return Config.model_validate(raw | teachers | {"algorithm": keys})


@pytest.mark.parametrize("base", BASES, ids=lambda base: ",".join(f"{k}={v}" for k, v in base.items()))
def test_a_key_is_named_as_unread_if_and_only_if_no_number_depends_on_it(base: dict[str, Any]) -> None:
    config = with_algorithm(base)
    usual = config.algorithm
    assert not list(unread_keys(config)), "what the recipe sets is not the user's"
    before = numbers(usual)
    num_compared = 0
    for key, value in {**OTHER, **{f"correction.{name}": value for name, value in INSIDE.items()}}.items():
        try:
            config = with_algorithm(changed(base, key, value))
        except (ConfigError, ValueError):
            continue  # refused with a remedy
        a = config.algorithm
        if a == usual or (a.recipe, key) in EXCEPT:
            continue
        after = numbers(a)
        is_same = all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(before, after, strict=True))
        named = [line for line in unread_keys(config) if line.startswith(f"algorithm.{key}=")]
        assert bool(named) == is_same, (key, value, is_same, named)
        num_compared += 1
    assert num_compared > 15


def test_a_note_names_the_value_what_makes_it_unread_and_a_remedy() -> None:
    assert list(unread_keys(with_algorithm({"recipe": "gspo", "ratio_clip_eps": 0.1}))) == [
        "algorithm.ratio_clip_eps=0.1 does nothing without algorithm.ratio_clip_eps_low=null or"
        " algorithm.ratio_clip_eps_high=null; use these two"
    ]
