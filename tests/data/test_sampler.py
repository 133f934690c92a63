"""Sampler over one dataset: only (seed, step) decides the prompts of a step."""

import hashlib
import itertools
import json

import pytest

from grpo_mega.data import Sampler
from grpo_mega.errors import ConfigError


def rows_of(sampler: Sampler, step: int) -> list[int]:
    return [draw.row for draw in sampler.draws(step)]


def draw(sampler: Sampler, num_steps: int) -> list[int]:
    return list(itertools.chain.from_iterable(rows_of(sampler, step) for step in range(num_steps)))


@pytest.mark.parametrize(("num_prompts", "prompts_per_step"), [(100, 8), (10, 7), (12, 4), (9, 9), (20, 7), (23, 12)])
def test_every_epoch_is_a_permutation_even_if_steps_span_epochs(num_prompts: int, prompts_per_step: int) -> None:
    sampler = Sampler([num_prompts], [1.0], prompts_per_step, seed=3, shuffle=True)
    drawn = draw(sampler, num_steps=5 * num_prompts)
    for epoch in range(5):
        assert sorted(drawn[epoch * num_prompts : (epoch + 1) * num_prompts]) == list(range(num_prompts))


@pytest.mark.parametrize(("num_prompts", "prompts_per_step"), [(100, 8), (10, 7), (9, 9), (20, 7), (23, 12), (3, 2)])
def test_no_step_has_a_prompt_twice(num_prompts: int, prompts_per_step: int) -> None:
    for seed in range(10):
        sampler = Sampler([num_prompts], [1.0], prompts_per_step, seed=seed, shuffle=True)
        for step in range(60):
            assert len(set(rows_of(sampler, step))) == prompts_per_step


def test_a_step_does_not_depend_on_earlier_steps() -> None:
    sampler = Sampler([50], [1.0], 8, seed=1, shuffle=True)
    before = [rows_of(sampler, step) for step in range(40)]
    for step in (39, 7, 0, 23):
        assert rows_of(Sampler([50], [1.0], 8, seed=1, shuffle=True), step) == before[step]


def test_epochs_and_seeds_have_different_orders() -> None:
    one, other = (Sampler([64], [1.0], 64, seed=seed, shuffle=True) for seed in (0, 1))
    assert rows_of(one, 0) != rows_of(one, 1)
    assert rows_of(one, 0) != rows_of(other, 0)


def test_without_shuffling_the_file_is_read_in_order() -> None:
    sampler = Sampler([5], [1.0], 2, seed=0, shuffle=False)
    assert draw(sampler, num_steps=5) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]


def test_no_prompts_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"data\.train "):
        Sampler([0], [1.0], 4, seed=0, shuffle=True)


def test_a_step_larger_than_the_data_names_the_largest_that_fits() -> None:
    with pytest.raises(ConfigError, match=r"batch\.prompts_per_step=32 .* at most 10"):
        Sampler([10], [1.0], 32, seed=0, shuffle=True)


# (sizes, weights, prompts_per_step)
FROZEN_CASES = [
    *[((100,), (1.0,), 8), ((9,), (1.0,), 9), ((10,), (3.0,), 7), ((23,), (0.5,), 12), ((64,), (1.0,), 4)],
    *[((100, 50), (1.0, 1.0), 8), ((100, 30, 7), (5.0, 3.0, 0.4), 10), ((40, 40, 40), (1.0, 1.0, 1.0), 10)],
    *[((9, 200), (1.0, 2.0), 12), ((300, 5), (1.0, 0.01), 16)],
]


def test_the_order_of_prompts_never_changes() -> None:
    """Checkpoints do not store the order, so every version of the code must draw the same prompts for resumed runs."""
    digest = hashlib.sha256()
    for sizes, weights, prompts_per_step in FROZEN_CASES:
        for seed in (0, 7, 2**31 - 1):
            for shuffle in (True, False):
                sampler = Sampler(sizes, weights, prompts_per_step, seed, shuffle=shuffle)
                digest.update(json.dumps([rows_of(sampler, step) for step in range(40)]).encode())
    assert digest.hexdigest() == "222b7a15c6efca40804a83648ee81b56af3fe5d1b06099b14dd04f0b886e450b"
    drawn = [rows_of(Sampler([10], [1.0], 7, 3, shuffle=True), step) for step in range(3)]
    assert drawn == [[6, 8, 4, 1, 3, 5, 9], [7, 0, 2, 4, 5, 8, 1], [3, 9, 6, 2, 0, 7, 4]]
