"""The engine interface, embedded or a server, and one sample request, with its sample order.

An engine holds a policy copy in its own layout. Only weight syncs fill it; `version` is that policy's version. Inputs
and outputs are token ids, never text. An engine may span several ranks. All ranks call every method together, but
`generate` may return at once on a rank that drives no engine.

Samples run group by group, or the longest first (Seer, arXiv 2511.14617). A phase lasts as long as its slowest sample,
so long responses must not start last. Lengths are not known in advance, but they are similar within a group. So one
sample per group starts first, as a probe. The other samples follow, ordered by their group's longest sample so far. The
order does not change any sampled token.
"""

from __future__ import annotations

import time
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.types import Group, Sample
from grpo_mega.weights.apply import Bucket
from grpo_mega.weights.layout import ShardLayout

if TYPE_CHECKING:
    from grpo_mega.rollout.sessions.conversations import Conversations

# ruff: noqa: B027  # some methods are empty on purpose without being abstract


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. `temperature` 0 means greedy decoding, with log-probs at temperature 1."""

    group_size: int
    temperature: float
    max_response_length: int
    stop_token_ids: frozenset[int]
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    vocab_size: int = 1 << 31  # number of token ids in the model
    with_routes: bool = False  # record each token's experts, see routes.py
    longest_first: bool = False  # the order in which samples start (Schedule); does not change any sample


def token_checksum(token_ids: Sequence[int]) -> int:
    """Return the tokens' CRC-32. It identifies a prompt's text, and seeds the turn that follows a context."""
    return zlib.crc32(np.asarray(token_ids, np.int64).tobytes())


class StopCondition:
    """Met when at least `wanted` groups and all groups in `needed` are done across ranks. All ranks construct it
    together.

    `clock` measures the engine's progress in this phase. It advances equally on all ranks: the embedded engine counts
    its sequential decoding steps, so the first groups do not depend on a rank's speed. A server has no such clock. Its
    groups have clock 0, and any `wanted` groups count as the first.
    """

    def __init__(self, rendezvous: Rendezvous, wanted: int, needed: Collection[int] = ()) -> None:
        """`needed`: prompt indices whose groups must be done before the phase ends."""
        self.clocks: dict[int, int] = {}  # clock when this rank finished each group, keyed by prompt index
        # Clock when this rank started or continued each sample, keyed by prompt index and sample index. Empty without a
        # clock.
        self.start_clocks: dict[tuple[int, int], int] = {}
        self._rendezvous, self._wanted, self._needed = rendezvous, wanted, frozenset(needed)
        self._name = rendezvous.unique_key("stop_condition")
        self._own_keys: list[str] = []
        self._known: list[tuple[int, int]] = []  # (clock, prompt index) of each done group on any rank, as far as read

    def done(self, prompt_index: int, clock: int = 0) -> None:
        """Report a group when all its samples have ended."""
        self.clocks[prompt_index] = clock
        if self._wanted or self._needed:  # otherwise no rank counts the groups
            self._own_keys.append(f"{self._name}/{self._rendezvous.fetch_add(self._name)}")
            self._rendezvous.set(self._own_keys[-1], f"{clock} {prompt_index}")

    def arrive(self) -> None:
        """Report that this rank has no engine and waits for the other ranks."""

    def is_met(self, clock: int = 0) -> bool:
        """Return True if the engine must stop its running samples. The call is cheap enough to repeat for every token.

        A rank may continue for a while before it sees other ranks' groups. The delay does not change which groups are
        chosen.
        """
        while (text := self._rendezvous.try_get(f"{self._name}/{len(self._known)}")) is not None:
            done_at, prompt_index = map(int, text.split())
            self._known.append((done_at, prompt_index))
        end = self.end(self._known)
        return end is not None and end <= clock

    def end(self, done: Collection[tuple[int, int]]) -> int | None:
        """Return the clock at which the phase ends, from (clock, prompt index) per done group; None if it continues."""
        first = sorted(clock for clock, _ in done)[: self._wanted]
        needed = [clock for clock, prompt_index in done if prompt_index in self._needed]
        if len(first) < self._wanted or len(needed) < len(self._needed):
            return None
        return max([*first, *needed], default=0)

    def close(self) -> None:
        """Delete this rank's keys from the store. Call this when no rank reads them any more."""
        for key in (*self._own_keys, self._name):
            self._rendezvous.delete(key)


class StopWhenTrainersArrive(StopCondition):
    """Met when all `num_trainers` ranks that train have arrived, however many groups are done."""

    def __init__(self, rendezvous: Rendezvous, num_trainers: int) -> None:
        super().__init__(rendezvous, wanted=0)
        self._num_trainers = num_trainers

    def arrive(self) -> None:
        self._rendezvous.fetch_add(self._name, limit=self._num_trainers)

    def is_met(self, clock: int = 0) -> bool:
        return self._rendezvous.fetch_add(self._name, 0, limit=self._num_trainers) >= self._num_trainers


@dataclass
class Usage:
    """How a phase used this rank's engine."""

    sample_seconds: float = 0.0  # seconds in which a sample was being decoded, summed over samples
    most_running: int = 0  # largest number of concurrent samples
    num_retracted: int = 0  # samples that were interrupted because the KV cache was full
    num_ended: int = 0


@dataclass(frozen=True)
class RolloutRequest:
    """Requests missing samples for groups. Every rank passes the same groups, and each group is generated on one rank.

    Samples start in group order, except with sampling.longest_first. Groups may come from an earlier phase: the engine
    resumes their unfinished samples and does not modify the objects. Conversations are not resumed: if a phase ends
    before a conversation, the conversation is discarded.
    """

    groups: Mapping[int, Group]  # incomplete groups, keyed by prompt index
    sampling: Sampling
    step: int  # seeds the random streams for samples that start now
    # Called with each finished sample, and its group including that sample.
    on_sample: Callable[[Sample, Group], None] = lambda sample, group: None
    stop: StopCondition | None = None  # when it is met, running samples are aborted; None: generate all samples
    usage: Usage = field(default_factory=Usage)
    # If set, each sample is an agent conversation; the engine generates the turns that the agent requests. None: each
    # sample is one response to its prompt.
    conversations: Conversations | None = None


class Receiver(Protocol):
    """Receives a sync's buckets. Engine describes the methods."""

    def start_update(self) -> list[str]: ...
    def allocate(self, index: int, num_bytes: int) -> Tensor: ...
    def load(self, bucket: Bucket) -> None: ...
    def end_update(self, version: int) -> list[str]: ...


class Engine(ABC):
    """One engine. Methods that are not abstract do nothing if the engine shares the trainer's process and device
    memory.
    """

    is_server = False  # the engine has a separate process with separate device memory
    version = -1  # the weights' policy version; -1 before the first sync
    failure: str | None = None  # why this rank's engine needs a restart before it can be used; None if it can be used
    device: torch.device  # the weights' device, if this process holds them

    def __init__(self, shard_layout: ShardLayout) -> None:
        """`shard_layout`: each engine rank's tensors, for sync plans."""
        self.shard_layout = shard_layout

    @property
    def adapter(self) -> Receiver:
        """Return the receiver for an adapter sent alone."""
        return self

    def wait_until_ready(self) -> None:
        """Wait until the engine has started. The constructor launched it. Raise EngineError if the start fails."""

    @abstractmethod
    def generate(self, request: RolloutRequest) -> dict[int, Group]:
        """Return this rank's share of the groups, keyed by prompt index.

        When `request.stop` is met, the engine returns its groups with unfinished samples, and is ready for the next
        phase. When the engine fails, `failure` holds the reason and unfinished groups are missing. If the engine
        accepts a seed per sample, a sample's random stream depends only on sampling.seed, the step in which the sample
        started, prompt id and sample index.
        """

    def restart(self, failed: Collection[int]) -> None:
        """Restart the engines on the ranks `failed`, without weights. Set `failure` again if the restart fails."""

    def sleep(self) -> None:
        """Release weight and KV cache device memory for the trainer."""

    def wake_weights(self) -> None:
        """Allocate weight memory again. The values are lost."""

    def wake_cache(self) -> None:
        """Allocate KV cache memory again. The cache is empty."""

    @abstractmethod
    def start_update(self) -> list[str]:
        """Start a sync. Return differences between the engine's tensors and its layout. If any, load nothing."""

    def allocate(self, index: int, num_bytes: int) -> Tensor:
        """Return the [num_bytes] uint8 tensor for sync round `index`, after the engine has read its old contents."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    @abstractmethod
    def load(self, bucket: Bucket) -> None:
        """Load a filled bucket. The engine may still be reading it after the return."""

    @abstractmethod
    def end_update(self, version: int) -> list[str]:
        """Wait until all buckets are loaded, then set the engine's version to `version`.

        Return the tensor names whose checksums differ from the checksums in the buckets. If there are any, the version
        does not change. FP8 blocks were verified on arrival.
        """

    def close(self) -> None:
        """Stop the processes that the engine started. This may be called at any time, and twice."""


class NoEngine(Engine):
    """The engine on a rank that only trains. It joins phases and syncs, has no weights and generates nothing."""

    def __init__(self, shard_layout: ShardLayout, device: torch.device) -> None:
        super().__init__(shard_layout)
        self.device = device

    def generate(self, request: RolloutRequest) -> dict[int, Group]:
        if request.stop is not None:
            request.stop.arrive()
        return {}

    def start_update(self) -> list[str]:
        return []

    def load(self, bucket: Bucket) -> None:
        assert not bucket.entries, "a rank without an engine received weights"

    def end_update(self, version: int) -> list[str]:
        self.version = version
        return []


class Schedule:
    """Runs at most `max_samples` at once, in group order. When a sample ends, the next one starts.

    An engine adds groups, takes samples while there are any, and reports for each sample that it ended or is left over.
    """

    def __init__(self, request: RolloutRequest, max_samples: int, share: int) -> None:
        """`share`: maximum number of groups in the engine at once."""
        self.groups: dict[int, Group] = {}  # groups with their finished samples, keyed by prompt index
        self._request, self._max_samples, self._share = request, max_samples, share
        self._waiting: dict[int, list[Sample]] = {}  # samples to start or continue, keyed by prompt index
        self._running: Counter[int] = Counter()  # number of running samples, keyed by prompt index; no zeros
        self._counted_until = time.monotonic()  # until here usage has the seconds of running samples

    @property
    def num_running(self) -> int:
        """Count samples that were taken and have not ended."""
        return self._running.total()

    @property
    def num_waiting(self) -> int:
        """Count added samples that were not taken yet."""
        return sum(map(len, self._waiting.values()))

    @property
    def wants_group(self) -> bool:
        """Return True if the engine should add a group, when engines share the groups."""
        num_taken = self.num_running + self.num_waiting
        return num_taken < self._max_samples and len(self._running.keys() | self._waiting.keys()) < self._share

    def add(self, prompt_index: int) -> None:
        """Add a group from the request, with its samples from earlier phases if there are any."""
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
        """Return all groups after a phase, with the unfinished samples that have tokens."""
        for prompt_index, samples in self._waiting.items():
            self.groups[prompt_index].samples += [sample for sample in samples if sample.response_len]
        for group in self.groups.values():
            group.samples.sort(key=lambda sample: sample.index)
        return self.groups

    def complete_groups(self) -> dict[int, Group]:
        """Return the complete groups after a phase in which the engine failed."""
        size = self._request.sampling.group_size
        return {prompt_index: group for prompt_index, group in self.finish().items() if group.is_complete(size)}

    def _order(self, room: int) -> Iterator[tuple[int, int]]:
        """Yield the prompt indices with waiting samples, and how many samples may start."""
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
    """Runs at most `max_samples` at once: first a probe per group without a finished sample, then the longest groups.

    The expected length is max_response_length for samples left unfinished in an earlier phase, and for groups without a
    finished sample. With `share` groups the engine wants no more while samples wait.
    """

    def __init__(self, request: RolloutRequest, max_samples: int, share: int) -> None:
        super().__init__(request, max_samples, share)
        self._unprobed: list[int] = []

    @property
    def wants_group(self) -> bool:
        has_room = len(self._unprobed) < self._max_samples - self.num_running
        return has_room and (len(self.groups) < self._share or not self._waiting)

    def add(self, prompt_index: int) -> None:
        super().add(prompt_index)
        if not self.groups[prompt_index].samples:
            self._unprobed.append(prompt_index)

    def _order(self, room: int) -> Iterator[tuple[int, int]]:
        probed, self._unprobed = self._unprobed[:room], self._unprobed[room:]
        yield from ((prompt_index, 1) for prompt_index in probed)
        longest_first = sorted(self._waiting, key=self._expected_length, reverse=True)
        yield from ((prompt_index, room) for prompt_index in longest_first)

    def _expected_length(self, prompt_index: int) -> int:
        lengths = {sample.index: sample.response_len for sample in self.groups[prompt_index].samples}
        is_known = lengths and all(sample.index in lengths for sample in self._request.groups[prompt_index].samples)
        return max(lengths.values()) if is_known else self._request.sampling.max_response_length


def schedule_of(request: RolloutRequest, max_concurrent: int, share: int) -> Schedule:
    """Return the schedule for an engine that decodes `max_concurrent` sequences at once. `share`: its maximum number of
    groups.
    """
    return (LongestFirst if request.sampling.longest_first else Schedule)(request, max_concurrent, share)
