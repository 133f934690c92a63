"""Share the samples of a rollout with every rank.

Each rank has generated some of the groups; afterwards all ranks hold all groups, in the order of the prompts, so that all of
them compute the same advantages and the same packing. Token ids and log-probs travel as arrays of 4 bytes per number, in one
all-reduce to which every rank adds its part, and stay arrays: as lists they would take eight times the memory on every rank.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise

import torch
import torch.distributed as dist

from grpo_mega.errors import SyncError
from grpo_mega.types import Group, Prompt, Sample

_TOKENS, _LOGPROBS = "i", "f"  # type codes of the arrays: int32 and float32
_LEFT_OUT = {"prompt": None, "response_ids": None, "rollout_logprobs": None}  # fields of a sample that travel otherwise


def gather(
    groups: Mapping[int, Group],
    prompts: Mapping[int, Prompt],
    verdict_names: Collection[str],
    ranks: dist.ProcessGroup | None = None,
) -> list[Group]:
    """Return the groups of all `ranks`, in the order of `prompts`. `groups` are this rank's, by keys of `prompts`.

    Verdicts that are not in `verdict_names` become "other".
    """
    return unpack_all(_all_gather_bytes(_packed(groups), ranks), prompts, verdict_names)


def unpack_all(
    parts: Sequence[bytes | memoryview], prompts: Mapping[int, Prompt], verdict_names: Collection[str]
) -> list[Group]:
    """Return the groups in the parts of all ranks, in the order of `prompts`."""
    gathered = {place: Group(prompt, []) for place, prompt in prompts.items()}
    for place, sample in (found for part in parts for found in _unpacked(part, prompts)):
        sample.verdicts = {name: text if text in verdict_names else "other" for name, text in sample.verdicts.items()}
        gathered[place].samples.append(sample)
    return list(gathered.values())


def check_versions(groups: Sequence[Group], oldest: int, newest: int) -> None:
    """Raise SyncError, naming a sample, unless policies of versions `oldest` to `newest` generated all of them."""
    for sample in (s for g in groups for s in g.samples):
        if wrong := [span.version for span in sample.spans if not oldest <= span.version <= newest]:
            wanted = f"{newest}" if oldest == newest else f"{oldest} to {newest}"
            raise SyncError(
                f"sample {sample.index} of prompt {sample.prompt.id} was made by policy version {wrong[0]}, not {wanted}; "
                "go on from the last checkpoint with --resume"
            )


def _packed(groups: Mapping[int, Group]) -> bytes:
    """Return the groups as bytes, without the prompts, which every rank has."""
    samples = [sample for group in groups.values() for sample in group.samples]
    if not samples:
        return b""
    rows = [(place, vars(sample) | _LEFT_OUT) for place, group in groups.items() for sample in group.samples]
    tokens = array(_TOKENS, chain.from_iterable(sample.response_ids for sample in samples))
    logprobs = array(_LOGPROBS, chain.from_iterable(sample.rollout_logprobs for sample in samples))
    return pickle.dumps((rows, [sample.response_len for sample in samples], tokens, logprobs))


def _unpacked(part: bytes | memoryview, prompts: Mapping[int, Prompt]) -> Iterator[tuple[int, Sample]]:
    """Yield the samples of one rank, each with its key of `prompts`."""
    if not part:
        return
    rows, lengths, tokens, logprobs = pickle.loads(part)
    ends = list(accumulate(lengths))
    for (place, row), begin, end in zip(rows, [0, *ends], ends, strict=False):
        arrays = {"response_ids": tokens[begin:end], "rollout_logprobs": logprobs[begin:end]}
        yield place, Sample(**row | arrays | {"prompt": prompts[place]})


def _all_gather_bytes(mine: bytes, ranks: dist.ProcessGroup | None) -> list[memoryview]:
    """Return the bytes of every rank. Each byte crosses the network twice per rank, as in any all-reduce: a gather of padded
    parts would take the longest part from every rank."""
    rank = dist.get_rank(ranks)
    sizes = torch.zeros(dist.get_world_size(ranks), dtype=torch.int64)
    sizes[rank] = len(mine)
    dist.all_reduce(sizes, group=ranks)
    ends = [0, *accumulate(sizes.tolist())]
    everything = torch.zeros(ends[-1], dtype=torch.uint8)
    begin = ends[rank]
    everything[begin : begin + len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else everything[:0]
    dist.all_reduce(everything, group=ranks)
    whole = memoryview(everything.numpy())  # type: ignore[arg-type]
    return [whole[begin:end] for begin, end in pairwise(ends)]
