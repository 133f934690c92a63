"""Pools of reward workers from (name, weight) pairs instead of a config section."""

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_mega.config.data import RewardsConfig
from grpo_mega.rewards import RewardPool


def reward_pool(
    functions: Sequence[tuple[str, float]],
    num_workers: int = 1,
    deadline_s: float = 20,
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    step_splitter: str = "blank-lines",
) -> RewardPool:
    """Return a pool. `options` are keyed by function name."""
    given = options or {}
    raw = {
        "functions": [{"name": name, "weight": weight, "options": given.get(name, {})} for name, weight in functions],
        "num_workers": num_workers,
        "deadline_s": deadline_s,
        "step_splitter": step_splitter,
    }
    return RewardPool(RewardsConfig.model_validate(raw))
