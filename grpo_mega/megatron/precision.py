"""FP8 by Transformer Engine: Megatron's settings for a config, which layers stay in bf16, and weights kept in FP8.

Norms, router, embedding and output layer are always in bf16; log-probs, loss and reductions in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer.transformer_config import TransformerConfig

from grpo_mega.config import PrecisionConfig
from grpo_mega.hardware.device import Device
from grpo_mega.hardware.kernels import transformer_engine_version
from grpo_mega.megatron.guard import Level
from grpo_mega.validation import raise_first
from grpo_mega.validation.precision import card_problems, transformer_engine_problems

if HAVE_TE:
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def megatron_settings(precision: PrecisionConfig, device: Device) -> dict[str, Any]:
    """Return fields of Megatron's config. Raises ConfigError for FP8 that this device cannot compute: Megatron would ignore
    it."""
    if precision.fp8 is None:
        return {}
    raise_first(card_problems(precision, device.capability, device.name))
    raise_first(transformer_engine_problems(precision, transformer_engine_version()))
    return fp8_settings(precision)


def fp8_settings(precision: PrecisionConfig) -> dict[str, Any]:
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

    Its maxima are reduced in groups that the next arrangement of the ranks does not have.
    """
    if HAVE_TE:
        FP8GlobalStateManager.reset()


def set_level(config: TransformerConfig, precision: PrecisionConfig, level: Level) -> None:
    """Set the layers that compute in bf16 from the next pass on: those of the config, and those that the guard adds."""
    if precision.fp8 is None:
        return
    added = {Level.AS_CONFIGURED: 0, Level.ENDS: precision.guard.layers, Level.ALL: config.num_layers}[level]
    first, last = max(precision.first_layers_bf16, added), max(precision.last_layers_bf16, added)
    config.first_last_layers_bf16 = bool(first or last)
    config.num_layers_at_start_in_bf16 = min(first, config.num_layers)
    config.num_layers_at_end_in_bf16 = min(last, config.num_layers)


@contextmanager
def in_bf16(config: TransformerConfig) -> Iterator[None]:
    """Compute every layer in bf16 inside the context: Megatron reads its config in each forward pass."""
    before = config.first_last_layers_bf16, config.num_layers_at_start_in_bf16
    config.first_last_layers_bf16, config.num_layers_at_start_in_bf16 = True, config.num_layers
    try:
        yield
    finally:
        config.first_last_layers_bf16, config.num_layers_at_start_in_bf16 = before
