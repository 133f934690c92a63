"""Run generation phases over all ranks: prompts in, groups out.

If `wanted` is smaller than the number of prompts, a phase ends when `wanted` groups are done over all ranks, and the rest is
aborted. Done groups are kept in this order: oldest policy first, then lowest engine clock, then position among the prompts. The
choice is the same on every rank. With the embedded engine the choice depends only on the samples and the number of ranks, so a
resumed run repeats it. With servers the choice depends on their speed.

Groups with a long response are aborted more often, so kept groups are shorter and easier than the average started group.
`Generator.flush_stats` reports the difference, as far as it is known. Partial rollouts (backlog.py) continue aborted groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.rollout.engine import NO_EARLIER_GROUPS, Engine, OnSample, Sampling
from grpo_mega.rollout.routes import cut
from grpo_mega.rollout.stop_condition import StopCondition, StopWhenTrainersArrive
from grpo_mega.types import Group, Prompt, Sample, StepMetrics


@dataclass(frozen=True)
class Phase:
    mine: dict[int, Group]  # kept groups generated on this rank, by index of their prompt
    places: list[int]  # prompt indices of all kept groups, ascending; the same on every rank
    rest: dict[int, Group]  # started groups of this rank that were not kept, complete or unfinished, by index of their prompt
    rest_places: list[int]  # prompt indices of the started groups of all ranks that were not kept


class Generator:
    """Generates with the engines of all ranks. All ranks call every method together."""

    def __init__(
        self, engine: Engine, rendezvous: Rendezvous, recover: Callable[[int], None], *, phase_deadline_s: float
    ) -> None:
        """`recover(version)` restarts failed engines and loads policy `version` into all engines again."""
        self._engine, self._rendezvous, self._recover = engine, rendezvous, recover
        self._deadline_s = phase_deadline_s
        self._sums: Counter[str] = Counter()  # counts of phases with oversampling since the last flush_stats

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        step: int,
        on_sample: OnSample,
        wanted: int | None = None,
        earlier: Mapping[int, Group] = NO_EARLIER_GROUPS,
        needed: Collection[int] = (),
    ) -> Phase:
        """Return complete groups for all prompts, or for the first `wanted` that are done. One rank generates each group.

        `earlier` has the groups that earlier phases started, by prompt index. The engines continue unfinished groups, and
        complete groups count as done. The phase ends only when the groups of the prompt indices `needed` are done, and keeps
        them before all others.

        If an engine fails, its unfinished groups are generated again. Raise EngineError on all ranks if `recover` raises it.
        """
        wanted = len(prompts) if wanted is None else min(wanted, len(prompts))
        whole = {place for place, group in earlier.items() if group.is_complete(sampling.group_size)}
        done = [_Done(earlier[place].oldest_version or 0, 0, 0, place) for place in whole]
        todo: Mapping[int, Prompt] = {place: prompt for place, prompt in enumerate(prompts) if place not in whole}
        mine: dict[int, Group] = {}
        reported: dict[int, _Report] = {}
        attempt = 0
        while len(done) < wanted or not {d.place for d in done}.issuperset(needed):
            attempt += 1
            version, missing = self._engine.version, max(0, wanted - len(done))
            unmet = set(needed).intersection(todo)
            stop = StopCondition(self._rendezvous, missing, unmet) if missing < len(todo) else None
            groups = self._engine.generate(todo, sampling, step=step, on_sample=on_sample, stop=stop, earlier=earlier)
            reports = self._gather_reports(groups, stop, sampling)
            ended = {report.place: report.clock for report in reports if report.clock is not None}
            end = stop.end([(clock, place) for place, clock in ended.items()]) if stop is not None else None
            if stop is not None and end is not None:
                ended = {place: clock for place, clock in ended.items() if clock <= end}
                groups = _as_of(end, groups, earlier, stop.start_clocks)
            if stop is not None:
                stop.close()
            mine = {place: group for place, group in mine.items() if place not in todo} | groups
            reported |= {report.place: report for report in reports}
            done += [_Done(reported[place].oldest_version, attempt, clock, place) for place, clock in ended.items()]
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
        earlier: Mapping[int, Group],
        num_trainers: int,
    ) -> Phase:
        """Generate until all `num_trainers` ranks that train and have no engine have called this. Keep no groups.

        If an engine fails meanwhile, the weight sync that must follow restarts it, and its running samples are generated again.
        """
        whole = {place for place, group in earlier.items() if group.is_complete(sampling.group_size)}
        todo: Mapping[int, Prompt] = {place: prompt for place, prompt in enumerate(prompts) if place not in whole}
        stop = StopWhenTrainersArrive(self._rendezvous, num_trainers)
        if self._engine.is_absent:
            stop.arrive()
        groups = self._engine.generate(todo, sampling, step=step, on_sample=on_sample, stop=stop, earlier=earlier)
        reports = self._gather_reports(groups, stop, sampling)
        stop.close()
        places = sorted(report.place for report in reports)
        return Phase({}, [], {place: groups[place] for place in places if place in groups}, places)

    def _gather_reports(self, groups: Mapping[int, Group], stop: StopCondition | None, sampling: Sampling) -> list[_Report]:
        """Return the reports of all ranks."""
        by_rank = self._rendezvous.all_gather("generation", _reports(groups, stop, sampling), self._deadline_s)
        return [_Report(*row) for rows in by_rank for row in rows]

    def flush_stats(self) -> StepMetrics:
        """Return counts of kept and aborted groups of phases with oversampling since the last call; {} without such phases.

        Lengths are means in tokens. Lengths of aborted groups are a lower bound, because their samples did not finish.
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
    """A done group. The fields are the sort key of the order in which groups are kept."""

    oldest_version: int  # version of the policy
    attempt: int  # clocks restart at 0 after an engine failure
    clock: int
    place: int


class _Report(NamedTuple):
    """Describes one group to the other ranks."""

    place: int
    clock: int | None  # None: not finished
    oldest_version: int
    num_samples: int  # with at least one token
    num_tokens: int


def _reports(groups: Mapping[int, Group], stop: StopCondition | None, sampling: Sampling) -> list[_Report]:
    """Report the groups that have at least one sample."""
    reports = []
    for place, group in groups.items():
        clock = (stop.clocks[place] if stop else 0) if group.is_complete(sampling.group_size) else None
        if group.oldest_version is not None:
            reports.append(_Report(place, clock, group.oldest_version, len(group.samples), group.num_tokens))
    return reports


def _as_of(
    end: int, groups: Mapping[int, Group], earlier: Mapping[int, Group], clocks: Mapping[tuple[int, int], int]
) -> dict[int, Group]:
    """Return the groups as they were when the phase ended, at the clock `end`.

    A rank decodes a few more tokens before it learns of the end, and their number depends on its speed. `clocks` has the clock
    at which each sample was started or continued. It is empty if the engine has no clock.
    """
    result = dict(groups)
    for place in {place for place, _ in clocks}:
        before = {sample.index: sample for sample in earlier[place].samples} if place in earlier else {}
        most = {sample.index: max(0, end - clocks.get((place, sample.index), end)) for sample in groups[place].samples}
        cut = [_cut(sample, before.get(sample.index), most[sample.index]) for sample in groups[place].samples]
        result[place] = Group(groups[place].prompt, [sample for sample in cut if sample is not None])
    return result


def _cut(sample: Sample, before: Sample | None, most: int) -> Sample | None:
    """Return the sample with at most `most` more tokens than before the phase; None if it has no tokens then."""
    length = most + (before.response_len if before else 0)
    if sample.response_len <= length:
        return sample
    if most == 0:
        return before
    spans = [*sample.spans[:-1], sample.spans[-1]._replace(end=length)]
    ids, logprobs = sample.response_ids[:length], sample.rollout_logprobs[:length]
    routes = cut(sample.routes, len(sample.prompt.token_ids) + length - 1) if sample.routes else None
    return replace(sample, response_ids=ids, rollout_logprobs=logprobs, finish_reason=None, spans=spans, routes=routes)
