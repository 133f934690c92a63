"""Run generation phases over all ranks: prompts in, groups out.

With fewer groups `wanted` than prompts given, a phase ends as soon as so many are done over all ranks, and the rest is
aborted. The groups that are kept are the first by the engines' clocks, then by their place among the prompts; the choice is the
same on every rank. With the embedded engine it depends on the samples and the number of ranks only, so that a resumed run
makes it again; with servers it depends on their speed.

Groups with a long response are aborted more often: kept groups are shorter, and easier, than those that were begun.
`Generator.flush_stats` reports by how much, as far as it is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.rollout.engine import Engine, OnSample, Sampling
from grpo_mega.rollout.stop_condition import StopCondition
from grpo_mega.types import Group, Prompt, StepMetrics


@dataclass(frozen=True)
class Phase:
    mine: dict[int, Group]  # of the groups that are kept, those that this rank generated, by place among the prompts
    places: list[int]  # of all that are kept, ascending; the same on every rank


class Generator:
    """Generates with the engines of all ranks; every rank calls its methods together with the others."""

    def __init__(
        self, engine: Engine, rendezvous: Rendezvous, recover: Callable[[int], None], *, phase_deadline_s: float
    ) -> None:
        """`recover(version)` restarts failed engines and gives all engines policy `version` again."""
        self._engine, self._rendezvous, self._recover = engine, rendezvous, recover
        self._deadline_s = phase_deadline_s
        self._sums: Counter[str] = Counter()  # over phases with oversampling

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int, on_sample: OnSample, wanted: int | None = None
    ) -> Phase:
        """Return the whole groups of all prompts, or of the first `wanted` that are done; one rank generates each group.

        Groups that a failed engine left unfinished are generated again. Raise EngineError on all ranks if `recover` raises it.
        """
        wanted = len(prompts) if wanted is None else min(wanted, len(prompts))
        todo: Mapping[int, Prompt] = dict(enumerate(prompts))
        mine: dict[int, Group] = {}
        places: list[int] = []
        while len(places) < wanted:
            version, missing = self._engine.version, wanted - len(places)
            stop = StopCondition(self._rendezvous, missing) if missing < len(todo) else None
            groups = self._engine.generate(todo, sampling, step=step, on_sample=on_sample, stop=stop)
            by_rank = self._rendezvous.all_gather("generation", _reports(groups, stop), self._deadline_s)
            reports = [_Report(*row) for rows in by_rank for row in rows]
            done = sorted((report.clock, report.place) for report in reports if report.clock is not None)
            kept = frozenset(place for _, place in done[:missing])
            if stop is not None:
                stop.close()
            if wanted < len(prompts):
                self._count(reports, kept)
            mine |= {place: group for place, group in groups.items() if place in kept}
            places += kept
            todo = {place: prompt for place, prompt in todo.items() if place not in kept}
            self._recover(version)
        return Phase(mine, sorted(places))

    def flush_stats(self) -> StepMetrics:
        """Return what phases with oversampling kept and aborted since the last call; nothing if there were none.

        Lengths are means in tokens. Those of aborted groups are a lower bound: their samples were not finished.
        """
        sums, self._sums = self._sums, Counter()
        if not sums:
            return {}
        return {
            "rollout/begun_groups": float(sums["kept_groups"] + sums["aborted_groups"]),
            "rollout/aborted_groups": float(sums["aborted_groups"]),
            "rollout/kept_tokens": float(sums["kept_tokens"]),
            "rollout/aborted_tokens": float(sums["aborted_tokens"]),
            "rollout/kept_length": sums["kept_tokens"] / max(1, sums["kept_samples"]),
            "rollout/aborted_length": sums["aborted_tokens"] / max(1, sums["aborted_samples"]),
        }

    def _count(self, reports: Sequence[_Report], kept: frozenset[int]) -> None:
        for report in reports:
            name = "kept" if report.place in kept else "aborted"
            self._sums.update({f"{name}_groups": 1, f"{name}_samples": report.num_samples, f"{name}_tokens": report.num_tokens})


class _Report(NamedTuple):
    """Describes one group to the other ranks."""

    place: int
    clock: int | None  # None: not finished
    num_samples: int  # with at least one token
    num_tokens: int


def _reports(groups: Mapping[int, Group], stop: StopCondition | None) -> list[_Report]:
    reports = []
    for place, group in groups.items():
        lengths = [s.response_len for s in group.samples]
        reports.append(_Report(place, stop.clocks[place] if stop else 0, len(lengths), sum(lengths)))
    for place, aborted in stop.lengths.items() if stop else ():
        reports.append(_Report(place, None, sum(length > 0 for length in aborted), sum(aborted)))
    return reports
