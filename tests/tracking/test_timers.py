"""Timers: every second belongs to one phase."""

import math

import pytest

from grpo_mega.tracking.progress import FreeMemory, Timers


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_phases_and_other_sum_to_the_step() -> None:
    clock = Clock()
    timers = Timers(clock)
    clock.now += 1
    with timers("sample"):
        clock.now += 4
    clock.now += 0.5
    with timers("update"):
        clock.now += 2
    with timers("sample"):
        clock.now += 3
    assert timers.lap() == {"seconds/sample": 7, "seconds/update": 2, "seconds/other": 1.5, "seconds/step": 10.5}


def test_a_nested_phase_is_not_counted_twice() -> None:
    clock = Clock()
    timers = Timers(clock)
    with timers("update"):
        clock.now += 1
        with timers("sync"):
            clock.now += 2
        clock.now += 4
    assert timers.lap() == {"seconds/update": 5, "seconds/sync": 2, "seconds/other": 0, "seconds/step": 7}


def test_a_lap_starts_where_the_last_one_ended() -> None:
    clock = Clock()
    timers = Timers(clock)
    with timers("sample"):
        clock.now += 1
    timers.lap()
    clock.now += 2
    assert timers.lap() == {"seconds/other": 2, "seconds/step": 2}


def test_a_phase_that_raises_is_still_measured() -> None:
    clock = Clock()
    timers = Timers(clock)
    with pytest.raises(ValueError), timers("sample"):
        clock.now += 3
        raise ValueError
    assert timers.lap()["seconds/sample"] == 3


def test_free_memory_is_the_smallest_of_a_phase_beside_the_plan() -> None:
    values, other_rank = iter([9, 4, 6, 7, 3]), [1.0, math.inf, 5.0, math.inf]
    free = FreeMemory(
        lambda: next(values) << 30, lambda mine: [min(a, b) for a, b in zip(mine, other_rank, strict=True)]
    )
    free.planned = {"generation": 2.5, "asleep": 70.0, "training": 10.0, "sync": 20.0}
    for phase in ("generation", "training", "training", "sync"):
        free.note(phase)
    assert free.take() == {
        "memory/free_generation_gib": 1,
        "memory/planned_free_generation_gib": 2.5,
        "memory/free_training_gib": 4,
        "memory/planned_free_training_gib": 10,
        "memory/free_sync_gib": 7,
        "memory/planned_free_sync_gib": 20,
    }
    free.note("training")
    assert free.take()["memory/free_training_gib"] == 3
    assert free.summary().endswith("generation 1.0 (plan 2.5), training 3.0 (plan 10.0), sync 7.0 (plan 20.0)")
