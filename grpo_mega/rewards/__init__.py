"""Rewards: reward functions by name, and the pool of killable worker processes that runs them.

Input: a sample's prompt, response, gold answer and extras. Output: one score and one verdict per function, their
weighted sum, and weighted step rewards. See README.md. Nothing here imports torch, and importing this package does not
import math-verify.
"""

from grpo_mega.rewards.api import NoScore, RewardFunction, RewardResult, Score, Step, splitter
from grpo_mega.rewards.pool import RewardPool
from grpo_mega.rewards.registry import BUILT_IN, resolve_reward

__all__ = [
    "BUILT_IN",
    "NoScore",
    "RewardFunction",
    "RewardPool",
    "RewardResult",
    "Score",
    "Step",
    "resolve_reward",
    "splitter",
]
