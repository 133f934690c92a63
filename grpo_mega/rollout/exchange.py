"""Share the samples of a rollout with every rank.

Each rank has generated some of the groups. After the exchange all ranks hold all groups, in the order of the prompts, so all
ranks compute the same advantages and the same packing. Token ids and log-probs are sent as arrays of 4 bytes per number, in one
all-reduce to which every rank adds its part. They stay arrays, because lists would take eight times the memory on every rank.
Each rank seals its part (distributed/messages.py). A part is a safetensors file, so reading it runs no code.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load, save

from grpo_mega.distributed.messages import seal, unseal
from grpo_mega.errors import EngineError, SyncError
from grpo_mega.rollout.sample_arrays import arrays_of, fields_of, samples_of
from grpo_mega.types import Group, Prompt, Sample

_ROWS = "rows"  # name of the array with the samples' other fields as JSON


def gather(
    groups: Mapping[int, Group],
    prompts: Mapping[int, Prompt],
    verdict_names: Collection[str],
    name: str,
    ranks: dist.ProcessGroup | None = None,
) -> list[Group]:
    """Return the groups of all `ranks`, in the order of `prompts`. `groups` are this rank's groups, by keys of `prompts`.

    Verdicts that are not in `verdict_names` become "other". `name` must be unique among the exchanges of the run. Raise
    EngineError if a rank's part is not the part that the rank sent.
    """
    names = [f"samples of {name}, of rank {rank}" for rank in range(dist.get_world_size(ranks))]
    parts = _all_gather_bytes(seal(names[dist.get_rank(ranks)], _packed(groups)), ranks)
    return unpack_all([unseal(name, part) for name, part in zip(names, parts, strict=True)], prompts, verdict_names)


def unpack_all(parts: Sequence[memoryview], prompts: Mapping[int, Prompt], verdict_names: Collection[str]) -> list[Group]:
    """Return the groups in the parts of all ranks, in the order of `prompts`.

    Raise EngineError if two ranks have samples of the same group.
    """
    gathered = {place: Group(prompt, []) for place, prompt in prompts.items()}
    owners: dict[int, int] = {}
    for rank, (place, sample) in ((rank, found) for rank, part in enumerate(parts) for found in _unpacked(part, prompts)):
        if owners.setdefault(place, rank) != rank:
            raise EngineError(
                f"ranks {owners[place]} and {rank} both generated samples of prompt {sample.prompt.id}; continue from the last "
                "checkpoint with --resume"
            )
        sample.verdicts = {name: text if text in verdict_names else "other" for name, text in sample.verdicts.items()}
        gathered[place].samples.append(sample)
    return list(gathered.values())


def check_versions(groups: Sequence[Group], oldest: int, newest: int) -> None:
    """Raise SyncError with the first sample that has tokens of a policy version outside `oldest` to `newest`."""
    for sample in (s for g in groups for s in g.samples):
        if wrong := [span.version for span in sample.spans if not oldest <= span.version <= newest]:
            wanted = f"{newest}" if oldest == newest else f"{oldest} to {newest}"
            raise SyncError(
                f"sample {sample.index} of prompt {sample.prompt.id} was made by policy version {wrong[0]}, not {wanted}; "
                "continue from the last checkpoint with --resume"
            )


def _packed(groups: Mapping[int, Group]) -> bytes:
    """Return the groups as bytes. Leave out the prompts, because every rank has them."""
    samples = [sample for group in groups.values() for sample in group.samples]
    if not samples:
        return b""
    rows = json.dumps([[place, fields_of(sample)] for place, group in groups.items() for sample in group.samples])
    return save(arrays_of(samples) | {_ROWS: np.frombuffer(rows.encode(), np.uint8)})


def _unpacked(part: memoryview, prompts: Mapping[int, Prompt]) -> Iterator[tuple[int, Sample]]:
    """Yield the samples of one rank, each with its key in `prompts`."""
    if not part:
        return
    arrays = load(bytes(part))
    rows = json.loads(arrays.pop(_ROWS).tobytes())
    places = [place for place, _ in rows]
    samples = samples_of(arrays, ((prompts[place], fields) for place, fields in rows))
    yield from zip(places, samples, strict=True)


def _all_gather_bytes(mine: bytes, ranks: dist.ProcessGroup | None) -> list[memoryview]:
    """Return the bytes of every rank.

    An all-reduce sends each byte twice per rank. A gather would need every part padded to the longest.
    """
    rank = dist.get_rank(ranks)
    sizes = torch.zeros(dist.get_world_size(ranks), dtype=torch.int64)
    sizes[rank] = len(mine)
    dist.all_reduce(sizes, group=ranks)
    ends = [0, *accumulate(sizes.tolist())]
    everything = torch.zeros(ends[-1], dtype=torch.uint8)
    start = ends[rank]
    everything[start : start + len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else everything[:0]
    dist.all_reduce(everything, group=ranks)
    whole = memoryview(everything.numpy())  # type: ignore[arg-type]
    return [whole[start:end] for start, end in pairwise(ends)]
