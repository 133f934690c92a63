"""Recipes named after texts on GRPO, and RLinf's keys, compared with formulas and listings of these texts in loops."""

from __future__ import annotations

import math
import random

import pytest
import torch
import yaml
from pydantic import ValidationError

from grpo_mega.algorithm.inputs import LossInputs
from grpo_mega.algorithm.losses import policy_loss
from grpo_mega.algorithm.token_weights import mini_batch_weights
from grpo_mega.config import AlgorithmConfig
from grpo_mega.types import Group, Prompt, Sample
from tests.helpers.losses import assigned

# The listing of an LLM math task on RLinf's page on GRPO.
RLINF = """
adv_type: grpo
loss_type: actor
loss_agg_func: "token-mean"
group_size: 16
kl_beta: 0.0
kl_penalty_type: low_var_kl
ratio_clip_eps: 0.2
calculate_entropy: False
entropy_bonus: 0.0
normalize_advantages: True
early_stop_imp_ratio: 5.0
use_valid_token_scale: False
"""
# The last group has no gradient.
SIZES = (
    (5, [1.0, 0.0, 0.0, 1.0, 0.5]),
    (3, [0.0, 0.25, 1.0]),
    (4, [1.0, 1.0, 1.0, 1.0]),
)


def rollout() -> list[Group]:
    """Return groups of various sizes and lengths. Samples have the log-probs before the update."""
    rng = random.Random(3)
    prompts = [Prompt(number, "q", (1,), "a") for number in range(len(SIZES))]
    return [
        Group(
            prompt,
            [
                Sample(prompt, i, [7] * n, [-rng.uniform(0.1, 2) for _ in range(n)], "stop", reward=rewards[i])
                for i, n in enumerate(rng.choices(range(1, 8), k=size))
            ],
        )
        for prompt, (size, rewards) in zip(prompts, SIZES, strict=True)
    ]


def ours(
    groups: list[Group], a: AlgorithmConfig, shifts: list[float], ref_shifts: list[float]
) -> tuple[float, list[float]]:
    """Return the loss and its gradient after log-probs changed by `shifts`. Reference log-probs differ by
    `ref_shifts`.
    """
    samples = assigned(groups, a)
    old = torch.tensor([value for s in samples for value in s.rollout_logprobs], dtype=torch.float64)
    weights = mini_batch_weights([samples], a, max_response_length=20)[0]
    logprobs = (old + torch.tensor(shifts, dtype=torch.float64)).requires_grad_()
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=old,
        ref_logprobs=old + torch.tensor(ref_shifts, dtype=torch.float64),
        rollout_logprobs=old,
        advantages=torch.cat([s.advantages.double() for s in samples if s.advantages is not None]),
        loss_mask=torch.ones_like(old),
        loss_weights=torch.tensor(
            [w for s, w in zip(samples, weights, strict=True) for _ in s.response_ids], dtype=torch.float64
        ),
        segments=torch.tensor([i for i, s in enumerate(samples) for _ in s.response_ids]),
        num_segments=len(samples),
    )
    loss = policy_loss(inputs, a).loss
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.tolist()


def of_the_texts(
    groups: list[Group],
    shifts: list[float],
    ref_shifts: list[float],
    *,
    beta: float,
    eps: float,
    of: str,
    whitens: bool = False,
) -> float:
    """Return -J, J = mean over responses or tokens of min(r A, clip(r, 0.8, 1.2) A) - beta (e^d - d - 1), d = ref -
    new.
    """
    advantages = []
    for group in groups:
        rewards = [s.reward or 0.0 for s in group.samples]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        advantages += [(r - mean) / (std + eps) if std else 0.0 for r in rewards]
    lengths = [s.response_len for group in groups for s in group.samples]
    num_tokens = sum(lengths)
    if whitens:
        mean = sum(a * n for a, n in zip(advantages, lengths, strict=True)) / num_tokens
        var = sum((a - mean) ** 2 * n for a, n in zip(advantages, lengths, strict=True)) / (num_tokens - 1)
        advantages = [(a - mean) / math.sqrt(var) for a in advantages]
    objective, t = 0.0, 0
    for advantage, length in zip(advantages, lengths, strict=True):
        for _ in range(length):
            ratio, less = math.exp(shifts[t]), ref_shifts[t] - shifts[t]
            gain = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage) - beta * (math.exp(less) - less - 1)
            objective += gain / (len(lengths) * length if of == "responses" else num_tokens)
            t += 1
    return -objective


RECIPES = {
    "deepseekmath": {"beta": 0.04, "eps": 0.0, "of": "responses"},
    "ms_swift": {"beta": 0.04, "eps": 1e-8, "of": "responses"},
    "open_r1": {"beta": 0.04, "eps": 1e-4, "of": "tokens"},
    "rlinf": {"beta": 0.0, "eps": 1e-6, "of": "tokens", "whitens": True},
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_equals_the_formula_of_its_text(recipe: str) -> None:
    groups = rollout()
    num_tokens = sum(s.response_len for group in groups for s in group.samples)
    rng = random.Random(5)
    shifts = [rng.uniform(-0.5, 0.5) for _ in range(num_tokens)]
    ref_shifts = [rng.uniform(-1, 1) for _ in range(num_tokens)]
    if recipe in ("deepseekmath", "open_r1"):  # the penalty of a token has no bound
        ref_shifts[0] = shifts[0] + 4.0
    loss, gradient = ours(groups, AlgorithmConfig(recipe=recipe), shifts, ref_shifts)
    assert loss == pytest.approx(of_the_texts(groups, shifts, ref_shifts, **RECIPES[recipe]), rel=1e-6)
    for t in (0, 7, num_tokens - 1):
        up, down = ([*shifts[:t], shifts[t] + step, *shifts[t + 1 :]] for step in (1e-5, -1e-5))
        slope = of_the_texts(groups, up, ref_shifts, **RECIPES[recipe]) - of_the_texts(
            groups, down, ref_shifts, **RECIPES[recipe]
        )
        assert gradient[t] == pytest.approx(slope / 2e-5, rel=1e-4, abs=1e-7)


def test_on_policy_the_clipped_objective_has_the_reinforce_gradient() -> None:
    """A text on open-r1 has L = E[r_g log pi] - beta KL. On-policy nothing is clipped."""
    groups = rollout()
    nothing = [0.0] * sum(s.response_len for group in groups for s in group.samples)
    _, clipped = ours(groups, AlgorithmConfig(recipe="open_r1"), nothing, nothing)
    _, plain = ours(groups, AlgorithmConfig(recipe="open_r1", loss_type="reinforce"), nothing, nothing)
    assert clipped == pytest.approx(plain, rel=1e-9) and max(map(abs, clipped)) > 0.01


def test_the_listing_of_rlinf_equals_the_recipe() -> None:
    listed = AlgorithmConfig(**yaml.safe_load(RLINF))
    assert listed.model_copy(update={"recipe": "rlinf"}) == AlgorithmConfig(recipe="rlinf")
    assert listed != AlgorithmConfig()


@pytest.mark.parametrize(
    ("theirs", "as_ours"),
    [
        ({"clip_ratio_low": 0.1, "clip_ratio_high": 0.28}, {"ratio_clip_eps_low": 0.1, "ratio_clip_eps_high": 0.28}),
        ({"clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": None}, {}),
        ({"clip_ratio_c": 2.5, "loss_type": "actor"}, {"loss_type": "dual_clip", "ratio_clip_c": 2.5}),
        (
            {"importance_sampling_fix": True, "importance_sampling_clip": 3},
            {"correction": {"importance": "token", "max_importance": 3}},
        ),
        ({"importance_sampling_fix": False, "importance_sampling_clip": 3}, {}),
        ({"clip_log_ratio_min": -20, "clip_log_ratio_max": 20.0, "recompute_logprobs": True}, {}),
        ({"adv_type": "reinpp"}, {"adv_type": "reinforce_plus_plus"}),
        (
            {
                "adv_type": "reinpp",
                "use_reinpp_baseline": True,
                "kl_beta": 0.0,
                "reinpp_kl_beta": 0.001,
                "kl_penalty_type": "k2",
            },
            {"adv_type": "reinforce_plus_plus_baseline", "kl_beta": 0.001, "kl_in": "reward", "kl_penalty_type": "mse"},
        ),
        (
            {"adv_type": "reinpp", "use_reinpp_baseline": False, "reinpp_kl_beta": 0.0},
            {"adv_type": "reinforce_plus_plus"},
        ),
        ({"kl_penalty_type": "k1"}, {"kl_penalty_type": "kl"}),
        ({"kl_penalty_type": "k3"}, {"kl_penalty_type": "low_var_kl"}),
        # Explicit, so it wins.
        (
            {"recipe": "dapo", "clip_ratio_high": 0.3},
            {"recipe": "dapo", "ratio_clip_eps_high": 0.3},
        ),
    ],
)
def test_keys_of_rlinf_are_accepted(theirs: dict, as_ours: dict) -> None:
    assert AlgorithmConfig(**theirs) == AlgorithmConfig(**as_ours)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"n_minibatches": 4}, "algorithm.n_minibatches=4: is RLinf's name; set batch.mini_batches instead"),
        (
            {"sampling_params": {"top_p": 1.0}},
            "and max_response_length, without top_p and top_k, which bias the gradient, instead",
        ),
        (
            {"clip_log_ratio_min": -5},
            "algorithm.clip_log_ratio_min=-5: must be -20, as it always is here; leave it out",
        ),
        (
            {"shuffle_rollout": True},
            "algorithm.shuffle_rollout=True: must be false, as it always is here; leave it out",
        ),
        (
            {"clip_ratio_low": 0.1, "ratio_clip_eps_low": 0.2},
            "algorithm.clip_ratio_low: means algorithm.ratio_clip_eps_low=0.1, which is 0.2; leave one of them out",
        ),
        (
            {"clip_ratio_c": 3, "loss_type": "gspo"},
            "algorithm.clip_ratio_c: means algorithm.loss_type=dual_clip, which is gspo",
        ),
    ],
)
def test_misplaced_or_contradicting_keys_of_rlinf_are_refused(given: dict, error: str) -> None:
    with pytest.raises(ValidationError) as raised:
        AlgorithmConfig(**given)
    assert error in str(raised.value)
