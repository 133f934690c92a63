"""Run packed micro-batches through the pipeline: forward only, or forward and backward.

Megatron's schedule runs the micro-batches. On the last stage it calls the caller's function with the last hidden
states. All micro-batches of one call have the same number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from grpo_mega.algorithm.losses import LossOutputs
from grpo_mega.distributed.watchdog import recorder
from grpo_mega.megatron.attention import HybridPackedSeqParams, LatentPackedSeqParams, pack_params, window_of
from grpo_mega.megatron.routers import Routers
from grpo_mega.types import PackedBatch

T = TypeVar("T")
FORWARD, BACKWARD = "forward", "backward"  # kinds of beats

LENGTH_STEP = 1024  # tokens; see te_params


class Pipeline:
    """This rank's model chunks (wrapped for data parallelism), ready to run micro-batches."""

    def __init__(self, chunks: Sequence[Any], *, uses_te: bool, routers: Routers | None = None) -> None:
        """Pass `routers` for a model that trains."""
        self._chunks, self._routers = list(chunks), routers
        self._uses_te = uses_te
        # Without this argument Megatron's casting wrapper copies the hidden states to fp32.
        self._model_kwargs = {"fp32_output": False} if chunks[0].config.bf16 else {}

    @torch.no_grad()
    def forward(self, batches: Sequence[PackedBatch], on_hidden: Callable[[Tensor, PackedBatch], T]) -> list[T]:
        """Return `on_hidden(hidden_TH, batch)` for each micro-batch on the last stage; an empty list on other
        stages.
        """

        def output(batch: PackedBatch, out: Tensor, non_loss_data: bool) -> T:
            return on_hidden(out.squeeze(0), batch)

        return self._run(batches, output, forward_only=True, collect_non_loss_data=True)

    def evaluate(
        self, mini_batches: Sequence[Sequence[PackedBatch]], on_hidden: Callable[[Tensor, PackedBatch], T]
    ) -> list[tuple[PackedBatch, T]]:
        """Return each batch with its `on_hidden(hidden_TH, batch)` on the last stage; an empty list on other stages."""
        pairs: list[tuple[PackedBatch, T]] = []
        for batches in mini_batches:
            values = self.forward(batches, on_hidden)
            pairs += zip(batches, values, strict=bool(values))
        return pairs

    def forward_backward(
        self, batches: Sequence[PackedBatch], on_hidden: Callable[[Tensor, PackedBatch], LossOutputs]
    ) -> list[LossOutputs]:
        """Write the gradient of the sum of all losses, over micro-batches and data-parallel ranks, to the gradient
        buffers.
        """
        for chunk in self._chunks:
            chunk.zero_grad_buffer()

        def loss(batch: PackedBatch, out: Tensor) -> tuple[Tensor, Tensor, LossOutputs]:
            outputs = on_hidden(out.squeeze(0), batch)
            return outputs.loss, torch.zeros([], dtype=torch.int32, device=out.device), outputs

        with self._routers.updating(batches) if self._routers else nullcontext():
            return self._run(batches, loss, forward_only=False)

    def _run(self, batches: Sequence[PackedBatch], on_output: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Return `on_output(batch, hidden states [1, T, hidden], ...)` for each micro-batch on the last stage."""

        def forward_step(items: Iterator[Any], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            batch, params = next(items)
            recorder().heartbeat(FORWARD)
            if self._routers:
                self._routers.start(self._chunks.index(model), batch)
            hidden = model(
                batch.tokens[None], batch.position_ids[None], None, packed_seq_params=params, **self._model_kwargs
            )
            if hidden.requires_grad:
                hidden.register_hook(
                    lambda gradient: recorder().heartbeat(BACKWARD)
                )  # the chunk's backward pass starts
            return hidden, partial(on_output, batch)

        items = [(batch, self.packed_seq_params_of(batch)) for batch in batches]
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(items) for _ in self._chunks],
            model=self._chunks,
            num_microbatches=len(batches),
            seq_length=batches[0].num_tokens
            * batches[0].cp_size,  # tokens of a whole row; the schedule divides them by cp
            micro_batch_size=1,
            **kwargs,
        )

    def packed_seq_params_of(self, batch: PackedBatch) -> PackedSeqParams:
        if not self._uses_te:
            dtype = None if batch.tokens.is_cuda else self._chunks[0].config.params_dtype
            branches, window = batch.shared_prompt_segments, window_of(self._chunks[0].config)
            cuts, positions, cp = batch.cu_seqlens, batch.position_ids, (batch.cp_size, batch.cp_rank)
            return pack_params(cuts, positions, dtype, *cp, branches, window)
        segments = te_params(batch.cu_seqlens, batch.cp_size)
        if self._chunks[0].config.experimental_attention_variant:
            linear = pack_params(batch.cu_seqlens, batch.position_ids, None)
            return HybridPackedSeqParams(**vars(segments), stacks=linear.stacks, restore=linear.restore)
        if self._chunks[0].config.multi_latent_attention:
            return LatentPackedSeqParams("packed", position_ids=batch.position_ids, segments=segments)
        return segments


def te_params(cu_seqlens: Tensor, cp_size: int) -> PackedSeqParams:
    """Return the parameters of Transformer Engine's attention: lengths of whole segments. A rank has 1 / cp_size of
    each.

    With context parallelism TE also needs padded lengths. They are equal, because our lengths include padding. The
    length of the longest segment is rounded up, because Megatron keeps a table of rotary angles for each of the last 32
    lengths, on the device.
    """
    cuts = cu_seqlens * cp_size
    padded, longest = None if cp_size == 1 else cuts, -(-int(cuts.diff().max()) // LENGTH_STEP) * LENGTH_STEP
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cuts,
        cu_seqlens_kv=cuts,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
