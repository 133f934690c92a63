"""Run packed micro-batches through the pipeline: forward only, or forward and backward.

Megatron's schedule runs the micro-batches and calls the caller's function with the last hidden states on the last stage. All
micro-batches of one call have the same number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from grpo_mega.algorithm.losses import LossOutputs
from grpo_mega.distributed.recorder import recorder
from grpo_mega.megatron.attention import pack_params
from grpo_mega.types import PackedBatch

T = TypeVar("T")
Item = tuple[PackedBatch, PackedSeqParams]


class Pipeline:
    """This rank's model chunks (wrapped for data parallelism), ready to run micro-batches."""

    def __init__(self, chunks: Sequence[Any], *, uses_te: bool) -> None:
        self._chunks = list(chunks)
        self._uses_te = uses_te
        # Without this Megatron's casting wrapper copies the hidden states to fp32.
        self._model_kwargs = {"fp32_output": False} if chunks[0].config.bf16 else {}

    @torch.no_grad()
    def forward(self, batches: Sequence[PackedBatch], on_hidden: Callable[[Tensor, PackedBatch], T]) -> list[T]:
        """Return `on_hidden(hidden_TH, batch)` of each micro-batch on the last stage; an empty list on the others."""

        def forward_step(items: Iterator[Item], model: Any) -> tuple[Tensor, Callable[..., T]]:
            item = next(items)
            return self._hidden(item, model), lambda out, non_loss_data: on_hidden(out.squeeze(0), item[0])

        return self._run(batches, forward_step, forward_only=True, collect_non_loss_data=True)

    def forward_backward(
        self, batches: Sequence[PackedBatch], on_hidden: Callable[[Tensor, PackedBatch], LossOutputs]
    ) -> list[LossOutputs]:
        """Put the gradient of the sum of all losses, over micro-batches and data-parallel ranks, into the gradient buffers."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()

        def loss(batch: PackedBatch, out: Tensor) -> tuple[Tensor, Tensor, LossOutputs]:
            outputs = on_hidden(out.squeeze(0), batch)
            return outputs.loss, torch.zeros([], dtype=torch.int32, device=out.device), outputs

        def forward_step(items: Iterator[Item], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            item = next(items)
            return self._hidden(item, model), partial(loss, item[0])

        return self._run(batches, forward_step, forward_only=False)

    def _hidden(self, item: Item, model: Any) -> Tensor:
        """Return hidden states: [1, T, hidden] on the last stage, [T (/ tp with sequence parallelism), 1, hidden] on the
        others."""
        batch, packed_seq_params = item
        recorder().beat()
        return model(
            batch.tokens[None], batch.position_ids[None], None, packed_seq_params=packed_seq_params, **self._model_kwargs
        )

    def _run(self, batches: Sequence[PackedBatch], forward_step: Callable[..., Any], **kwargs: Any) -> list[Any]:
        items = [(batch, self.packed_seq_params_of(batch)) for batch in batches]
        iterators = [iter(items) for _ in self._chunks]
        is_single = len(self._chunks) == 1
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators[0] if is_single else iterators,
            model=self._chunks[0] if is_single else self._chunks,
            num_microbatches=len(batches),
            seq_length=batches[0].num_tokens,
            micro_batch_size=1,
            **kwargs,
        )

    def packed_seq_params_of(self, batch: PackedBatch) -> PackedSeqParams:
        if not self._uses_te:
            return pack_params(batch.cu_seqlens, batch.position_ids)
        longest = int(batch.cu_seqlens.diff().max())
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=batch.cu_seqlens,
            cu_seqlens_kv=batch.cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
