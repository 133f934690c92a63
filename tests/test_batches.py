"""Which samples train, and what their tokens weigh, from a step's groups to packed batches."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import grpo_mega.megatron  # noqa: F401  # its patches come first
from grpo_mega import config as configs
from grpo_mega.algorithm.advantages import assign
from grpo_mega.batches import make_batches
from grpo_mega.types import Group, Prompt, Sample

ONE_RANK: Any = SimpleNamespace(dp_size=1, dp_rank=0, length_multiple=1, micro_batch_multiple=1)
MAX_LENGTH = 10


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


def groups(lengths: list[list[int]]) -> list[Group]:
    """Two samples each, of rewards 1 and 0; those of MAX_LENGTH tokens were cut off."""
    found = []
    for g, lens in enumerate(lengths):
        prompt = Prompt(g, "", (1, 2), "")
        samples = [
            Sample(prompt, i, [3] * n, [-1.0] * n, "length" if n == MAX_LENGTH else "stop", 0, reward=1.0 - i)
            for i, n in enumerate(lens)
        ]
        found.append(Group(prompt, samples))
    return found


def weights(config: configs.Config, groups: list[Group]) -> list[list[float]]:
    """Of each sample of each mini-batch: the weight of its tokens, and 0 for one that does not train."""
    assign(groups)
    batches = make_batches(config, groups, ONE_RANK)
    found = []
    for mini_batch in batches:
        (batch,) = mini_batch
        cuts = batch.cu_seqlens.tolist()
        found.append([float(batch.loss_weights[a:b].max()) for a, b in itertools.pairwise(cuts)])
        assert torch.equal(batch.loss_mask > 0, batch.loss_weights > 0)
    return found


def test_a_token_weighs_one_over_the_tokens_of_its_mini_batch() -> None:
    assert weights(config(), groups([[2, 4], [3, 1]])) == [[pytest.approx(1 / 6)] * 2, [pytest.approx(1 / 4)] * 2]


def test_with_use_valid_token_scale_every_token_of_the_rollout_weighs_the_same() -> None:
    found = weights(config(use_valid_token_scale=True), groups([[2, 4], [3, 1]]))
    assert found == [[pytest.approx(2 / 10)] * 2] * 2  # ten tokens over two mini-batches


def test_with_overlong_filter_responses_that_were_cut_off_neither_train_nor_count() -> None:
    given = groups([[2, MAX_LENGTH], [3, 1]])
    assert weights(config(), given)[0] == [pytest.approx(1 / 12)] * 2
    assert weights(config(overlong_filter=True), given)[0] == [pytest.approx(1 / 2), 0.0]
    # In their group's mean they stay: the other one's advantage is not that of a group of one.
    assert given[0].samples[0].advantages is not None and given[0].samples[0].advantages[0] > 0.5


def test_a_sample_without_a_reward_neither_trains_nor_counts_unless_its_steps_have_one() -> None:
    given = groups([[2, 4], [3, 1]])
    given[0].samples[1].reward = None
    assert weights(config(), given)[0] == [pytest.approx(1 / 2), 0.0]
    given[0].samples[1].step_ends, given[0].samples[1].step_rewards = [3], [1.0]
    assert weights(config(), given)[0] == [pytest.approx(1 / 6)] * 2
