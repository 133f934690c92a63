"""Decide the prompts of each step: a pure function of (seed, step), so that a resumed run needs no sampler state.

Each set has a separate endless order: epoch after epoch, each a permutation seeded by (seed, set, epoch). A step draws
its share of prompts_per_step from every set. The share is rounded up or down, so that its mean over the steps is exact.

Invariant: no step has a prompt twice, even if the step spans two epochs. The random stream of a sample is fixed by
(seed, step, prompt id, sample index), so two copies of a prompt would get the same responses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from grpo_mega.errors import ConfigError

Ints = NDArray[np.int64]
_GOLDEN = (math.sqrt(5) - 1) / 2  # any number of its multiples modulo 1 are spread evenly
_MIXING = 1 << 63  # key of the first step's offset; the other keys are epochs, which stay below it


class Draw(NamedTuple):
    source: int  # number of the set
    row: int  # index into all sets
    epoch: int  # number of the pass over the set, from 0


class Sampler:
    """Draws `prompts_per_step` prompts per step from sets of `sizes` prompts, in proportion to `weights`.

    The prompts of all sets are interleaved evenly within a step, so mini-batches are mixed too. Raises ConfigError if a
    set has fewer prompts than a step may draw from it.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], prompts_per_step: int, seed: int, *, shuffle: bool
    ) -> None:
        shares = [weight / sum(weights) for weight in weights]
        most = [math.ceil(round(share * prompts_per_step, 9)) for share in shares]
        if len(sizes) == 1 and most[0] > sizes[0]:
            if not sizes[0]:
                raise ConfigError("data.train holds no usable prompt; name a file with prompts")
            raise ConfigError(
                f"batch.prompts_per_step={prompts_per_step} is more than the {sizes[0]} prompts of data.train; "
                f"use at most {sizes[0]}"
            )
        for number, (size, share, needed) in enumerate(zip(sizes, shares, most, strict=True)):
            if needed > size:
                raise ConfigError(
                    f"data.train.{number} has {size} prompts, but its share {share:.3g} of batch.prompts_per_step="
                    f"{prompts_per_step} takes up to {needed} per step; lower its weight or batch.prompts_per_step"
                )
        self._bounds = np.round(np.cumsum([0.0, *shares]) * prompts_per_step, 9)  # bounds of the sets within a step
        self._first_offset = np.random.Generator(np.random.Philox(key=[seed, _MIXING])).random()
        self._firsts = [sum(sizes[:number]) for number in range(len(sizes))]
        self._orders = [
            _EndlessOrder(size, needed, key=seed + (number << 32), shuffle=shuffle)
            for number, (size, needed) in enumerate(zip(sizes, most, strict=True))
        ]

    def draws(self, step: int) -> list[Draw]:
        """Return the prompts of step `step` (from 0), with their sets and epochs. No row occurs twice.

        A step has an offset u in [0, 1). It draws as many prompts from a set as there are values of u, u + 1, u + 2,
        ... within the set's bounds.
        """
        offsets = (self._first_offset + _GOLDEN * np.arange(step + 1)) % 1.0
        counts = np.diff(np.ceil(self._bounds - offsets[:, None]), axis=1).astype(np.int64)
        # [step + 2, num_sets]: the number of prompts drawn from each set before steps 0, 1, ..., step + 1
        all_starts = np.concatenate([np.zeros((1, counts.shape[1]), dtype=np.int64), counts.cumsum(axis=0)])
        places: list[tuple[float, Draw]] = []  # (relative place in the step, draw)
        sets = zip(self._firsts, self._orders, all_starts.T, strict=True)
        for number, (first, order, starts) in enumerate(sets):
            drawn, start = order.last_step(starts), int(starts[-2])
            for i, index in enumerate(drawn):
                places.append(((i + 0.5) / len(drawn), Draw(number, first + index, (start + i) // order.num_prompts)))
        return [draw for _, draw in sorted(places)]


@dataclass(frozen=True)
class _EndlessOrder:
    """The order of one set's prompts over all epochs. A step draws at most `most_per_step` <= num_prompts prompts."""

    num_prompts: int
    most_per_step: int
    key: int
    shuffle: bool
    # Cached order of the last requested epoch. The orders of later epochs depend on it.
    _last: dict[int, Ints] = field(default_factory=dict)

    def last_step(self, starts: Ints) -> list[int]:
        """Return the prompts of the last step, given the number of prompts drawn before each step."""
        start, end = map(int, starts[-2:])
        epoch, place = divmod(start, self.num_prompts)
        # Only the first 2 * most_per_step places of an epoch depend on the previous epoch.
        is_tail_independent = self.num_prompts >= 3 * self.most_per_step
        first = max(0, epoch - 1) if is_tail_independent else 0
        known = [number for number in self._last if first <= number <= epoch]
        first, order = (known[0], self._last[known[0]]) if known else (first, self._permutation(first))
        for later in range(first + 1, epoch + 1):
            order = self._following(order, later, starts)
        self._last.clear()
        self._last[epoch] = order
        drawn = order[place : place + end - start]
        if missing := end - start - len(drawn):
            drawn = np.concatenate([drawn, self._following(order, epoch + 1, starts)[:missing]])
        return [int(index) for index in drawn]

    def _following(self, previous: Ints, epoch: int, starts: Ints) -> Ints:
        """Return the order of `epoch`. Its first step's prompts that were drawn from `previous` are moved back."""
        order = self._permutation(epoch)
        place = epoch * self.num_prompts
        num_shared = place - int(starts[np.searchsorted(starts, place, side="right") - 1])
        if not self.shuffle or num_shared == 0:
            return order
        head = order[: 2 * self.most_per_step]
        is_taken = np.isin(head, previous[-num_shared:])
        return np.concatenate([head[~is_taken], head[is_taken], order[len(head) :]])

    def _permutation(self, epoch: int) -> Ints:
        if not self.shuffle:
            return np.arange(self.num_prompts)
        return np.random.Generator(np.random.Philox(key=[self.key, epoch])).permutation(self.num_prompts)
