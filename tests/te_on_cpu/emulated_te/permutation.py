"""Plain torch in place of Transformer Engine's Triton kernels that send tokens to their experts and back.

Maps have the layout of the kernels: per token the rows of its copies among the permuted tokens, the last row first, the
experts of these copies from column num_experts on, and their number in the last column. Shapes do not depend on values,
so the functions also run on fake tensors. Not emulated: tokens in FP8, and weights that merge copies of a token.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor | None]


def install() -> None:
    kernels = importlib.import_module("transformer_engine.pytorch.triton.permutation")
    for function in (
        make_row_id_map,
        permute_with_mask_map,
        unpermute_with_mask_map,
        make_chunk_sort_map,
        sort_chunks_by_map,
    ):
        takes_padding = "pad_offsets" in getattr(kernels, function.__name__).__code__.co_varnames  # since TE 2.12
        setattr(kernels, function.__name__, _without_padding(function) if takes_padding else function)


def _without_padding(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with the argument pad_offsets in the fifth place."""

    def padded(*args: Any) -> Any:
        if args[4] is not None:
            raise NotImplementedError("the permutation with padding per expert is not emulated")
        return function(*args[:4], *args[5:])

    return padded


def make_row_id_map(routing_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """Return the map [num_tokens, 2 * num_experts + 1] of a mask [num_tokens, num_experts]."""
    is_chosen = routing_map.bool()
    rows = is_chosen.T.reshape(-1).int().cumsum(0).sub(1).view(num_experts, num_tokens).T
    rows, experts = torch.where(is_chosen, rows, -1).sort(dim=1, descending=True)
    return torch.cat((rows, experts, is_chosen.sum(1, keepdim=True)), dim=1).int()


def permute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    scale: Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
    scale_hidden_dim: Any,
) -> tuple[Tensor, None, Tensor | None]:
    if scale is not None:
        raise NotImplementedError("the permutation of tokens in FP8 is not emulated")
    out, of_probs = inp.new_zeros(num_out_tokens + 1, hidden_size), None
    if probs is not None:
        of_probs = probs.new_zeros(num_out_tokens + 1)
    for rows, experts in _columns(row_id_map, num_experts, num_out_tokens):
        out.index_copy_(0, rows, inp)
        if probs is not None and of_probs is not None:
            of_probs.index_copy_(0, rows, probs.gather(1, experts[:, None])[:, 0])
    return out[:-1], None, None if of_probs is None else of_probs[:-1]


def unpermute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None,
    permuted_probs: Tensor | None,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
) -> Pair:
    """Return the sum of each token's copies, added in fp32, and the copies' weights [num_tokens, num_experts]."""
    if merging_probs is not None:
        raise NotImplementedError("an unpermutation with weights is not emulated")
    padded = torch.cat((inp, inp.new_zeros(1, hidden_size)))
    out = torch.zeros(num_tokens, hidden_size)
    of_probs = None if permuted_probs is None else permuted_probs.new_zeros(num_tokens, num_experts)
    for rows, experts in _columns(row_id_map, num_experts, len(inp)):
        out += padded[rows].float()
        if permuted_probs is not None and of_probs is not None:
            of_probs.scatter_(1, experts[:, None], torch.cat((permuted_probs, permuted_probs.new_zeros(1)))[rows, None])
    return out.to(inp.dtype), of_probs


def make_chunk_sort_map(split_sizes: Tensor, sorted_indices: Tensor, num_tokens: int, num_splits: int) -> Tensor:
    """Return the place of each row after its chunk has moved."""
    sizes, order = split_sizes.long(), sorted_indices.long()
    starts = torch.zeros_like(sizes)
    starts[order] = sizes[order].cumsum(0) - sizes[order]
    shift = starts - (sizes.cumsum(0) - sizes)
    rows = torch.arange(num_tokens)
    chunks = torch.searchsorted(sizes.cumsum(0), rows, right=True).clamp(max=num_splits - 1)
    return (rows + shift[chunks]).int()


def sort_chunks_by_map(
    inp: Tensor, row_id_map: Tensor, probs: Tensor | None, num_tokens: int, hidden_size: int, is_forward: bool
) -> Pair:
    rows = row_id_map.long()

    def moved(values: Tensor) -> Tensor:
        return torch.empty_like(values).index_copy_(0, rows, values) if is_forward else values[rows]

    return moved(inp), None if probs is None else moved(probs)


def _columns(row_id_map: Tensor, num_experts: int, spare: int) -> list[tuple[Tensor, Tensor]]:
    """Return (rows, experts) of all tokens' first copies, second copies, and so on. Missing copies have row `spare`."""
    rows, experts = row_id_map[:, :num_experts].long(), row_id_map[:, num_experts : 2 * num_experts].long()
    rows = torch.where(rows < 0, spare, rows)
    return [(rows[:, i], experts[:, i]) for i in range(num_experts)]
