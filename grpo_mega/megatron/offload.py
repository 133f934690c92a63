"""Offload a policy to host memory and onload it again, so that trainer and engine can take turns on the same GPUs.

Storages move, not tensors. A storage is copied to the host and shrunk to size 0; later it is resized and filled. Every
tensor on it stays valid (Megatron's parameters, buckets and fp32 shards are views of a few large buffers), and a shared
storage moves once. Gradients are dropped and return as zeros. Host memory is allocated once and reused in every step.
With CUDA it is pinned, and copies run on a separate stream. On a CPU, device and host are both RAM.

Megatron's own functions fit only for gradient buffers. `MegatronOptimizer.offload_to_cpu` copies tensor by tensor into
new pageable memory, gives fp32 master shards separate storages (they are views of fp32 weights) and does nothing
without CUDA. `offload_to_cpu` of parameter buffers needs CUDA and does not return the freed memory to the device.
`optimizer_cpu_offload` is for optimizer steps on the CPU (optimizer.cpu_offload). Its state is always on the host, so
only weights and gradients move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from grpo_mega.megatron.optimizer import wait_for_param_gather

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


class Movable:
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
        self._moved_weights = Movable(self._stream, is_pinned=is_cuda)
        self._moved_optimizer = Movable(self._stream, is_pinned=is_cuda)

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
