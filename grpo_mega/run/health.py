"""Checks after each step if the run may continue: are updates finite, and does the engine agree with the trainer?

Input: the metrics of a step, identical on all ranks. Output: a warning, or NonFiniteError or MismatchError with the remedy, in
one line.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from grpo_mega.config import Config
from grpo_mega.errors import MismatchError, NonFiniteError
from grpo_mega.observe.metrics import K3_STALE, engine_mismatch
from grpo_mega.types import Sample, StepMetrics

_MOST_NAMED = 8  # maximum number of samples in a warning


@dataclass
class Health:
    """Counts consecutive steps with updates that were dropped because of infinities or NaN."""

    config: Config
    nonfinite_steps: int = 0

    @property
    def has_diverged(self) -> bool:
        """Return True if there were too many such steps. The run must then end after this step, with a checkpoint."""
        return self.nonfinite_steps >= self.config.max_nonfinite_steps

    def observe(self, step: int, metrics: StepMetrics, blamed: Sequence[Sample]) -> list[str]:
        """Count the update of `step`. If part of it was dropped, return a warning with the samples that caused it."""
        if not metrics.get("nonfinite_mini_batches"):
            self.nonfinite_steps = 0
            return []
        self.nonfinite_steps += 1
        names = [f"prompt {sample.prompt.id} sample {sample.index}" for sample in blamed[:_MOST_NAMED]]
        blame = f"from {', '.join(names)}" if names else "from the gradient alone"
        return [f"step {step}: loss or gradient not finite, {blame}; the mini-batch was dropped"]

    def check(self, step: int, metrics: StepMetrics, checkpoints: Path) -> None:
        """Raise an error if the run must end. The step has been logged.

        Raise NonFiniteError after too many steps with dropped updates; the last step is saved in `checkpoints`. Raise
        MismatchError if the token probabilities of engine and trainer differ too much.
        """
        if self.has_diverged:
            raise NonFiniteError(
                f"loss or gradient was not finite in {self.nonfinite_steps} steps in a row, up to step {step}; a checkpoint is "
                f"in {checkpoints}; continue with --resume and a lower optimizer.lr, or a higher max_nonfinite_steps"
            )
        k3, limit = engine_mismatch(metrics), self.config.rollout.mismatch_stop
        is_counted = math.isnan(k3) and self.nonfinite_steps > 0  # NaN from the trainer is a nonfinite step, not a mismatch
        if limit is not None and not is_counted and not k3 <= limit:
            raise MismatchError(
                f"step {step}: the KL (k3) between engine and trainer is {k3:.3g} nats per token, above "
                f"rollout.mismatch_stop={limit}; continue from an earlier checkpoint, or raise the limit"
            )


def staleness_metrics(samples: Sequence[Sample], old_logprobs: Sequence[Tensor], version: int) -> StepMetrics:
    """Return the staleness of tokens in the loss, in policy versions, and the mismatch for each staleness.

    The mismatch is the k3 of old_logprobs and rollout_logprobs, in nats per token. `old_logprobs` has a row per sample, with
    NaN for tokens not in the loss.
    """
    tokens, sums = Counter[int](), dict[int, float]()
    for sample, old in zip(samples, old_logprobs, strict=True):
        log_ratio = (old - torch.tensor(sample.rollout_logprobs)).double()
        k3 = log_ratio.expm1() - log_ratio
        for span in sample.spans:
            values, age = k3[span.start : span.end], version - span.version
            values = values[~values.isnan()]
            tokens[age] += len(values)
            sums[age] = sums.get(age, 0.0) + float(values.sum())
    counts = {age: n for age, n in sorted(tokens.items()) if n}
    if not counts:
        return {}
    mean = sum(age * n for age, n in counts.items()) / sum(counts.values())
    mismatch = {f"{K3_STALE}{age}": sums[age] / n for age, n in counts.items()}
    return {"staleness/mean": mean, "staleness/max": float(max(counts)), **mismatch}
