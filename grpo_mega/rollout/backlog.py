"""The backlog: groups that wait to be finished or trained. It is identical on every rank.

Without partial rollouts the backlog is empty between steps, and each rollout draws its prompts. Partial rollouts
(`rollout.partial`; APRIL, arXiv 2509.18521) stop a rollout early and keep the other groups here. The next rollout
resumes unfinished groups with the updated policy, and the next step trains complete groups. Engine ranks that generate
ahead while a step trains (`rollout.placement=separate`) use the same backlog. Groups keep the order in which they were
drawn, oldest first.

A group is never trained if any of its tokens is from a policy more than `max_staleness` versions old. A rollout
finishes the groups that would be too old for the next step. If there are more such groups than a step trains, a group
restarts from its prompt and keeps its position.

If the data draws a prompt again before its group is trained, the prompt is deferred. It is drawn as soon as it is free,
before any new prompt. So all prompts get equally many turns, however long their responses are and however small the
data set is.

The ledger counts groups and response tokens since the start of the run: started = trained + carried + waiting +
dropped. It also counts deferred prompts.

A checkpoint has the backlog as a file: arrays of the samples (exchange.py), and JSON in the header. A prompt is stored
as its index in the training data and a checksum of its tokens. If the data has another prompt at this index now, its
deferred turns and its group are dropped. The ledger counts the dropped group if it has samples.
"""

from __future__ import annotations

import json
import math
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from safetensors import safe_open
from safetensors.numpy import save

from grpo_mega.rollout.exchange import arrays_of, fields_of, samples_of
from grpo_mega.types import Group, Prompt, StepMetrics, Turn

FILE = "backlog.safetensors"

UNITS = ("groups", "tokens")


@dataclass(frozen=True)
class Backlog:
    """An immutable backlog. Each method returns a new one, so a failed step keeps the backlog of the step before."""

    draws: int = 0  # number of batches of prompts drawn from the data so far
    groups: tuple[Group, ...] = ()  # oldest first; a group without samples has not started yet
    # "begun_tokens", "trained_groups", "dropped_tokens/REASON", ...
    ledger: Counter[str] = field(default_factory=Counter)
    deferred: tuple[Turn, ...] = ()  # turns drawn while their prompt was not free, in the order of drawing

    def drawn_up_to(self, num_groups: int, draw: Callable[[int], Sequence[Turn]], seen: Collection[int]) -> Backlog:
        """Draw prompts until the backlog has `num_groups` groups or the data has no free prompt. `draw(n)` returns draw
        n.

        A prompt is free if it has no group here and its id is not in `seen`. Turns of other prompts are deferred, and
        come first in later calls. A turn of epoch e + 2 gets no group while a turn of epoch e of the same data set is
        deferred. If nothing is left to draw, there are fewer groups. A draw that adds no group is kept for later,
        unless a later draw adds one.
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

    def without_stale(self, oldest: int) -> Backlog:
        """Discard the samples of groups that started before policy version `oldest`. The groups keep their position."""
        is_stale = [group.oldest_version is not None and group.oldest_version < oldest for group in self.groups]
        pairs = list(zip(self.groups, is_stale, strict=True))
        fresh = tuple(Group(group.prompt, []) if stale else group for group, stale in pairs)
        return replace(self, groups=fresh).dropped("stale", [group for group, stale in pairs if stale])

    def needed(self, oldest: int) -> list[int]:
        """Return the positions of the groups that a rollout must finish.

        The next step may not train groups that started with policy version `oldest`. Groups of prompts with a deferred
        turn must finish too, because there would be too few prompts to draw otherwise.
        """
        waited_for = {turn.prompt.id for turn in self.deferred}
        return [
            p for p, group in enumerate(self.groups) if group.oldest_version == oldest or group.prompt.id in waited_for
        ]

    def after_phase(self, before: Sequence[Group], kept: Sequence[Group], rest: Sequence[Group]) -> Backlog:
        """Update groups and ledger after a phase that took the first groups, `before`, and returned `kept` and
        `rest`.
        """
        ledger = self.ledger.copy()
        after = (*kept, *rest)
        ledger["begun_groups"] += sum(bool(g.samples) for g in after) - sum(bool(g.samples) for g in before)
        ledger["begun_tokens"] += num_tokens(after) - num_tokens(before)
        return replace(self, groups=(*rest, *self.groups[len(before) :]), ledger=ledger)

    def trained(self, groups: Sequence[Group]) -> Backlog:
        """Count groups that were trained."""
        return self._counted("trained", "", groups)

    def dropped(self, reason: str, groups: Sequence[Group]) -> Backlog:
        """Count groups that were dropped."""
        return self._counted("dropped", f"/{reason}", groups)

    def metrics(self, group_size: int) -> StepMetrics:
        """Return the ledger. Raise AssertionError if its counts do not add up."""
        whole = [group for group in self.groups if group.is_complete(group_size)]
        unfinished = [group for group in self.groups if group.samples and not group.is_complete(group_size)]
        counts = {f"{name}_{unit}": 0 for name in ("begun", "trained") for unit in UNITS} | {"deferred_prompts": 0}
        counts |= self.ledger
        for name, groups in (("carried", unfinished), ("waiting", whole)):
            counts |= {f"{name}_groups": len(groups), f"{name}_tokens": num_tokens(groups)}
        for unit in UNITS:
            parts = [
                n
                for name, n in counts.items()
                if name.partition("/")[0].endswith(f"_{unit}") and not name.startswith("begun")
            ]
            assert counts[f"begun_{unit}"] == sum(parts), f"the ledger of partial rollouts does not add up: {counts}"
        return {f"ledger/{name}": float(count) for name, count in sorted(counts.items())}

    def files(self) -> dict[str, bytes]:
        """Return the file by its name. There is none if there is nothing to store."""
        if not (self.groups or self.ledger or self.deferred):
            return {}
        groups = [
            {"prompt": g.prompt.id, "checksum": _checksum(g.prompt), "samples": [fields_of(s) for s in g.samples]}
            for g in self.groups
        ]
        deferred = [[t.prompt.id, _checksum(t.prompt), t.source, t.epoch] for t in self.deferred]
        header = {"groups": groups, "ledger": self.ledger, "deferred": deferred}
        arrays = arrays_of([sample for group in self.groups for sample in group.samples])
        return {FILE: save(arrays, {name: json.dumps(value) for name, value in header.items()})}

    @classmethod
    def read(cls, folder: Path, draws: int, prompt_of: Callable[[int], Prompt | None]) -> Backlog:
        """Return the backlog in a folder, or an empty one if it has no file. `prompt_of(id)` returns a prompt of the
        data.
        """
        if not (folder / FILE).exists():
            return cls(draws)
        with safe_open(folder / FILE, "numpy") as file:
            header = {name: json.loads(text) for name, text in file.metadata().items()}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # a file is not a mapping

        def same_prompt(number: int, checksum: int) -> Prompt | None:
            prompt = prompt_of(number)
            return prompt if prompt is not None and _checksum(prompt) == checksum else None

        prompts = [same_prompt(row["prompt"], row["checksum"]) for row in header["groups"]]
        rows = [
            (prompt or Prompt(row["prompt"], "", (), ""), row["samples"])
            for prompt, row in zip(prompts, header["groups"], strict=True)
        ]
        samples = samples_of(arrays, ((prompt, fields) for prompt, group in rows for fields in group))
        groups = [Group(prompt, list(islice(samples, len(group)))) for prompt, group in rows]
        turns = [(same_prompt(number, checksum), rest) for number, checksum, *rest in header["deferred"]]
        return cls(
            draws,
            tuple(group for group, prompt in zip(groups, prompts, strict=True) if prompt),
            Counter(header["ledger"]),
            tuple(Turn(prompt, *rest) for prompt, rest in turns if prompt),
        ).dropped(
            "data_changed",
            [group for group, prompt in zip(groups, prompts, strict=True) if not prompt and group.samples],
        )

    def _with_turns(self, turns: Sequence[Turn], seen: Collection[int], most: float = math.inf) -> Backlog:
        """Add a group for each turn that may have one, up to `most` groups. Defer the other turns."""
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


def is_early(turn: Turn, deferred: Iterable[Turn]) -> bool:
    """Return True if `deferred` has a turn of the same data set that is at least two epochs older."""
    return any(turn.source == owed.source and turn.epoch >= owed.epoch + 2 for owed in deferred)


def num_tokens(groups: Iterable[Group]) -> int:
    return sum(group.num_tokens for group in groups)


def _checksum(prompt: Prompt) -> int:
    return zlib.crc32(array("q", prompt.token_ids).tobytes())
