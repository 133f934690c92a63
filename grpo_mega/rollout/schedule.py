"""The order in which an engine begins samples: groups in turn, or the longest responses first (Seer, arXiv 2511.14617).

A phase lasts as long as its slowest sample, so long responses must not begin last. How long they will be is not known before,
but those of a group are alike: one sample of each group begins first, as a probe, and the others follow by the longest of
their group so far. Only the order differs; which tokens are sampled does not depend on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence

from grpo_mega.rollout.engine import Sampling
from grpo_mega.types import Group, Prompt, Sample


class Schedule(ABC):
    """An engine adds groups, takes samples as long as there are any, and says of each whether it has ended or is left over."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._waiting: dict[int, list[Sample]] = {}  # to begin or to continue, by key of their group, in the order of groups
        self._under_way: Counter[int] = Counter()  # samples, by key; no zeros

    @property
    def num_under_way(self) -> int:
        """Return the number of samples that were taken and have not ended."""
        return self._under_way.total()

    @property
    @abstractmethod
    def wants_group(self) -> bool:
        """Return True if the engine should add a group, where engines share them."""

    @abstractmethod
    def take(self) -> dict[int, list[Sample]]:
        """Take the samples that may begin or continue now, by key of their group; there are some if none is under way."""

    def add(self, key: int, prompt: Prompt, begun: Group | None) -> Group:
        """Add a group, of which there are the samples of `begun`. Return it with those that are finished."""
        there = {sample.index: sample for sample in begun.samples} if begun else {}
        samples = [there.get(index) or Sample(prompt, index, [], [], None) for index in range(self._group_size)]
        self._waiting[key] = [sample for sample in samples if not sample.is_finished]
        return Group(prompt, [sample for sample in samples if sample.is_finished])

    def ended(self, key: int, sample: Sample) -> None:
        self._leave(key, 1)

    def left_over(self, key: int, samples: Sequence[Sample]) -> None:
        """Take samples back that were aborted, or were not begun after all."""
        self._leave(key, len(samples))
        self._waiting.setdefault(key, []).extend(samples)

    def return_to(self, groups: Mapping[int, Group]) -> None:
        """Add to the groups what there is of their unfinished samples; the phase is over."""
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
    """At most `max_samples` at once, in the order of their groups: as one ends, the next begins."""

    def __init__(self, group_size: int, max_samples: int, share: int) -> None:
        """`share`: groups that the engine has at most at once."""
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
    """At most `max_samples` at once: a probe of each group without a finished sample, then the groups with the longest samples.

    A sample that an earlier phase left unfinished counts as `longest`, as does a group of which no sample has ended yet.
    """

    def __init__(self, group_size: int, max_samples: int, share: int, longest: int) -> None:
        """`share`: groups after which the engine wants no more while others wait."""
        super().__init__(group_size)
        self._max_samples, self._share, self._longest = max_samples, share, longest
        self._unprobed: list[int] = []
        self._lengths: dict[int, dict[int, int]] = {}  # of samples by key and index

    @property
    def wants_group(self) -> bool:
        has_room = len(self._unprobed) < self._max_samples - self.num_under_way
        return has_room and (len(self._lengths) < self._share or not self._waiting)

    def add(self, key: int, prompt: Prompt, begun: Group | None) -> Group:
        group = super().add(key, prompt, begun)
        there = begun.samples if begun else ()
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
        for key in sorted(self._waiting, key=self._expected, reverse=True):  # equal ones stay in their order
            samples = self._waiting[key]
            if room > 0 and samples:
                taken.setdefault(key, []).extend(samples[:room])
                self._waiting[key], room = samples[room:], room - len(samples[:room])
        return self._begin(taken)

    def _expected(self, key: int) -> int:
        return max(self._lengths[key].values(), default=self._longest)


def schedule_of(sampling: Sampling, max_concurrent: int, share: int) -> Schedule:
    """Return the schedule of an engine that decodes `max_concurrent` sequences at once, and has `share` groups to itself."""
    if sampling.longest_first:
        return LongestFirst(sampling.group_size, max_concurrent, share, sampling.max_response_length)
    return InOrder(sampling.group_size, max_concurrent, share)
