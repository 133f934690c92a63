"""Weights that Transformer Engine keeps in FP8, beside plain ones: read, written and moved like these.

A quantised parameter is a shell around its data, scales and transposed copy. To slice it would give a copy, and to write into
the slice would change nothing: whatever reads or writes by slices goes through here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor


class PlainTensors(Mapping[str, Tensor]):
    """Parameters by name, quantised ones as the numbers that they stand for; one such copy is held at a time."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        p: Any = self._parameters[name]
        if not is_float8tensor(p):
            return p
        if self._last is None or self._last[0] != name:
            self._last = None  # before there is another
            self._last = name, p.dequantize(dtype=p.dtype)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


@torch.no_grad()
def write_back(parameter: Any, values: Tensor) -> None:
    """Quantise `values` into the parameter; the optimizer, made afterwards, takes its masters from the values themselves."""
    if hasattr(parameter._quantizer, "amax"):
        # With delayed scaling it is the maximum of the memory that the parameter was made on, and would decide later scales.
        parameter._quantizer.amax.zero_()
    parameter.copy_(values)
    parameter._high_precision_init_val = values.cpu()


def is_quantised(parameter: Tensor) -> bool:
    return bool(is_float8tensor(parameter))


def held(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The tensors that hold the bytes of parameters, be they plain or quantised."""
    found: list[Tensor] = []
    for p in parameters:
        found += [v for v in p.get_metadata().values() if isinstance(v, Tensor)] if is_quantised(p) else [p]  # type: ignore[attr-defined]
    return found
