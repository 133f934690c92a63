"""Worked examples of texts on GRPO, from rewards to the loss, computed by our losses and by the oracle."""

import math

import pytest
import torch

from grpo_mega.algorithm.inputs import LossInputs
from grpo_mega.algorithm.token_weights import token_weights
from grpo_mega.config import AlgorithmConfig
from grpo_mega.types import Group, Prompt, Sample
from tests.helpers.losses import assigned, loss_of
from tools.conformance import adapter

PROMPT = Prompt(id=0, text="Calculate 2 + 2 x 6", token_ids=(1,), answer="14")
RIGHT = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]  # four of eight answers are 14


def advantages(*rewards_of_groups, **settings):
    """Return the advantages of groups of answers with one token each."""
    groups = [
        Group(PROMPT, [Sample(PROMPT, i, [5], [-0.5], "stop", reward=r) for i, r in enumerate(rewards)])
        for rewards in rewards_of_groups
    ]
    return torch.cat([sample.advantages for sample in assigned(groups, AlgorithmConfig(**settings))])


def inputs_of(ratios, advantages_T, old=0.5):
    """Return the inputs for answers of one token each, with probability `old` under the old policy."""
    num = len(ratios)
    logprobs = torch.tensor([math.log(ratio * old) for ratio in ratios], dtype=torch.float64)
    before = torch.full((num,), math.log(old), dtype=torch.float64)
    weights = token_weights([1] * num, "seq-mean-token-mean", max_response_length=1, num_samples=num, num_tokens=num)
    return LossInputs(
        logprobs=logprobs.requires_grad_(),
        old_logprobs=before,
        ref_logprobs=before,
        rollout_logprobs=before,
        advantages=torch.as_tensor(advantages_T, dtype=torch.float64),
        loss_mask=torch.ones(num, dtype=torch.float64),
        loss_weights=torch.tensor(weights, dtype=torch.float64),
        segments=torch.arange(num),
        num_segments=num,
    )


def test_groups_with_half_of_the_answers_correct_score_plus_minus_0_866():
    scores = advantages([1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 1.0])
    expected = [0.8660, -0.8660, -0.8660, 0.8660, -0.8660, -0.8660, 0.8660, 0.8660]
    assert scores.tolist() == pytest.approx(expected, abs=5e-5)


def test_two_and_two_times_six_from_eight_answers_to_the_loss():
    """Mean 0.5, deviation 0.53, advantages +-0.94. The probability of the first correct answer rises from 0.5 to 0.7.
    Its ratio of 1.4 is clipped to 1.2, so the objective is 0.2 * advantage / 8, and this answer has no gradient.
    """
    scores = advantages(RIGHT)
    assert scores.tolist() == pytest.approx([0.9354 if right else -0.9354 for right in RIGHT], abs=5e-5)
    assert torch.tensor(RIGHT).std().item() == pytest.approx(0.53, abs=5e-3)
    inputs = inputs_of([0.7 / 0.5] + [1.0] * 7, scores)
    outputs = loss_of(inputs, clip_low=0.2, clip_high=0.2)
    outputs.loss.backward()
    assert outputs.loss.item() == pytest.approx(-0.2 * 0.9354 / 8, rel=1e-4)
    assert inputs.logprobs.grad[0] == 0
    assert inputs.logprobs.grad[1:].tolist() == pytest.approx([-a / 8 for a in scores.tolist()[1:]], rel=1e-6)
    # kl_beta is the paper's; k3 is computed for 0.5 / 0.7.
    with_kl = loss_of(inputs, clip_low=0.2, clip_high=0.2, kl_beta=0.04)
    assert with_kl.loss.item() - outputs.loss.item() == pytest.approx(
        0.04 * (5 / 7 - 1 - math.log(5 / 7)) / 8, rel=1e-9
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective"),
    [(1.8, 1.0, 1.2), (1.4, 1.0, 1.2), (0.4, 1.0, 0.4), (1.8, -1.0, -1.8), (1.4, -1.0, -1.4), (0.4, -1.0, -0.8)],
)
def test_a_ratio_is_clipped_only_if_that_lowers_the_objective(ratio, advantage, objective):
    """The ratio 0.9 / 0.5 = 1.8 is clipped to 1.2, and 0.2 / 0.5 = 0.4 to 0.8. But 0.4 A of a good
    answer and 1.8 A of a bad answer are not clipped and keep their gradient.
    """
    inputs = inputs_of([ratio], [advantage])
    outputs = loss_of(inputs, clip_low=0.2, clip_high=0.2)
    outputs.loss.backward()
    is_clipped = objective != ratio * advantage
    assert -outputs.loss.item() == pytest.approx(objective)
    assert -inputs.logprobs.grad.item() == pytest.approx(0.0 if is_clipped else objective)
    names = ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages")
    response = {name: getattr(inputs, name).tolist() for name in names} | {"entropy": [0.0], "mask": [1]}
    settings = {"ratio_clip_eps_low": 0.2, "ratio_clip_eps_high": 0.2}
    expected = adapter.expected("loss", {"responses": [response]}, settings)
    assert expected["loss"] == pytest.approx(-objective)
    assert expected["gradients"][0][0] == pytest.approx(inputs.logprobs.grad.item())


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective"), [(5.0, -1.0, -3.0), (2.9, -1.0, -2.9), (5.0, 1.0, 1.2), (0.4, -1.0, -0.8)]
)
def test_the_dual_clip_also_bounds_the_objective_of_bad_answers_from_below(ratio, advantage, objective):
    inputs = inputs_of([ratio], [advantage], old=0.1)
    outputs = loss_of(inputs, loss_type="dual_clip", clip_low=0.2, clip_high=0.2, clip_c=3.0)
    outputs.loss.backward()
    assert -outputs.loss.item() == pytest.approx(objective)
    assert -inputs.logprobs.grad.item() == pytest.approx(objective if ratio == 2.9 else 0.0)
