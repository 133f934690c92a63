"""Patches of transformers 5.12. tests/rollout/test_embedded.py fails when a patch is no longer needed."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer


class LinearState(LinearAttentionLayer):
    """The state of a layer of linear attention. It stays float32; transformers would round it to the model's dtype."""

    def update_recurrent_state(self, recurrent_states: Tensor, **kwargs: Any) -> Tensor:
        self.recurrent_states, self.is_recurrent_states_initialized = recurrent_states, True
        return recurrent_states

    def append(self, others: Iterable[LinearState]) -> None:
        """Append the sequences of other caches. A state has no padding, whatever the lengths of the sequences."""
        states: list[Any] = [self, *others]
        for name in ("conv_states", "recurrent_states"):
            setattr(self, name, torch.cat([getattr(one, name) for one in states]))


def silence_fast_path() -> None:
    """Drop transformers' notice that kernels for linear attention are missing: these kernels need a GPU."""
    for name in ("qwen3_5", "qwen3_5_moe"):
        logging.getLogger(f"transformers.models.{name}.modeling_{name}").addFilter(_is_no_notice)


def _is_no_notice(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("The fast path is not available")


def new_cache(config: Any) -> DynamicCache:
    cache = DynamicCache(config=config)
    cache.layers = [LinearState() if isinstance(layer, LinearAttentionLayer) else layer for layer in cache.layers]
    return cache


def scale_attention(model: Any) -> None:
    """Multiply the scale of DeepSeek-V2's attention by the square of YaRN's mscale, as DeepSeek's own code does.

    transformers applies this factor only to DeepSeek-V3.
    """
    rope = model.config.rope_parameters
    if model.config.model_type != "deepseek_v2" or not rope.get("mscale_all_dim") or rope["factor"] <= 1:
        return
    mscale = 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1
    for layer in model.model.layers:
        layer.self_attn.scaling *= mscale**2
