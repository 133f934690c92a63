"""FP8 through Transformer Engine: Megatron's settings, layers that stay in bf16, and weights kept in FP8.

Norms, router, embedding and output layer are always in bf16. Log-probs, loss and reductions are in fp32.

A weight kept in FP8 wraps its data, scales and transposed copy. Slicing it makes a copy, and writing to the slice changes
nothing. All code that reads or writes slices must use `PlainTensors` and `write_back`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from grpo_mega.config import PrecisionConfig
from grpo_mega.megatron.guard import Level

if HAVE_TE:
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

_BITS = {2: torch.int16, 4: torch.int32}  # integers as wide as a weight
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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


def set_level(config: TransformerConfig, precision: PrecisionConfig, level: Level) -> None:
    """Set the layers that compute in bf16 from the next pass on: the config's layers and the layers that the guard adds."""
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
    """Parameters by name, dequantized where needed. Only one dequantized copy exists at a time."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        p: Any = self._parameters[name]
        if not is_float8tensor(p):
            return p
        if self._last is None or self._last[0] != name:
            self._last = None  # free the last copy before making the next
            self._last = name, p.dequantize(dtype=p.dtype)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


@torch.no_grad()
def write_back(parameter: Any, values: Tensor) -> None:
    """Quantize `values` into the parameter. An optimizer created later reads its masters from the unquantized values."""
    if hasattr(parameter._quantizer, "amax"):
        # With delayed scaling, amax is the maximum of uninitialized memory and would determine later scales.
        parameter._quantizer.amax.zero_()
    parameter.copy_(values)
    parameter._high_precision_init_val = values.cpu()


@torch.no_grad()
def is_rounded_from(parameter: Any, start: int, end: int) -> Callable[[Tensor], bool]:
    """Return a function that tests if fp32 masters belong to the current values of `parameter.view(-1)[start:end]`.

    Plain weights equal their masters in the weights' dtype, bit for bit. Quantized weights were rounded twice, by the optimizer
    and when a checkpoint was loaded, so they are within one FP8 step of their masters.
    """
    if not is_quantised(parameter):
        weights = parameter.detach().view(-1)[start:end].clone()
        bits = _BITS[weights.element_size()]
        return lambda masters: torch.equal(weights.view(bits), masters.detach().view(-1).to(weights.dtype).view(bits))
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
