"""Prompts that were drawn, and groups that were begun, but not trained yet; the same on every rank.

Without partial rollouts it is empty between steps, and each rollout draws its prompts. With them (`rollout.partial`; APRIL,
arXiv 2509.18521) a rollout that ends early leaves its other groups here: unfinished ones are continued by the next, with the
policy of then, and whole ones are trained in the next step. So do engine ranks that generate ahead while a step trains
(`rollout.placement=separate`). Groups stand in the order in which they were drawn; old ones go first.

A step trains no group of which a policy older than `max_staleness` versions generated a part: a rollout does not end without
the groups that would be too old for the next. Where that does not suffice, as with more old groups than a step trains, a group
begins again, in its old place.

A prompt that the data's order draws again before its group is trained is deferred: it is drawn once it is free, before any new
prompt. So every prompt gets as many turns as the others, however long its responses are and however small the data set is.

The ledger counts groups and response tokens since the run began: begun = trained + carried + waiting + dropped. It counts
deferred prompts, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from grpo_mega.types import Group, StepMetrics, Turn

UNITS = ("groups", "tokens")


@dataclass(frozen=True)
class Backlog:
    """A value: each method returns another, so that a step that fails leaves the one of the step before."""

    draws: int = 0  # number of batches of prompts that were drawn from the data
    groups: tuple[Group, ...] = ()  # the oldest first; those without samples are drawn and not begun
    ledger: Counter[str] = field(default_factory=Counter)  # "begun_tokens", "trained_groups", "dropped_tokens/REASON", ...
    deferred: tuple[Turn, ...] = ()  # drawn while the prompt was not free; in the order in which they were drawn

    def drawn_up_to(self, num_groups: int, draw: Callable[[int], Sequence[Turn]], seen: Collection[int]) -> Backlog:
        """Return one with at least so many groups, if the data has as many free prompts; `draw(n)` gives those of draw n.

        A prompt is free unless it has a group here, or its id is `seen`. The turns of others are deferred, and come first in
        later calls. Nor does a turn of epoch e + 2 get a group while one of epoch e of its set is deferred: where that leaves
        nothing to draw, fewer groups are returned. Draws without any group are left for later, unless a later draw has one.
        """
        backlog = ahead = replace(self, deferred=())._with_turns(self.deferred, seen, num_groups)
        is_ahead = False
        while len(backlog.groups) < num_groups and not is_ahead:
            turns = draw(ahead.draws)
            is_ahead = any(is_early(turn, ahead.deferred) for turn in turns)
            drawn = ahead._with_turns(turns, seen)
            counted = ahead.ledger + Counter(deferred_prompts=len(drawn.deferred) - len(ahead.deferred))
            drawn = replace(drawn, draws=ahead.draws + 1, ledger=counted)
            if len(drawn.groups) > len(ahead.groups):
                backlog = drawn
            ahead = drawn
        return backlog

    def restarted(self, oldest: int) -> Backlog:
        """Return one in which groups that a policy older than version `oldest` began are not begun."""
        is_stale = [group.begun_by is not None and group.begun_by < oldest for group in self.groups]
        pairs = list(zip(self.groups, is_stale, strict=True))
        fresh = tuple(Group(group.prompt, []) if stale else group for group, stale in pairs)
        return replace(self, groups=fresh).dropped("stale", [group for group, stale in pairs if stale])

    def needed(self, oldest: int) -> list[int]:
        """Return the places of the groups that a rollout must finish: those that the policy of version `oldest` began, which
        the next step may not train, and those that keep a deferred turn waiting, or there would be too few prompts to draw."""
        waited_for = {turn.prompt.id for turn in self.deferred}
        return [p for p, group in enumerate(self.groups) if group.begun_by == oldest or group.prompt.id in waited_for]

    def after_phase(self, before: Sequence[Group], kept: Sequence[Group], rest: Sequence[Group]) -> Backlog:
        """Return one after a phase that was given its first groups, `before`, and returned `kept` and `rest`."""
        ledger = self.ledger.copy()
        after = (*kept, *rest)
        ledger["begun_groups"] += sum(bool(g.samples) for g in after) - sum(bool(g.samples) for g in before)
        ledger["begun_tokens"] += num_tokens(after) - num_tokens(before)
        return replace(self, groups=(*rest, *self.groups[len(before) :]), ledger=ledger)

    def trained(self, groups: Sequence[Group]) -> Backlog:
        return self._counted("trained", "", groups)

    def dropped(self, reason: str, groups: Sequence[Group]) -> Backlog:
        """Count groups that are given up."""
        return self._counted("dropped", f"/{reason}", groups)

    def metrics(self, group_size: int) -> StepMetrics:
        """Return the ledger. Raise AssertionError if it does not close."""
        whole = [group for group in self.groups if group.is_complete(group_size)]
        unfinished = [group for group in self.groups if group.samples and not group.is_complete(group_size)]
        counts = {f"{name}_{unit}": 0 for name in ("begun", "trained") for unit in UNITS} | {"deferred_prompts": 0}
        counts |= self.ledger
        for name, groups in (("carried", unfinished), ("waiting", whole)):
            counts |= {f"{name}_groups": len(groups), f"{name}_tokens": num_tokens(groups)}
        for unit in UNITS:
            parts = [
                n for name, n in counts.items() if name.partition("/")[0].endswith(f"_{unit}") and not name.startswith("begun")
            ]
            assert counts[f"begun_{unit}"] == sum(parts), f"the ledger of partial rollouts does not close: {counts}"
        return {f"ledger/{name}": float(count) for name, count in sorted(counts.items())}

    def _with_turns(self, turns: Sequence[Turn], seen: Collection[int], most: float = math.inf) -> Backlog:
        """Return one with groups for the turns that may have one, up to `most` groups, and with the others deferred."""
        groups, deferred = list(self.groups), list(self.deferred)
        taken = {group.prompt.id for group in groups}.union(seen)
        for turn in turns:
            if len(groups) < most and turn.prompt.id not in taken and not is_early(turn, deferred):
                groups.append(Group(turn.prompt, []))
                taken.add(turn.prompt.id)
            else:
                deferred.append(turn)
        return replace(self, groups=tuple(groups), deferred=tuple(deferred))

    def _counted(self, name: str, reason: str, groups: Sequence[Group]) -> Backlog:
        added = {f"{name}_groups{reason}": len(groups), f"{name}_tokens{reason}": num_tokens(groups)}
        return replace(self, ledger=self.ledger + Counter(added))


NO_BACKLOG = Backlog()


def is_early(turn: Turn, deferred: Iterable[Turn]) -> bool:
    """Return True if a turn of the same set, two epochs or more before this one, is deferred."""
    return any(turn.source == owed.source and turn.epoch >= owed.epoch + 2 for owed in deferred)


def num_tokens(groups: Iterable[Group]) -> int:
    return sum(group.num_tokens for group in groups)
