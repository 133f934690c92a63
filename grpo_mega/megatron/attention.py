"""Attention, norm and rotary positions of packed sequences, for layers without Transformer Engine.

A micro-batch is one row of T tokens, several segments end to end. Attention must not cross segments: they are gathered into a
few right-padded batches of similar length (causal attention never sees padding on the right), passed through torch's fused
attention, and scattered back. The same code runs on any device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

MAX_PADDING = 1.25  # a batch of segments may be this much larger than the tokens in it


@dataclass
class LocalPackedSeqParams(PackedSeqParams):
    """A micro-batch's segments for the parts below, computed once and used by every layer.

    `qkv_format` is not "thd": Megatron then takes rotary positions from the table (one row per token) that `PackedRotary`
    makes.
    """

    position_ids: Tensor = field(default_factory=Tensor)  # [T]
    gathers: tuple[Tensor, ...] = ()  # each [segments, longest], indices into T; padding repeats a segment's last token
    restore: Tensor = field(default_factory=Tensor)  # [T], the place of each token in the concatenated, flattened batches


def pack_params(cu_seqlens: Tensor, position_ids: Tensor) -> LocalPackedSeqParams:
    """Return the parameters of the segments [cu_seqlens[i], cu_seqlens[i + 1]), which cover all T tokens."""
    cuts = cu_seqlens.tolist()
    spans = sorted(((b - a, a) for a, b in pairwise(cuts) if b > a), reverse=True)
    gathers: list[Tensor] = []
    restore = torch.empty(cuts[-1], dtype=torch.int64)
    base = 0
    for batch in _similar(spans):
        longest = batch[0][0]
        lengths = torch.tensor([n for n, _ in batch])[:, None]
        starts = torch.tensor([a for _, a in batch])[:, None]
        column = torch.arange(longest)[None, :]
        gathers.append(starts + torch.minimum(column, lengths - 1))
        slots = (base + torch.arange(len(batch) * longest)).view(len(batch), longest)
        is_real = column < lengths
        restore[gathers[-1][is_real]] = slots[is_real]
        base += len(batch) * longest
    device = position_ids.device
    return LocalPackedSeqParams(
        qkv_format="packed",
        position_ids=position_ids,
        gathers=tuple(g.to(device) for g in gathers),
        restore=restore.to(device),
    )


def _similar(spans: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Split (length, start), longest first, into runs with a padded size of at most MAX_PADDING times their tokens."""
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
    """Megatron's `core_attention` for packed rows. No parameters."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        assert config.context_parallel_size == 1, "context parallelism needs Transformer Engine"
        assert not (config.attention_dropout if attention_dropout is None else attention_dropout)
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,  # [T, 1, heads / tp, head_dim]; with latents there is no dim of 1
        key: Tensor,  # [T, 1, kv_heads / tp, head_dim]
        value: Tensor,  # of another width with latents
        attention_mask: Tensor | None,
        *,
        packed_seq_params: LocalPackedSeqParams,
        **kwargs: Any,
    ) -> Tensor:  # [T, 1, heads / tp * width of a value]
        params = packed_seq_params
        rows = [x.flatten(1) for x in (query, key, value)]  # [T, heads * head_dim]
        outputs = []
        for gather in params.gathers:
            q, k, v = (
                r.index_select(0, gather.view(-1)).view(*gather.shape, -1, x.shape[-1]).transpose(1, 2)
                for r, x in zip(rows, (query, key, value), strict=True)
            )
            width = v.shape[-1]
            if width < q.shape[-1]:  # torch's fused kernels take one width, and keep no matrix of all pairs
                v = F.pad(v, (0, q.shape[-1] - width))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1])
            outputs.append(out[..., :width].transpose(1, 2).reshape(gather.numel(), -1))
        return torch.cat(outputs).index_select(0, params.restore).unsqueeze(1)


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm that allows sequence parallelism (Megatron's own, without Apex or TE, does not)."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class PackedRotary(RotaryEmbedding):
    """Rotary angles by each token's position in its segment; `inv_freq` is the model's own, scaling included."""

    def __init__(self, inv_freq: Tensor) -> None:
        torch.nn.Module.__init__(self)
        self.inv_freq = inv_freq  # [head_dim / 2]

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return position ids in place of a length: GPTModel only passes the result to `forward`. The last argument is ours."""
        return args[-1].position_ids

    def forward(self, position_ids: Tensor, **kwargs: Any) -> Tensor:  # -> [T, 1, 1, head_dim]
        angles = torch.outer(position_ids.float(), self.inv_freq.to(position_ids.device))
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]
