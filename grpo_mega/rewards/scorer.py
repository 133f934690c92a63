"""Scoring a rollout: samples go to the pool as they end, and their scores come back into them.

`submit` is called by the engine for every sample that ends; `finish` waits for the rest and fills in scores, verdicts and
reward. `drop_unusable` then takes out the groups whose gold answer does not parse: they would train on format alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grpo_mega.rewards.pool import RewardPool
from grpo_mega.types import Group, Sample

VERDICTS = (
    "correct",
    "wrong",
    "unparsable",
    "gold_unparsable",
    "well_formed",
    "malformed",
    "scored",
    "not_applicable",
    "timeout",
    "error",
)


class Scorer:
    """One rank's samples, scored in a pool of worker processes."""

    def __init__(self, pool: RewardPool, decode: Callable[[list[int]], str]) -> None:
        self._pool = pool
        self._decode = decode
        self._samples: dict[int, Sample] = {}

    def submit(self, sample: Sample) -> None:
        """Does not wait. The response is scored as text without special tokens."""
        key = len(self._samples)
        self._samples[key] = sample
        prompt = sample.prompt
        extras = {**prompt.extras, "prefill": prompt.prefill}
        self._pool.submit(key, prompt.text, self._decode(sample.response_ids), prompt.answer, extras)

    def finish(self) -> None:
        """Waits until everything submitted is scored. Raises RewardError if a function raised on every sample."""
        results = self._pool.collect()
        for key, sample in self._samples.items():
            result = results[key]
            sample.scores, sample.verdicts, sample.reward = dict(result.scores), dict(result.verdicts), result.total
        self._samples = {}


def drop_unusable(groups: Sequence[Group]) -> tuple[list[Group], int]:
    """The groups whose gold answer parses, and how many were dropped."""
    usable = [g for g in groups if not any("gold_unparsable" in s.verdicts.values() for s in g.samples)]
    return usable, len(groups) - len(usable)
