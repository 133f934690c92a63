"""The backlog: groups that wait to be finished or trained, identical on every rank, and the sample exchange.

Without partial rollouts the backlog is empty between steps, and each rollout draws its prompts. Partial rollouts
(`rollout.partial`; APRIL, arXiv 2509.18521) stop a rollout early and keep the other groups here. The next rollout
resumes unfinished groups with the updated policy, and the next step trains complete groups. Engine ranks that generate
ahead while a step trains (`rollout.placement=separate`) use the same backlog. Groups keep the order in which they were
drawn, oldest first.

A group with a token from a policy more than `max_staleness` versions old is never trained. A rollout finishes the
groups that would be too old for the next step. When there are more such groups than a step trains, a group restarts
from its prompt and keeps its position.

When a prompt is drawn again before its group is trained, it is deferred. It is drawn as soon as it is free, before any
new prompt. So all prompts get equally many turns, however long their responses are and however small the dataset is.

The ledger counts groups and response tokens since the run started: started = trained + carried + waiting + dropped. It
also counts deferred prompts.

A checkpoint stores the backlog as a file: sample arrays, with JSON in the header. A prompt is stored as its dataset
index and a token checksum. When the dataset now has another prompt at this index, its deferred turns and its group are
dropped. The ledger counts the dropped group if it has samples.

Ranks exchange samples as arrays and JSON. Four arrays hold all samples' tokens, log-probs, rewritten contexts and
routes, one sample after another. The other fields are one JSON object per sample. Prompts are not included, because
every rank has them. The backlog file uses the same arrays.

After an exchange all ranks hold all groups, so all ranks compute the same advantages and the same packing. The arrays
are sent in one all-reduce to which every rank adds its part. They stay arrays, because lists would take eight times the
memory on every rank. Each rank seals its part (distributed/messages.py). A part is a safetensors file, so reading it
runs no code. Routes take most bytes, and only the ranks that train a sample need them. So routes stay on their rank for
groups that are trained next, and `send_routes` sends them when the samples are packed.
"""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load, save

from grpo_mega.distributed.messages import seal, unseal
from grpo_mega.errors import EngineError
from grpo_mega.rollout.engine import token_checksum
from grpo_mega.types import Context, Group, Prompt, PromptDraw, Routes, Sample, Span, StepMetrics, unknown_expert

FILE = "backlog.safetensors"
UNITS = ("groups", "tokens")


@dataclass(frozen=True)
class Backlog:
    """An immutable backlog. Each method returns a new one, so a failed step keeps the previous backlog."""

    draws: int = 0  # number of prompt batches drawn from the dataset so far
    groups: tuple[Group, ...] = ()  # oldest first; a group without samples has not started yet
    # "begun_tokens", "trained_groups", "dropped_tokens/REASON", ...
    ledger: Counter[str] = field(default_factory=Counter)
    deferred: tuple[PromptDraw, ...] = ()  # turns drawn while their prompt was not free, in draw order

    def drawn_up_to(
        self, num_groups: int, draw: Callable[[int], Sequence[PromptDraw]], seen: Collection[int]
    ) -> Backlog:
        """Draw prompts until the backlog has `num_groups` groups or no prompt is free. `draw(n)` returns draw n.

        A prompt is free if it has no group here and its id is not in `seen`. Other prompts' turns are deferred, and
        come first in later calls. A turn in epoch e + 2 gets no group while a turn in epoch e is deferred for the same
        dataset. When nothing is left to draw, there are fewer groups. If a draw adds no group, the draw counter
        advances only after a later draw adds one.
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
        """Discard samples in groups that started before policy version `oldest`. The groups keep their position."""

        def is_stale(group: Group) -> bool:
            return group.oldest_version is not None and group.oldest_version < oldest

        fresh = tuple(Group(group.prompt, []) if is_stale(group) else group for group in self.groups)
        return replace(self, groups=fresh).dropped("stale", list(filter(is_stale, self.groups)))

    def needed(self, oldest: int) -> list[int]:
        """Return the positions for groups that a rollout must finish.

        The next step may not train groups that started with policy version `oldest`. When a prompt has a deferred turn,
        its group must finish too, because otherwise there would be too few prompts to draw.
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
        """Count trained groups."""
        return self._counted("trained", "", groups)

    def dropped(self, reason: str, groups: Sequence[Group]) -> Backlog:
        """Count dropped groups."""
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
            of_unit = {name: n for name, n in counts.items() if name.partition("/")[0].endswith(f"_{unit}")}
            num_started = of_unit.pop(f"begun_{unit}")
            assert num_started == sum(of_unit.values()), f"the ledger of partial rollouts does not add up: {counts}"
        return {f"ledger/{name}": float(count) for name, count in sorted(counts.items())}

    def files(self) -> dict[str, bytes]:
        """Return the file by its name. There is none if there is nothing to store."""
        if not (self.groups or self.ledger or self.deferred):
            return {}
        groups = [
            {
                "prompt": g.prompt.id,
                "checksum": token_checksum(g.prompt.token_ids),
                "samples": [fields_of(s) for s in g.samples],
            }
            for g in self.groups
        ]
        deferred = [[t.prompt.id, token_checksum(t.prompt.token_ids), t.source, t.epoch] for t in self.deferred]
        header = {"groups": groups, "ledger": self.ledger, "deferred": deferred}
        arrays = arrays_of([sample for group in self.groups for sample in group.samples])
        return {FILE: save(arrays, {name: json.dumps(value) for name, value in header.items()})}

    @classmethod
    def read(cls, folder: Path, draws: int, prompt_of: Callable[[int], Prompt | None]) -> Backlog:
        """Read the backlog from a directory; return an empty one if there is no file. `prompt_of(id)` returns a dataset
        prompt.
        """
        if not (folder / FILE).exists():
            return cls(draws)
        with safe_open(folder / FILE, "numpy") as file:
            header = {name: json.loads(text) for name, text in file.metadata().items()}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # a file is not a mapping

        def same_prompt(number: int, checksum: int) -> Prompt | None:
            prompt = prompt_of(number)
            return prompt if prompt is not None and token_checksum(prompt.token_ids) == checksum else None

        unknown = Prompt(-1, "", (), "")
        rows = [(same_prompt(row["prompt"], row["checksum"]) or unknown, row["samples"]) for row in header["groups"]]
        samples = samples_of(arrays, ((prompt, fields) for prompt, group in rows for fields in group))
        groups = [Group(prompt, list(islice(samples, len(group)))) for prompt, group in rows]
        kept = tuple(group for group in groups if group.prompt is not unknown)
        changed = [group for group in groups if group.prompt is unknown and group.samples]
        turns = [(same_prompt(number, checksum), rest) for number, checksum, *rest in header["deferred"]]
        deferred = tuple(PromptDraw(prompt, *rest) for prompt, rest in turns if prompt)
        return cls(draws, kept, Counter(header["ledger"]), deferred).dropped("data_changed", changed)

    def _with_turns(self, turns: Sequence[PromptDraw], seen: Collection[int], most: float = math.inf) -> Backlog:
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


def is_early(turn: PromptDraw, deferred: Iterable[PromptDraw]) -> bool:
    """Return True if `deferred` contains a turn from the same dataset that is at least two epochs older."""
    return any(turn.source == owed.source and turn.epoch >= owed.epoch + 2 for owed in deferred)


def num_tokens(groups: Iterable[Group]) -> int:
    return sum(group.num_tokens for group in groups)


_FIELDS = ("index", "finish_reason", "scores", "verdicts", "reward", "step_ends", "step_rewards")
_ROWS = "rows"  # name of the array with the samples' other fields as JSON
_ROUND_BYTES = 2**28  # all ranks' routes in one exchange, because the device also holds the policy


def gather_samples(
    groups: Mapping[int, Group],
    prompts: Mapping[int, Prompt],
    verdict_names: Collection[str],
    name: str,
    ranks: dist.ProcessGroup | None = None,
    without_routes: Collection[int] = (),
) -> dict[int, Group]:
    """Gather groups from all `ranks`, keyed and ordered like `prompts`. `groups` are this rank's groups.

    Verdicts that are not in `verdict_names` become "other". `name` must be unique across the run's exchanges. For
    groups in `without_routes` the routes stay on their rank, and `ranks` must be the default group. Raise EngineError
    if a rank's part is not the part that it sent.
    """
    rank, names = dist.get_rank(ranks), [f"samples of {name}, of rank {i}" for i in range(dist.get_world_size(ranks))]
    groups = dict(groups)
    for key in groups.keys() & without_routes:
        marked = [replace(s, routes=s.routes and replace(s.routes, rank=rank)) for s in groups[key].samples]
        groups[key] = Group(groups[key].prompt, marked)
    mine = bytearray(seal(names[rank], pack_groups(groups)))
    sizes = torch.zeros(len(names), dtype=torch.int64)
    sizes[rank] = len(mine)
    dist.all_reduce(sizes, group=ranks)
    ends = [0, *accumulate(sizes.tolist())]
    # An all-reduce sends each byte twice per rank. A gather would need every part padded to the longest.
    everything = torch.zeros(ends[-1], dtype=torch.uint8)
    everything[ends[rank] : ends[rank + 1]] = torch.frombuffer(mine, dtype=torch.uint8)
    dist.all_reduce(everything, group=ranks)
    whole = memoryview(everything.numpy())  # type: ignore[arg-type]
    parts = [whole[start:end] for start, end in pairwise(ends)]
    found = unpack([unseal(name, part) for name, part in zip(names, parts, strict=True)], prompts, verdict_names)
    for key in groups.keys() & without_routes:
        for theirs, ours in zip(found[key].samples, groups[key].samples, strict=True):
            theirs.routes = ours.routes
    return found


def send_routes(samples: Sequence[Sample], readers: Sequence[Collection[int]], device: torch.device) -> None:
    """Send the experts for samples[i] to the ranks `readers[i]`. All ranks in the default group call it together.

    The arguments are the same on all ranks, except for the experts. A rank receives only experts that it lacks.
    """
    rank, others = dist.get_rank(), range(dist.get_world_size())
    held = {i: sample.routes for i, sample in enumerate(samples) if sample.routes and sample.routes.rank is not None}
    for members in _rounds({i: routes.experts.nbytes for i, routes in held.items()}):
        mine = [i for i in members if held[i].rank == rank]
        missing = [i for i in members if held[i].rank != rank and rank in readers[i]]
        sent = [[i for i in mine if other != rank and other in readers[i]] for other in others]
        received = [[i for i in missing if held[i].rank == other] for other in others]
        from_ranks, to_ranks = (
            [sum(held[i].experts.nbytes for i in some) for some in lists] for lists in (received, sent)
        )
        parts = [torch.from_numpy(held[i].experts).reshape(-1).view(torch.uint8) for some in sent for i in some]
        outgoing = torch.cat([torch.empty(0, dtype=torch.uint8), *parts])
        incoming = torch.empty(sum(from_ranks), dtype=torch.uint8, device=device)
        dist.all_to_all_single(incoming, outgoing.to(device), from_ranks, to_ranks)
        start, found = 0, incoming.cpu().numpy()
        for i in chain.from_iterable(received):
            like = held[i].experts
            experts = found[start : start + like.nbytes].view(like.dtype).reshape(like.shape)
            samples[i].routes = replace(held[i], experts=experts)
            start += like.nbytes


def pack_groups(groups: Mapping[int, Group]) -> bytes:
    """Return the groups' samples as bytes, with the group keys."""
    samples = [sample for group in groups.values() for sample in group.samples]
    if not samples:
        return b""
    rows = json.dumps([[key, fields_of(sample)] for key, group in groups.items() for sample in group.samples])
    return save(arrays_of(samples) | {_ROWS: np.frombuffer(rows.encode(), np.uint8)})


def unpack(
    parts: Sequence[memoryview], prompts: Mapping[int, Prompt], verdict_names: Collection[str]
) -> dict[int, Group]:
    """Return the groups from all ranks' parts. Raise EngineError if two ranks have samples for the same group."""
    gathered = {key: Group(prompt, []) for key, prompt in prompts.items()}
    owners: dict[int, int] = {}
    for rank, part in enumerate(parts):
        if not part:
            continue
        arrays = load(bytes(part))
        rows = json.loads(arrays.pop(_ROWS).tobytes())
        samples = samples_of(arrays, ((prompts[key], fields) for key, fields in rows))
        for (key, _), sample in zip(rows, samples, strict=True):
            if owners.setdefault(key, rank) != rank:
                raise EngineError(
                    f"ranks {owners[key]} and {rank} both generated samples of prompt {sample.prompt.id}; continue from"
                    " the last checkpoint with --resume"
                )
            sample.verdicts = {
                name: text if text in verdict_names else "other" for name, text in sample.verdicts.items()
            }
            gathered[key].samples.append(sample)
    return gathered


def arrays_of(samples: Sequence[Sample]) -> dict[str, NDArray[Any]]:
    """Return tokens [T] int32, log-probs [T] float32 and, if there are any, context tokens (int32) and routes [tokens,
    layers, experts per token].
    """
    arrays: dict[str, NDArray[Any]] = {
        "tokens": np.fromiter(chain.from_iterable(s.response_ids for s in samples), np.int32),
        "logprobs": np.fromiter(chain.from_iterable(s.rollout_logprobs for s in samples), np.float32),
    }
    if any(s.contexts for s in samples):
        contexts = (context.token_ids for s in samples for context in s.contexts)
        arrays["contexts"] = np.fromiter(chain.from_iterable(contexts), np.int32)
    if routes := [s.routes.experts for s in samples if s.routes and s.routes.rank is None]:
        arrays["routes"] = np.concatenate(routes)
    return arrays


def fields_of(sample: Sample) -> dict[str, Any]:
    """Return the fields that are not in the arrays, and the sample's lengths in the arrays, as JSON values."""
    fields = {name: getattr(sample, name) for name in _FIELDS} | {
        "length": sample.response_len,
        "spans": list(sample.spans),
    }
    if sample.sampled:
        fields["sampled"] = [list(turn) for turn in sample.sampled]
    if sample.contexts:
        fields["contexts"] = [[context.start, len(context.token_ids)] for context in sample.contexts]
    if sample.messages is not None:
        fields["messages"] = sample.messages
    if sample.routes:
        fields |= {"routed": len(sample.routes.experts), "routes_checksum": sample.routes.checksum}
        if sample.routes.rank is not None:  # the array stays there
            fields["routes_of"] = [sample.routes.rank, sample.routes.experts.dtype.name, *sample.routes.experts.shape]
    return fields


def samples_of(
    arrays: Mapping[str, NDArray[Any]], rows: Iterable[tuple[Prompt, Mapping[str, Any]]]
) -> Iterator[Sample]:
    """Yield the samples. `rows` contains each sample's prompt and fields, in array order.

    Raise ValueError if the lengths differ.
    """
    tokens, logprobs = array("i", arrays["tokens"].tobytes()), array("f", arrays["logprobs"].tobytes())
    context_ids = iter(arrays["contexts"].tolist() if "contexts" in arrays else ())
    start = num_routed = 0
    for prompt, fields in rows:
        end = start + fields["length"]
        kept: dict[str, Any] = {name: fields[name] for name in _FIELDS} | {
            "spans": [Span(*span) for span in fields["spans"]],
            "sampled": tuple((first, last) for first, last in fields.get("sampled", ())),
            "contexts": tuple(Context(at, tuple(islice(context_ids, n))) for at, n in fields.get("contexts", ())),
            "messages": fields.get("messages"),
        }
        if "routes_of" in fields:
            rank, dtype, *shape = fields["routes_of"]
            unknown = np.full(1, unknown_expert(np.dtype(dtype)), dtype)
            kept["routes"] = Routes(np.broadcast_to(unknown, shape), fields["routes_checksum"], rank)  # takes no memory
        elif "routed" in fields:
            experts = arrays["routes"][num_routed : num_routed + fields["routed"]]
            kept["routes"] = Routes(experts, fields["routes_checksum"])
            num_routed += fields["routed"]
        yield Sample(prompt=prompt, response_ids=tokens[start:end], rollout_logprobs=logprobs[start:end], **kept)
        start = end
    if start != len(tokens) or start != len(logprobs):
        raise ValueError(f"{len(tokens)} tokens and {len(logprobs)} log-probs of samples with {start}")


def _rounds(num_bytes: Mapping[int, int]) -> list[list[int]]:
    """Split the keys into runs up to _ROUND_BYTES, at least one key each."""
    rounds: list[list[int]] = []
    total = _ROUND_BYTES
    for key, size in num_bytes.items():
        total += size
        if total > _ROUND_BYTES:
            rounds.append([])
            total = size
        rounds[-1].append(key)
    return rounds
