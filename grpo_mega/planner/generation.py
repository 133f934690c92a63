"""A simulation of generation, event by event: engines that take groups from one queue, and steps that end before all is done.

As in rollout/: a phase ends once `wanted` groups are whole, and those that would be too old for the next step; what is left
over is continued with other weights, and so begins with a prefill of all its tokens. Between two events, which are ends of
sequences, all sequences of an engine grow evenly. Draws come in a fixed order, so that equal arguments give equal times.
"""

from __future__ import annotations

import functools
import math
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from grpo_mega.planner.lengths import Lengths

MEASURED = 4  # steps whose mean counts; those before them, until all groups in a step are of the steady kind, do not


@dataclass(frozen=True)
class Engines:
    """Engines of one kind."""

    count: int
    concurrent: int  # sequences that one decodes at once
    in_batches: bool  # another begins only when all have ended
    steps: tuple[float, ...]  # seconds of a decoding step by number of sequences, without their contexts
    per_context: float  # seconds that a decoding step takes longer for a token of context
    per_prefill: float  # seconds for a token


@dataclass(frozen=True)
class Schedule:
    """The groups of a step."""

    prompts: int  # whole groups that a step waits for
    group_size: int
    begun: int  # groups that are begun or continued until then
    ahead: int  # groups that are continued while the step trains
    carries: bool  # what is left is continued in the next step
    max_staleness: int


@dataclass(eq=False, slots=True)
class Response:
    length: int
    group: Group
    decoded: int = 0
    before: int = 0  # the engine's step in which its first token would have come, if it had been there from the start


@dataclass(eq=False, slots=True)
class Group:
    responses: list[Response] = field(default_factory=list)
    begun_by: int | None = None  # the step with its first token
    num_open: int = 0  # responses that have not ended

    def opened(self) -> list[Response]:
        return [response for response in self.responses if response.decoded < response.length]

    def restart(self) -> None:
        self.begun_by = None
        for response in self.responses:
            response.decoded = 0


@functools.lru_cache(maxsize=256)
def mean_wait(engines: Engines, lengths: Lengths, prompt: float, schedule: Schedule, training: float) -> float:
    """Return the seconds per step until its groups are whole; `training`: seconds for which engines of their own go on then.

    `prompt`: tokens of each prompt.
    """
    draw, backlog, waits = _draws(lengths, schedule), list[Group](), list[float]()
    for step in range(MEASURED + (1 + schedule.max_staleness if schedule.carries else 0)):
        oldest = step - schedule.max_staleness
        for group in backlog:
            if group.begun_by is not None and group.begun_by < oldest:
                group.restart()
        needed = {place for place, group in enumerate(backlog) if group.begun_by == oldest}
        while len(backlog) < schedule.begun:
            backlog += next(draw)
        here = backlog[: schedule.begun]
        waits.append(run_phase(engines, prompt, here, step, wanted=schedule.prompts, needed=[here[i] for i in needed]))
        whole = [place for place, group in enumerate(here) if not group.opened()]
        whole.sort(key=lambda place: (place not in needed, here[place].begun_by, place))
        kept = set(whole[: schedule.prompts])
        backlog = [group for place, group in enumerate(backlog) if place not in kept] if schedule.carries else []
        if schedule.ahead:
            run_phase(engines, prompt, backlog[: schedule.ahead], step, until=training)
    return sum(waits[-MEASURED:]) / MEASURED


def _draws(lengths: Lengths, schedule: Schedule) -> Iterator[list[Group]]:
    """Yield the groups of one step after the other, each with all lengths of the distribution, shuffled over its groups."""
    shuffled = lengths.of(schedule.prompts * schedule.group_size)
    order = random.Random(0)
    while True:
        order.shuffle(shuffled)
        groups = [Group() for _ in range(schedule.prompts)]
        for place, length in enumerate(shuffled):
            group = groups[place // schedule.group_size]
            group.responses.append(Response(length, group))
        yield groups


def run_phase(
    engines: Engines,
    prompt: float,
    groups: Sequence[Group],
    step: int,
    *,
    wanted: float = math.inf,
    needed: Collection[Group] = (),
    until: float = math.inf,
) -> float:
    """Decode the groups until `wanted` of them are whole, and those `needed`, or for so many seconds; return the seconds."""
    for group in groups:
        group.num_open = len(group.opened())
    opened = [group for group in groups if group.num_open]
    missing, unmet = wanted - (len(groups) - len(opened)), {group for group in needed if group.num_open}
    if missing <= 0 and not unmet:
        return 0.0
    queue = deque(opened)
    servers = [_Server(engines, prompt, share=-(-len(opened) // engines.count)) for _ in range(engines.count)]
    events: list[tuple[float, int]] = []  # the next end of a response by server
    for index, server in enumerate(servers):
        server.take(queue)
        if server.live:
            heappush(events, (server.next_end(), index))
    now = 0.0
    while events and events[0][0] <= until:
        now, index = heappop(events)
        whole = servers[index].advance()
        missing -= len(whole)
        unmet.difference_update(whole)
        if missing <= 0 and not unmet:
            break
        servers[index].take(queue)
        if servers[index].live:
            heappush(events, (servers[index].next_end(), index))
    else:
        now = until if events else now
    for server in servers:
        server.stop(now)
    for group in opened:
        if group.begun_by is None and any(response.decoded for response in group.responses):
            group.begun_by = step
    return now


class _Server:
    """One engine in one phase."""

    def __init__(self, engines: Engines, prompt: float, share: int) -> None:
        """`share`: groups that it has at most at once."""
        self.live: list[tuple[int, int, Response]] = []  # a heap by the step in which a response ends
        self._engines, self._prompt, self._share = engines, prompt, share
        self._waiting: deque[Response] = deque()
        self._now, self._step, self._num_groups, self._num_begun = 0.0, 0, 0, 0
        self._context = 0.0  # tokens of all live responses, prompts included

    def take(self, queue: deque[Group]) -> None:
        """Begin with as many responses as can be decoded at once; take groups from the queue for them."""
        concurrent = self._engines.concurrent
        if self._engines.in_batches and self.live:
            return
        while queue and self._num_groups < self._share and len(self.live) + len(self._waiting) < concurrent:
            self._waiting.extend(queue.popleft().opened())
            self._num_groups += 1
            self._now += self._prompt * self._engines.per_prefill
        while self._waiting and len(self.live) < concurrent:
            response = self._waiting.popleft()
            response.before = self._step - response.decoded
            self._now += response.decoded * self._engines.per_prefill
            self._context += self._prompt + response.decoded
            self._num_begun += 1
            heappush(self.live, (response.before + response.length, self._num_begun, response))

    def next_end(self) -> float:
        return self._now + self._seconds(self.live[0][0] - self._step)

    def advance(self) -> list[Group]:
        """Decode until a response ends; return the groups that are whole by that."""
        self._decode(self.live[0][0] - self._step)
        whole = []
        while self.live and self.live[0][0] == self._step:
            response = heappop(self.live)[2]
            response.decoded = response.length
            self._context -= self._prompt + response.length
            response.group.num_open -= 1
            if not response.group.num_open:
                whole.append(response.group)
        self._num_groups -= len(whole)
        return whole

    def stop(self, now: float) -> None:
        """Decode what is possible by then."""
        if self.live:
            most = range(self.live[0][0] - self._step + 1)
            self._decode(max(0, bisect_right(most, now - self._now, key=self._seconds) - 1))
            for _, _, response in self.live:
                response.decoded = self._step - response.before

    def _decode(self, steps: int) -> None:
        self._now += self._seconds(steps)
        self._step += steps
        self._context += len(self.live) * steps

    def _seconds(self, steps: int) -> float:
        """Return the time of so many steps of what is live, each with contexts one token longer than the one before."""
        count, per_context = len(self.live), self._engines.per_context
        contexts = steps * self._context + count * steps * (steps - 1) / 2
        return steps * self._engines.steps[count] + per_context * contexts
