"""Which prompts a step draws: a pure function of (seed, step), so a resumed run needs no sampler state.

Of one set the prompts are passed over epoch after epoch. Of several, every step draws a set's share of prompts_per_step,
rounded up or down so that in the mean it is the share, and each set has epochs of its own. No step holds a prompt twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from grpo_mega.data.order import EpochOrder
from grpo_mega.errors import ConfigError

_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples modulo 1 are spread evenly, however many are taken
_MIXING = 1 << 63  # the stream from which the mixture's start is drawn; epochs stay below


class Sampler(Protocol):
    def indices(self, step: int) -> list[int]:
        """The prompts of step `step` (from 0), as indices into all sets one after another."""
        ...


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
        self.prompts_per_step = prompts_per_step
        self._order = EpochOrder(num_prompts, prompts_per_step, seed, shuffle=shuffle)

    def indices(self, step: int) -> list[int]:
        """prompts_per_step distinct values below num_prompts."""
        size = self.prompts_per_step
        return self._order.between(step * size, (step + 1) * size, lambda place: place - place % size)


class MixedSampler:
    """Draws `prompts_per_step` indices a step from sets of `sizes` prompts, in the proportion of `weights`.

    A set of share w gives floor or ceil of w * prompts_per_step to each step; over many steps the counts follow the shares to
    within a few prompts. A step's prompts of all sets are interleaved evenly, so that mini-batches are mixed too. Raises
    ConfigError for a set that is smaller than what a step may draw of it.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], prompts_per_step: int, seed: int, shuffle: bool) -> None:
        shares = [weight / sum(weights) for weight in weights]
        most = [math.ceil(round(share * prompts_per_step, 9)) for share in shares]
        for number, (size, needed) in enumerate(zip(sizes, most, strict=True)):
            if needed > size:
                raise ConfigError(
                    f"data.train.{number} has {size} prompts, but its share {shares[number]:.3g} of batch.prompts_per_step="
                    f"{prompts_per_step} takes up to {needed} a step; lower its weight or batch.prompts_per_step"
                )
        self._bounds = np.round(np.cumsum([0.0, *shares]) * prompts_per_step, 9)  # of the sets, in units of a step's places
        self._first_offset = np.random.Generator(np.random.Philox(key=[seed, _MIXING])).random()
        self._firsts = [sum(sizes[:number]) for number in range(len(sizes))]
        self._orders = [
            EpochOrder(size, needed, seed, shuffle=shuffle, stream=number)
            for number, (size, needed) in enumerate(zip(sizes, most, strict=True))
        ]

    def indices(self, step: int) -> list[int]:
        """prompts_per_step distinct values below sum(sizes)."""
        places: list[tuple[float, int, int]] = []  # (where in the step, set, index)
        for number, (order, begins) in enumerate(zip(self._orders, self._begins(step).T, strict=True)):

            def begin_of_step(place: int, begins: NDArray[np.int64] = begins) -> int:
                return int(begins[np.searchsorted(begins, place, side="right") - 1])

            drawn = order.between(int(begins[step]), int(begins[step + 1]), begin_of_step)
            first = self._firsts[number]
            places += [((i + 0.5) / len(drawn), number, first + index) for i, index in enumerate(drawn)]
        return [index for _, _, index in sorted(places)]

    def _begins(self, step: int) -> NDArray[np.int64]:
        """[step + 2, num_sets]: how many prompts of each set the steps before 0, 1, ..., step + 1 have drawn.

        A step has an offset u in [0, 1) and draws of a set as often as one of u, u + 1, u + 2, ... lies within its bounds.
        """
        offsets = (self._first_offset + _GOLDEN * np.arange(step + 1)) % 1.0
        counts = np.diff(np.ceil(self._bounds - offsets[:, None]), axis=1).astype(np.int64)
        return np.concatenate([np.zeros((1, counts.shape[1]), dtype=np.int64), counts.cumsum(axis=0)])
