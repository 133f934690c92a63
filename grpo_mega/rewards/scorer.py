"""Scoring a rollout: samples go to the pool as they end, and their scores come back into them.

`submit` is called by the engine for every sample that ends; `finish` waits for the rest and fills in scores, verdicts, reward
and the rewards of steps. Training then calls `check`; evaluation only warns of `first_error`. `drop_unusable`
takes out the groups whose gold answer does not parse: they would train on format alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from grpo_mega.rewards.api import RewardResult, Step
from grpo_mega.rewards.failures import Failures
from grpo_mega.rewards.token_ends import token_ends
from grpo_mega.rewards.workers.pool import RewardPool
from grpo_mega.types import Group, Sample

VERDICTS = (
    "correct",
    "wrong",
    "unparsable",
    "gold_unparsable",
    "well_formed",
    "malformed",
    "steps_right",
    "steps_wrong",
    "no_steps",
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
        self._scored: list[tuple[Sample, RewardResult]] = []  # of the last rollout
        self._failures = Failures()
        self.has_warned = False  # a person was told that a function failed
        self._keys = itertools.count()

    def submit(self, sample: Sample) -> None:
        """Does not wait. The response is scored as text without special tokens."""
        key = next(self._keys)
        self._samples[key] = sample
        prompt = sample.prompt
        extras = {**prompt.extras, "prefill": prompt.prefill}
        self._pool.submit(key, prompt.text, self._decode(sample.response_ids), prompt.answer, extras)

    def keep(self, groups: Iterable[Group]) -> None:
        """Of what was submitted only the samples of these groups count; the others are not scored any further."""
        kept = {id(sample) for group in groups for sample in group.samples}
        dropped = [key for key, sample in self._samples.items() if id(sample) not in kept]
        self._pool.discard(dropped)
        for key in dropped:
            del self._samples[key]

    def finish(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Wait until everything submitted is scored; call `on_progress()` as checks finish."""
        results = self._pool.collect(on_progress)
        for key, sample in self._samples.items():
            result = results[key]
            sample.scores, sample.verdicts, sample.reward = dict(result.scores), dict(result.verdicts), result.total
            sample.step_ends, sample.step_rewards = self._at_tokens(sample, result.steps)
        self._scored = [(sample, results[key]) for key, sample in self._samples.items()]
        self._samples = {}

    def check(self) -> None:
        """Raises RewardError for a function that is broken, as the samples of this rollout and those before show it."""
        self._failures.add(self._scored)

    @property
    def first_error(self) -> str | None:
        """The first exception on the samples of this rollout, with the function's name."""
        return next((f"{name}: {text}" for _, result in self._scored for name, text in result.errors.items()), None)

    def _at_tokens(self, sample: Sample, steps: Sequence[Step]) -> tuple[list[int], list[float]]:
        """Where the steps end and what they are worth; those that end at one token make one step."""
        if not steps:
            return [], []
        sums: dict[int, float] = {}
        for token, step in zip(token_ends(sample.response_ids, self._decode, [s.end for s in steps]), steps, strict=True):
            sums[token] = sums.get(token, 0.0) + step.value
        return list(sums), list(sums.values())


def drop_unusable(groups: Sequence[Group]) -> tuple[list[Group], int]:
    """The groups whose gold answer parses, and how many were dropped."""
    usable = [g for g in groups if not any("gold_unparsable" in s.verdicts.values() for s in g.samples)]
    return usable, len(groups) - len(usable)
