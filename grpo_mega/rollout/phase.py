"""One generation phase over all ranks: prompts in, groups out, and what became of the groups that were begun for nothing.

With fewer groups `wanted` than prompts given, the phase ends as soon as so many are done over all ranks, and the rest is
aborted. Those that go on are the first by the engines' clocks, then by their place among the prompts; the choice is the same on
every rank. With the embedded engine it depends on nothing but the samples and the number of ranks, so that a run that is
resumed makes it again; with servers it depends on their speed.

Groups with a long response are aborted more often: what goes on is shorter, and easier, than what was begun. `Economy` says
by how much as far as it is known.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.rollout.engine import Engine, OnSample, Sampling, Until
from grpo_mega.types import Group, Prompt, StepMetrics


@dataclass(frozen=True)
class Phase:
    mine: dict[int, Group]  # of the groups that go on, those that this rank sampled, by place among the prompts
    places: list[int]  # of all that go on, ascending; the same on every rank


class Economy:
    """Adds up what phases with oversampling kept and threw away; the same on every rank."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()

    def add(self, reports: Sequence[_Report], kept: frozenset[int]) -> None:
        for report in reports:
            name = "kept" if report.place in kept else "aborted"
            self._sums.update({f"{name}_groups": 1, f"{name}_samples": report.num_samples, f"{name}_tokens": report.num_tokens})

    def lap(self) -> StepMetrics:
        """Since the last lap; nothing if no phase oversampled. Lengths are means in tokens, of the aborted as far as they came.

        What was aborted is a lower bound: how long those responses would have become nobody knows.
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


def sample(
    engine: Engine,
    rendezvous: Rendezvous,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    step: int,
    on_sample: OnSample,
    wanted: int,
    deadline_s: float,
    mend: Callable[[int], None],
    economy: Economy,
) -> Phase:
    """`wanted` whole groups. What a failed engine left unfinished is begun anew, after `mend(version)` has given all engines
    policy `version` again; all ranks call that together, also if none has failed."""
    todo: Mapping[int, Prompt] = dict(enumerate(prompts))
    mine: dict[int, Group] = {}
    places: list[int] = []
    while len(places) < wanted:
        version, missing = engine.version, wanted - len(places)
        until = Enough(rendezvous, missing) if missing < len(todo) else None
        found = engine.generate(todo, sampling, step=step, on_sample=on_sample, until=until)
        said = rendezvous.all_gather("sampling", [report.row for report in _reports(found, until)], deadline_s)
        reports = [_Report(*row) for rows in said for row in rows]
        kept = _first(reports, missing)
        if until is not None:
            until.forget()
        if wanted < len(prompts):
            economy.add(reports, kept)
        mine |= {place: group for place, group in found.items() if place in kept}
        places += kept
        todo = {place: prompt for place, prompt in todo.items() if place not in kept}
        mend(version)
    return Phase(mine, sorted(places))


class Enough(Until):
    """Reached at the clock at which `wanted` groups are done, over all ranks. Every rank makes its own at the same time."""

    def __init__(self, rendezvous: Rendezvous, wanted: int) -> None:
        self.clocks: dict[int, int] = {}  # of the groups that this rank finished, by key
        self.lengths: dict[int, Sequence[int]] = {}  # of the groups that it aborted
        self._rendezvous, self._wanted = rendezvous, wanted
        self._name = rendezvous.unique_key("enough")
        self._posted: list[str] = []
        self._known: list[int] = []  # clocks of all ranks' groups, ascending

    def done(self, key: int, clock: int = 0) -> None:
        self.clocks[key] = clock
        entry = f"{self._name}/{self._rendezvous.fetch_add(self._name)}"
        self._rendezvous.set(entry, str(clock))
        self._posted.append(entry)

    def is_reached(self, clock: int = 0) -> bool:
        """A rank may go on for a while after it is so, until it hears of it; that changes nothing about who is first."""
        while (text := self._rendezvous.try_get(f"{self._name}/{len(self._known)}")) is not None:
            insort(self._known, int(text))
        return bisect_right(self._known, clock) >= self._wanted

    def aborted(self, key: int, lengths: Sequence[int]) -> None:
        self.lengths[key] = lengths

    def forget(self) -> None:
        """Takes what this rank said from the rendezvous, once no rank asks any more."""
        for entry in (*self._posted, self._name):
            self._rendezvous.delete(entry)


@dataclass(frozen=True)
class _Report:
    """What one rank tells the others of a group."""

    place: int
    clock: int | None  # None: not finished
    num_samples: int  # with at least one token
    num_tokens: int

    @property
    def row(self) -> tuple[int, int | None, int, int]:
        return self.place, self.clock, self.num_samples, self.num_tokens


def _reports(found: Mapping[int, Group], until: Enough | None) -> list[_Report]:
    reports = []
    for place, group in found.items():
        lengths = [s.response_len for s in group.samples]
        reports.append(_Report(place, until.clocks[place] if until else 0, len(lengths), sum(lengths)))
    for place, aborted in until.lengths.items() if until else ():
        reports.append(_Report(place, None, sum(length > 0 for length in aborted), sum(aborted)))
    return reports


def _first(reports: Sequence[_Report], wanted: int) -> frozenset[int]:
    done = sorted((report.clock, report.place) for report in reports if report.clock is not None)
    return frozenset(place for _, place in done[:wanted])
