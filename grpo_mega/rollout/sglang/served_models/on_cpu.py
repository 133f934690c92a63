"""Changes to what SGLang 0.5.21 computes without a GPU. A test fails once one is no longer needed.

Expert parallelism: of a token's experts those on other ranks have the id -1, with which SGLang's experts in plain torch would
index. They are given each choice of a token as a token of its own, without those of other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.moe import fused_moe_native

Forward = Callable[[torch.nn.Module, torch.Tensor, Any, Any], torch.Tensor]


def own_experts_alone(forward: Forward) -> Forward:
    """Return the forward pass of a rank's experts, given one that has all of them."""

    def of_a_part(layer: torch.nn.Module, x: torch.Tensor, topk_output: Any, config: Any) -> torch.Tensor:
        weights, ids, _ = topk_output
        if bool((ids >= 0).all()):
            return forward(layer, x, topk_output, config)
        token, choice = (ids >= 0).nonzero(as_tuple=True)
        own = topk_output._replace(topk_weights=weights[token, choice, None], topk_ids=ids[token, choice, None])
        result = torch.zeros_like(x)
        return result.index_add_(0, token, forward(layer, x[token], own, config)) if len(token) else result

    return of_a_part


fused_moe_native.moe_forward_native = own_experts_alone(fused_moe_native.moe_forward_native)
EntryClass: list[type] = []  # which SGLang takes from every module here
