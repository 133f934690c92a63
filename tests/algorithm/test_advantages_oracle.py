"""All advantages compared with the oracle on random ragged groups, and worked examples of process supervision and
RLOO.
"""

import itertools
import random

import pytest
import torch

from grpo_mega.algorithm.advantages import ADVANTAGES
from grpo_mega.config import AlgorithmConfig
from grpo_mega.types import Group, Prompt, Sample
from tests.helpers.losses import assigned
from tools.conformance import adapter, cases

OPTIONS = {
    "normalize_by_std": (True, False),
    "std_ddof": (1, 0),
    "std_eps": (1e-6, 0.1),
    "normalize_advantages": (False, True),
    "kl_in": ("loss", "reward"),
    "overlong_buffer": (0.0, 0.25),
}


def random_groups(seed):
    """Return 1 to 3 groups of 1 to 5 samples of up to 8 tokens. Some samples have no reward or no steps."""
    rng = random.Random(seed)
    groups = [
        cases.samples(rng.randrange(10**6), [rng.randint(0, 8) for _ in range(rng.randint(1, 5))])
        for _ in range(rng.randint(1, 3))
    ]
    for sample in itertools.chain(*groups):
        if rng.random() < 0.3:
            sample |= {"step_rewards": [], "step_ends": []}
        if rng.random() < 0.2 or (rng.random() < 0.3 and sample["step_rewards"]):
            sample["reward"] = None
    return groups


@pytest.mark.parametrize("adv_type", sorted(ADVANTAGES.keys() - {"none"}))
def test_advantages_equal_the_oracle_for_any_groups_and_settings(adv_type):
    num_nonzero = 0
    for seed, choice in enumerate(itertools.product(*OPTIONS.values())):
        settings = cases.ADVANTAGE_SETTINGS | dict(zip(OPTIONS, choice, strict=True)) | {"adv_type": adv_type}
        settings |= {"kl_beta": 0.2, "kl_penalty_type": cases.PENALTIES[seed % 5]}
        if adv_type in ("grpo_process", "grpo_turn", "gdpo"):  # these do not support a KL penalty in the reward
            settings |= {"kl_in": "loss"}
        if adv_type == "gdpo":
            settings |= {"overlong_buffer": 0.0, "reward_weights": {"accuracy": 0.7, "format": -0.3}}
        if adv_type == "pass_at_k":
            settings |= {"pass_k": (None, 2, 3)[seed % 3]}
        if adv_type == "grpo" and settings["normalize_by_std"] and seed % 3 == 0:
            settings |= {"std_over": "batch"}
        groups = random_groups(seed)
        groups = cases.with_scores(groups) if adv_type == "gdpo" else groups
        expected = adapter.expected("advantages", {"groups": groups}, settings)
        actual = adapter.ours("advantages", {"groups": groups}, settings)
        assert adapter.differences(expected, actual, 1e-6) == []
        num_nonzero += any(x for group in expected["advantages"] for row in group for x in row)
    assert num_nonzero > 40


def process_group(step_rewards, step_ends, lengths):
    prompt = Prompt(id=0, text="q", token_ids=(1,), answer="a")
    samples = [Sample(prompt, i, [5] * n, [-0.5] * n, "stop") for i, n in enumerate(lengths)]
    for sample, rewards, ends in zip(samples, step_rewards, step_ends, strict=True):
        sample.step_rewards, sample.step_ends = rewards, ends
    return Group(prompt, samples)


def test_an_advantage_sums_the_normalized_rewards_of_this_and_later_steps():
    """Rewards .2 .8 1 0 .4 have mean .48 and deviation .4147. Normalized: -.6751 .7716 1.2538 and -1.1574 -.1929."""
    group = process_group([[0.2, 0.8, 1.0], [0.0, 0.4]], [[3, 7, 9], [2, 5]], [10, 6])
    first, second = assigned([group], AlgorithmConfig(adv_type="grpo_process", std_eps=0.0))
    assert first.advantages.tolist() == pytest.approx([1.3503] * 4 + [2.0254] * 4 + [1.2538] * 2, abs=5e-5)
    assert second.advantages.tolist() == pytest.approx([-1.3503] * 3 + [-0.1929] * 3, abs=5e-5)


def test_tokens_after_the_last_step_have_no_advantage():
    group = process_group([[1.0], [0.0], []], [[1], [3], []], [4, 4, 3])
    samples = assigned([group], AlgorithmConfig(adv_type="grpo_process", std_eps=0.0))
    high = 0.5**0.5
    expected = [[high, high, 0, 0], [-high] * 4, [0.0] * 3]
    assert [sample.advantages.tolist() for sample in samples] == [pytest.approx(row, abs=1e-6) for row in expected]


@pytest.mark.parametrize("adv_type", ADVANTAGES)
@pytest.mark.parametrize("normalize", [False, True])
def test_equal_rewards_and_steps_have_exactly_zero_advantages(adv_type, normalize):
    group = process_group([[0.1, 0.1], [0.1]], [[0, 2], [1]], [3, 3])
    for sample in group.samples:
        sample.reward = 0.3
    for groups in ([group], [process_group([[]], [[]], [3])], [process_group([[], []], [[], []], [0, 0])]):
        samples = assigned(groups, AlgorithmConfig(adv_type=adv_type, normalize_advantages=normalize))
        assert all(sample.advantages.eq(0).all() for sample in samples)


def test_the_baseline_of_rloo_is_the_mean_of_the_other_samples():
    group = process_group([[]] * 4, [[]] * 4, [1] * 4)
    for sample, reward in zip(group.samples, [1.0, 0.0, 0.0, None], strict=True):
        sample.reward = reward
    samples = assigned([group], AlgorithmConfig(adv_type="rloo"))
    assert torch.cat([sample.advantages for sample in samples]).tolist() == [1.0, -0.5, -0.5, 0.0]


def test_a_reward_penalty_in_reinforce_plus_plus_counts_for_earlier_tokens():
    group = process_group([[]], [[]], [3])
    group.samples[0].reward = 1.0
    penalties = [torch.tensor([0.0, 2.0, 0.5])]
    (sample,) = assigned(
        [group], AlgorithmConfig(adv_type="reinforce_plus_plus", kl_beta=0.1, kl_in="reward"), penalties
    )
    returns = torch.tensor([0.75, 0.75, 0.95])  # 1 - .1 (2 + .5) for the first two tokens, then 1 - .1 .5
    torch.testing.assert_close(sample.advantages, (returns - returns.mean()) / returns.std(), rtol=1e-5, atol=1e-5)
