"""From a step's groups to packed batches: samples that train, and the loss weights of their tokens."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import grpo_mega.megatron  # noqa: F401  # its patches come first
from grpo_mega import config as configs
from grpo_mega.algorithm.advantages import ADVANTAGES, assign_advantages
from grpo_mega.algorithm.token_weights import mini_batch_weights, positive_weights
from grpo_mega.batching.layout import sampled_mask
from grpo_mega.batching.pack import PackingSpec, split
from grpo_mega.trainer import batches
from grpo_mega.trainer.batches import _penalty, is_zero_variance, pack
from grpo_mega.types import Group, Prompt, Sample
from tools.conformance import oracle_advantages

ONE_RANK: Any = SimpleNamespace(packing=PackingSpec(dp_size=1, dp_rank=0, token_budget=1000))
MAX_LENGTH = 10
WEIGHTS = {"accuracy": 1.0, "format": 0.5}  # reward weights, as in the config


def config(**algorithm: Any) -> configs.Config:
    return configs.validate(
        {
            "run_dir": "unused",
            "steps": 1,
            "model": {"path": "unused"},
            "data": {"train": "unused", "max_prompt_length": 4},
            "rollout": {"max_response_length": MAX_LENGTH},
            "algorithm": {"group_size": 2, "loss_agg_func": "token-mean", **algorithm},
            "batch": {"prompts_per_step": 2, "mini_batches": 2, "tokens_per_micro_batch": 64},
        }
    )


def drop_zero_variance(config: configs.Config, groups: list[Group]) -> tuple[list[Group], list[Group]]:
    return batches.drop_zero_variance(config.rollout, config.rewards, config.algorithm, groups)


def groups(lengths: list[list[int]]) -> list[Group]:
    """Return groups of two samples with rewards 1 and 0. A sample of MAX_LENGTH tokens was cut off."""
    found = []
    for g, lens in enumerate(lengths):
        prompt = Prompt(g, "", (1, 2), "")
        samples = [
            Sample(prompt, i, [3] * n, [-1.0] * n, "length" if n == MAX_LENGTH else "stop", reward=1.0 - i)
            for i, n in enumerate(lens)
        ]
        found.append(Group(prompt, samples))
    return found


def weights(config: configs.Config, groups: list[Group]) -> list[list[float]]:
    """Return the token weight of each sample, per mini-batch. The weight of an excluded sample is 0."""
    assign_advantages(groups, config.algorithm, max_response_length=MAX_LENGTH)
    batches = pack(config, groups, ONE_RANK)
    found = []
    for mini_batch in batches:
        (batch,) = mini_batch
        cuts = batch.cu_seqlens.tolist()
        found.append([float(batch.loss_weights[a:b].max()) for a, b in itertools.pairwise(cuts)])
        assert torch.equal(batch.loss_mask > 0, batch.loss_weights > 0)
    return found


def test_a_step_is_packed_without_advantages_only_for_a_kl_reward() -> None:
    given = groups([[2, 4], [3, 1]])
    with pytest.raises(AssertionError, match="assign advantages before packing"):
        pack(config(), given, ONE_RANK)
    ((batch,), _) = pack(config(kl_in="reward", kl_beta=0.1), given, ONE_RANK)
    assert torch.equal(batch.advantages.isnan(), batch.loss_mask > 0)


def test_a_token_weighs_one_over_the_tokens_of_its_mini_batch() -> None:
    assert weights(config(), groups([[2, 4], [3, 1]])) == [[pytest.approx(1 / 6)] * 2, [pytest.approx(1 / 4)] * 2]


def test_use_valid_token_scale_weighs_all_tokens_of_a_rollout_equally() -> None:
    found = weights(config(use_valid_token_scale=True), groups([[2, 4], [3, 1]]))
    assert found == [[pytest.approx(2 / 10)] * 2] * 2  # ten tokens over two mini-batches


def test_overlong_filter_excludes_cut_off_responses_from_loss_and_weights() -> None:
    given = groups([[2, MAX_LENGTH], [3, 1]])
    assert weights(config(), given)[0] == [pytest.approx(1 / 12)] * 2
    assert weights(config(overlong_filter=True), given)[0] == [pytest.approx(1 / 2), 0.0]
    # The group's mean still includes the cut-off sample. Without it the other sample's advantage would be 0.
    assert given[0].samples[0].advantages is not None and given[0].samples[0].advantages[0] > 0.5


def test_weights_count_sampled_tokens_and_exclude_what_a_limit_ended() -> None:
    own = config(overlong_filter=True)
    step = groups([[6, 4], [5, 3]])
    step[0].samples[0].sampled = [(0, 2), (5, 6)]
    step[1].samples[0].finish_reason = "deadline"
    first, second = mini_batch_weights(split(step, 2), own.algorithm, max_response_length=MAX_LENGTH)
    assert first == [1 / 7, 1 / 7] and second == [0.0, 1 / 3]
    step[1].samples[0].finish_reason = "turns"
    assert mini_batch_weights(split(step, 2), own.algorithm, max_response_length=MAX_LENGTH)[1] == [0.0, 1 / 3]
    assert positive_weights(step[0].samples, own.algorithm) == [1 / 3, 0.0]


def test_whitening_and_length_baselines_use_sampled_tokens_only() -> None:
    """A conversation has the advantages of the same sample without its inserted tokens."""
    for recipe in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo", "rlinf", "mt_grpo", "gdpo"):
        plain, inserted = groups([[5, 4], [2, 6]]), groups([[5, 4], [2, 6]])
        for one in (*plain, *inserted):
            one.samples[1].step_ends, one.samples[1].step_rewards = [1], [0.25]
            one.samples[0].reward = 0.7
        own = config(recipe=recipe).algorithm
        grown = inserted[0].samples[0]
        grown.response_ids, grown.rollout_logprobs = [3] * 9, [-1.0, -1.0, 0, 0, 0, -1.0, -1.0, -1.0, 0]
        grown.sampled = [(0, 2), (5, 8)]
        for some in (plain, inserted):
            assign_advantages(some, own, max_response_length=MAX_LENGTH)
        for a, b in zip(plain, inserted, strict=True):
            for old, new in zip(a.samples, b.samples, strict=True):
                mask = sampled_mask(new) > 0
                assert torch.equal(new.advantages[mask], old.advantages) and not new.advantages[~mask].any()


def test_a_sample_without_any_reward_is_excluded_unless_its_steps_have_one() -> None:
    given = groups([[2, 4], [3, 1]])
    given[0].samples[1].reward = None
    assert weights(config(), given)[0] == [pytest.approx(1 / 2), 0.0]
    given[0].samples[1].step_ends, given[0].samples[1].step_rewards = [3], [1.0]
    assert weights(config(), given)[0] == [pytest.approx(1 / 6)] * 2


def sampled_group(rng: random.Random) -> Group:
    """Return a group of up to four samples with few distinct rewards. Some lack a reward, have step rewards or were cut
    off.
    """
    prompt = Prompt(0, "", (1, 2), "")
    group = Group(prompt, [])
    has_steps = rng.random() < 0.6
    for i in range(rng.randint(2, 4)):
        length = rng.choice([0, 3, 7, MAX_LENGTH - 1, MAX_LENGTH])
        reward = rng.choice([0.0, 1.0, None]) if rng.random() < 0.4 else rng.choice([None, 1.0])
        reason: Any = "length" if length == MAX_LENGTH else "stop"
        sample = Sample(prompt, i, [3] * length, [-1.0] * length, reason, 0, reward=reward)
        sample.step_ends = sorted(rng.sample(range(length), min(length, 2))) if has_steps else []
        sample.step_rewards = [rng.choice([0.5, 0.5, 0.5, 0.25]) for _ in sample.step_ends]
        group.samples.append(sample)
    return group


def oracle_are_zero_variance(settings: configs.Config, step: list[Group]) -> list[bool]:
    """Return per group whether the papers' formulas, over all groups of the step, give only zeros up to rounding."""
    a = settings.algorithm
    names = (
        "adv_type",
        "normalize_by_std",
        "std_over",
        "std_ddof",
        "std_eps",
        "normalize_advantages",
        "overlong_buffer",
        "overlong_penalty",
    )
    values = {name: getattr(a, name) for name in names} | {"max_response_length": MAX_LENGTH}
    values |= {"reward_weights": WEIGHTS}
    scored = [
        [
            oracle_advantages.Scored(s.response_len, s.reward, s.step_rewards, s.step_ends, scores=s.scores)
            for s in group.samples
        ]
        for group in step
    ]
    found = []
    for group, rows in zip(
        step, oracle_advantages.advantages(scored, oracle_advantages.AdvantageSettings(**values)), strict=True
    ):
        is_cut = [a.overlong_filter and sample.finish_reason == "length" for sample in group.samples]
        found.append(not any(abs(x) > 1e-9 for row, cut in zip(rows, is_cut, strict=True) if not cut for x in row))
    return found


@pytest.mark.parametrize("adv_type", sorted(ADVANTAGES.keys() - {"none"}))
def test_a_group_has_zero_variance_if_its_advantages_are_all_zero(adv_type: str) -> None:
    """With step rewards, overlong penalties, normalization, other groups in the step and excluded responses."""
    rng = random.Random(3)
    found: Counter[tuple[bool, bool]] = Counter()
    for number in range(400):
        algorithm: dict[str, Any] = {
            "adv_type": adv_type,
            "group_size": 3,
            "overlong_buffer": 0.3 * (number % 2) if adv_type != "gdpo" else 0.0,
            "overlong_filter": number % 3 == 0,
        }
        algorithm |= {"normalize_by_std": number % 5 > 0, "normalize_advantages": number % 7 == 0}
        if adv_type == "grpo" and number % 5 > 0 and number % 2:
            algorithm |= {"std_over": "batch"}
        settings, step = config(**algorithm), [sampled_group(rng) for _ in range(rng.randint(1, 3))]
        for sample in (sample for group in step for sample in group.samples):
            sample.scores = {"accuracy": sample.reward, "format": rng.choice([None, 0.0, 0.0, 1.0])}
        before = [copy.copy(sample) for group in step for sample in group.samples]
        expected = oracle_are_zero_variance(settings, step)
        useful, equal = drop_zero_variance(settings, step)
        assert [sample for group in step for sample in group.samples] == before  # it works on copies
        is_kept = [adv_type == "reinforce_plus_plus" or not is_zero for is_zero in expected]
        assert useful == [group for group, kept in zip(step, is_kept, strict=True) if kept], (algorithm, step)
        assert equal == [group for group, kept in zip(step, is_kept, strict=True) if not kept]
        assign_advantages(step, settings.algorithm, max_response_length=MAX_LENGTH, reward_weights=WEIGHTS)
        assert [is_zero_variance(settings.algorithm, group) for group in step] == expected, (algorithm, step)
        for group, is_zero in zip(step, expected, strict=True):
            rewards = {sample.reward for sample in group.samples} - {None}
            differ = len(rewards) > 1 or len({r for sample in group.samples for r in sample.step_rewards}) > 1
            found[is_zero, differ] += 1
    assert len(found) == 4 and min(found.values()) >= 5, found  # all four combinations occur


def test_a_group_of_equal_rewards_is_kept_if_the_step_is_whitened() -> None:
    """Without a group baseline, an all-correct group among mostly wrong groups has the largest advantages of the
    step.
    """
    step = groups([[3, 5], [4, 2], [6, 1]])
    for group, rewards in zip(step, [(1.0, 1.0), (0.0, 0.0), (0.0, 1.0)], strict=True):
        for sample, reward in zip(group.samples, rewards, strict=True):
            sample.reward = reward
    assert drop_zero_variance(config(recipe="reinforce_plus_plus"), step) == (step, [])
    # Nothing to compare with.
    assert drop_zero_variance(config(recipe="reinforce_plus_plus"), step[:1]) == (
        step[:1],
        [],
    )
    assert drop_zero_variance(config(recipe="rlinf"), step) == (step, [])  # the mean over tokens is not 0
    assert drop_zero_variance(config(recipe="rlinf"), step[:2]) == ([], step[:2])
    assert drop_zero_variance(config(), step) == (step[2:], step[:2])


@pytest.mark.parametrize("recipe", ["rlinf", "reinforce_plus_plus_baseline", "gdpo"])
def test_a_group_at_the_mean_of_the_step_has_advantages_of_exactly_zero(recipe: str) -> None:
    """The mean of z-scores is 0 only up to rounding. Divided by a deviation, the error would look like an advantage."""
    for seed in range(30):
        rng = random.Random(seed)
        step = groups([[7] * 2 for _ in range(5)])
        for group in step[1:]:
            for sample in group.samples:
                sample.reward = rng.random()
                sample.scores = {"accuracy": sample.reward, "format": rng.random()}
        for sample in step[0].samples:
            sample.reward, sample.scores = 0.3, {"accuracy": 0.3, "format": 0.1}
        functions = [{"name": "accuracy"}, {"name": "format", "weight": 0.5}]
        settings = config(recipe=recipe, group_size=2)
        settings = settings.model_copy(update={"rewards": settings.rewards.model_validate({"functions": functions})})
        assert drop_zero_variance(settings, step) == (step[1:], step[:1])


@pytest.mark.parametrize(
    ("kl_clamp", "expected"), [(2.5, 2.5), (30.0, math.exp(3.1) - 4.1), (None, math.exp(3.1) - 4.1)]
)
def test_the_kl_penalty_of_a_reward_has_the_bound_of_the_config(kl_clamp: float | None, expected: float) -> None:
    a = config(kl_in="reward", kl_beta=0.1, kl_clamp=kl_clamp).algorithm
    old = torch.tensor([-4.0, -4.0, -4.0], dtype=torch.float64)
    batch: Any = SimpleNamespace(
        old_logprobs=old, ref_logprobs=old + torch.tensor([3.1, 0.2, 0.0], dtype=torch.float64)
    )
    penalty = _penalty(a, batch)
    assert penalty is not None and penalty.tolist() == pytest.approx([expected, math.exp(0.2) - 1.2, 0.0], rel=1e-9)
    mse = _penalty(a.model_copy(update={"kl_penalty_type": "mse"}), batch)
    assert mse is not None and mse.tolist() == pytest.approx([3.1**2 / 2, 0.02, 0.0], rel=1e-9)
    batch.ref_logprobs = None
    assert _penalty(a, batch) is None  # this pipeline stage has no log-probs


def test_a_long_response_is_penalized_if_only_steps_are_rewarded() -> None:
    settings = config(adv_type="grpo_process", overlong_buffer=0.5, overlong_penalty=0.5, normalize_by_std=False)
    (group,) = groups([[4, 9]])
    for sample in group.samples:
        sample.reward, sample.step_ends, sample.step_rewards = None, [2], [1.0]
    assign_advantages([group], settings.algorithm, max_response_length=MAX_LENGTH)
    short, long = (sample.advantages for sample in group.samples)
    assert short is not None and long is not None
    # The penalty is 4/5 of 0.5, and the mean is subtracted.
    assert short.tolist() == pytest.approx([0.2] * 4) and long.tolist() == pytest.approx([-0.2] * 9)
