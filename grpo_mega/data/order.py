"""The endless order of one set's prompts: epoch after epoch, each a permutation seeded by (seed, stream, epoch).

Invariant: no step holds a prompt twice, also where it begins in one epoch and ends in the next, since a rollout's random
stream is fixed by (seed, step, prompt id, sample index) and two copies of a prompt would be answered alike.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Order = NDArray[np.int64]  # [num_prompts], a permutation


class EpochOrder:
    """`most_per_step` bounds what a step draws of the set, and is at most num_prompts; `stream` tells sets apart."""

    def __init__(self, num_prompts: int, most_per_step: int, seed: int, *, shuffle: bool, stream: int = 0) -> None:
        self.num_prompts = num_prompts
        self.most_per_step = most_per_step
        self.key = seed + (stream << 32)
        self.shuffle = shuffle

    def between(self, begin: int, end: int, begin_of_step: Callable[[int], int]) -> list[int]:
        """The prompts at places `begin` to `end` of the endless order, which are those of one step.

        `begin_of_step(place)` is where the step begins that draws `place`, for places before `end`.
        """

        def num_shared(epoch: int) -> int:
            """How many prompts of the epoch before stand in the step with which `epoch` begins."""
            place = epoch * self.num_prompts
            return place - begin_of_step(place)

        epoch, first = divmod(begin, self.num_prompts)
        order = self._order(epoch, num_shared)
        drawn = order[first : first + end - begin]
        missing = end - begin - len(drawn)
        if missing:
            following = self._following(order, epoch + 1, num_shared(epoch + 1))
            drawn = np.concatenate([drawn, following[:missing]])
        return [int(index) for index in drawn]

    def _order(self, epoch: int, num_shared: Callable[[int], int]) -> Order:
        """The order of an epoch. Only its first 2 * most_per_step places depend on the epoch before."""
        is_tail_independent = self.num_prompts >= 3 * self.most_per_step
        first = max(0, epoch - 1) if is_tail_independent else 0
        order = self._permutation(first)
        for later in range(first + 1, epoch + 1):
            order = self._following(order, later, num_shared(later))
        return order

    def _following(self, previous: Order, epoch: int, num_shared: int) -> Order:
        """The order of `epoch`, which does not begin with the prompts that fill the rest of its first step."""
        order = self._permutation(epoch)
        if not self.shuffle or num_shared == 0:
            return order
        head = order[: 2 * self.most_per_step]
        is_taken = np.isin(head, previous[-num_shared:])
        return np.concatenate([head[~is_taken], head[is_taken], order[len(head) :]])

    def _permutation(self, epoch: int) -> Order:
        if not self.shuffle:
            return np.arange(self.num_prompts)
        return np.random.Generator(np.random.Philox(key=[self.key, epoch])).permutation(self.num_prompts)
