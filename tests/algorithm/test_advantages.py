"""Outcome advantages: worked examples, groups of equal rewards, samples without a reward, whitening."""

import math

import pytest
import torch

from grpo_mega.algorithm.advantages import assign_advantages, group_zscore, overlong_penalty
from grpo_mega.config import AlgorithmConfig
from grpo_mega.errors import RewardError
from grpo_mega.types import Group, Prompt, Sample, Span
from tests.helpers.losses import assigned


def make_group(rewards, lengths=None, prompt_id=0):
    prompt = Prompt(id=prompt_id, text="q", token_ids=(1, 2), answer="a")
    lengths = lengths or [3] * len(rewards)
    samples = [
        Sample(prompt, i, [5] * n, [-0.5] * n, "stop", reward=reward)
        for i, (reward, n) in enumerate(zip(rewards, lengths, strict=True))
    ]
    return Group(prompt, samples)


def first_values(samples):
    return [sample.advantages[0].item() for sample in samples]


@pytest.mark.parametrize(
    ("rewards", "magnitude"), [([1.0, 0, 0, 1], 0.8660), ([0.0, 0, 1, 1], 0.8660), ([1.0, 0] * 4, 0.9354)]
)
def test_equally_many_right_and_wrong_answers_have_the_worked_scores(rewards, magnitude):
    scores = group_zscore(torch.tensor(rewards), AlgorithmConfig())
    expected = [magnitude if reward else -magnitude for reward in rewards]
    assert scores.tolist() == pytest.approx(expected, abs=5e-5)


def test_the_scores_equal_python_arithmetic():
    rewards = [0.3, 1.5, 0.0, -2.0, 1.5]
    mean = sum(rewards) / 5
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 4)
    scores = group_zscore(torch.tensor(rewards, dtype=torch.float64), AlgorithmConfig())
    assert scores.tolist() == pytest.approx([(r - mean) / (std + 1e-6) for r in rewards], rel=1e-13)


def test_samples_of_several_policies_have_one_baseline():
    """With partial rollouts, several policies may generate a group. Excluding samples would favor short responses."""
    group = make_group([0.3, 1.5, 0.0, -2.0])
    for sample, spans in zip(
        group.samples, ([(4, 0, 3)], [(4, 0, 1), (5, 1, 3)], [(5, 0, 3)], [(3, 0, 2), (5, 2, 3)]), strict=True
    ):
        sample.spans = [Span(*span) for span in spans]
    found = first_values(assigned([group], AlgorithmConfig()))
    std = math.sqrt(sum((r + 0.05) ** 2 for r in (0.3, 1.5, 0.0, -2.0)) / 3)
    assert found == pytest.approx([(r + 0.05) / (std + 1e-6) for r in (0.3, 1.5, 0.0, -2.0)], rel=1e-5)


def test_the_divisor_of_the_variance_can_be_the_group_size():
    assert group_zscore(torch.tensor([1.0, 0, 0, 1]), AlgorithmConfig(std_ddof=0)).tolist() == pytest.approx(
        [1, -1, -1, 1], abs=1e-5
    )


@pytest.mark.parametrize("rewards", [[0.1] * 7, [1.0] * 4, [0.0, 0.0], [0.7], []])
@pytest.mark.parametrize("ddof", [0, 1])
def test_groups_of_equal_rewards_score_exactly_zero(rewards, ddof):
    assert group_zscore(torch.tensor(rewards), AlgorithmConfig(std_ddof=ddof)).tolist() == [0.0] * len(rewards)


def test_every_token_of_a_response_gets_its_samples_score():
    samples = assigned([make_group([1.0, 0, 0, 1], lengths=[1, 4, 0, 2])])
    assert [sample.advantages.shape[0] for sample in samples] == [1, 4, 0, 2]
    assert all(sample.advantages.dtype == torch.float32 for sample in samples)
    assert samples[1].advantages.tolist() == pytest.approx([-0.8660] * 4, abs=5e-5)


def test_samples_keep_their_order_and_are_scored_within_their_group():
    groups = [
        make_group([1.0, 0], prompt_id=7),
        make_group([5.0, 5.0], prompt_id=8),
        make_group([0.0, 9.0], prompt_id=9),
    ]
    samples = assigned(groups)
    assert [(sample.prompt.id, sample.index) for sample in samples] == [(7, 0), (7, 1), (8, 0), (8, 1), (9, 0), (9, 1)]
    assert first_values(samples) == pytest.approx([0.7071, -0.7071, 0, 0, -0.7071, 0.7071], abs=5e-5)


def test_samples_without_a_reward_get_zero_and_do_not_change_the_mean():
    samples = assigned([make_group([1.0, None, 0.0, None])])
    assert first_values(samples) == pytest.approx([0.7071, 0, -0.7071, 0], abs=5e-5)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("rewards", [[None, None], [None, 1.0], [0.3, 0.3, 0.3]])
def test_groups_with_nothing_to_compare_get_zeros(rewards, normalize):
    samples = assigned([make_group(rewards)], AlgorithmConfig(normalize_advantages=normalize))
    assert first_values(samples) == [0.0] * len(rewards)


def test_rewards_that_differ_only_by_rounding_have_tiny_advantages():
    samples = assigned([make_group([0.1 + 0.2, 0.3])])
    assert max(abs(value) for value in first_values(samples)) < 1e-9


def test_normalized_advantages_have_mean_0_and_deviation_1_over_all_tokens():
    groups = [make_group([1.0, 0, 0, 1], [1, 9, 4, 2]), make_group([3.0, 0, None, 1], [3, 3, 5, 8])]
    samples = assigned(groups, AlgorithmConfig(normalize_advantages=True))
    values = torch.cat([sample.advantages for sample in samples if sample.reward is not None])
    assert values.mean().item() == pytest.approx(0, abs=1e-6)
    assert values.std().item() == pytest.approx(1, abs=1e-6)
    assert samples[6].advantages.eq(0).all()


def test_without_groups_there_are_no_samples():
    assert assigned([], AlgorithmConfig(normalize_advantages=True)) == []


def test_a_reward_that_is_not_finite_is_refused_by_name():
    with pytest.raises(RewardError, match=r"sample 1 .*prompt 4 .*nan"):
        assigned([make_group([1.0, float("nan")], prompt_id=4)])


def test_without_the_deviation_a_score_is_the_distance_from_the_mean():
    rewards = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    assert group_zscore(rewards, AlgorithmConfig(normalize_by_std=False)).tolist() == [0.75, -0.25, -0.25, -0.25]
    assert group_zscore(torch.ones(4), AlgorithmConfig(normalize_by_std=False)).tolist() == [0.0] * 4
    samples = assigned([make_group([1.0, 0, 0, 0])], AlgorithmConfig(normalize_by_std=False))
    assert first_values(samples) == [0.75, -0.25, -0.25, -0.25]


def test_divisor_and_epsilon_reach_every_group():
    samples = assigned([make_group([1.0, 0]), make_group([0.0, 4.0])], AlgorithmConfig(std_ddof=0, std_eps=0.0))
    assert first_values(samples) == [1.0, -1.0, -1.0, 1.0]
    (first, _) = assigned([make_group([1.0, 0])], AlgorithmConfig(std_ddof=0, std_eps=0.5))
    assert first.advantages[0].item() == pytest.approx(0.5 / (0.5 + 0.5))


@pytest.mark.parametrize(("length", "expected"), [(7, 0.0), (8, -1 / 3), (9, -2 / 3), (10, -1.0)])
def test_the_buffer_of_long_responses_is_rounded_to_whole_tokens(length, expected):
    a = AlgorithmConfig(overlong_buffer=0.26)  # 2.6 of 10 tokens is rounded to whole tokens
    assert overlong_penalty(length, a, 10) == pytest.approx(expected)


def test_penalties_count_only_if_kl_is_in_the_reward():
    prompt = Prompt(0, "", (1,), "")
    for kl_in, share in (("loss", 0.0), ("reward", 0.5)):
        group = Group(prompt, [Sample(prompt, i, [3], [-1.0], "stop", reward=1.0 - i) for i in range(2)])
        a = AlgorithmConfig(adv_type="rloo", kl_in=kl_in, kl_beta=0.5)
        first, second = assign_advantages(
            [group], a, max_response_length=4, kl_penalties=[torch.ones(1), torch.zeros(1)]
        )
        assert first.advantages.tolist() == [1.0 - share] and second.advantages.tolist() == [share - 1.0]
