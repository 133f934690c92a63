"""Generation as the plan simulates it, against a token-by-token simulation and arithmetic by hand; and response
lengths.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from grpo_mega import types
from grpo_mega.cli.planner import generation
from grpo_mega.cli.planner.generation import (
    Engines,
    Lengths,
    Response,
    SimulatedGroup,
    StepGroups,
    assumed_lengths,
    mean_wait,
    read_lengths,
    run_phase,
)
from grpo_mega.errors import ConfigError
from grpo_mega.rollout.backlog import Backlog

PROMPT = 7.0


def groups_of(lengths: list[list[int]], decoded: list[list[int]]) -> list[SimulatedGroup]:
    groups = []
    for sizes, num_started in zip(lengths, decoded, strict=True):
        group = SimulatedGroup()
        group.responses += [Response(length, group, done) for length, done in zip(sizes, num_started, strict=True)]
        groups.append(group)
    return groups


@dataclass
class Machine:
    """An engine of the slow simulation: its responses, and the current time."""

    now: float = 0.0
    live: list[tuple[int, int]] = field(default_factory=list)  # (group, response)
    waiting: list[tuple[int, int]] = field(default_factory=list)
    groups: set[int] = field(default_factory=set)


def token_by_token(
    engines: Engines, lengths: list[list[int]], decoded: list[list[int]], wanted: float, needed: set[int], until: float
) -> tuple[float, list[list[int]]]:
    """Simulate one token of each live response at a time. Return the end of the phase, and the length of each
    response.
    """
    done = [row[:] for row in decoded]

    def is_whole(g: int) -> bool:
        return done[g] == lengths[g]

    def is_over() -> bool:
        return sum(map(is_whole, range(len(lengths)))) >= wanted and all(map(is_whole, needed))

    if is_over():
        return 0.0, done
    queue = [g for g in range(len(lengths)) if not is_whole(g)]
    share = math.ceil(len(queue) / engines.count)
    machines = [Machine() for _ in range(engines.count)]

    def fill(machine: Machine) -> None:
        if engines.in_batches and machine.live:
            return
        while queue and len(machine.groups) < share and len(machine.live) + len(machine.waiting) < engines.concurrent:
            g = queue.pop(0)
            machine.groups.add(g)
            machine.waiting += [(g, i) for i in range(len(lengths[g])) if done[g][i] < lengths[g][i]]
            machine.now += PROMPT * engines.per_prefill
        while machine.waiting and len(machine.live) < engines.concurrent:
            g, i = machine.waiting.pop(0)
            machine.live.append((g, i))
            machine.now += done[g][i] * engines.per_prefill

    def next_token(machine: Machine) -> float:
        if not machine.live:
            return math.inf
        context = sum(PROMPT + done[g][i] for g, i in machine.live)
        return machine.now + engines.steps[len(machine.live)] + engines.per_context * context

    for machine in machines:
        fill(machine)
    while True:
        machine = min(machines, key=next_token)
        time = next_token(machine)
        if time > until or time == math.inf:
            return (until if time < math.inf else max(m.now for m in machines)), done
        machine.now = time
        for g, i in machine.live:
            done[g][i] += 1
        machine.live = [(g, i) for g, i in machine.live if done[g][i] < lengths[g][i]]
        machine.groups = {g for g in machine.groups if not is_whole(g)}
        if is_over():
            for other in machines:  # tokens at the same moment count too
                while other is not machine and next_token(other) <= time:
                    other.now = next_token(other)
                    for g, i in other.live:
                        done[g][i] += 1
                    other.live = [(g, i) for g, i in other.live if done[g][i] < lengths[g][i]]
            return time, done
        fill(machine)


@pytest.mark.parametrize("seed", range(60))
def test_a_phase_equals_a_token_by_token_simulation(seed: int) -> None:
    """All times are whole numbers, so both simulations are exact."""
    draw = random.Random(seed)
    count, group = draw.randint(1, 17), draw.choice([1, 3, 5])
    lengths = [[draw.choice([draw.randint(1, 9), draw.randint(1, 60)]) for _ in range(group)] for _ in range(count)]
    decoded = [[draw.choice([0, 0, draw.randint(0, n)]) for n in row] for row in lengths]
    concurrent = draw.randint(1, 9)
    engines = Engines(
        count=draw.randint(1, 4),
        concurrent=concurrent,
        in_batches=draw.random() < 0.3,
        steps=tuple(float(1000 + 30 * n + 7 * n * n) for n in range(concurrent + 1)),
        per_context=float(draw.choice([0, 1, 5])),
        per_prefill=float(draw.choice([0, 3])),
    )
    wanted = draw.choice([math.inf, draw.randint(1, count)])
    needed = set(draw.sample(range(count), draw.choice([0, min(2, count)])))
    until = draw.choice([math.inf, math.inf, float(draw.randint(1, 60_000))])
    groups = groups_of(lengths, decoded)
    seconds = run_phase(
        engines, PROMPT, groups, step=4, wanted=wanted, needed=[groups[index] for index in needed], until=until
    )
    slow_seconds, slow_done = token_by_token(engines, lengths, decoded, wanted, needed, until)
    assert seconds == slow_seconds
    assert [[response.decoded for response in one.responses] for one in groups] == slow_done


def wait(lengths: Lengths, schedule: StepGroups, training: float = 0.0, count: int = 1, concurrent: int = 4) -> float:
    """Simulate engines that take a second per token for any number of responses."""
    engines = Engines(count, concurrent, in_batches=False, steps=(1.0,) * 100, per_context=0.0, per_prefill=0.0)
    return mean_wait(engines, lengths, 5.0, schedule, training)


ALL_EQUAL = Lengths((0.0, 1.0), (30.0, 30.0))
ONE_LONG = Lengths((0.0, 0.875, 0.875, 1.0), (10.0, 10.0, 90.0, 90.0))  # one of eight is nine times as long


def test_a_trainer_waits_only_for_generation_that_training_does_not_hide() -> None:
    """Eight responses of 30 tokens in four slots take 60 seconds per step, at any time."""
    in_turns = StepGroups(8, 1, num_started=8, ahead=0, keeps_unfinished=False, max_staleness=0)
    ahead = StepGroups(8, 1, num_started=16, ahead=8, keeps_unfinished=True, max_staleness=1)
    assert wait(ALL_EQUAL, in_turns) == 60
    assert [wait(ALL_EQUAL, ahead, training) for training in (0.0, 15.0, 45.0, 60.0, 200.0)] == [60, 45, 15, 0, 0]


def test_partial_rollouts_fill_the_tail_and_staleness_bounds_it() -> None:
    """With eight slots a step that waits for all responses takes 90 seconds; its tokens fill 20 seconds of full
    batches.
    """
    whole = StepGroups(8, 1, num_started=8, ahead=0, keeps_unfinished=False, max_staleness=0)
    assert wait(ONE_LONG, whole, concurrent=8) == 90
    waits = {
        staleness: wait(
            ONE_LONG, StepGroups(8, 1, 16, 0, keeps_unfinished=True, max_staleness=staleness), concurrent=16
        )
        for staleness in (1, 2, 30)
    }
    # There is at most one long response at once. It ends in the step before it would be too old.
    assert waits[1] > waits[2] > waits[30]
    assert waits[30] == pytest.approx(10, abs=1)  # seven short responses, and one of the old ones, end in 10 seconds
    assert waits[1] == pytest.approx(45, abs=6)  # two steps share its 90 seconds


def test_equal_arguments_give_equal_times_despite_other_random_draws() -> None:
    schedule = StepGroups(16, 3, num_started=20, ahead=0, keeps_unfinished=True, max_staleness=2)
    lengths = assumed_lengths(40, 400)
    first = wait(lengths, schedule)
    random.seed(5)
    mean_wait.cache_clear()
    assert wait(lengths, schedule) == first


def test_lengths_have_the_given_percentiles_up_to_the_longest() -> None:
    lengths = read_lengths("p50=700,p90=3000,p99.5=12000", 8000)
    drawn = lengths.of(2000)
    assert [drawn[999], drawn[1799], drawn[1989], drawn[1999]] == [700, 2999, pytest.approx(8000, abs=90), 8000]
    assert drawn[0] == 1 and drawn == sorted(drawn)


def test_lengths_of_an_earlier_run_equal_its_samples(tmp_path: Path) -> None:
    rows = [{"rollout_logprobs": [0.0] * n} for n in (3, 50, 7, 1200, 9)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"half')
    for path in (tmp_path, tmp_path / "samples.jsonl"):
        assert read_lengths(str(path), 1000).of(5) == [3, 7, 9, 50, 1000]


@pytest.mark.parametrize(("mean", "longest"), [(300, 4096), (1536, 3072), (2900, 3072)])
def test_assumed_lengths_have_the_mean_that_is_given(mean: int, longest: int) -> None:
    drawn = assumed_lengths(mean, longest).of(20_000)
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.003)
    assert drawn[-1] == pytest.approx(longest, rel=0.01)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("p50=700,p90", "must be percentiles like"),
        ("p50=700,p101=9", "must be percentiles like"),
        ("p50=700,p90=300", "grow with the percentile"),
        ("p0=0,p50=3", "at least 1 token"),
        ("/none", "cannot read /none/samples.jsonl|cannot read /none"),
    ],
)
def test_invalid_lengths_are_refused_with_the_remedy(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_lengths(text, 1000)


def after(group: types.Group, lengths: list[int], done: list[int], step: int) -> types.Group:
    """Return the group of a run that has `done` tokens of each sample. Policy `step` made the new tokens."""
    before = {sample.index: sample for sample in group.samples}
    samples = []
    for index, (length, tokens) in enumerate(zip(lengths, done, strict=True)):
        old = before.get(index)
        start = old.response_len if old else 0
        spans = [*(old.spans if old else ()), *([types.Span(step, start, tokens)] if tokens > start else [])]
        reason: types.FinishReason | None = "stop" if tokens == length else None
        if tokens:
            samples.append(types.Sample(group.prompt, index, [0] * tokens, [0.0] * tokens, reason, spans))
    return types.Group(group.prompt, samples)


@pytest.mark.parametrize(
    ("num_started", "ahead", "staleness"), [(7, 0, 1), (9, 0, 3), (16, 0, 1), (10, 5, 1), (15, 10, 2), (20, 3, 2)]
)
def test_steps_continue_the_groups_of_a_runs_backlog(num_started: int, ahead: int, staleness: int) -> None:
    """The backlog is the trainer's. Its phases are simulated token by token."""
    wanted, size, training = 5, 3, 9000.0
    distribution = Lengths((0.0, 0.9, 1.0), (1.0, 12.0, 150.0))
    schedule = StepGroups(wanted, size, num_started, ahead, keeps_unfinished=True, max_staleness=staleness)
    engines = Engines(2, 6, False, tuple(1000.0 + 50 * n for n in range(7)), 2.0, 1.0)
    draws = generation._draws(distribution, schedule)
    lengths: dict[int, list[int]] = {}

    def draw(number: int) -> list[types.Turn]:
        new = {len(lengths) + index: [r.length for r in group.responses] for index, group in enumerate(next(draws))}
        lengths.update(new)
        return [types.Turn(types.Prompt(key, "", (), "")) for key in new]

    def phase(groups: Sequence[types.Group], step: int, wanted: float, needed: set[int], until: float) -> Any:
        sizes = [lengths[group.prompt.id] for group in groups]
        had = [{sample.index: sample.response_len for sample in group.samples} for group in groups]
        decoded = [[there.get(index, 0) for index in range(size)] for there in had]
        seconds, done = token_by_token(engines, sizes, decoded, wanted, needed, until)
        return seconds, [after(*row, step) for row in zip(groups, sizes, done, strict=True)]

    backlog, waits = Backlog(), []
    for step in range(generation.NUM_AVERAGED_STEPS + 1 + staleness):
        oldest = step - staleness
        backlog = backlog.without_stale(oldest).drawn_up_to(num_started, draw, ())
        needed = backlog.needed(oldest)
        before = backlog.groups[: max(num_started, 1 + max(needed, default=-1))]
        seconds, now = phase(before, step, wanted, set(needed), math.inf)
        waits.append(seconds)
        whole = [index for index, group in enumerate(now) if group.is_complete(size)]
        kept = sorted(whole, key=lambda index: (index not in needed, now[index].oldest_version, index))[:wanted]
        rest = [group for index, group in enumerate(now) if index not in kept]
        backlog = backlog.after_phase(before, [now[index] for index in kept], rest)
        backlog = backlog.trained([now[index] for index in kept])
        if ahead:
            before = backlog.groups[:ahead]
            backlog = backlog.after_phase(before, [], phase(before, step, math.inf, set(), training)[1])
    expected = sum(waits[-generation.NUM_AVERAGED_STEPS :]) / generation.NUM_AVERAGED_STEPS
    assert mean_wait(engines, distribution, PROMPT, schedule, training if ahead else 0.0) == pytest.approx(
        expected, abs=0
    )
