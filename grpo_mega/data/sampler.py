"""Which prompts a step draws: a pure function of (seed, step), so a resumed run needs no sampler state.

The prompts are passed over epoch after epoch, each epoch a permutation seeded by (seed, epoch); a step may begin in one
epoch and end in the next. Invariant: no step holds a prompt twice, since a rollout's random stream is fixed by (seed,
step, prompt id, sample index) and two copies of a prompt would be answered alike.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from grpo_mega.errors import ConfigError

Order = NDArray[np.int64]  # [num_prompts], a permutation


class PromptSampler:
    """Draws `prompts_per_step` of `num_prompts` indices a step. Raises ConfigError if a step cannot be filled."""

    def __init__(self, num_prompts: int, prompts_per_step: int, seed: int, shuffle: bool) -> None:
        if num_prompts == 0:
            raise ConfigError("data.train holds no usable prompt; name a file with prompts")
        if prompts_per_step > num_prompts:
            raise ConfigError(
                f"batch.prompts_per_step={prompts_per_step} is more than the {num_prompts} prompts of data.train; "
                f"use at most {num_prompts}"
            )
        self.num_prompts = num_prompts
        self.prompts_per_step = prompts_per_step
        self.seed = seed
        self.shuffle = shuffle

    def indices(self, step: int) -> list[int]:
        """The indices of step `step` (from 0): prompts_per_step distinct values below num_prompts."""
        epoch, begin = divmod(step * self.prompts_per_step, self.num_prompts)
        order = self._order(epoch)
        drawn = order[begin : begin + self.prompts_per_step]
        missing = self.prompts_per_step - len(drawn)
        if missing:
            drawn = np.concatenate([drawn, self._following(order, epoch + 1)[:missing]])
        return [int(index) for index in drawn]

    def _order(self, epoch: int) -> Order:
        """The order of an epoch. Only its first 2 * prompts_per_step places depend on the epoch before."""
        is_tail_independent = self.num_prompts >= 3 * self.prompts_per_step
        first = max(0, epoch - 1) if is_tail_independent else 0
        order = self._permutation(first)
        for later in range(first + 1, epoch + 1):
            order = self._following(order, later)
        return order

    def _following(self, previous: Order, epoch: int) -> Order:
        """The order of `epoch`, which does not begin with the prompts that fill the rest of its first step."""
        order = self._permutation(epoch)
        num_shared = (epoch * self.num_prompts) % self.prompts_per_step
        if not self.shuffle or num_shared == 0:
            return order
        head = order[: 2 * self.prompts_per_step]
        is_taken = np.isin(head, previous[-num_shared:])
        return np.concatenate([head[~is_taken], head[is_taken], order[len(head) :]])

    def _permutation(self, epoch: int) -> Order:
        if not self.shuffle:
            return np.arange(self.num_prompts)
        return np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(self.num_prompts)
