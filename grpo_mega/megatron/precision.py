"""FP8 through Transformer Engine: Megatron's settings, the guard that falls back to bf16, and weights kept in FP8.

Norms, router, embedding and output layer are always in bf16. Log-probs, loss and reductions are in fp32.

A weight kept in FP8 wraps its data, scales and transposed copy. Slicing it makes a copy, and writing to the slice
changes nothing. All code that reads or writes slices must use `PlainTensors` and `write_back`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from itertools import groupby
from statistics import median
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from grpo_mega.config import GuardConfig, PrecisionConfig

if HAVE_TE:
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

_BITS = {2: torch.int16, 4: torch.int32}  # integers as wide as a weight
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Level(IntEnum):
    """Decoder layers that compute in bf16."""

    AS_CONFIGURED = 0
    ENDS = 1
    ALL = 2


class Guard:
    """Watch the numbers that low precision affects first, and decide when fewer layers should compute in FP8.

    Two things trip the guard: a layer's gradient norm that is not finite or far above the median of its recent norms,
    and a mismatch between engine and trainer above its limit. The guard then warns and names the layers. With
    `fall_back`, the decoder layers at both ends compute in bf16 for some steps. If the guard trips again during these
    steps, all layers do. Then the configured precision returns. The guard is deterministic and resumes from its
    `state()`.
    """

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
        config, worst, why = self._config, self._spikes(passes), []
        if worst:
            largest = max(worst.values())
            times = f"up to {largest:.0f} times its median" if math.isfinite(largest) else "not finite"
            why.append(f"the gradient norm of {names(worst, self._num_layers)} is {times}")
        # Without a fall-back the rule of tracking/rules.py reports a mismatch.
        if not mismatch <= self._mismatch_limit and (worst or self._config.fall_back):
            why.append(f"engine and trainer disagree by a KL (k3) of {mismatch:.3g} nats per token")
        if why:
            message = f"step {step}: {' and '.join(why)}"
            if config.fall_back:
                self.level, self._until = Level(min(self.level + 1, Level.ALL)), step + config.steps
                which = f"the first and last {config.layers} layers" if self.level == Level.ENDS else "all layers"
                message += f"; {which} compute in bf16 for the next {config.steps} steps"
            return [message]
        if self.level and step >= self._until:
            self.level = Level.AS_CONFIGURED
            return [f"step {step}: no anomaly for {config.steps} steps; restoring the configured precision"]
        return []

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
                has_median = len(past) >= max(4, self._config.history // 4)
                ratio = (norm / median(past) if has_median else 0.0) if math.isfinite(norm) else math.inf
                if ratio > limit:
                    spikes[group] = max(ratio, spikes.get(group, 0.0))
                if math.isfinite(norm) and norm > 0:  # zero-variance groups have no gradient
                    past.append(norm)
        return spikes


def megatron_settings(precision: PrecisionConfig) -> dict[str, Any]:
    """Return the FP8 fields of Megatron's config."""
    if precision.fp8 is None:
        return {}
    return {
        "fp8": precision.fp8,
        "fp8_recipe": precision.fp8_recipe,
        "fp8_param": precision.fp8_parameters,
        "fp8_amax_history_len": precision.fp8_amax_history_len,
        "fp8_amax_compute_algo": precision.fp8_amax_compute_algo,
        "first_last_layers_bf16": bool(precision.first_layers_bf16 or precision.last_layers_bf16),
        "num_layers_at_start_in_bf16": precision.first_layers_bf16,
        "num_layers_at_end_in_bf16": precision.last_layers_bf16,
    }


def forget_fp8_state() -> None:
    """Drop Transformer Engine's global state of delayed scaling, which outlives a model.

    Its maxima are reduced in process groups that the next arrangement of the ranks does not have.
    """
    if HAVE_TE:
        FP8GlobalStateManager.reset()


def reset_scales(model: torch.nn.Module) -> None:
    """Give delayed scaling its initial scales and maxima. A layer keeps its own if the saved state is empty, which is
    the state of a policy before its first pass."""
    for module in model.modules():
        for state in getattr(module, "fp8_meta", {}).values():
            if hasattr(state, "amax_history"):
                state.scale.fill_(1.0)
                state.amax_history.zero_()


def set_level(config: TransformerConfig, precision: PrecisionConfig, level: Level) -> None:
    """Set the layers that compute in bf16 from the next pass on: the config's layers and the layers that the guard
    adds.
    """
    if precision.fp8 is None:
        return
    added = {Level.AS_CONFIGURED: 0, Level.ENDS: precision.guard.layers, Level.ALL: config.num_layers}[level]
    first, last = max(precision.first_layers_bf16, added), max(precision.last_layers_bf16, added)
    config.first_last_layers_bf16 = bool(first or last)
    config.num_layers_at_start_in_bf16 = min(first, config.num_layers)
    config.num_layers_at_end_in_bf16 = min(last, config.num_layers)


@contextmanager
def in_bf16(config: TransformerConfig) -> Iterator[None]:
    """Compute every layer in bf16 inside the context. Megatron reads its config in each forward pass."""
    before = config.first_last_layers_bf16, config.num_layers_at_start_in_bf16
    config.first_last_layers_bf16, config.num_layers_at_start_in_bf16 = True, config.num_layers
    try:
        yield
    finally:
        config.first_last_layers_bf16, config.num_layers_at_start_in_bf16 = before


class PlainTensors(Mapping[str, Tensor]):
    """Parameters by name, dequantized and merged where needed. Only one such copy exists at a time."""

    def __init__(
        self, parameters: Mapping[str, Tensor], merged: Callable[[str, Tensor], Tensor] = lambda name, weight: weight
    ) -> None:
        """`merged(name, weight)` returns the weight with its adapter in fp32, or the weight itself."""
        self._parameters, self._merged = parameters, merged
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            p: Any = self._parameters[name]
            self._last = None  # free the last copy before making the next
            self._last = name, self._merged(name, p.dequantize(dtype=p.dtype) if is_float8tensor(p) else p)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


@torch.no_grad()
def write_back(parameter: Any, values: Tensor) -> None:
    """Quantize `values` into the parameter. An optimizer created later reads its masters from the unquantized
    values.
    """
    if hasattr(parameter._quantizer, "amax"):
        # With delayed scaling, amax is the maximum of uninitialized memory and would determine later scales.
        parameter._quantizer.amax.zero_()
    parameter.copy_(values)
    parameter._high_precision_init_val = values.cpu()


@torch.no_grad()
def is_rounded_from(parameter: Any, start: int, end: int) -> Callable[[Tensor], bool]:
    """Return a function that tests if fp32 masters belong to the current values of `parameter.view(-1)[start:end]`.

    Plain weights equal their masters in the weights' dtype, bit for bit. Quantized weights were rounded twice, by the
    optimizer and when a checkpoint was loaded, so they are within one FP8 step of their masters.
    """
    if not is_quantised(parameter):
        weights = parameter.detach().view(-1)[start:end].clone()
        bits = _BITS[weights.element_size()]
        # the masters of an optimizer on the CPU are on the host
        return lambda masters: torch.equal(weights.view(bits), masters.detach().view(-1).to(weights).view(bits))
    weights = parameter.dequantize(dtype=torch.float32).view(-1)[start:end]
    metadata = parameter.get_metadata()
    scale = next(metadata[name] for name in ("fp8_scale_inv", "rowwise_scale_inv") if metadata.get(name) is not None)
    smallest = float(scale.max()) * 2**-9  # distance between subnormal numbers of e4m3

    def is_near(masters: Tensor) -> bool:
        masters = masters.detach().view(-1).float()
        return bool(((weights - masters).abs() <= masters.abs() / 8 + smallest).all())

    return is_near


def is_quantised(parameter: Tensor) -> bool:
    return bool(is_float8tensor(parameter))


def storage_tensors(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that hold the bytes of plain and quantized parameters."""
    tensors: list[Tensor] = []
    for p in parameters:
        tensors += [v for v in p.get_metadata().values() if isinstance(v, Tensor)] if is_quantised(p) else [p]  # type: ignore[attr-defined]
    return tensors


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
