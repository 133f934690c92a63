"""Moves a policy between device and host memory, so that trainer and engine can take turns on the same GPUs.

What moves is storages: one is copied to the host and shrunk to nothing, later grown again and filled. So every tensor on it
stays valid (Megatron's parameters, buckets and fp32 shards are views of a few large buffers), and what shares a storage moves
once. Gradients are dropped, not copied: they come back as zeros. Host memory is allocated once and used again in every step;
it is pinned where there is CUDA, and copies run on a stream of their own. On a CPU device and host are both RAM.

Of Megatron's own means only those for gradient buffers are used, which do just this. `MegatronOptimizer.offload_to_cpu` copies
tensor by tensor into new pageable memory, gives fp32 master shards storages of their own (they are views of fp32 weights) and
does nothing without CUDA; the parameter buffers' `offload_to_cpu` cannot run without CUDA, and leaves the freed memory with
the process; `optimizer_cpu_offload` is for optimizer steps on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage

CHUNK_BYTES = 256 << 20  # of host memory; torch rounds a pinned allocation up to a power of two, so one large one could double
ALIGNMENT = 512  # of each storage's bytes on the host


def storages_of(tensors: Iterable[Tensor], *, but_of: Iterable[Tensor] = ()) -> list[UntypedStorage]:
    """The storages under `tensors` that hold anything, each once, without those under `but_of`."""
    found = {s.data_ptr(): s for s in (t.untyped_storage() for t in tensors) if s.nbytes()}
    for other in but_of:
        found.pop(other.untyped_storage().data_ptr(), None)
    return list(found.values())


class HostCopy:
    """A copy of device storages in host memory, which is kept for the next copy."""

    def __init__(self, stream: Any, *, is_pinned: bool, chunk_bytes: int = CHUNK_BYTES) -> None:
        assert chunk_bytes % ALIGNMENT == 0
        self.taken: list[tuple[UntypedStorage, int]] = []  # with their bytes
        self._stream, self._is_pinned, self._chunk_bytes = stream, is_pinned, chunk_bytes
        self._chunks: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Host memory held."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def take(self, storages: Sequence[UntypedStorage]) -> None:
        """Copies the storages to the host, after what is queued on the current stream; the copy runs on `stream`."""
        self.taken = [(s, s.nbytes()) for s in storages]
        self._reserve(sum(_aligned(nbytes) for _, nbytes in self.taken))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for device, host in self._pieces():
                host.copy_(device, non_blocking=True)

    def put(self) -> Any:
        """Copies the bytes back into the storages they came from, likewise; the event is to be waited for before their use."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for device, host in self._pieces():
                device.copy_(host, non_blocking=True)
        return self._stream.record_event()

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All bytes as pairs of (device, host), cut where a chunk ends."""
        begin = 0
        for storage, nbytes in self.taken:
            assert storage.nbytes() == nbytes, (storage.nbytes(), nbytes)
            device = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            done = 0
            while done < nbytes:
                index, offset = divmod(begin + done, self._chunk_bytes)
                host = self._chunks[index][offset : offset + nbytes - done]
                yield device[done : done + host.numel()], host
                done += host.numel()
            begin += _aligned(nbytes)

    def _reserve(self, nbytes: int) -> None:
        """Chunks for `nbytes` bytes; only the last may be short, and is replaced when more is needed."""
        if nbytes <= self.nbytes:
            return
        del self._chunks[self.nbytes // self._chunk_bytes :]
        while (missing := nbytes - self.nbytes) > 0:
            size = min(missing, self._chunk_bytes)
            self._chunks.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._is_pinned))


class Movable:
    """Storages that are on the device or, their contents in `copy`, on the host."""

    def __init__(self, stream: Any, *, is_pinned: bool, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.copy = HostCopy(stream, is_pinned=is_pinned, chunk_bytes=chunk_bytes)
        self.is_away = False
        self._stream = stream
        self._arrival: Any = None  # of what is on its way to the device

    def offload(self, storages: Sequence[UntypedStorage]) -> None:
        """To the host, unless already there. When this returns nothing uses the device memory any more."""
        if self.is_away:
            return
        assert all(s.resizable() for s in storages), (
            "numpy() was called on a tensor of these storages, which pins them for good"
        )
        self.copy.take(storages)
        self._stream.synchronize()
        for storage in storages:
            storage.resize_(0)
        self.is_away, self._arrival = bool(storages), None

    def begin_onload(self) -> None:
        """Starts for the device. `onload` must come before any use."""
        if self.is_away:
            for storage, nbytes in self.copy.taken:
                storage.resize_(nbytes)
            self.is_away, self._arrival = False, self.copy.put()

    def onload(self) -> None:
        """What is queued on the current stream after this finds the storages filled."""
        self.begin_onload()
        if self._arrival is not None:
            torch.cuda.current_stream().wait_event(self._arrival)
            self._arrival = None


class PolicyMemory:
    """Where a policy's weights, gradients and optimizer state are. Whatever is already in its place is left alone."""

    def __init__(
        self,
        chunks: Sequence[Any],
        weights: Callable[[], list[Tensor]],
        optimizer_state: Callable[[], list[Tensor]],
        *,
        is_cuda: bool,
    ) -> None:
        """`chunks`: wrapped for data parallelism. `weights()` and `optimizer_state()`: tensors as they are now; Adam makes its
        moments at its first step, a restore makes them anew, and weights in FP8 get transposed copies as they are used."""
        self._chunks, self._weights, self._optimizer_state = chunks, weights, optimizer_state
        self._stream, self._is_cuda = torch.cuda.Stream(), is_cuda
        self._moved_weights = Movable(self._stream, is_pinned=is_cuda)
        self._moved_optimizer = Movable(self._stream, is_pinned=is_cuda)

    @property
    def has_weights(self) -> bool:
        return not self._moved_weights.is_away

    @property
    def device_bytes(self) -> int:
        """Held by weights, gradients, fp32 master weights and Adam's moments."""
        tensors = [*self._weights(), *self._optimizer_state(), *(b.grad_data for c in self._chunks for b in _buffers(c))]
        return sum(s.nbytes() for s in storages_of(tensors))

    @property
    def host_bytes(self) -> int:
        """Held for what is or was on the host, whether in use or not."""
        return self._moved_weights.copy.nbytes + self._moved_optimizer.copy.nbytes

    def offload_optimizer(self) -> None:
        """Drops the gradients and what Transformer Engine can make again; the optimizer's state goes to the host."""
        before = self.device_bytes
        for chunk in self._chunks:
            chunk.offload_grad_buffers(synchronize=False, empty_cache=False)
            _drop_fp8_weights(chunk)
        self._moved_optimizer.offload(storages_of(self._optimizer_state(), but_of=self._weights()))
        self._give_back(before)

    def offload_weights(self) -> None:
        """The weights, which no collective may still be writing, go to the host."""
        before = self.device_bytes
        self._moved_weights.offload(storages_of(self._weights()))
        self._give_back(before)

    def onload_weights(self) -> None:
        self._moved_weights.onload()

    def onload_optimizer(self) -> None:
        """The optimizer's state, without which the fp32 master weights are not to be read."""
        self._moved_optimizer.onload()

    def onload(self) -> None:
        """Everything; the optimizer's state goes on arriving until `onload_optimizer`. Gradients are zeros."""
        self.onload_weights()
        for chunk in self._chunks:
            chunk.restore_grad_buffers(synchronize=False)
        self._moved_optimizer.begin_onload()

    def copy_weights(self) -> HostCopy:
        """A copy of the weights as they are now, for `with_weights`."""
        copy = HostCopy(self._stream, is_pinned=self._is_cuda)
        copy.take(storages_of(self._weights()))
        self._stream.synchronize()
        return copy

    @contextmanager
    def with_weights(self, copy: HostCopy) -> Iterator[None]:
        """Other weights while it lasts; then the policy's own again, bit for bit. They wait where they go when offloaded."""
        assert self.has_weights
        own = self._moved_weights.copy
        own.take(storages_of(self._weights()))
        torch.cuda.current_stream().wait_event(copy.put())
        try:
            yield
        finally:
            torch.cuda.current_stream().wait_event(own.put())

    def _give_back(self, before: int) -> None:
        """Freed memory goes from the process to the device, where the engine can take it."""
        if self.device_bytes < before:
            torch.cuda.empty_cache()


def _buffers(chunk: Any) -> list[Any]:
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def _drop_fp8_weights(chunk: Any) -> None:
    """Transformer Engine's fp8 copies of the weights, which it makes anew at the first micro-batch of a pass."""
    for module in chunk.modules():
        getattr(module, "_fp8_workspaces", {}).clear()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
