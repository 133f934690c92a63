"""Share the samples of a rollout with every rank.

Each rank has generated some of the groups; afterwards all ranks hold all groups, in the order of the prompts, so that all of
them compute the same advantages and the same packing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from grpo_mega.errors import SyncError
from grpo_mega.types import Group, Prompt, Sample


def gather(groups: Mapping[int, Group], prompts: Mapping[int, Prompt], verdict_names: Collection[str]) -> list[Group]:
    """Return all ranks' groups in the order of `prompts`. `groups` are this rank's, by keys of `prompts`.

    Verdicts that are not in `verdict_names` become "other".
    """
    by_rank: list[dict[int, list[dict[str, Any]]]] = [{}] * dist.get_world_size()
    # Without the prompts, which every rank has.
    mine = {place: [vars(sample) | {"prompt": None} for sample in group.samples] for place, group in groups.items()}
    dist.all_gather_object(by_rank, mine)
    rows = {place: samples for one in by_rank for place, samples in one.items()}
    gathered = [Group(prompt, [Sample(**row | {"prompt": prompt}) for row in rows[place]]) for place, prompt in prompts.items()]
    for sample in (s for g in gathered for s in g.samples):
        sample.verdicts = {name: text if text in verdict_names else "other" for name, text in sample.verdicts.items()}
    return gathered


def check_versions(groups: Sequence[Group], version: int) -> None:
    """Raise SyncError, naming a sample, unless policy `version` generated all of them."""
    for sample in (s for g in groups for s in g.samples):
        if sample.policy_version != version:
            raise SyncError(
                f"sample {sample.index} of prompt {sample.prompt.id} was made by policy version {sample.policy_version}, "
                f"not {version}; go on from the last checkpoint with --resume"
            )
