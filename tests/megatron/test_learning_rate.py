"""The learning-rate schedule against transformers' schedule."""

import pytest
import torch
from transformers import get_scheduler

from grpo_mega.config import OptimizerConfig
from grpo_mega.megatron.optimizer import learning_rate

TOTAL, WARMUP = 20, 4


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_rates_after_the_warm_up_equal_transformers(schedule: str) -> None:
    config = OptimizerConfig(lr=1e-3, schedule=schedule, warmup_steps=WARMUP)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
    scheduler = get_scheduler(schedule, optimizer, num_warmup_steps=WARMUP, num_training_steps=TOTAL)
    for step in range(TOTAL):
        if step >= WARMUP:
            assert learning_rate(config, step, TOTAL) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("total", [1, 2, 5])
def test_no_step_has_a_learning_rate_of_zero(schedule: str, total: int) -> None:
    config = OptimizerConfig(lr=1e-3, schedule=schedule, warmup_steps=1)
    rates = [learning_rate(config, step, total) for step in range(total)]
    assert all(0 < rate <= 1e-3 for rate in rates) and rates[0] == 1e-3


def test_the_decay_ends_near_its_floor_and_never_below() -> None:
    config = OptimizerConfig(lr=1e-3, min_lr=1e-4, schedule="linear")
    rates = [learning_rate(config, step, 100) for step in range(120)]
    assert rates[99] == pytest.approx(1.09e-4) and min(rates) == pytest.approx(1e-4)
