"""The order in which an engine starts samples: groups in turn, or the longest responses first (Seer, arXiv 2511.14617).

A phase lasts as long as its slowest sample, so long responses must not start last. Lengths are not known in advance, but they
are similar within a group. So one sample of each group starts first, as a probe. The other samples follow in the order of their
group's longest sample so far. The order does not change any sampled token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence

from grpo_mega.rollout.engine import Sampling
from grpo_mega.types import Group, Prompt, Sample


class Schedule(ABC):
    """Samples that wait and samples that run.

    An engine adds groups, takes samples while there are any, and reports for each sample that it ended or is left over.
    """

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._waiting: dict[int, list[Sample]] = {}  # samples to start or continue, by group key, in the order of groups
        self._under_way: Counter[int] = Counter()  # number of running samples by group key; no zeros

    @property
    def num_under_way(self) -> int:
        """Return the number of samples that were taken and have not ended yet."""
        return self._under_way.total()

    @property
    @abstractmethod
    def wants_group(self) -> bool:
        """Return True if the engine should add a group, in case engines share the groups."""

    @abstractmethod
    def take(self) -> dict[int, list[Sample]]:
        """Take the samples that may start or continue now, by group key. If no sample runs, take at least one."""

    def add(self, key: int, prompt: Prompt, earlier: Group | None) -> Group:
        """Add a group, with its samples of earlier phases if there are any. Return the group with only its finished samples."""
        there = {sample.index: sample for sample in earlier.samples} if earlier else {}
        samples = [there.get(index) or Sample(prompt, index, [], [], None) for index in range(self._group_size)]
        self._waiting[key] = [sample for sample in samples if not sample.is_finished]
        return Group(prompt, [sample for sample in samples if sample.is_finished])

    def ended(self, key: int, sample: Sample) -> None:
        self._leave(key, 1)

    def left_over(self, key: int, samples: Sequence[Sample]) -> None:
        """Take back samples that were aborted or never started."""
        self._leave(key, len(samples))
        self._waiting.setdefault(key, []).extend(samples)

    def return_to(self, groups: Mapping[int, Group]) -> None:
        """At the end of a phase, add the unfinished samples that have tokens to their groups."""
        for key, samples in self._waiting.items():
            groups[key].samples += [sample for sample in samples if sample.response_len]

    def _begin(self, taken: dict[int, list[Sample]]) -> dict[int, list[Sample]]:
        self._waiting = {key: samples for key, samples in self._waiting.items() if samples}
        self._under_way.update({key: len(samples) for key, samples in taken.items()})
        return taken

    def _leave(self, key: int, num_samples: int) -> None:
        self._under_way[key] -= num_samples
        if not self._under_way[key]:
            del self._under_way[key]


class InOrder(Schedule):
    """Runs at most `max_samples` at once, in the order of their groups. When a sample ends, the next one starts."""

    def __init__(self, group_size: int, max_samples: int, share: int) -> None:
        """`share`: maximum number of groups that the engine has at once."""
        super().__init__(group_size)
        self._max_samples, self._share = max_samples, share

    @property
    def wants_group(self) -> bool:
        num_taken = self.num_under_way + sum(map(len, self._waiting.values()))
        return num_taken < self._max_samples and len(self._under_way.keys() | self._waiting.keys()) < self._share

    def take(self) -> dict[int, list[Sample]]:
        room, taken = self._max_samples - self.num_under_way, dict[int, list[Sample]]()
        for key, samples in self._waiting.items():
            if room and samples:
                taken[key], self._waiting[key] = samples[:room], samples[room:]
                room -= len(taken[key])
        return self._begin(taken)


class LongestFirst(Schedule):
    """Runs at most `max_samples` at once: first a probe of each group without a finished sample, then the longest groups.

    A sample that an earlier phase left unfinished has the expected length `longest`. So has a group without a finished sample.
    """

    def __init__(self, group_size: int, max_samples: int, share: int, longest: int) -> None:
        """`share`: with this many groups the engine wants no more while samples wait."""
        super().__init__(group_size)
        self._max_samples, self._share, self._longest = max_samples, share, longest
        self._unprobed: list[int] = []
        self._lengths: dict[int, dict[int, int]] = {}  # length of each sample, by group key and sample index

    @property
    def wants_group(self) -> bool:
        has_room = len(self._unprobed) < self._max_samples - self.num_under_way
        return has_room and (len(self._lengths) < self._share or not self._waiting)

    def add(self, key: int, prompt: Prompt, earlier: Group | None) -> Group:
        group = super().add(key, prompt, earlier)
        there = earlier.samples if earlier else ()
        self._lengths[key] = {s.index: s.response_len if s.is_finished else self._longest for s in there}
        self._unprobed += [] if group.samples else [key]
        return group

    def ended(self, key: int, sample: Sample) -> None:
        super().ended(key, sample)
        self._lengths[key][sample.index] = sample.response_len

    def take(self) -> dict[int, list[Sample]]:
        room = self._max_samples - self.num_under_way
        probed, self._unprobed = self._unprobed[:room], self._unprobed[room:]
        taken = {key: [self._waiting[key].pop(0)] for key in probed}
        room -= len(probed)
        for key in sorted(self._waiting, key=self._expected, reverse=True):  # the sort is stable
            samples = self._waiting[key]
            if room > 0 and samples:
                taken.setdefault(key, []).extend(samples[:room])
                self._waiting[key], room = samples[room:], room - len(samples[:room])
        return self._begin(taken)

    def _expected(self, key: int) -> int:
        return max(self._lengths[key].values(), default=self._longest)


def schedule_of(sampling: Sampling, max_concurrent: int, share: int) -> Schedule:
    """Return the schedule of an engine that decodes `max_concurrent` sequences at once. `share` is its share of the groups."""
    if sampling.longest_first:
        return LongestFirst(sampling.group_size, max_concurrent, share, sampling.max_response_length)
    return InOrder(sampling.group_size, max_concurrent, share)
