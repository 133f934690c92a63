"""Alternate steps with partial rollouts and phases of the same size that run to the end. The weights do not change.

So a continued response must equal the response that is generated in one go, because both use the same random stream.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from torch.distributed import HashStore

from grpo_mega.config import RolloutConfig
from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.observe.timers import Timers
from grpo_mega.rollout.backlog import Backlog
from grpo_mega.rollout.engine import Engine, Sampling
from grpo_mega.rollout.rollouts import Rollouts
from grpo_mega.types import Group, Prompt, Turn

PROMPT_LENGTH, VOCAB = 16, 256


def rollouts_of(engine: Engine, sampling: Sampling, recover: Callable[[int], None], deadline_s: float) -> Rollouts:
    """Return rollouts of one rank that score nothing and keep unfinished groups."""
    rollout = RolloutConfig(partial=True, oversample=2.0, phase_deadline_s=deadline_s)
    config: Any = SimpleNamespace(rollout=rollout, log=SimpleNamespace(progress=False))
    scorer: Any = SimpleNamespace(submit=lambda sample: None, submit_group=lambda samples: None)
    return Rollouts(
        config=config,
        engine=engine,
        recover=recover,
        rendezvous=Rendezvous(HashStore(), 0, 1),
        scorer=scorer,
        sampling=sampling,
        decode=str,
        timers=Timers(),
        warn=print,
        ranks=None,
        raise_on_all_ranks=nullcontext,
    )


class Partial:
    def __init__(self, rollouts: Rollouts, wanted: int, num_started: int) -> None:
        self.rollouts, self.engine, self.wanted, self.num_started = rollouts, rollouts.engine, wanted, num_started
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
        must = backlog.needed(step - max_staleness) if max_staleness is not None else ()
        started_at = time.monotonic()
        found = self.rollouts.generate(before, step, "", wanted=wanted, needed=must)
        self.seconds = time.monotonic() - started_at
        after = list(before)
        for index, group in found.mine.items():
            after[index] = group
        self.turns = max((_most_new_tokens(now, then) for now, then in zip(after, before, strict=True)), default=0)
        kept = [after[index] for index in found.kept]
        rest = [group for index, group in enumerate(after) if index not in found.kept]
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
