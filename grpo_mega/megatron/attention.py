"""Attention, norm and rotary positions of packed sequences, for layers without Transformer Engine.

A micro-batch is one row of T tokens: several segments end to end. Attention must not cross segments. Segments of
similar length are gathered into right-padded batches, passed through torch's fused attention, and scattered back.
Causal attention never sees padding on the right. The same code runs on any device.

In a layer with a sliding window, a segment longer than the window is cut into runs of queries, each with the keys that
the run sees. Time and memory then grow linearly with the segment's length.

With context parallelism a rank has the queries of its part of every segment (batching/layout.py) and gathers the keys
and values of all parts. The backward pass sums gradients over ranks, and each rank keeps the gradients of its part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from grpo_mega.batching.layout import chunks_of

MAX_PADDING = 1.25  # largest ratio of a batch's padded size to its number of tokens
SHORTEST_RUN = 128  # queries of a run, if the window is smaller


@dataclass(frozen=True)
class Stack:
    """A batch for fused attention: runs of queries of equal length, and the keys that each run may see."""

    queries: Tensor  # [runs, longest], indices into T; padding repeats a run's last token
    keys: Tensor  # [runs, most], indices into the keys of all ranks, concatenated by rank
    # [longest, most], 0 for the keys that each query sees, else -inf. It has the dtype of the queries, because torch
    # would convert a bool mask in every layer and keep the copy. With a mask, queries are in reverse order. Without
    # one they are in order, attention is causal, and the last query sees all keys.
    mask: Tensor | None


@dataclass
class LocalPackedSeqParams(PackedSeqParams):
    """A micro-batch's segments for the modules below, computed once and used by every layer.

    `qkv_format` is not "thd", so Megatron reads rotary positions from the table of `PackedRotary` (one row per token).
    """

    position_ids: Tensor = field(default_factory=Tensor)  # [T]
    stacks: tuple[Stack, ...] = ()
    restore: Tensor = field(default_factory=Tensor)  # [T], index of each token in the concatenated, flattened queries
    windowed: LocalPackedSeqParams | None = None  # parameters of layers with a sliding window; None without such layers


@dataclass
class LatentPackedSeqParams(PackedSeqParams):
    """The same for multi-latent attention of Transformer Engine's layers: positions per token, and `segments` for TE.

    Megatron's rotary embedding of "thd" would split each row into its segments on the host, in every layer.
    """

    position_ids: Tensor = field(default_factory=Tensor)  # [T]
    segments: PackedSeqParams = field(default_factory=PackedSeqParams)


@dataclass
class HybridPackedSeqParams(PackedSeqParams):
    """Segments for Transformer Engine's attention, and the stacks for linear attention without FLA."""

    stacks: tuple[Stack, ...] = ()
    restore: Tensor = field(default_factory=Tensor)


def attend_latent(
    attend: Callable[..., Tensor], *args: Any, packed_seq_params: LatentPackedSeqParams, **kwargs: Any
) -> Tensor:  # [T, 1, heads / tp * width of a value]
    """Replace the forward of TE's attention, `attend`, in multi-latent attention."""
    return attend(*args, packed_seq_params=packed_seq_params.segments, **kwargs).flatten(1).unsqueeze(1)


def pack_params(
    cu_seqlens: Tensor,
    position_ids: Tensor,
    dtype: torch.dtype | None,
    cp_size: int = 1,
    cp_rank: int = 0,
    shared_prompt_segments: Sequence[int] | None = None,
    window: int = 0,
) -> LocalPackedSeqParams:
    """Return the parameters of the segments [cu_seqlens[i], cu_seqlens[i + 1]) for queries of `dtype`.

    With None there are no masks: torch's kernels for CUDA align causal attention at the last key, and would copy a mask
    to a matrix of all queries and keys in every layer.
    The segments cover all T tokens of this rank. `shared_prompt_segments`: see PackedBatch. `window` is the sliding
    window of some layers, 0 if no layer has one.
    """
    cuts = cu_seqlens.tolist()
    shared_prompt_segments = shared_prompt_segments or ()
    branches = {i for i, trunk in enumerate(shared_prompt_segments) if trunk >= 0}
    spans = sorted(((b - a, a) for i, (a, b) in enumerate(pairwise(cuts)) if b > a and i not in branches), reverse=True)
    found = _whole_segments(spans) if cp_size == 1 else _chunks(spans, cuts[-1], dtype, cp_size, cp_rank)
    found += _branches(cuts, shared_prompt_segments, dtype)
    params = _params_of(found, cu_seqlens, position_ids)
    if not window:
        return params
    assert cp_size == 1 and not branches, "windows support neither context parallelism nor shared prompts"
    is_cut = bool(spans) and spans[0][0] > window
    windowed = _params_of(_runs(spans, window, dtype), cu_seqlens, position_ids) if is_cut else params
    return replace(params, windowed=windowed)


def window_of(config: Any) -> int:
    """Return the sliding window of Megatron's config in tokens; 0 if there is none."""
    return config.window_size[0] + 1 if config.window_size else 0


def _params_of(found: list[tuple[Stack, Tensor]], cu_seqlens: Tensor, position_ids: Tensor) -> LocalPackedSeqParams:
    """Return the parameters of stacks, each with a mask of its real tokens."""
    device, restore = position_ids.device, torch.empty(len(position_ids), dtype=torch.int64)
    base = 0
    for stack, is_real in found:
        slots = (base + torch.arange(stack.queries.numel())).view(stack.queries.shape)
        restore[stack.queries[is_real]] = slots[is_real]
        base += stack.queries.numel()
    return LocalPackedSeqParams(
        qkv_format="packed",
        cu_seqlens_q=cu_seqlens,
        position_ids=position_ids,
        stacks=tuple(
            Stack(s.queries.to(device), s.keys.to(device), None if s.mask is None else s.mask.to(device))
            for s, _ in found
        ),
        restore=restore.to(device),
    )


def _whole_segments(spans: list[tuple[int, int]]) -> list[tuple[Stack, Tensor]]:
    """Return stacks of the segments (length, start), longest first, each with a mask of its real tokens."""
    found = []
    for batch in _similar(spans):
        longest = batch[0][0]
        lengths = torch.tensor([n for n, _ in batch])[:, None]
        starts = torch.tensor([a for _, a in batch])[:, None]
        column = torch.arange(longest)[None, :]
        gather = starts + torch.minimum(column, lengths - 1)
        found.append((Stack(gather, gather, None), column < lengths))
    return found


def _runs(spans: list[tuple[int, int]], window: int, dtype: torch.dtype | None) -> list[tuple[Stack, Tensor]]:
    """Return stacks for a sliding window of the segments (length, start), longest first; the longest exceeds it.

    The first tokens of a segment, up to `window`, see all tokens before them. The other tokens are cut into runs of
    equal length.
    """
    found = _whole_segments([(min(length, window), start) for length, start in spans])
    size = min(max(window, SHORTEST_RUN), spans[0][0] - window)
    runs = [(first, length, start) for length, start in spans for first in range(window, length, size)]
    firsts, lengths, starts = (torch.tensor(column)[:, None] for column in zip(*runs, strict=True))
    places = firsts - window + 1 + torch.arange(window - 1 + size)  # in the segment; the queries are the last ones
    keys, is_real = starts + torch.minimum(places, lengths - 1), places[:, window - 1 :] < lengths
    sees = torch.zeros(2 * size + window - 2, dtype=torch.bool)
    sees[size - 1 : size - 1 + window] = True
    mask = sees if dtype is None else torch.zeros(len(sees), dtype=dtype).masked_fill_(~sees, -torch.inf)
    band = mask.as_strided((size, window - 1 + size), (1, 1))  # rows are views, as in _seen_by_last_first
    return [*found, (Stack(keys[:, window - 1 :].flip(1), keys, band), is_real.flip(1))]


def _branches(
    cuts: list[int], shared_prompt_segments: Sequence[int], dtype: torch.dtype | None
) -> list[tuple[Stack, Tensor]]:
    """Return one stack per trunk: the segments of any length that continue it. Their queries see all keys of the
    trunk.
    """
    found = []
    for trunk in sorted({trunk for trunk in shared_prompt_segments if trunk >= 0}):
        spans = [(cuts[i], cuts[i + 1] - cuts[i]) for i, other in enumerate(shared_prompt_segments) if other == trunk]
        starts, lengths = (torch.tensor(column)[:, None] for column in zip(*spans, strict=True))
        column = torch.arange(int(lengths.max()))
        queries, before = starts + torch.minimum(column, lengths - 1), torch.arange(cuts[trunk], cuts[trunk + 1])
        keys = torch.cat((before.expand(len(spans), -1), queries), dim=1)
        if dtype is None:
            found.append((Stack(queries, keys, None), column < lengths))
            continue
        mask = _seen_by_last_first(len(column), keys.shape[1], dtype)
        found.append((Stack(queries.flip(1), keys, mask), (column < lengths).flip(1)))
    return found


def _seen_by_last_first(num_queries: int, num_keys: int, dtype: torch.dtype) -> Tensor:
    """Return the mask of queries in reverse order: the last query sees all keys, and each earlier one sees one key
    less.

    Rows are views of one vector, each shifted by one. A full matrix for a long sample would be as large as activations.
    """
    seen = torch.zeros(num_queries + num_keys - 1, dtype=dtype)
    seen[num_keys:] = -torch.inf
    return seen.as_strided((num_queries, num_keys), (1, 1))


def _chunks(
    spans: list[tuple[int, int]], num_tokens: int, dtype: torch.dtype | None, cp_size: int, cp_rank: int
) -> list[tuple[Stack, Tensor]]:
    """Return stacks of this rank's chunks of the segments (length, start).

    All chunks of a stack have the same length and the same place in their segments, because causal attention of queries
    to more keys allows no padding.
    """
    found = []
    for length, group in groupby(spans, key=lambda span: span[0]):
        starts = torch.tensor([start for _, start in group])
        places = torch.empty(length * cp_size, dtype=torch.int64)  # index of each token in the keys of all ranks
        for rank in range(cp_size):
            rows = torch.cat([torch.arange(c.start, c.stop) for c in chunks_of(length * cp_size, cp_size, rank)])
            places[rows] = rank * num_tokens + torch.arange(length)
        for first, chunk in zip((0, length // 2), chunks_of(length * cp_size, cp_size, cp_rank), strict=True):
            queries = starts[:, None] + first + torch.arange(len(chunk))
            mask = None
            if chunk.start and dtype is not None:
                queries, mask = queries.flip(1), _seen_by_last_first(len(chunk), chunk.stop, dtype)
            stack = Stack(queries, starts[:, None] + places[: chunk.stop], mask)
            found.append((stack, torch.ones_like(queries, dtype=torch.bool)))
    return found


def _similar(spans: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Split (length, start), longest first, into batches with a padded size of at most MAX_PADDING times their
    tokens.
    """
    batches: list[list[tuple[int, int]]] = []
    tokens = 0
    for length, start in spans:
        if batches and batches[-1][0][0] * (len(batches[-1]) + 1) <= MAX_PADDING * (tokens + length):
            batches[-1].append((length, start))
            tokens += length
        else:
            batches.append([(length, start)])
            tokens = length
    return batches


class PackedAttention(torch.nn.Module):
    """Megatron's `core_attention` for packed rows. It has no parameters."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None
        assert not (config.attention_dropout if attention_dropout is None else attention_dropout)
        assert not torch.backends.cuda.cudnn_sdp_enabled(), "compat.py turns cuDNN's attention off"
        self.scale = softmax_scale
        self.has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)

    def forward(
        self,
        query: Tensor,  # [T, 1, heads / tp, head_dim]; MLA has no dimension of 1
        key: Tensor,  # [T, 1, kv_heads / tp, head_dim]
        value: Tensor,  # [T, 1, kv_heads / tp, head_dim]; with MLA its width differs from the key's
        attention_mask: Tensor | None,
        *,
        packed_seq_params: LocalPackedSeqParams,
        **kwargs: Any,
    ) -> Tensor:  # [T, 1, heads / tp * width of a value]
        params = packed_seq_params.windowed if self.has_window else packed_seq_params
        assert params is not None
        if self.cp_group is not None:
            both = torch.cat((key, value), dim=-1)
            both = gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True, group=self.cp_group)
            key, value = both.split((key.shape[-1], value.shape[-1]), dim=-1)
        rows = [x.flatten(1) for x in (query, key, value)]  # [T, heads * head_dim]
        outputs = []
        for stack in params.stacks:
            q, k, v = (
                r.index_select(0, places.view(-1)).view(*places.shape, -1, x.shape[-1]).transpose(1, 2)
                for r, x, places in zip(rows, (query, key, value), (stack.queries, stack.keys, stack.keys), strict=True)
            )
            width = v.shape[-1]
            if width < q.shape[-1]:  # torch's fused kernels store no attention matrix, but need equal widths
                v = F.pad(v, (0, q.shape[-1] - width))
            mask, is_grouped = stack.mask, q.shape[1] != k.shape[1]
            if mask is None and q.shape[2] != k.shape[2]:
                mask = causal_lower_right(q.shape[2], k.shape[2])
            out = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, scale=self.scale, enable_gqa=is_grouped
            )
            outputs.append(out[..., :width].transpose(1, 2).reshape(stack.queries.numel(), -1))
        return torch.cat(outputs).index_select(0, params.restore).unsqueeze(1)


class RMSNorm(torch.nn.Module):
    """RMS norm that supports sequence parallelism. Megatron's own norm does not, without Apex or TE."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__()
        self.eps, self._is_zero_centred = eps, config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, is_zero_centred=self._is_zero_centred)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, is_zero_centred: bool) -> Tensor:
    """Return the RMS norm of the last dim. A zero-centred weight is stored less 1, and has too few digits in bfloat16
    once 1 is added.
    """
    if is_zero_centred:
        return F.rms_norm(x.float(), weight.shape, 1 + weight.float(), eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


class PackedRotary(RotaryEmbedding):
    """Rotary angles from each token's position in its segment. `inv_freq` is the model's, scaling included."""

    def __init__(self, inv_freq: Tensor) -> None:
        torch.nn.Module.__init__(self)
        self.inv_freq = inv_freq  # [head_dim / 2]

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return position ids instead of a length. GPTModel only passes the result to `forward`. The last argument is
        ours.
        """
        return args[-1].position_ids

    def forward(self, position_ids: Tensor, **kwargs: Any) -> Tensor:  # -> [T, 1, 1, head_dim]
        angles = torch.outer(position_ids.float(), self.inv_freq.to(position_ids.device))
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class LatentRotary(PackedRotary):
    """Rotary angles of multi-latent attention, and the scale of cosine and sine."""

    def __init__(self, inv_freq: Tensor, scale: float) -> None:
        super().__init__(inv_freq)
        self.scale = scale

    def forward(self, position_ids: Tensor, **kwargs: Any) -> Any:  # -> ([T, 1, rope_dim], scale)
        return super().forward(position_ids)[:, 0], self.scale
