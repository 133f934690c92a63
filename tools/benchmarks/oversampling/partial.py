"""Alternate steps with partial rollouts and phases of the same size that run to the end. The weights do not change.

So a continued response must equal the response that is generated in one go, because both use the same random stream.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from grpo_mega.rollout.backlog import Backlog
from grpo_mega.rollout.engine import Engine, Sampling
from grpo_mega.rollout.phase import Generator
from grpo_mega.types import Group, Prompt, Turn

PROMPT_LENGTH, VOCAB = 16, 256


class Partial:
    def __init__(self, engine: Engine, generator: Generator, sampling: Sampling, wanted: int, num_started: int) -> None:
        self.engine, self.generator, self.sampling, self.wanted, self.num_started = (
            engine,
            generator,
            sampling,
            wanted,
            num_started,
        )
        self.seconds = self.turns = 0.0  # last phase: wall time, and decoding steps

    def measure(self, num_steps: int, max_staleness: int) -> dict[str, Any]:
        backlog, trained, whole = Backlog(), list[Group](), list[Group]()
        seconds, turns = {"plain": 0.0, "partial": 0.0}, {"plain": 0.0, "partial": 0.0}
        for step in range(num_steps):
            self.engine.version = step
            backlog = backlog.without_stale(step - max_staleness).drawn_up_to(self.num_started, self.draw, ())
            kept, backlog = self.phase(backlog, self.num_started, self.wanted, step, max_staleness)
            trained += kept
            seconds["partial"] += self.seconds
            turns["partial"] += self.turns
            turns_of_step = self.draw(step)
            fresh = Backlog().drawn_up_to(1, lambda _: turns_of_step, ())  # noqa: B023
            plain, _ = self.phase(fresh, self.wanted, self.wanted, step)
            whole += plain
            seconds["plain"] += self.seconds
            turns["plain"] += self.turns
        thrown_away = sum(n for name, n in backlog.ledger.items() if name.startswith("dropped_tokens"))
        left = sum(bool(group.samples) for group in backlog.groups)
        rest, _ = self.phase(backlog, left, left, num_steps)
        expected = {group.prompt.id: _tokens(group) for group in whole}
        begun_as_drawn = [g for g in (*trained, *rest) if g.oldest_version == (g.prompt.id - 1) // self.wanted]
        assert begun_as_drawn, "no group started in the step of its draw"
        return {
            "gain": round(turns["plain"] / turns["partial"], 3),
            "gain_in_seconds": round(seconds["plain"] / seconds["partial"], 3),
            "thrown_away": round(thrown_away / max(1, backlog.ledger["begun_tokens"]), 4),
            "length_bias": round(_mean_length(trained) / _mean_length([*trained, *rest]) - 1, 4),
            "identical": all(_tokens(g) == expected[g.prompt.id] for g in begun_as_drawn if g.prompt.id in expected),
        }

    def phase(
        self, backlog: Backlog, num_started: int, wanted: int, step: int, max_staleness: int | None = None
    ) -> tuple[list[Group], Backlog]:
        before = backlog.groups[:num_started]
        there = {place: group for place, group in enumerate(before) if group.samples}
        must = backlog.needed(step - max_staleness) if max_staleness is not None else ()
        started_at = time.monotonic()
        found = self.generator.generate(
            [group.prompt for group in before],
            self.sampling,
            step=step,
            on_sample=lambda *_: None,
            wanted=wanted,
            earlier=there,
            needed=must,
        )
        self.seconds = time.monotonic() - started_at
        after = list(before)
        for place, group in (found.mine | found.rest).items():
            after[place] = group
        self.turns = max((_most_new_tokens(now, then) for now, then in zip(after, before, strict=True)), default=0)
        kept = [after[place] for place in found.places]
        rest = [group for place, group in enumerate(after) if place not in found.places]
        return kept, backlog.after_phase(before, kept, rest).trained(kept)

    def draw(self, number: int) -> list[Turn]:
        """Return the prompts of a draw. It has as many as a step trains. Ids are unique and start at 1."""
        numbers = random.Random(number)
        ids = range(1 + number * self.wanted, 1 + (number + 1) * self.wanted)
        return [Turn(Prompt(i, "", tuple(numbers.randrange(VOCAB) for _ in range(PROMPT_LENGTH)), "")) for i in ids]


def _most_new_tokens(now: Group, then: Group) -> int:
    lengths = {sample.index: sample.response_len for sample in then.samples}
    return max((sample.response_len - lengths.get(sample.index, 0) for sample in now.samples), default=0)


def _tokens(group: Group) -> list[list[int]]:
    return [list(sample.response_ids) for sample in group.samples]


def _mean_length(groups: Sequence[Group]) -> float:
    return statistics.fmean(sample.response_len for group in groups for sample in group.samples)
