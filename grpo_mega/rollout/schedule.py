"""The samples of a request on one engine, and their order: groups in turn, or the longest first (Seer, arXiv
2511.14617).

A phase lasts as long as its slowest sample, so long responses must not start last. Lengths are not known in advance,
but they are similar within a group. So one sample of each group starts first, as a probe. The other samples follow in
the order of their group's longest sample so far. The order does not change any sampled token.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence

from grpo_mega.rollout.engine import RolloutRequest
from grpo_mega.types import Group, Sample


class Schedule:
    """Runs at most `max_samples` at once, in the order of their groups. When a sample ends, the next one starts.

    An engine adds groups, takes samples while there are any, and reports for each sample that it ended or is left over.
    """

    def __init__(self, request: RolloutRequest, max_samples: int, share: int) -> None:
        """`share`: maximum number of groups that the engine has at once."""
        self.groups: dict[int, Group] = {}  # groups with their finished samples, keyed by prompt index
        self._request, self._max_samples, self._share = request, max_samples, share
        self._waiting: dict[int, list[Sample]] = {}  # samples to start or continue, keyed by prompt index
        self._running: Counter[int] = Counter()  # number of running samples, keyed by prompt index; no zeros
        self._counted_until = time.monotonic()  # until here usage has the seconds of running samples

    @property
    def num_running(self) -> int:
        """Return the number of samples that were taken and have not ended yet."""
        return self._running.total()

    @property
    def num_waiting(self) -> int:
        """Return the number of added samples that were not taken yet."""
        return sum(map(len, self._waiting.values()))

    @property
    def wants_group(self) -> bool:
        """Return True if the engine should add a group, in case engines share the groups."""
        num_taken = self.num_running + self.num_waiting
        return num_taken < self._max_samples and len(self._running.keys() | self._waiting.keys()) < self._share

    def add(self, prompt_index: int) -> None:
        """Add a group of the request, with its samples of earlier phases if there are any."""
        group = self._request.groups[prompt_index]
        there = {sample.index: sample for sample in group.samples}
        indices = range(self._request.sampling.group_size)
        samples = [there.get(index) or Sample(group.prompt, index, [], [], None) for index in indices]
        self._waiting[prompt_index] = [sample for sample in samples if not sample.is_finished]
        self.groups[prompt_index] = Group(group.prompt, [sample for sample in samples if sample.is_finished])

    def take(self) -> dict[int, list[Sample]]:
        """Take the samples that may start or continue now, keyed by prompt index. If no sample runs, take at least
        one.
        """
        room, taken = self._max_samples - self.num_running, dict[int, list[Sample]]()
        for prompt_index, most in self._order(room):
            waiting, most = self._waiting[prompt_index], min(most, room)
            if most and waiting:
                taken.setdefault(prompt_index, []).extend(waiting[:most])
                self._waiting[prompt_index] = waiting[most:]
                room -= len(waiting[:most])
        self._waiting = {prompt_index: samples for prompt_index, samples in self._waiting.items() if samples}
        self._count_seconds()
        self._running.update({prompt_index: len(samples) for prompt_index, samples in taken.items()})
        self._request.usage.most_running = max(self._request.usage.most_running, self.num_running)
        return taken

    def ended(self, prompt_index: int, sample: Sample, clock: int = 0) -> None:
        """Report a finished sample, and its group if it was the last one, at the engine's `clock`."""
        self._leave(prompt_index, 1)
        self._request.usage.num_ended += 1
        group, request = self.groups[prompt_index], self._request
        group.samples.append(sample)
        request.on_sample(sample, group)
        if request.stop is not None and len(group.samples) == request.sampling.group_size:
            request.stop.done(prompt_index, clock)

    def left_over(self, prompt_index: int, samples: Sequence[Sample]) -> None:
        """Take back samples that were aborted or never started."""
        self._leave(prompt_index, len(samples))
        self._waiting.setdefault(prompt_index, []).extend(samples)

    def finish(self) -> dict[int, Group]:
        """Return all groups at the end of a phase, with the unfinished samples that have tokens."""
        for prompt_index, samples in self._waiting.items():
            self.groups[prompt_index].samples += [sample for sample in samples if sample.response_len]
        for group in self.groups.values():
            group.samples.sort(key=lambda sample: sample.index)
        return self.groups

    def _order(self, room: int) -> Iterator[tuple[int, int]]:
        """Yield the prompt indices of waiting samples, with the number of samples that may start."""
        yield from ((prompt_index, room) for prompt_index in self._waiting)

    def _leave(self, prompt_index: int, num_samples: int) -> None:
        self._count_seconds()
        self._running[prompt_index] -= num_samples
        if not self._running[prompt_index]:
            del self._running[prompt_index]

    def _count_seconds(self) -> None:
        now = time.monotonic()
        self._request.usage.sample_seconds += self.num_running * (now - self._counted_until)
        self._counted_until = now


class LongestFirst(Schedule):
    """Runs at most `max_samples` at once: first a probe of each group without a finished sample, then the longest
    groups.

    A sample that an earlier phase left unfinished has the expected length max_response_length. So has a group without a
    finished sample. With `share` groups the engine wants no more while samples wait.
    """

    def __init__(self, request: RolloutRequest, max_samples: int, share: int) -> None:
        super().__init__(request, max_samples, share)
        self._unprobed: list[int] = []
        self._lengths: dict[int, dict[int, int]] = {}  # length of each sample, keyed by prompt index and sample index

    @property
    def wants_group(self) -> bool:
        has_room = len(self._unprobed) < self._max_samples - self.num_running
        return has_room and (len(self.groups) < self._share or not self._waiting)

    def add(self, prompt_index: int) -> None:
        super().add(prompt_index)
        longest, samples = self._request.sampling.max_response_length, self._request.groups[prompt_index].samples
        self._lengths[prompt_index] = {s.index: s.response_len if s.is_finished else longest for s in samples}
        if not self.groups[prompt_index].samples:
            self._unprobed.append(prompt_index)

    def ended(self, prompt_index: int, sample: Sample, clock: int = 0) -> None:
        self._lengths[prompt_index][sample.index] = sample.response_len
        super().ended(prompt_index, sample, clock)

    def _order(self, room: int) -> Iterator[tuple[int, int]]:
        probed, self._unprobed = self._unprobed[:room], self._unprobed[room:]
        yield from ((prompt_index, 1) for prompt_index in probed)
        longest = self._request.sampling.max_response_length
        expected = {
            prompt_index: max(self._lengths[prompt_index].values(), default=longest) for prompt_index in self._waiting
        }
        yield from ((prompt_index, room) for prompt_index in sorted(expected, key=expected.__getitem__, reverse=True))


def schedule_of(request: RolloutRequest, max_concurrent: int, share: int) -> Schedule:
    """Return the schedule of an engine that decodes `max_concurrent` sequences at once. `share` is its share of the
    groups.
    """
    return (LongestFirst if request.sampling.longest_first else Schedule)(request, max_concurrent, share)
