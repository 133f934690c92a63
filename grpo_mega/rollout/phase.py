"""Run generation phases over all ranks: prompts in, groups out.

With fewer groups `wanted` than prompts given, a phase ends as soon as so many are done over all ranks, and the rest is
aborted. Of the groups that are done, those of the oldest policy are kept first, then the first by the engines' clocks, then by
their place among the prompts; the choice is the same on every rank. With the embedded engine it depends on the samples and the
number of ranks only, so that a resumed run makes it again; with servers it depends on their speed.

Groups with a long response are aborted more often: kept groups are shorter, and easier, than those that were begun.
`Generator.flush_stats` reports by how much, as far as it is known. Partial rollouts (backlog.py) continue what was aborted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.rollout.engine import NONE_BEGUN, Engine, OnSample, Sampling
from grpo_mega.rollout.routes import cut
from grpo_mega.rollout.stop_condition import StopCondition, UntilTrained
from grpo_mega.types import Group, Prompt, Sample, StepMetrics


@dataclass(frozen=True)
class Phase:
    mine: dict[int, Group]  # of the groups that are kept, those that this rank generated, by place among the prompts
    places: list[int]  # of all that are kept, ascending; the same on every rank
    rest: dict[int, Group]  # the other groups of this rank that were begun, whole or unfinished
    rest_places: list[int]  # of those of all ranks


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
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        step: int,
        on_sample: OnSample,
        wanted: int | None = None,
        begun: Mapping[int, Group] = NONE_BEGUN,
        needed: Collection[int] = (),
    ) -> Phase:
        """Return the whole groups of all prompts, or of the first `wanted` that are done; one rank generates each group.

        `begun` has groups of earlier phases by place, which are continued; those that are whole count as done. The phase does
        not end without the groups in the places `needed`, which are kept before all others.

        Groups that a failed engine left unfinished are generated again. Raise EngineError on all ranks if `recover` raises it.
        """
        wanted = len(prompts) if wanted is None else min(wanted, len(prompts))
        whole = {place for place, group in begun.items() if group.is_complete(sampling.group_size)}
        done = [_Done(begun[place].begun_by or 0, 0, 0, place) for place in whole]
        todo: Mapping[int, Prompt] = {place: prompt for place, prompt in enumerate(prompts) if place not in whole}
        mine: dict[int, Group] = {}
        reported: dict[int, _Report] = {}
        attempt = 0
        while len(done) < wanted or not {d.place for d in done}.issuperset(needed):
            attempt += 1
            version, missing = self._engine.version, max(0, wanted - len(done))
            unmet = set(needed).intersection(todo)
            stop = StopCondition(self._rendezvous, missing, unmet) if missing < len(todo) else None
            groups = self._engine.generate(todo, sampling, step=step, on_sample=on_sample, stop=stop, begun=begun)
            reports = self._gather_reports(groups, stop, sampling)
            ended = {report.place: report.clock for report in reports if report.clock is not None}
            end = stop.end([(clock, place) for place, clock in ended.items()]) if stop is not None else None
            if stop is not None and end is not None:
                ended = {place: clock for place, clock in ended.items() if clock <= end}
                groups = _as_of(end, groups, begun, stop.begun)
            if stop is not None:
                stop.close()
            mine = {place: group for place, group in mine.items() if place not in todo} | groups
            reported |= {report.place: report for report in reports}
            done += [_Done(reported[place].begun_by, attempt, clock, place) for place, clock in ended.items()]
            todo = {place: prompt for place, prompt in todo.items() if place not in ended}
            self._recover(version)
        first = sorted(done, key=lambda one: (one.place not in needed, one))[:wanted]
        places = sorted(one.place for one in first)
        if wanted < len(prompts):
            self._count(reported.values(), frozenset(places))
        kept, rest = {place: mine[place] for place in places if place in mine}, sorted(reported.keys() - set(places))
        return Phase(kept, places, {place: mine[place] for place in rest if place in mine}, rest)

    def generate_meanwhile(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        step: int,
        on_sample: OnSample,
        begun: Mapping[int, Group],
        num_trainers: int,
    ) -> Phase:
        """Generate until the ranks that train call this, too: as many as `num_trainers`, those without an engine. Keep nothing.

        An engine that fails meanwhile is restarted by the weight sync that must follow; what it had under way in this phase is
        generated again.
        """
        whole = {place for place, group in begun.items() if group.is_complete(sampling.group_size)}
        todo: Mapping[int, Prompt] = {place: prompt for place, prompt in enumerate(prompts) if place not in whole}
        stop = UntilTrained(self._rendezvous, num_trainers)
        if self._engine.is_absent:
            stop.arrive()
        groups = self._engine.generate(todo, sampling, step=step, on_sample=on_sample, stop=stop, begun=begun)
        reports = self._gather_reports(groups, stop, sampling)
        stop.close()
        places = sorted(report.place for report in reports)
        return Phase({}, [], {place: groups[place] for place in places if place in groups}, places)

    def _gather_reports(self, groups: Mapping[int, Group], stop: StopCondition | None, sampling: Sampling) -> list[_Report]:
        """Return the reports of all ranks."""
        by_rank = self._rendezvous.all_gather("generation", _reports(groups, stop, sampling), self._deadline_s)
        return [_Report(*row) for rows in by_rank for row in rows]

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

    def _count(self, reports: Collection[_Report], kept: frozenset[int]) -> None:
        for report in reports:
            name = "kept" if report.place in kept else "aborted"
            self._sums.update({f"{name}_groups": 1, f"{name}_samples": report.num_samples, f"{name}_tokens": report.num_tokens})


class _Done(NamedTuple):
    """A group that is done, in the order in which groups are kept."""

    begun_by: int  # version of the policy
    attempt: int  # after failures of an engine the clocks begin again
    clock: int
    place: int


class _Report(NamedTuple):
    """Describes one group to the other ranks."""

    place: int
    clock: int | None  # None: not finished
    begun_by: int
    num_samples: int  # with at least one token
    num_tokens: int


def _reports(groups: Mapping[int, Group], stop: StopCondition | None, sampling: Sampling) -> list[_Report]:
    """Report the groups of which there is anything."""
    reports = []
    for place, group in groups.items():
        clock = (stop.clocks[place] if stop else 0) if group.is_complete(sampling.group_size) else None
        if group.begun_by is not None:
            reports.append(_Report(place, clock, group.begun_by, len(group.samples), group.num_tokens))
    return reports


def _as_of(
    end: int, groups: Mapping[int, Group], begun: Mapping[int, Group], clocks: Mapping[tuple[int, int], int]
) -> dict[int, Group]:
    """Return the groups as they were at the clock `end`, at which the phase ended: a rank decodes a few tokens more before it
    learns of that, and how many depends on its speed. `clocks`: when samples were begun or continued, where a clock is.
    """
    result = dict(groups)
    for place in {place for place, _ in clocks}:
        before = {sample.index: sample for sample in begun[place].samples} if place in begun else {}
        most = {sample.index: max(0, end - clocks.get((place, sample.index), end)) for sample in groups[place].samples}
        cut = [_cut(sample, before.get(sample.index), most[sample.index]) for sample in groups[place].samples]
        result[place] = Group(groups[place].prompt, [sample for sample in cut if sample is not None])
    return result


def _cut(sample: Sample, before: Sample | None, most: int) -> Sample | None:
    """Return the sample with at most so many tokens more than it had before the phase; None for no tokens."""
    length = most + (before.response_len if before else 0)
    if sample.response_len <= length:
        return sample
    if most == 0:
        return before
    spans = [*sample.spans[:-1], sample.spans[-1]._replace(end=length)]
    ids, logprobs = sample.response_ids[:length], sample.rollout_logprobs[:length]
    routes = cut(sample.routes, len(sample.prompt.token_ids) + length - 1) if sample.routes else None
    return replace(sample, response_ids=ids, rollout_logprobs=logprobs, finish_reason=None, spans=spans, routes=routes)
