"""Watch the numbers that low precision affects first, and decide when fewer layers should compute in FP8.

Two things trip the guard: a layer's gradient norm that is not finite or far above the median of its recent norms, and a
mismatch between engine and trainer above its limit. The guard then warns and names the layers. With `fall_back`, the decoder
layers at both ends compute in bf16 for some steps. If the guard trips again during these steps, all layers do. Then the
configured precision returns. The guard is deterministic and resumes from its `state()`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from itertools import groupby
from statistics import median
from typing import Any

from grpo_mega.config import GuardConfig


class Level(IntEnum):
    """Decoder layers that compute in bf16."""

    AS_CONFIGURED = 0
    ENDS = 1
    ALL = 2


class Guard:
    def __init__(self, config: GuardConfig, num_layers: int, mismatch_limit: float) -> None:
        """Trip above `mismatch_limit`, a KL (k3) between engine and trainer in nats per token."""
        self._config, self._num_layers, self._mismatch_limit = config, num_layers, mismatch_limit
        self.level = Level.AS_CONFIGURED
        self._until = 0  # the step that ends the fall-back
        self._norms: list[deque[float]] = [deque(maxlen=config.history) for _ in range(num_groups(num_layers))]

    def observe(self, step: int, mismatch: float, passes: Sequence[Sequence[float]]) -> list[str]:
        """Judge the updates of a step, set `level` for the next step, and return messages for the log.

        `passes` has the gradient norm of each group for each optimizer step.
        """
        worst = self._spikes(passes)
        why = [f"the gradient norm of {names(worst, self._num_layers)} is {_times(max(worst.values()))}"] if worst else []
        if not mismatch <= self._mismatch_limit:
            why.append(f"engine and trainer disagree by a KL (k3) of {mismatch:.3g} nats per token")
        messages = [f"step {step}: {' and '.join(why)}{self._fall_back(step)}"] if why else []
        if not why and self.level and step >= self._until:
            self.level = Level.AS_CONFIGURED
            messages.append(f"step {step}: no anomaly for {self._config.steps} steps; restoring the configured precision")
        return messages

    def state(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {"level": int(self.level), "until": self._until, "norms": [list(norms) for norms in self._norms]}

    def restore(self, state: dict[str, Any]) -> None:
        self.level, self._until = Level(state["level"]), state["until"]
        for norms, values in zip(self._norms, state["norms"], strict=True):
            norms.extend(values)

    def _spikes(self, passes: Sequence[Sequence[float]]) -> dict[int, float]:
        """Return the groups above the limit, each with its largest ratio of a norm to the median of earlier norms."""
        limit = math.inf if self._config.grad_spike is None else self._config.grad_spike
        spikes: dict[int, float] = {}
        for norms in passes:
            for group, (norm, past) in enumerate(zip(norms, self._norms, strict=True)):
                ratio = _ratio(norm, past)
                if ratio > limit:
                    spikes[group] = max(ratio, spikes.get(group, 0.0))
                if math.isfinite(norm) and norm > 0:  # zero-variance groups have no gradient
                    past.append(norm)
        return spikes

    def _fall_back(self, step: int) -> str:
        config = self._config
        if not config.fall_back:
            return ""
        self.level = Level(min(self.level + 1, Level.ALL))
        self._until = step + config.steps
        which = f"the first and last {config.layers} layers" if self.level == Level.ENDS else "all layers"
        return f"; {which} compute in bf16 for the next {config.steps} steps"


def num_groups(num_layers: int) -> int:
    """Return the number of groups: the embedding, each decoder layer, and everything after the last layer."""
    return num_layers + 2


def names(groups: Sequence[int] | dict[int, float], num_layers: int) -> str:
    """Return the names of groups, such as "embedding, layers 0-3, layer 7"."""
    parts = ["embedding"] if 0 in groups else []
    layers = [group - 1 for group in sorted(groups) if 1 <= group <= num_layers]
    for _, pairs in groupby(enumerate(layers), lambda pair: pair[1] - pair[0]):  # consecutive layers have equal keys
        run = [layer for _, layer in pairs]
        parts.append(f"layer {run[0]}" if len(run) == 1 else f"layers {run[0]}-{run[-1]}")
    if num_layers + 1 in groups:
        parts.append("output layer")
    return ", ".join(parts)


def _ratio(norm: float, past: deque[float]) -> float:
    if not math.isfinite(norm):
        return math.inf
    assert past.maxlen is not None
    return norm / median(past) if len(past) >= max(4, past.maxlen // 4) else 0.0


def _times(ratio: float) -> str:
    return f"up to {ratio:.0f} times its median" if math.isfinite(ratio) else "not finite"
