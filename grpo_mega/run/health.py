"""The health of updates: when a step earns a warning, and when the run must end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_mega.errors import MismatchError, NonFiniteError
from grpo_mega.observe.metrics import engine_mismatch
from grpo_mega.types import Sample, StepMetrics

_MOST_NAMED = 8  # maximum number of samples in a warning


@dataclass
class Health:
    """Counts consecutive steps with updates that were dropped because of infinities or NaN."""

    max_nonfinite_steps: int
    mismatch_stop: float | None
    nonfinite_steps: int = 0

    @property
    def has_diverged(self) -> bool:
        """Return True if there were too many such steps. The run must then end after this step, with a checkpoint."""
        return self.nonfinite_steps >= self.max_nonfinite_steps

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
                f"loss or gradient was not finite in {self.nonfinite_steps} steps in a row, up to step {step}; a"
                f" checkpoint is in {checkpoints}; continue with --resume and a lower optimizer.lr, or a higher"
                " max_nonfinite_steps"
            )
        k3, limit = engine_mismatch(metrics), self.mismatch_stop
        # NaN from the trainer is a nonfinite step, not a mismatch.
        is_counted = math.isnan(k3) and self.nonfinite_steps > 0
        if limit is not None and not is_counted and not k3 <= limit:
            raise MismatchError(
                f"step {step}: the KL (k3) between engine and trainer is {k3:.3g} nats per token, above "
                f"rollout.mismatch_stop={limit}; continue from an earlier checkpoint, or raise the limit"
            )
