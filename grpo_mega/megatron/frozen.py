"""Models whose weights stay in host memory while the policy trains: the reference, and teachers to distill from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from grpo_mega.algorithm.logprobs import vocab_parallel_logprobs
from grpo_mega.config import AlgorithmConfig, Config, PrecisionConfig
from grpo_mega.megatron.model import (
    biases_of,
    build_chunks,
    output_weight,
    parameters_of,
    shards_of,
    uses_transformer_engine,
)
from grpo_mega.megatron.offload import HostCopy, PolicyMemory, storages_of
from grpo_mega.megatron.pipeline import Pipeline
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.types import PackedBatch
from grpo_mega.weights.apply import load_shards
from grpo_mega.weights.boxes import Box
from grpo_mega.weights.spec import Family, ModelShape, padded_vocab


class Reference:
    """The reference of the KL penalty. Its weights start as the start model's and can follow the policy.

    A refresh sets them to alpha * policy + (1 - alpha) * reference, alpha = algorithm.ref_model_mixup_alpha
    (DeepSeekMath, arXiv 2402.03300, algorithm 1, and TRL's `sync_ref_model`). At alpha 1 they equal the policy, bit for
    bit. Below 1 the average is kept in fp32.
    """

    def __init__(self, memory: PolicyMemory, parameters: Mapping[str, Tensor], algorithm: AlgorithmConfig) -> None:
        """Copy the current weights. They must be on the device here and in every method."""
        self.weights = memory.copy_weights()  # input of PolicyMemory.with_weights
        self._memory, self._parameters, self._alpha = memory, parameters, algorithm.ref_model_mixup_alpha
        self._average = self._copied(torch.float32) if algorithm.averages_reference else None

    def computing(self) -> AbstractContextManager[None]:
        """Return a context in which the policy's modules compute with the reference's weights."""
        return self._memory.with_weights(self.weights)

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the reference from the policy once."""
        if self._average is None:
            self._memory.copy_weights(self.weights)
            return
        for name, average in self._average.items():
            average.mul_(1 - self._alpha).add_(self._parameters[name].detach().cpu(), alpha=self._alpha)
        self._put(self._average)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors for a checkpoint, on the host, by parameter name: the fp32 average, else copies of the
        weights.
        """
        if self._average is not None:
            return self._average
        with self._memory.with_weights(self.weights):
            return self._copied()

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors of a checkpoint."""
        if self._average is not None:
            self._average = {name: tensor.to("cpu", torch.float32) for name, tensor in tensors.items()}
        self._put(tensors)

    def _copied(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        return {name: p.detach().to("cpu", dtype or p.dtype, copy=True) for name, p in self._parameters.items()}

    def _put(self, tensors: Mapping[str, Tensor]) -> None:
        with self._memory.borrowed():
            for name, p in self._parameters.items():
                p.copy_(tensors[name])
            self._memory.copy_weights(self.weights)


class Teacher:
    """A frozen Megatron model of any size and family, in the policy's layout. It computes log-probs of the responses.

    Its weights are on the device only while it computes. It has no gradients and no optimizer. It computes in
    model.dtype, whatever precision the policy has. Methods are collective: all ranks must call them together.
    """

    def __init__(
        self, config: Config, shape: ModelShape, family: Family, hf_config: Any, runtime: Runtime, vocab_size: int
    ) -> None:
        """Build the model without weights; `load` fills them. `vocab_size` is the policy's. Rows beyond it are
        padding.
        """
        ep = runtime.layout.ep if shape.num_experts else 1
        self._runtime = replace(runtime, layout=replace(runtime.layout, layers_per_chunk=None, ep=ep))
        self._temperature, self._vocab_size = config.rollout.temperature, vocab_size
        config = config.model_copy(update={"precision": PrecisionConfig()})
        self._models = build_chunks(shape, family, hf_config, config, self._runtime)
        self._holding = shards_of(family, shape, config, self._runtime).rank_shards(runtime.rank)
        self._parameters = parameters_of(self._models, self._holding)
        self._pipeline = Pipeline(
            [Float16Module(m.config, m) if m.config.bf16 else m for m in self._models],
            uses_te=uses_transformer_engine(runtime),
        )
        self._parameters |= biases_of(self._models)
        # On the last stage: the output layer's rows that the policy has on this rank, in host memory. The teacher's own
        # shard may differ.
        self.head_VG = torch.empty(0)
        head = (family.embedding if shape.tied else family.output).hf[0]
        width = padded_vocab(vocab_size, runtime.layout.tp) // runtime.layout.tp
        start, end = (min(width * (runtime.tp_rank + i), vocab_size) for i in (0, 1))
        is_wanted = config.algorithm.has_vocab_kl and runtime.pp_rank == runtime.layout.pp - 1
        self._head = Box(head, (start, 0), (end, shape.hidden)) if is_wanted else None
        self._head_size = (width, shape.hidden)
        self._host = HostCopy(torch.cuda.Stream(), is_pinned=runtime.device.is_cuda)

    def load(self, read: Callable[[Box], Tensor]) -> None:
        """Fill the weights from a checkpoint's slices, and move them to the host."""
        with self._runtime.raise_on_all_ranks(), torch.no_grad():
            load_shards(self._holding, self._parameters, read)
            if self._head is not None:
                dtype, is_pinned = next(iter(self._parameters.values())).dtype, self._runtime.device.is_cuda
                self.head_VG = torch.zeros(self._head_size, dtype=dtype, pin_memory=is_pinned)
                self.head_VG[: self._head.shape[0]] = read(self._head)
        self._host.take(storages_of(self._parameters.values()))
        self._host.drop()

    def logprobs(self, mini_batches: Sequence[Sequence[PackedBatch]]) -> list[tuple[PackedBatch, Tensor]]:
        """Return each batch with the log-probs [T] of its tokens in the loss; an empty list except on the last stage.

        They use the policy's sampling temperature.
        """

        def logprobs_of(hidden_TH: Tensor, batch: PackedBatch) -> Tensor:
            return vocab_parallel_logprobs(
                hidden_TH,
                output_weight(self._models[-1]),
                batch.targets,
                vocab_size=self._vocab_size,
                temperature=self._temperature,
                tp_group=self._runtime.tp_group,
                needed_T=batch.loss_mask > 0,
            )[0]

        with self._on_device():
            return self._pipeline.evaluate(mini_batches, logprobs_of)

    def hidden(
        self, mini_batches: Sequence[Sequence[PackedBatch]], is_taught: Callable[[PackedBatch], Tensor]
    ) -> list[tuple[PackedBatch, tuple[Tensor, Tensor]]]:
        """Return each batch with `is_taught(batch)`, [T] bool, and the last hidden states of these tokens, on the
        host.
        """

        def taught(hidden_TH: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
            is_taught_T = is_taught(batch)
            return is_taught_T, hidden_TH[is_taught_T].cpu()

        with self._on_device():
            return self._pipeline.evaluate(mini_batches, taught)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        torch.cuda.current_stream().wait_event(self._host.put())
        try:
            yield
        finally:
            self._host.drop()  # the host keeps the weights, and they never change
