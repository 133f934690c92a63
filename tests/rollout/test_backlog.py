"""The backlog of partial rollouts: drawing, continuing, restarting and counting groups, and its file in a
checkpoint.
"""

from __future__ import annotations

import math
import random
from array import array
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_mega.rollout.backlog import Backlog, arrays_of, fields_of, pack_groups, unpack
from grpo_mega.types import Context, Group, Prompt, PromptDraw, Sample, Span

PROMPTS = [Prompt(id=3 * i, text=f"p{i}\u2028\ud800", token_ids=(i, 7, 70_000 + i), answer="") for i in range(12)]
SIZE = 3


def sample(prompt: Prompt, index: int, *spans: tuple[int, int], finished: bool = True) -> Sample:
    """Return a sample. `spans` has the version and number of tokens of each span."""
    numbers, made, end = random.Random(prompt.id * 10 + index), list[Span](), 0
    for version, length in spans:
        made.append(Span(version, end, end + length))
        end += length
    ids = array("i", (numbers.randrange(1 << 17) for _ in range(end)))
    logprobs = array("f", (-numbers.random() * 20 for _ in range(end)))
    return Sample(prompt, index, ids, logprobs, "stop" if finished else None, made)


def group(place: int, *spans: tuple[int, int], finished: bool = True) -> Group:
    return Group(PROMPTS[place], [sample(PROMPTS[place], i, *spans, finished=finished or i > 0) for i in range(SIZE)])


def draw(number: int) -> list[PromptDraw]:
    """Draw four prompts at a time, repeating; an epoch has three draws."""
    return [PromptDraw(PROMPTS[(4 * number + i) % len(PROMPTS)], 0, number // 3) for i in range(4)]


def ids(backlog: Backlog) -> list[int]:
    return [one.prompt.id // 3 for one in backlog.groups]


def test_prompts_are_drawn_in_order_without_repeats_until_there_are_enough() -> None:
    first = Backlog().drawn_up_to(5, draw, ())
    assert (ids(first), first.draws) == (list(range(8)), 2)
    assert first.drawn_up_to(8, draw, ()) == first
    assert ids(first.drawn_up_to(9, draw, {27, 30})) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 11]
    everything = first.drawn_up_to(99, draw, ())
    assert ids(everything) == list(range(12)) and everything.draws == 3  # more draws would return known prompts
    assert Backlog(draws=7).drawn_up_to(1, draw, {prompt.id for prompt in PROMPTS}) == Backlog(draws=7)


def deferred(backlog: Backlog) -> list[tuple[int, int]]:
    return [(turn.prompt.id // 3, turn.epoch) for turn in backlog.deferred]


def test_a_prompt_that_is_not_free_is_deferred_and_comes_first_later() -> None:
    held = Backlog(draws=3, groups=(group(1, (0, 2)), group(2, (0, 2))))
    after = held.drawn_up_to(4, draw, {9})
    assert (ids(after), deferred(after), after.draws) == ([1, 2, 0, 4, 5, 6, 7], [(1, 1), (2, 1), (3, 1)], 5)
    assert after.ledger["deferred_prompts"] == 3
    assert after.needed(oldest=-1) == [0, 1]  # indices of groups whose prompts have a deferred turn
    free = replace(after, groups=after.groups[3:])
    later = free.drawn_up_to(6, draw, ())
    assert (ids(later), deferred(later), later.draws) == ([4, 5, 6, 7, 1, 2], [(3, 1)], 5)  # no more than requested
    assert later.ledger["deferred_prompts"] == 3
    last = later.drawn_up_to(8, draw, ())
    assert (ids(last), deferred(last), last.draws) == ([4, 5, 6, 7, 1, 2, 3, 8, 9, 10, 11], [], 6)


def test_no_turn_starts_two_epochs_after_a_deferred_one() -> None:
    backlog, held = Backlog(), group(0, (0, 2))
    for _ in range(12):
        backlog = replace(backlog, groups=(held,)).drawn_up_to(4, draw, ())
        earlier = [place for place in ids(backlog) if place != 0]
    assert earlier == [] and backlog.draws == 6  # epochs 0 and 1 are drawn, and the turn of epoch 0 is still deferred
    assert deferred(backlog) == [(0, 0), (0, 1)]
    freed = replace(backlog, groups=()).drawn_up_to(4, draw, ())
    assert ids(freed)[0] == 0 and len(freed.groups) >= 4


def test_each_data_set_has_separate_epochs() -> None:
    def of_two_sets(number: int) -> list[PromptDraw]:
        """The first set has one prompt, so each draw is an epoch; the second set is large."""
        return [PromptDraw(PROMPTS[0], 0, number), PromptDraw(PROMPTS[1 + number % 11], 1, number // 11)]

    held = Backlog(groups=(group(0, (0, 2)),))
    found = held.drawn_up_to(9, of_two_sets, ())
    assert ids(found) == [0, 1, 2, 3] and deferred(found) == [(0, 0), (0, 1), (0, 2)]


def test_a_group_is_needed_before_it_is_too_old_or_restarts_in_place() -> None:
    groups = (
        group(0, (4, 2), (6, 1), finished=False),
        group(1, (5, 9), finished=False),
        group(2, (6, 2)),
        Group(PROMPTS[3], []),
    )
    ledger = Backlog().after_phase([Group(g.prompt, []) for g in groups], [], groups).ledger
    backlog = Backlog(2, groups, ledger)
    assert (backlog.needed(4), backlog.needed(5), backlog.needed(3)) == ([0], [1], [])
    assert backlog.without_stale(4) == backlog
    again = backlog.without_stale(6)
    assert ids(again) == [0, 1, 2, 3] and [bool(g.samples) for g in again.groups] == [False, False, True, False]
    assert again.metrics(SIZE) == {
        "ledger/begun_groups": 3.0,
        "ledger/begun_tokens": 42.0,
        "ledger/carried_groups": 0.0,
        "ledger/carried_tokens": 0.0,
        "ledger/deferred_prompts": 0.0,
        "ledger/dropped_groups/stale": 2.0,
        "ledger/dropped_tokens/stale": 36.0,
        "ledger/trained_groups": 0.0,
        "ledger/trained_tokens": 0.0,
        "ledger/waiting_groups": 1.0,
        "ledger/waiting_tokens": 6.0,
    }


def test_the_ledger_closes_after_any_phases_and_an_error_is_reported() -> None:
    numbers = random.Random(1)
    backlog, trained = Backlog(), 0
    for step in range(40):
        backlog = backlog.without_stale(step - 2).drawn_up_to(6, draw, ())
        before = backlog.groups[:6]
        after = [grown(g, step, numbers) for g in before]
        kept = [g for g in after if g.is_complete(SIZE)][:3]
        backlog = backlog.after_phase(before, kept, [g for g in after if g not in kept])
        backlog = backlog.dropped("equal_rewards", kept[2:]).trained(kept[:2])
        trained += sum(s.response_len for g in kept[:2] for s in g.samples)
        found = backlog.metrics(SIZE)
        assert found["ledger/trained_tokens"] == trained
        assert found["ledger/carried_tokens"] + found["ledger/waiting_tokens"] == sum(
            g.num_tokens for g in backlog.groups
        )
    assert trained and found["ledger/dropped_tokens/stale"] and found["ledger/dropped_tokens/equal_rewards"]
    with pytest.raises(AssertionError, match="does not add up"):
        replace(backlog, groups=backlog.groups[1:]).metrics(SIZE)


def grown(one: Group, step: int, numbers: random.Random) -> Group:
    """Return the group with up to three more tokens per sample."""
    samples = []
    for index in range(SIZE):
        before = next((s for s in one.samples if s.index == index), None)
        spans = [(span.version, span.end - span.start) for span in before.spans] if before else []
        more = 0 if before and before.is_finished else numbers.randrange(4)
        if more or before:
            is_finished = numbers.random() < 0.5 if not (before and before.is_finished) else True
            samples.append(sample(one.prompt, index, *spans, *([(step, more)] if more else []), finished=is_finished))
    return Group(one.prompt, samples)


def write(backlog: Backlog, folder: Path) -> None:
    for name, content in backlog.files().items():
        (folder / name).write_bytes(content)


def test_a_written_backlog_is_read_back_to_the_bit(tmp_path: Path) -> None:
    scored = group(5, (1, 4), (2, 3))
    scored.samples[1] = replace(
        scored.samples[1], scores={"a": None, "b": 0.1 + 0.2}, verdicts={"a": "timeout"}, reward=None, step_ends=[0, 2]
    )
    scored.samples[2] = replace(scored.samples[2], reward=math.pi, step_rewards=[1e-300])
    groups = (group(2, (0, 5), finished=False), scored, Group(PROMPTS[0], []))
    waiting = (PromptDraw(PROMPTS[2], 0, 4), PromptDraw(PROMPTS[7], 1, 3), PromptDraw(PROMPTS[2], 0, 5))
    backlog = Backlog(9, groups, deferred=waiting)
    backlog = backlog.after_phase([Group(g.prompt, []) for g in groups], [], groups).trained([])
    write(backlog, tmp_path)
    prompts = {prompt.id: prompt for prompt in PROMPTS}
    assert Backlog.read(tmp_path, 9, prompts.get) == backlog


def test_conversations_are_stored_and_exchanged_to_the_bit(tmp_path: Path) -> None:
    one = group(5, (1, 9))
    first, second, third = one.samples
    first = replace(first, sampled=((0, 2), (3, 5), (6, 9)), finish_reason="turns", step_ends=[1, 4])
    first = replace(first, contexts=(Context(3, (4, 70_001)), Context(6, (5, 6, 7))), step_rewards=[0.5, -1.0])
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"b": 1, "a": "é"}}]}]
    first = replace(first, messages=messages)
    third = replace(third, messages=[], contexts=(Context(0, (8,)),), finish_reason="deadline")
    conversations = Group(one.prompt, [first, second, third])
    backlog = Backlog(9, (conversations, group(2, (0, 5))))
    backlog = backlog.after_phase([Group(g.prompt, []) for g in backlog.groups], [], backlog.groups)
    write(backlog, tmp_path)
    assert Backlog.read(tmp_path, 9, {prompt.id: prompt for prompt in PROMPTS}.get) == backlog
    sent = dict(enumerate(backlog.groups))
    parts = [memoryview(pack_groups(sent)), memoryview(b"")]
    assert unpack(parts, {key: one.prompt for key, one in sent.items()}, ()) == sent


def test_samples_without_turns_have_the_same_file_as_before() -> None:
    fields = fields_of(sample(PROMPTS[1], 0, (0, 3)))
    assert fields.keys() == {
        *("index", "finish_reason", "scores", "verdicts", "reward", "step_ends", "step_rewards", "length", "spans")
    }
    assert arrays_of([sample(PROMPTS[1], 0, (0, 3))]).keys() == {"tokens", "logprobs"}


def test_groups_of_prompts_removed_from_the_data_are_dropped_and_counted(tmp_path: Path) -> None:
    groups = tuple(group(i, (3, 2)) for i in range(3))
    backlog = Backlog(1, groups).after_phase([Group(g.prompt, []) for g in groups], [], groups)
    turns = tuple(PromptDraw(PROMPTS[i], 0, 1) for i in (0, 1, 2))
    # The last group has not started.
    backlog = replace(backlog, groups=(*groups, Group(PROMPTS[3], [])), deferred=turns)
    write(backlog, tmp_path)
    prompts = {PROMPTS[0].id: replace(PROMPTS[0], token_ids=(1,)), PROMPTS[2].id: PROMPTS[2]}
    found = Backlog.read(tmp_path, 1, prompts.get)
    assert found.groups == groups[2:] and found.deferred == turns[2:]
    assert found.metrics(SIZE)["ledger/dropped_tokens/data_changed"] == 12.0


def test_an_empty_backlog_needs_no_file(tmp_path: Path) -> None:
    write(Backlog(5), tmp_path)
    assert not list(tmp_path.iterdir()) and Backlog.read(tmp_path, 5, lambda _: None) == Backlog(5)


def test_deferred_turns_alone_are_stored(tmp_path: Path) -> None:
    backlog = Backlog(4, deferred=(PromptDraw(PROMPTS[1], 0, 2),))
    write(backlog, tmp_path)
    assert Backlog.read(tmp_path, 4, {PROMPTS[1].id: PROMPTS[1]}.get) == backlog
    write(Backlog(4, ledger=Counter(begun_groups=1)), tmp_path)
    assert Backlog.read(tmp_path, 4, lambda _: None) == Backlog(4, ledger=Counter(begun_groups=1))
