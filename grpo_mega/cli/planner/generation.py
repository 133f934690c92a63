"""Distribution of response lengths, and a simulation of generation: a step can end before all groups do.

The distribution comes from given percentiles, the samples of an earlier run, or an assumed tail. Engines take groups
from one queue.

As in rollout/, a phase ends once `wanted` groups are complete and the groups that would be too old for the next step
are, too. The other groups continue with new weights, so each continued response starts with a prefill of all its
tokens. Events are ends of sequences. Between two events all sequences of an engine grow evenly. Draws come in a fixed
order, so equal arguments return equal times.
"""

from __future__ import annotations

import functools
import math
import random
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from grpo_mega.errors import ConfigError
from grpo_mega.paths import SAMPLES_FILE, user_path
from grpo_mega.text import read_json_lines

NUM_AVERAGED_STEPS = 4  # earlier steps are warm-up, until every step has the same mix of old and new groups


@dataclass(frozen=True)
class Lengths:
    """Quantiles of the length in tokens, with linear interpolation between them."""

    shares: tuple[float, ...]
    tokens: tuple[float, ...]

    def of(self, count: int) -> list[int]:
        """Return `count` lengths in ascending order: the quantiles at the middles of `count` equal shares."""
        middles = (np.arange(count) + 0.5) / count
        lengths: list[int] = np.rint(np.interp(middles, self.shares, self.tokens)).astype(int).clip(1).tolist()
        return lengths

    def at(self, share: float) -> float:
        return float(np.interp(share, self.shares, self.tokens))


def assumed_lengths(mean: float, longest: int) -> Lengths:
    """Return a distribution with this mean: a share q is no longer than longest * q ** (longest / mean - 1)."""
    shares = np.linspace(0, 1, 1001)
    return Lengths(tuple(shares.tolist()), tuple((longest * shares ** (longest / mean - 1)).tolist()))


def read_lengths(text: str, longest: int) -> Lengths:
    """Return the distribution of "p50=700,p99=12000", from one token to `longest`, or of a run's samples.

    Longer responses count as `longest`. Raise ConfigError.
    """
    if "=" in text:
        found = [re.fullmatch(r"p(\d+(?:\.\d+)?)=(\d+)", part) for part in text.split(",")]
        given = {float(match[1]) / 100: float(match[2]) for match in found if match}
        if len(given) < len(found) or max(given) > 1:
            raise ConfigError(
                f"--lengths {text}: must be percentiles like p50=700,p99=12000, or the folder of a run; change it"
            )
        points = {0.0: 1.0, 1.0: float(longest)} | given
    else:  # the finished responses in a run's folder, or in a samples file
        path = user_path(text)
        path = path / SAMPLES_FILE if path.is_dir() else path
        try:
            rows = [row for _, row in read_json_lines(path) if row is not None]
        except OSError as error:
            raise ConfigError(
                f"--lengths: cannot read {path} ({error.strerror}); name the folder of a run, or percentiles"
            ) from None
        lengths = sorted(len(row["rollout_logprobs"]) for row in rows if row.get("rollout_logprobs"))
        if not lengths:
            raise ConfigError(
                f"--lengths: {path} has no samples; name the folder of a run with log.samples_per_step > 0"
            )
        points = {(i + 0.5) / len(lengths): float(length) for i, length in enumerate(lengths)}
    shares = sorted(points)
    tokens = [min(points[share], float(longest)) for share in shares]
    if tokens != sorted(tokens) or tokens[0] < 1:
        raise ConfigError(f"--lengths {text}: must be at least 1 token and grow with the percentile; change an entry")
    return Lengths(tuple(shares), tuple(tokens))


@dataclass(frozen=True)
class Engines:
    """Identical engines."""

    count: int
    concurrent: int  # sequences that one engine decodes at once
    in_batches: bool  # a new batch starts only when all sequences of the last one have ended
    steps: tuple[float, ...]  # seconds of a decoding step, indexed by the number of sequences; contexts not included
    per_context: float  # seconds that each token of context adds to a decoding step
    per_prefill: float  # seconds per token of a prefill


@dataclass(frozen=True)
class StepGroups:
    """Groups of a step."""

    prompts: int  # complete groups that a step waits for
    group_size: int
    num_started: int  # number of groups to start or continue while the step waits
    ahead: int  # groups that continue while the step trains
    keeps_unfinished: bool  # unfinished groups continue in the next step
    max_staleness: int


@dataclass(eq=False, slots=True)
class Response:
    length: int
    group: SimulatedGroup
    decoded: int = 0
    before: int = 0  # engine step just before its first token, as if all its tokens had been decoded in this phase


@dataclass(eq=False, slots=True)
class SimulatedGroup:
    responses: list[Response] = field(default_factory=list)
    first_step: int | None = None  # step of the first token
    num_open: int = 0  # number of unfinished responses

    def opened(self) -> list[Response]:
        return [response for response in self.responses if response.decoded < response.length]

    def restart(self) -> None:
        self.first_step = None
        for response in self.responses:
            response.decoded = 0


@functools.lru_cache(maxsize=256)
def mean_wait(engines: Engines, lengths: Lengths, prompt: float, schedule: StepGroups, training: float) -> float:
    """Return the mean seconds per step until its groups are complete.

    `prompt`: tokens per prompt. `training`: seconds for which separate engines continue while the others train.
    """
    draw, backlog, waits = _draws(lengths, schedule), list[SimulatedGroup](), list[float]()
    for step in range(NUM_AVERAGED_STEPS + (1 + schedule.max_staleness if schedule.keeps_unfinished else 0)):
        oldest = step - schedule.max_staleness
        for group in backlog:
            if group.first_step is not None and group.first_step < oldest:
                group.restart()
        needed = {group for group in backlog if group.first_step == oldest}
        while len(backlog) < schedule.num_started:
            backlog += next(draw)
        here = backlog[: schedule.num_started]
        waits.append(run_phase(engines, prompt, here, step, wanted=schedule.prompts, needed=needed))
        whole = [group for group in here if not group.opened()]
        whole.sort(key=lambda group: (group not in needed, group.first_step))
        trained = set(whole[: schedule.prompts])
        backlog = [group for group in backlog if group not in trained] if schedule.keeps_unfinished else []
        if schedule.ahead:
            run_phase(engines, prompt, backlog[: schedule.ahead], step, until=training)
    return sum(waits[-NUM_AVERAGED_STEPS:]) / NUM_AVERAGED_STEPS


def _draws(lengths: Lengths, schedule: StepGroups) -> Iterator[list[SimulatedGroup]]:
    """Yield the groups of one step after another. Each step has all lengths of the distribution, shuffled over its
    groups.
    """
    shuffled = lengths.of(schedule.prompts * schedule.group_size)
    order = random.Random(0)
    while True:
        order.shuffle(shuffled)
        groups = [SimulatedGroup() for _ in range(schedule.prompts)]
        for index, length in enumerate(shuffled):
            group = groups[index // schedule.group_size]
            group.responses.append(Response(length, group))
        yield groups


def run_phase(
    engines: Engines,
    prompt: float,
    groups: Sequence[SimulatedGroup],
    step: int,
    *,
    wanted: float = math.inf,
    needed: Collection[SimulatedGroup] = (),
    until: float = math.inf,
) -> float:
    """Decode the groups until `wanted` of them and all `needed` ones are complete, or until `until` seconds; return the
    seconds.
    """
    for group in groups:
        group.num_open = len(group.opened())
    opened = [group for group in groups if group.num_open]
    missing, unmet = wanted - (len(groups) - len(opened)), {group for group in needed if group.num_open}
    if missing <= 0 and not unmet:
        return 0.0
    queue = deque(opened)
    servers = [_Server(engines, prompt, share=-(-len(opened) // engines.count)) for _ in range(engines.count)]
    events: list[tuple[float, int]] = []  # next end of a response, per server

    def refill(index: int) -> None:
        servers[index].take(queue)
        if servers[index].live:
            heappush(events, (servers[index].next_end(), index))

    for index in range(len(servers)):
        refill(index)
    now = 0.0
    while events and events[0][0] <= until:
        now, index = heappop(events)
        whole = servers[index].advance()
        missing -= len(whole)
        unmet.difference_update(whole)
        if missing <= 0 and not unmet:
            break
        refill(index)
    else:
        now = until if events else now
    for server in servers:
        server.stop(now)
    for group in opened:
        if group.first_step is None and any(response.decoded for response in group.responses):
            group.first_step = step
    return now


class _Server:
    """One engine during one phase."""

    def __init__(self, engines: Engines, prompt: float, share: int) -> None:
        """`share`: largest number of groups that it holds at once."""
        self.live: list[tuple[int, int, Response]] = []  # a heap, ordered by the step in which a response ends
        self._engines, self._prompt, self._share = engines, prompt, share
        self._waiting: deque[Response] = deque()
        self._now, self._step, self._num_groups, self._num_taken = 0.0, 0, 0, 0
        self._context = 0.0  # tokens of all live responses, prompts included

    def take(self, queue: deque[SimulatedGroup]) -> None:
        """Start as many responses as can be decoded at once, with groups from the queue."""
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
            self._num_taken += 1
            heappush(self.live, (response.before + response.length, self._num_taken, response))

    def next_end(self) -> float:
        return self._now + self._seconds(self.live[0][0] - self._step)

    def advance(self) -> list[SimulatedGroup]:
        """Decode until a response ends; return the groups that are now complete."""
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
        """Decode as many steps as fit before `now`."""
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
        """Return the time of `steps` steps of the live sequences. Each step makes every context one token longer."""
        count, per_context = len(self.live), self._engines.per_context
        contexts = steps * self._context + count * steps * (steps - 1) / 2
        return steps * self._engines.steps[count] + per_context * contexts
