"""When a reward function is broken, and the run must end: after it has raised on everything for a while.

An exception may also be the fault of one row of the data, on which the function raises for each sample of the group, and a rank
may have few prompts in a rollout. So a function counts as broken once it has raised on every sample of this rank since it last
gave a score, and these are MIN_SAMPLES different ones, of MIN_PROMPTS prompts. To wait that long costs little: scores that are
all equal give no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_mega.errors import RewardError
from grpo_mega.rewards.api import RewardResult
from grpo_mega.types import Sample

MIN_SAMPLES = 8
MIN_PROMPTS = 4


class Failures:
    """Count the samples on which each function has raised since it last gave a score."""

    def __init__(self) -> None:
        self._failed: dict[str, set[tuple[int, tuple[int, ...]]]] = {}  # by function: (prompt id, response)

    def add(self, scored: Sequence[tuple[Sample, RewardResult]]) -> None:
        """Take note of one rollout. Raises RewardError for a function that is broken."""
        for name in {name for _, result in scored for name in result.verdicts}:
            errors = [(sample, result.errors[name]) for sample, result in scored if name in result.errors]
            if len(errors) < len(scored):
                self._failed.pop(name, None)
                continue
            failed = self._failed.setdefault(name, set())
            failed |= {(sample.prompt.id, tuple(sample.response_ids)) for sample, _ in errors}
            if len(failed) >= MIN_SAMPLES and len({prompt for prompt, _ in failed}) >= MIN_PROMPTS:
                raise RewardError(
                    f"reward function {name!r} raised an exception for every one of the last {len(failed)} samples, now "
                    f"{errors[0][1]}; correct the function or take it out of rewards.functions"
                )
