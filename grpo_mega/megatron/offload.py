"""Models in host memory: the policy during generation; reference and teachers, which stay there, during updates.

A policy is offloaded and onloaded again, so that trainer and engine can take turns on the same GPUs. Storages move, not
tensors. A storage is copied to the host and shrunk to size 0; later it is resized and filled. Every tensor on it stays
valid (Megatron's parameters, buckets and fp32 shards are views of a few large buffers), and a shared storage moves
once. Gradients are dropped and return as zeros. Host memory is allocated once and reused in every step. With CUDA it is
pinned, and copies run on a separate stream. On a CPU, device and host are both RAM.

You can use Megatron's offload functions only for gradient buffers. `MegatronOptimizer.offload_to_cpu` copies tensor by
tensor into new pageable memory, gives fp32 master shards separate storages (they are views of fp32 weights) and does
nothing without CUDA. `offload_to_cpu` of parameter buffers needs CUDA and does not return the freed memory to the
device. `optimizer_cpu_offload` is for optimizer steps on the CPU (optimizer.cpu_offload). Its state is always on the
host, so only weights and gradients move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer.module import Float16Module
from torch import Tensor, UntypedStorage

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
from grpo_mega.megatron.optimizer import wait_for_param_gather
from grpo_mega.megatron.pipeline import Pipeline
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.types import PackedBatch
from grpo_mega.weights.apply import load_shards
from grpo_mega.weights.boxes import Box
from grpo_mega.weights.spec import Family, ModelShape, round_up

CHUNK_BYTES = 256 << 20  # torch rounds pinned allocations up to a power of two, and could double a larger one
ALIGNMENT = 512  # each storage starts at a multiple of this many bytes on the host


def storages_of(tensors: Iterable[Tensor], *, but_of: Iterable[Tensor] = ()) -> list[UntypedStorage]:
    """Return the non-empty storages under `tensors`, each once, without the storages under `but_of`."""
    storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in tensors) if s.nbytes()}
    for other in but_of:
        storages.pop(other.untyped_storage().data_ptr(), None)
    return list(storages.values())


class HostCopy:
    """A copy of device storages in host memory. The next copy reuses the memory.

    Copies run on a separate stream. Only this class knows when they have ended, so only this class frees the storages.
    """

    def __init__(self, stream: Any, *, is_pinned: bool, chunk_bytes: int = CHUNK_BYTES) -> None:
        assert chunk_bytes % ALIGNMENT == 0
        self.taken: list[tuple[UntypedStorage, int]] = []  # copied storages and their sizes in bytes
        self._stream, self._is_pinned, self._chunk_bytes = stream, is_pinned, chunk_bytes
        self._chunks: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Return the size of the host memory."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def take(self, storages: Sequence[UntypedStorage]) -> None:
        """Copy the storages to the host, on the copy stream, after all work queued on the current stream."""
        self.taken = [(s, s.nbytes()) for s in storages]
        nbytes = sum(_aligned(size) for _, size in self.taken)
        if nbytes > self.nbytes:  # only the last chunk may be short, and a longer one replaces it
            del self._chunks[self.nbytes // self._chunk_bytes :]
            while (missing := nbytes - self.nbytes) > 0:
                size = min(missing, self._chunk_bytes)
                self._chunks.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._is_pinned))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for device, host in self._pieces():
                host.copy_(device, non_blocking=True)

    def put(self) -> Any:
        """Copy the bytes back into their storages on the copy stream. Wait for the returned event before you use
        them.
        """
        for storage, nbytes in self.taken:
            if not storage.nbytes():
                storage.resize_(nbytes)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for device, host in self._pieces():
                device.copy_(host, non_blocking=True)
        return self._stream.record_event()

    def finish(self) -> None:
        """Wait on the host until the copies have ended."""
        self._stream.synchronize()

    def drop(self) -> None:
        """Free the device memory of the storages after the copies have ended. `put` allocates it again."""
        self.finish()
        for storage, _ in self.taken:
            storage.resize_(0)

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all bytes as pairs of (device, host) slices, split at chunk boundaries."""
        start = 0
        for storage, nbytes in self.taken:
            assert storage.nbytes() == nbytes, (storage.nbytes(), nbytes)
            device = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            done = 0
            while done < nbytes:
                index, offset = divmod(start + done, self._chunk_bytes)
                host = self._chunks[index][offset : offset + nbytes - done]
                yield device[done : done + host.numel()], host
                done += host.numel()
            start += _aligned(nbytes)


class OffloadedStorages:
    """Storages that are on the device, or on the host with their contents in `copy`."""

    def __init__(self, stream: Any, *, is_pinned: bool, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.copy = HostCopy(stream, is_pinned=is_pinned, chunk_bytes=chunk_bytes)
        self.is_away = False
        self._arrival: Any = None  # event of a copy to the device that may still be running

    def offload(self, storages: Sequence[UntypedStorage]) -> None:
        """Move the storages to the host unless they are already there. On return nothing uses the device memory."""
        if self.is_away:
            return
        assert all(s.resizable() for s in storages), (
            "numpy() was called on a tensor of these storages, so they can never be resized"
        )
        self.copy.take(storages)
        self.copy.drop()
        self.is_away, self._arrival = bool(storages), None

    def begin_onload(self) -> None:
        """Start the copy to the device. Call `onload` before any use."""
        if self.is_away:
            self.is_away, self._arrival = False, self.copy.put()

    def onload(self) -> None:
        """Make the current stream wait until the storages are filled."""
        self.begin_onload()
        if self._arrival is not None:
            torch.cuda.current_stream().wait_event(self._arrival)
            self._arrival = None


class PolicyMemory:
    """The weights, gradients and optimizer state of a policy, on the device or offloaded. Repeated calls do nothing."""

    def __init__(
        self,
        chunks: Sequence[Any],
        weights: Callable[[], list[Tensor]],
        optimizer_state: Callable[[], list[Tensor]],
        *,
        is_cuda: bool,
    ) -> None:
        """`chunks` are wrapped for data parallelism. `weights()` and `optimizer_state()` return the current tensors.

        The tensors change: Adam makes its moments at its first step, a restore replaces them, and FP8 weights get
        transposed copies when they are used.
        """
        self._chunks, self._weights, self._optimizer_state = chunks, weights, optimizer_state
        self._stream, self._is_cuda = torch.cuda.Stream(), is_cuda
        self._moved_weights = OffloadedStorages(self._stream, is_pinned=is_cuda)
        self._moved_optimizer = OffloadedStorages(self._stream, is_pinned=is_cuda)

    @property
    def has_weights(self) -> bool:
        return not self._moved_weights.is_away

    @property
    def device_bytes(self) -> int:
        """Return the device memory of weights, gradients, fp32 master weights and Adam's moments."""
        buffers = [b for chunk in self._chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        tensors = [*self._weights(), *self._optimizer_state(), *(buffer.grad_data for buffer in buffers)]
        return sum(s.nbytes() for s in storages_of(tensors))

    def offload_optimizer(self) -> None:
        """Drop the gradients and TE's FP8 copies, and offload the optimizer's state. Call it after an update, before a
        sync.
        """
        before = self.device_bytes
        for chunk in self._chunks:
            chunk.offload_grad_buffers(synchronize=False, empty_cache=False)
            for module in chunk.modules():  # TE makes new FP8 copies at the first micro-batch of a pass
                getattr(module, "_fp8_workspaces", {}).clear()
        self._moved_optimizer.offload(storages_of(self._optimizer_state(), but_of=self._weights()))
        self._give_back(before)

    def offload_weights(self) -> None:
        """Offload the weights once no gather writes to them. Call it after a sync."""
        if self.has_weights:
            wait_for_param_gather(self._chunks)
        before = self.device_bytes
        self._moved_weights.offload(storages_of(self._weights()))
        self._give_back(before)

    def onload_weights(self) -> None:
        self._moved_weights.onload()

    def onload_optimizer(self) -> None:
        """Onload the optimizer's state and wait for it. Do not read the fp32 master weights earlier."""
        self._moved_optimizer.onload()

    def onload(self) -> None:
        """Onload everything, with gradients as zeros. The optimizer's state may be incomplete until
        `onload_optimizer`.
        """
        self.onload_weights()
        for chunk in self._chunks:
            chunk.restore_grad_buffers(synchronize=False)
        self._moved_optimizer.begin_onload()

    def copy_weights(self, into: HostCopy | None = None) -> HostCopy:
        """Return a copy of the current weights for `with_weights`. If given, reuse the host memory of `into`."""
        copy = into or HostCopy(self._stream, is_pinned=self._is_cuda)
        copy.take(storages_of(self._weights()))
        copy.finish()
        return copy

    @contextmanager
    def with_weights(self, copy: HostCopy) -> Iterator[None]:
        """Use other weights inside the context."""
        with self.borrowed():
            torch.cuda.current_stream().wait_event(copy.put())
            yield

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Let the caller overwrite the weights inside the context. Then restore the policy's, bit for bit, from the
        host.
        """
        assert self.has_weights
        own = self._moved_weights.copy
        own.take(storages_of(self._weights()))
        torch.cuda.current_stream().wait_stream(self._stream)
        try:
            yield
        finally:
            torch.cuda.current_stream().wait_event(own.put())

    def _give_back(self, before: int) -> None:
        """Return freed memory from the process to the device, so the engine can use it."""
        if self.device_bytes < before:
            torch.cuda.empty_cache()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


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
        self._models = build_chunks(
            shape, family, hf_config, config.model, config.layout, PrecisionConfig(), self._runtime
        )
        self._holding = shards_of(family, shape, config.model, self._runtime).rank_shards(runtime.rank)
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
        width = round_up(vocab_size, runtime.layout.tp) // runtime.layout.tp
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
                num_needed=batch.num_loss_tokens,
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
            kept_NG = hidden_TH[is_taught_T].cpu()
            # The update copies pinned memory without waiting.
            return is_taught_T, kept_NG.pin_memory() if hidden_TH.is_cuda else kept_NG

        with self._on_device():
            return self._pipeline.evaluate(mini_batches, taught)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        torch.cuda.current_stream().wait_event(self._host.put())
        try:
            yield
        finally:
            self._host.drop()  # the host keeps the weights, and they never change
