"""The order in which samples start, with an engine on a simulated server. Brute force computes the expected start
times.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.rollout import engine
from grpo_mega.rollout.engine import RolloutRequest, Sampling, StopCondition, Usage
from grpo_mega.types import Group, Prompt, Sample, Span
from tests.helpers.simulated_server import Lengths, SimulatedSession, fresh, simulate

LONGEST = 90
IN_ORDER = Sampling(3, 1.0, LONGEST, frozenset())
LONGEST_FIRST = Sampling(3, 1.0, LONGEST, frozenset(), longest_first=True)


def make_prompts(num_groups: int) -> dict[int, Prompt]:
    return {10 + 3 * i: Prompt(i, "", (1, 2), "") for i in range(num_groups)}


def make_lengths(prompts: Mapping[int, Prompt], numbers: random.Random) -> dict[tuple[int, int], int]:
    means = {key: numbers.choice((4, 15, 60)) for key in prompts}
    return {
        (key, i): min(LONGEST, 1 + int(numbers.gammavariate(3, means[key] / 3))) for key in prompts for i in range(3)
    }


def part(prompt: Prompt, index: int, num_tokens: int, is_finished: bool) -> Sample:
    tokens = [7] * num_tokens
    return Sample(prompt, index, tokens, [-1.0] * num_tokens, "stop" if is_finished else None, [Span(0, 0, num_tokens)])


def expected_starts(
    lengths: Lengths, prompts: Mapping[int, Prompt], earlier: Mapping[int, Group], slots: int
) -> dict[tuple[int, int], int]:
    """Return the start time of each sample. If a slot is free, select the next sample from scratch."""
    known = {key: {s.index: s for s in earlier[key].samples} if key in earlier else {} for key in prompts}
    opened = [(k, i) for k in prompts for i in range(3) if i not in known[k] or known[k][i].finish_reason is None]
    finished = {key: [s.response_len for s in known[key].values() if s.finish_reason] for key in prompts}
    unfinished = {(key, i) for key in prompts for i, s in known[key].items() if s.finish_reason is None}
    start_times: dict[tuple[int, int], int] = {}
    running: list[tuple[int, int, int]] = []
    now = 0

    def urgency(one: tuple[int, int]) -> tuple[bool, int]:
        key = one[0]
        needs_probe = not finished[key] and not any((key, i) in start_times for i in range(3))
        is_long = not finished[key] or any((key, i) in unfinished for i in range(3))
        return needs_probe, LONGEST if is_long else max(finished[key])

    while opened or running:
        while opened and len(running) < slots:
            one = max(opened, key=urgency)  # the first of equal samples
            opened.remove(one)
            start_times[one] = now
            there = known[one[0]].get(one[1])
            heapq.heappush(running, (now + lengths[one] - (there.response_len if there else 0), *one))
        now, key, index = heapq.heappop(running)
        finished[key].append(lengths[key, index])
        unfinished.discard((key, index))
    return start_times


@pytest.mark.parametrize("slots", [1, 4, 7, 40])
def test_probes_start_first_and_then_samples_of_the_longest_groups(slots: int) -> None:
    for seed in range(30):
        numbers = random.Random(seed)
        prompts = make_prompts(numbers.randrange(1, 12))
        lengths = make_lengths(prompts, numbers)
        earlier = {}
        for key, prompt in prompts.items():
            parts = [part(prompt, 0, lengths[key, 0], True), part(prompt, 2, lengths[key, 2] // 2, False)]
            chosen = [s for s in parts if s.response_len and numbers.random() < 0.25]
            earlier |= {key: Group(prompt, chosen)} if chosen else {}
        session = SimulatedSession(lengths)
        groups = simulate(session, RolloutRequest(fresh(prompts) | earlier, LONGEST_FIRST, step=0), slots)
        assert session.begun_at == expected_starts(lengths, prompts, earlier, slots)
        assert session.most_at_once <= slots
        assert sorted(groups) == sorted(prompts)
        for key, group in groups.items():
            assert [(s.index, s.response_len) for s in group.samples] == [(i, lengths[key, i]) for i in range(3)]
            assert all(s.is_finished for s in group.samples)


def test_without_longest_first_samples_start_in_the_order_of_groups() -> None:
    prompts = make_prompts(8)
    lengths = make_lengths(prompts, random.Random(1))
    session = SimulatedSession(lengths)
    simulate(session, RolloutRequest(fresh(prompts), IN_ORDER, step=0), slots=7)
    free, start_times = [0] * 7, {}
    for one, length in lengths.items():
        start_times[one] = free[0]
        heapq.heapreplace(free, free[0] + length)
    assert session.begun_at == start_times and session.most_at_once == 7


@pytest.mark.parametrize("wanted", [1, 2, 4])
def test_requests_of_aborted_groups_end_and_only_whole_groups_count(wanted: int) -> None:
    """One request of the group may be aborted before samples of the other end, so the group may have a full number of
    samples."""
    cases = 0
    for seed in range(60):
        numbers = random.Random(seed)
        prompts = make_prompts(6)
        lengths = make_lengths(prompts, numbers)
        groups: dict[int, Group] = {}
        heard: list[Sample] = []
        whole: list[Group] = []

        def hear(sample: Sample, group: Group, heard: list[Sample] = heard, whole: list[Group] = whole) -> None:
            heard.append(sample)
            whole += [group] if len(group.samples) == 3 else []
            assert all(one.is_finished for one in group.samples)

        for phase in itertools.count():
            todo = {key: group for key, group in (fresh(prompts) | groups).items() if not group.is_complete(3)}
            if not todo:
                break
            stop = StopCondition(Rendezvous(HashStore(), 0, 1), wanted) if len(todo) > wanted else None
            session = SimulatedSession(lengths)
            found = simulate(session, RolloutRequest(todo, LONGEST_FIRST, 0, hear, stop), slots=5)
            assert not session.is_aborting and phase < 20
            done = {key for key, group in found.items() if group.is_complete(3)}
            assert done == (set(stop.clocks) if stop else set(todo))
            for key, group in found.items():
                before = {s.index: s.response_len for s in groups[key].samples} if key in groups else {}
                there = {s.index: s.response_len for s in group.samples}
                assert all(there[index] >= length for index, length in before.items())
                assert all(there.values()) and len(there) == len(group.samples)
            cases += sum(len(group.samples) == 3 and key not in done for key, group in found.items())
            groups |= found
        assert sorted(lengths.values()) == sorted(s.response_len for s in heard)
        assert len(whole) == 6
    assert cases, "the test has become too easy"


def test_an_engine_takes_more_groups_when_none_of_its_share_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = make_prompts(10)
    lengths = make_lengths(prompts, random.Random(4))
    taken: list[int] = []
    session = SimulatedSession(lengths)
    fetch_add = Rendezvous.fetch_add

    def watched(rendezvous: Rendezvous, counter: str) -> int:
        taken.append(len([1 for _, index in session.begun_at if index]))  # started samples that are not probes
        return fetch_add(rendezvous, counter)

    monkeypatch.setattr(Rendezvous, "fetch_add", watched)
    simulate(session, RolloutRequest(fresh(prompts), LONGEST_FIRST, step=0), slots=4, num_engines=2)
    assert taken[:5] == [0] * 5 and 0 < taken[5] <= taken[9] < taken[10]
    first = list(prompts)[:5]
    assert max(session.begun_at[key, 0] for key in first) <= min(session.begun_at[key, 1] for key in first)


@pytest.mark.parametrize("slots", [4, 7, 100])
def test_the_seconds_of_running_samples_are_counted(monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    prompts = make_prompts(10)
    lengths = make_lengths(prompts, random.Random(4))
    session = SimulatedSession(lengths)
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: session.now))  # a token takes a second
    request = RolloutRequest(fresh(prompts), IN_ORDER, step=0)
    simulate(session, request, slots)
    assert request.usage == Usage(sum(lengths.values()), session.most_at_once, 0, 30)


def test_long_samples_that_come_last_no_longer_last_alone() -> None:
    prompts = make_prompts(12)
    lengths = {(key, i): LONGEST if key == max(prompts) else 10 + i for key in prompts for i in range(3)}
    sessions = {sampling: SimulatedSession(lengths) for sampling in (IN_ORDER, LONGEST_FIRST)}
    for sampling, session in sessions.items():
        simulate(session, RolloutRequest(fresh(prompts), sampling, step=0), slots=6)
    assert sessions[IN_ORDER].now >= LONGEST + 55 and sessions[LONGEST_FIRST].now <= LONGEST + 35
