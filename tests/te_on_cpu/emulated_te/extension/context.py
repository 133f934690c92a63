"""Packed sequences over context-parallel ranks: the rows of a rank, and corrections of its results by other ranks'
keys.

A rank has two chunks of every sequence, called its first and second half here. `cu_seqlens` are this rank's: the whole
sequences' divided by the number of ranks, except in thd_get_partitioned_indices. Statistics are log-sum-exps in fp32,
[heads, T], in the packed form that cuDNN returns since version 9.6. A GPU leaves rows beyond the sequences unset; here
they are 0.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from tests.te_on_cpu.emulated_te.extension.common import check, check_int32


def thd_get_partitioned_indices(
    cu_seqlens: torch.Tensor, total_tokens: int, world_size: int, rank: int
) -> torch.Tensor:
    """Return the rows of the whole batch that a rank has, in the rank's order."""
    check_int32(cu_seqlens)
    check(int(cu_seqlens[-1]) <= total_tokens, "the sequences are longer than the batch")
    rows = []
    for start, end in pairwise(cu_seqlens.tolist()):
        check((end - start) % (2 * world_size) == 0, "a sequence is not cut into equal chunks")
        chunks = torch.arange(start, end, dtype=torch.int32).chunk(2 * world_size)
        rows += [chunks[rank], chunks[-1 - rank]]
    return torch.cat(rows)


def thd_read_half_tensor(tensor: torch.Tensor, cu_seqlens: torch.Tensor, half_idx: int) -> torch.Tensor:
    """Return the first or the second halves, concatenated, of [T, heads, d] or of two such tensors [2, T, heads, d]."""
    dim = tensor.dim() - 3
    check(
        tensor.shape[-1] * tensor.shape[-2] * tensor.element_size() % 16 == 0, "a token's bytes are no multiple of 16"
    )
    rows = _halves(cu_seqlens)[half_idx]
    half = tensor.new_zeros(*tensor.shape[:dim], tensor.shape[dim] // 2, *tensor.shape[-2:])
    half.narrow(dim, 0, len(rows)).copy_(tensor.index_select(dim, rows))
    return half


def thd_read_second_half_lse(
    lse: torch.Tensor, cu_seqlens: torch.Tensor, lse_packed: bool, second_half_lse_seqlen: int
) -> torch.Tensor:
    check_packed(lse_packed)
    rows = _halves(cu_seqlens)[1]
    half = lse.new_zeros(lse.shape[0], second_half_lse_seqlen)
    half[:, : len(rows)] = lse[:, rows]
    return half


def thd_second_half_lse_correction(
    lse: torch.Tensor, lse_per_step: torch.Tensor, cu_seqlens: torch.Tensor, lse_packed: bool
) -> None:
    """Add the statistics of more keys to the second halves, in place."""
    check_packed(lse_packed)
    rows = _halves(cu_seqlens)[1]
    lse[:, rows] = torch.logaddexp(lse[:, rows], lse_per_step[:, : len(rows)])


def thd_out_correction(
    out: torch.Tensor,
    out_per_step: torch.Tensor,
    lse: torch.Tensor,
    lse_per_step: torch.Tensor,
    cu_seqlens: torch.Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    """Add the output of some keys in place, scaled by their share of the softmax over all keys. Each addition rounds
    `out`.
    """
    check_packed(lse_packed)
    rows = rows_of(cu_seqlens, only_second_half)
    share = share_of(lse_per_step[:, : len(rows)], lse[:, rows])
    out[rows] = (out[rows].float() + out_per_step[: len(rows)].float() * share).to(out.dtype)


def thd_grad_correction(
    grad: torch.Tensor, grad_per_step: torch.Tensor, cu_seqlens: torch.Tensor, first_half: str, second_half: str
) -> None:
    """Copy or add a step's gradient to each half of `grad` in place; "none" skips a half. The step then has only the
    other half."""
    dim = grad.dim() - 3
    for rows, change in zip(_halves(cu_seqlens), (first_half, second_half), strict=True):
        if change != "none":
            source = torch.arange(len(rows)) if "none" in (first_half, second_half) else rows
            found = grad_per_step.index_select(dim, source)
            grad.index_copy_(dim, rows, found + grad.index_select(dim, rows) if change == "add" else found)


def rows_of(cu_seqlens: torch.Tensor, only_second_half: bool) -> torch.Tensor:
    return _halves(cu_seqlens)[1] if only_second_half else torch.arange(int(cu_seqlens[-1]))


def _halves(cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of all first halves and of all second halves, in order."""
    check_int32(cu_seqlens)
    pairs = [torch.arange(start, end).chunk(2) for start, end in pairwise(cu_seqlens.tolist())]
    check(
        all(len(pair) == 2 and len(pair[0]) == len(pair[1]) for pair in pairs),
        "a sequence is not cut into equal halves",
    )
    first, second = (torch.cat(halves) for halves in zip(*pairs, strict=True))
    return first, second


def share_of(lse: torch.Tensor, lse_of_all: torch.Tensor) -> torch.Tensor:
    """Return the share [rows, heads, 1] of some keys of the softmax over all keys, from statistics [heads, rows]."""
    return (lse - lse_of_all).exp().t()[..., None]


def check_packed(lse_packed: bool) -> None:
    if not lse_packed:
        raise NotImplementedError("the unpacked statistics of cuDNN before version 9.6 are not emulated")
