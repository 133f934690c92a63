"""PromptSampler: (seed, step) alone decides what a step draws."""

import itertools

import pytest

from grpo_mega.data import PromptSampler
from grpo_mega.errors import ConfigError


def draw(sampler: PromptSampler, num_steps: int) -> list[int]:
    return list(itertools.chain.from_iterable(sampler.indices(step) for step in range(num_steps)))


@pytest.mark.parametrize(("num_prompts", "prompts_per_step"), [(100, 8), (10, 7), (12, 4), (9, 9), (20, 7), (23, 12)])
def test_every_epoch_is_a_permutation_even_where_steps_span_epochs(num_prompts: int, prompts_per_step: int) -> None:
    sampler = PromptSampler(num_prompts, prompts_per_step, seed=3, shuffle=True)
    drawn = draw(sampler, num_steps=5 * num_prompts)
    for epoch in range(5):
        assert sorted(drawn[epoch * num_prompts : (epoch + 1) * num_prompts]) == list(range(num_prompts))


@pytest.mark.parametrize(("num_prompts", "prompts_per_step"), [(100, 8), (10, 7), (9, 9), (20, 7), (23, 12), (3, 2)])
def test_no_step_holds_a_prompt_twice(num_prompts: int, prompts_per_step: int) -> None:
    for seed in range(10):
        sampler = PromptSampler(num_prompts, prompts_per_step, seed=seed, shuffle=True)
        for step in range(60):
            assert len(set(sampler.indices(step))) == prompts_per_step


def test_a_step_is_the_same_for_a_sampler_that_never_saw_the_steps_before() -> None:
    sampler = PromptSampler(50, 8, seed=1, shuffle=True)
    before = [sampler.indices(step) for step in range(40)]
    for step in (39, 7, 0, 23):
        assert PromptSampler(50, 8, seed=1, shuffle=True).indices(step) == before[step]


def test_epochs_and_seeds_differ_in_their_order() -> None:
    one, other = (PromptSampler(64, 64, seed=seed, shuffle=True) for seed in (0, 1))
    assert one.indices(0) != one.indices(1)
    assert one.indices(0) != other.indices(0)


def test_without_shuffling_the_file_is_read_in_order() -> None:
    sampler = PromptSampler(5, 2, seed=0, shuffle=False)
    assert draw(sampler, num_steps=5) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]


def test_no_prompts_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"data\.train holds no usable prompt"):
        PromptSampler(0, 4, seed=0, shuffle=True)


def test_a_step_larger_than_the_data_names_the_largest_that_fits() -> None:
    with pytest.raises(ConfigError, match=r"batch\.prompts_per_step=32 is more than the 10 prompts .* at most 10"):
        PromptSampler(10, 32, seed=0, shuffle=True)
