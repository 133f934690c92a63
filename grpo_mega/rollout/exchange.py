"""Samples as arrays and JSON, and their exchange between ranks.

Tokens, log-probs, rewritten contexts and routes of all samples are four arrays, one sample after another. The other
fields are one JSON object per sample. Prompts are not included, because every rank has them. The backlog's file has the
same arrays.

After an exchange all ranks hold all groups, so all ranks compute the same advantages and the same packing. The arrays
are sent in one all-reduce to which every rank adds its part. They stay arrays, because lists would take eight times the
memory on every rank. Each rank seals its part (distributed/messages.py). A part is a safetensors file, so reading it
runs no code. Routes are most of the bytes, and only the ranks that train a sample need them. So the routes of groups
that are trained next stay on their rank, and `send_routes` sends them when the samples are packed.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain, islice, pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors.numpy import load, save

from grpo_mega.distributed.messages import seal, unseal
from grpo_mega.errors import EngineError
from grpo_mega.types import Context, Group, Prompt, Routes, Sample, Span, unknown_expert

_FIELDS = ("index", "finish_reason", "scores", "verdicts", "reward", "step_ends", "step_rewards")
_ROWS = "rows"  # name of the array with the samples' other fields as JSON
_ROUND_BYTES = 2**28  # routes of all ranks in one exchange, because the device also holds the policy


def gather(
    groups: Mapping[int, Group],
    prompts: Mapping[int, Prompt],
    verdict_names: Collection[str],
    name: str,
    ranks: dist.ProcessGroup | None = None,
    without_routes: Collection[int] = (),
) -> dict[int, Group]:
    """Return the groups of all `ranks`, by the keys of `prompts` and in their order. `groups` are this rank's groups.

    Verdicts that are not in `verdict_names` become "other". `name` must be unique among the exchanges of the run. The
    routes of the groups `without_routes` stay on their rank; `ranks` must be the default group then. Raise EngineError
    if a rank's part is not the part that the rank sent.
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
    """Give the ranks `readers[i]` the experts of samples[i]. All ranks of the default group call it together.

    The arguments are the same on all ranks, except for the experts. A rank receives only experts that it lacks.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    held = {i: sample.routes for i, sample in enumerate(samples) if sample.routes and sample.routes.rank is not None}
    for members in _rounds({i: routes.experts.nbytes for i, routes in held.items()}):
        sent: list[list[int]] = [[] for _ in range(world_size)]
        received: list[list[int]] = [[] for _ in range(world_size)]
        for i in members:
            owner = held[i].rank or 0
            for reader in readers[i] if owner == rank else ():
                sent[reader].extend([i] if reader != rank else [])
            if owner != rank and rank in readers[i]:
                received[owner].append(i)
        from_ranks, to_ranks = (
            [sum(held[i].experts.nbytes for i in some) for some in lists] for lists in (received, sent)
        )
        parts = [torch.from_numpy(held[i].experts).reshape(-1).view(torch.uint8) for some in sent for i in some]
        outgoing = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        incoming = torch.empty(sum(from_ranks), dtype=torch.uint8, device=device)
        dist.all_to_all_single(incoming, outgoing.to(device), from_ranks, to_ranks)
        start, found = 0, incoming.cpu().numpy()
        for i in chain.from_iterable(received):
            like = held[i].experts
            experts = found[start : start + like.nbytes].view(like.dtype).reshape(like.shape)
            samples[i].routes = replace(held[i], experts=experts)
            start += like.nbytes


def pack_groups(groups: Mapping[int, Group]) -> bytes:
    """Return the samples of groups as bytes, with the keys of their groups."""
    samples = [sample for group in groups.values() for sample in group.samples]
    if not samples:
        return b""
    rows = json.dumps([[key, fields_of(sample)] for key, group in groups.items() for sample in group.samples])
    return save(arrays_of(samples) | {_ROWS: np.frombuffer(rows.encode(), np.uint8)})


def unpack(
    parts: Sequence[memoryview], prompts: Mapping[int, Prompt], verdict_names: Collection[str]
) -> dict[int, Group]:
    """Return the groups in the parts of all ranks. Raise EngineError if two ranks have samples of the same group."""
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
    """Return tokens [T] int32, log-probs [T] float32 and, if there are any, the tokens of contexts (int32) and routes
    [tokens, layers, experts per token].
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
    """Yield the samples. `rows` has the prompt and fields of each, in the order of the arrays.

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
    """Split the keys into runs of at most _ROUND_BYTES, or of one key."""
    rounds: list[list[int]] = []
    total = _ROUND_BYTES
    for key, size in num_bytes.items():
        total += size
        if total > _ROUND_BYTES:
            rounds.append([])
            total = size
        rounds[-1].append(key)
    return rounds
