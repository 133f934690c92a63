"""Share the samples of a rollout with every rank.

Each rank has generated some of the groups; afterwards all ranks hold all groups, in the order of the prompts, so that all of
them compute the same advantages and the same packing. Samples travel as two host tensors, never pickled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mega.errors import SyncError
from grpo_mega.types import Group, Prompt, Sample

_FINISH = ("stop", "length")
_NONE = float("nan")  # a score of None


def gather(
    groups: Mapping[int, Group], prompts: Mapping[int, Prompt], reward_names: Sequence[str], verdict_names: Sequence[str]
) -> list[Group]:
    """Return all ranks' groups in the order of `prompts`, samples by index. `groups` are this rank's, by keys of `prompts`.

    Verdicts that are not in `verdict_names` become "other".
    """
    verdicts = [*verdict_names, "other"]
    ints, floats = _encode(groups, reward_names, verdicts)
    gathered = {place: Group(p, []) for place, p in prompts.items()}
    for i, f in zip(_all_gather(ints), _all_gather(floats), strict=True):
        for place, sample in _decode(i, f, prompts, reward_names, verdicts):
            gathered[place].samples.append(sample)
    for group in gathered.values():
        group.samples.sort(key=lambda s: s.index)
    return list(gathered.values())


def check_versions(groups: Sequence[Group], version: int) -> None:
    """Raise SyncError, naming a sample, unless policy `version` generated all of them."""
    for sample in (s for g in groups for s in g.samples):
        if sample.policy_version != version:
            raise SyncError(
                f"sample {sample.index} of prompt {sample.prompt.id} was made by policy version {sample.policy_version}, "
                f"not {version}; go on from the last checkpoint with --resume"
            )


def _encode(groups: Mapping[int, Group], reward_names: Sequence[str], verdicts: list[str]) -> tuple[Tensor, Tensor]:
    ints: list[int] = []
    floats: list[float] = []
    for place, group in groups.items():
        for s in group.samples:
            ints += [place, s.index, s.policy_version, _FINISH.index(s.finish_reason), s.response_len]
            for name in reward_names:
                verdict = s.verdicts.get(name, "other")
                ints.append(verdicts.index(verdict if verdict in verdicts else "other"))
                floats.append(_NONE if s.scores.get(name) is None else float(s.scores[name]))  # type: ignore[arg-type]
            floats.append(_NONE if s.reward is None else s.reward)
            ints += [len(s.step_ends), *s.step_ends]
            floats += s.step_rewards
            ints += s.response_ids
            floats += s.rollout_logprobs
    return torch.tensor(ints, dtype=torch.int64), torch.tensor(floats, dtype=torch.float64)


def _decode(
    ints: Tensor, floats: Tensor, prompts: Mapping[int, Prompt], reward_names: Sequence[str], verdicts: list[str]
) -> list[tuple[int, Sample]]:
    i, f = iter(ints.tolist()), iter(floats.tolist())
    samples = []

    def score() -> float | None:
        value = next(f)
        return None if value != value else value  # NaN stands for None

    for place in i:
        index, version, finish, length = (next(i) for _ in range(4))
        sample = Sample(
            prompt=prompts[place],
            index=index,
            response_ids=[],
            rollout_logprobs=[],
            finish_reason=_FINISH[finish],  # type: ignore[arg-type]
            policy_version=version,
            verdicts={name: verdicts[next(i)] for name in reward_names},
            scores={name: score() for name in reward_names},
            reward=score(),
            step_ends=[next(i) for _ in range(next(i))],
        )
        sample.step_rewards = [next(f) for _ in sample.step_ends]
        sample.response_ids = [next(i) for _ in range(length)]
        sample.rollout_logprobs = [next(f) for _ in range(length)]
        samples.append((place, sample))
    return samples


def _all_gather(values: Tensor) -> list[Tensor]:
    """Return every rank's vector; lengths differ."""
    world_size = dist.get_world_size()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([len(values)]))
    longest = max(int(s) for s in sizes)
    padded = torch.zeros(longest, dtype=values.dtype)
    padded[: len(values)] = values
    rows = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(rows, padded)
    return [row[: int(size)] for row, size in zip(rows, sizes, strict=True)]
