"""Score a rollout: samples go to the pool as they end, and their scores come back into them.

`submit` is called for every sample that ends, `submit_group` once all of a group have; `finish` waits for the rest and fills in
scores, verdicts, reward and the rewards of steps. Training then calls `check`; evaluation only warns of `first_error`.
`drop_unusable` removes the groups whose gold answer does not parse: they would train on format alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from grpo_mega.errors import RewardError
from grpo_mega.rewards.api import RewardResult, Step
from grpo_mega.rewards.groups import FINISH_REASON
from grpo_mega.rewards.steps import tokens_at
from grpo_mega.rewards.workers.pool import RewardPool
from grpo_mega.types import Group, Sample

MIN_SAMPLES, MIN_PROMPTS = 8, 4  # on which a reward function has raised before it counts as broken

VERDICTS = (
    "correct",
    "wrong",
    "unparsable",
    "gold_unparsable",
    "well_formed",
    "malformed",
    "oracle_right",
    "oracle_wrong",
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

    def __init__(self, pool: RewardPool, decode: Callable[[Sequence[int]], str]) -> None:
        self._pool = pool
        self._decode = decode
        self._samples: dict[int, Sample] = {}
        self._key_of: dict[int, int] = {}  # by id() of a sample in _samples
        self._scored: list[tuple[Sample, RewardResult]] = []  # of the last rollout
        self._failures = Failures()
        self.warned_of: set[str] = set()  # kinds of failures that the log names already; see run/rollout.py
        self._keys = itertools.count()

    def submit(self, sample: Sample) -> None:
        """Hand a sample to the workers, without waiting. The response is scored as the text that `decode` returns."""
        key = next(self._keys)
        self._samples[key] = sample
        self._key_of[id(sample)] = key
        prompt = sample.prompt
        extras = {**prompt.extras, "prefill": prompt.prefill, FINISH_REASON: sample.finish_reason}
        self._pool.submit(key, prompt.text, self._decode(sample.response_ids), prompt.answer, extras)

    def submit_group(self, samples: Iterable[Sample]) -> None:
        """Hand the samples of a group to the functions that are called once per group; first those not submitted yet, which
        finished in an earlier phase, to the others."""
        ordered = sorted(samples, key=lambda sample: sample.index)
        for sample in ordered:
            if id(sample) not in self._key_of:
                self.submit(sample)
        keys, token_ids = [self._key_of[id(sample)] for sample in ordered], [list(sample.response_ids) for sample in ordered]
        self._pool.submit_group(keys, ordered[0].prompt.given, token_ids)

    def keep(self, groups: Iterable[Group]) -> None:
        """Keep the samples of these groups; the others that were submitted are not scored any further."""
        kept = {id(sample) for group in groups for sample in group.samples}
        dropped = [key for key, sample in self._samples.items() if id(sample) not in kept]
        self._pool.discard(dropped)
        for key in dropped:
            del self._key_of[id(self._samples.pop(key))]

    def finish(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Wait until everything submitted is scored; call `on_progress()` as checks finish."""
        results = self._pool.collect(on_progress)
        for key, sample in self._samples.items():
            result = results[key]
            sample.scores, sample.verdicts, sample.reward = dict(result.scores), dict(result.verdicts), result.total
            sample.step_ends, sample.step_rewards = self._at_tokens(sample, result.steps)
        self._scored = [(sample, results[key]) for key, sample in self._samples.items()]
        self._samples, self._key_of = {}, {}

    def check(self) -> None:
        """Raise RewardError for a function that is broken, as the samples of this rollout and those before show it."""
        self._failures.add(self._scored)

    @property
    def first_error(self) -> str | None:
        """The first exception on the samples of this rollout, with the function's name; None if there is none."""
        return next((f"{name}: {text}" for _, result in self._scored for name, text in result.errors.items()), None)

    def _at_tokens(self, sample: Sample, steps: Sequence[Step]) -> tuple[list[int], list[float]]:
        """Return the tokens at which steps end, and their rewards; steps that end at one token make one step."""
        if not steps:
            return [], []
        sums: dict[int, float] = {}
        for token, step in zip(tokens_at(sample.response_ids, self._decode, [s.end for s in steps]), steps, strict=True):
            sums[token] = sums.get(token, 0.0) + step.value
        return list(sums), list(sums.values())


def drop_unusable(groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
    """Return the groups whose gold answer parses, and the others."""
    usable, dropped = list[Group](), list[Group]()
    for group in groups:
        (dropped if any("gold_unparsable" in s.verdicts.values() for s in group.samples) else usable).append(group)
    return usable, dropped


def failures_of(sample: Sample) -> set[str]:
    """Return what failed checks left the sample with: "zero" for a score of 0, "missing" for none where there should be one."""
    failed = [
        (sample.scores.get(name), verdict) for name, verdict in sample.verdicts.items() if verdict in ("error", "timeout")
    ]
    missing = {"missing" for score, _ in failed if score is None}
    return missing | {"zero" for score, verdict in failed if score is not None and verdict == "error"}


class Failures:
    """Decide when a reward function is broken, and the run must end: after it has raised on everything for a while.

    An exception may also be the fault of one row of the data, on which the function raises for each sample of the group, and a
    rank may have few prompts in a rollout. So a function counts as broken once it has raised on every sample of this rank since
    it last gave a score, and these are MIN_SAMPLES different ones, of MIN_PROMPTS prompts. To wait that long costs little:
    scores that are all equal give no gradient.
    """

    def __init__(self) -> None:
        self._failed: dict[str, set[tuple[int, tuple[int, ...]]]] = {}  # by function: (prompt id, response)

    def add(self, scored: Sequence[tuple[Sample, RewardResult]]) -> None:
        """Add the results of one rollout. Raises RewardError for a function that is broken."""
        for name in {name for _, result in scored for name in result.verdicts}:
            errors = [(sample, result.errors[name]) for sample, result in scored if name in result.errors]
            if len(errors) < len(scored):
                self._failed.pop(name, None)
                continue
            failed = self._failed.setdefault(name, set())
            failed |= {(sample.prompt.id, tuple(sample.response_ids)) for sample, _ in errors}
            if len(failed) >= MIN_SAMPLES and len({prompt for prompt, _ in failed}) >= MIN_PROMPTS:
                raise RewardError(
                    f"reward function {name!r} raised an exception for every one of the last {len(failed)} samples, now "
                    f"{errors[0][1]}; correct the function or take it out of rewards.functions"
                )
