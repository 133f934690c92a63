"""The trainer's side when syncing a server on the same machine: bucket buffers, server parameter tables, and adapters.

Buffers are anonymous shared memory on a CPU, CUDA IPC on a GPU.

A rank fills the buffers, and its engine's process on the same device opens them. CPU memory belongs to the rank's file
descriptors (memfd), so nothing is left in /dev/shm, however the processes end.

A sync may send only an adapter (sync.lora=adapter): A and B arrive on the leader, and the server loads them. Each
version has a new name, and every request names it. The previous adapter is unloaded. An earlier sync sent the base, and
its checksums are verified again.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import os
import pickle
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing  # registers tensors with ForkingPickler
from torch import Tensor

from grpo_mega.rollout.sglang.loader import NUM_BUFFERS
from grpo_mega.weights.apply import SCALES, VALUES, Bucket, Entry, mismatched_tensors, scales_name, write_entries
from grpo_mega.weights.boxes import Index, RankShards
from grpo_mega.weights.spec import FLOAT32, num_blocks

# (request without a name, problems, version) -> problems on all engine ranks
Loads = Callable[[Callable[[], dict[str, Any]], list[str], int], list[str]]


@dataclass(frozen=True)
class ServedLora:
    rank: int
    alpha: float
    modules: tuple[str, ...]  # name endings for the base's matrices, such as q_proj
    tensors: Mapping[str, Index]  # A and B, by their Hugging Face names

    def server_arguments(self, device_type: str) -> dict[str, Any]:
        return {
            "enable_lora": True,
            "max_lora_rank": self.rank,
            "lora_target_modules": [*self.modules],
            "max_loras_per_batch": 2,  # the base, for the request of the start, and one adapter
            "lora_strict_loading": True,
            **({"lora_backend": "torch_native"} if device_type == "cpu" else {}),
        }


class AdapterUpdate:
    """Collects A and B for one version, and lets the engine load them. All engine ranks call it together."""

    def __init__(self, lora: ServedLora, dtype: torch.dtype, tp: int, device: torch.device, load: Loads) -> None:
        self._lora, self._dtype, self._tp, self._device, self._load = lora, dtype, tp, device, load
        self._entries: list[Entry] = []
        # Memory that the server's processes open. A request with the tensors would have them once per process.
        self._file = os.memfd_create("grpo_mega_adapter")
        # SGLang needs all matrices in a fused layer. A and B stay 0 for matrices that do not train.
        self._tensors = {name: torch.zeros(shape, dtype=dtype) for name, shape in lora.tensors.items()}

    def start_update(self) -> list[str]:
        self._entries = []
        return []

    def allocate(self, index: int, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def load(self, bucket: Bucket) -> None:
        self._entries += bucket.entries
        write_entries(bucket.entries, bucket.values.cpu(), self._tensors, bucket.dtype)

    def end_update(self, version: int) -> list[str]:
        return self._load(self._request, mismatched_tensors(self._entries, self._tensors), version)

    def _request(self) -> dict[str, Any]:
        """Return the request to load the adapter. Each server process compares the checksums."""
        lora = self._lora
        with os.fdopen(self._file, "wb", closefd=False) as file:
            file.seek(0)
            torch.save(self._tensors, file)
            file.truncate()
        data = base64.b64encode(pickle.dumps(f"/proc/{os.getpid()}/fd/{self._file}")).decode()
        return {
            "config_dict": {
                "peft_type": "LORA",
                "r": lora.rank,
                "lora_alpha": lora.alpha,
                "target_modules": [*lora.modules],
            },
            "serialized_named_tensors": [data] * self._tp,
            "expected_checksums": {
                name: hashlib.sha256(tensor.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
                for name, tensor in self._tensors.items()
            },
        }


class HostBuckets:
    def __init__(self) -> None:
        self._files: dict[int, int] = {}  # file descriptors by slot
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * NUM_BUFFERS

    def allocate(self, index: int, num_bytes: int) -> Tensor:
        slot = index % NUM_BUFFERS
        if self._buffers[slot].numel() < num_bytes:
            if slot not in self._files:
                self._files[slot] = os.memfd_create(f"grpo_mega_bucket_{slot}")
            os.ftruncate(self._files[slot], num_bytes)
            path = f"/proc/self/fd/{self._files[slot]}"
            self._buffers[slot] = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
        return self._buffers[slot][:num_bytes]

    def finish(self, slot: int) -> tuple[Tensor, dict[str, Any], Tensor]:
        """Return the slot's buffer, how the server should open it, and the tensor to send.

        The tensor is empty, because the server opens a file. The buffer is a new object if the server must open it
        again.
        """
        file = f"/proc/{os.getpid()}/fd/{self._files[slot]}"
        return self._buffers[slot], {"file": file, "num_bytes": self._buffers[slot].numel()}, torch.empty(0)

    def close(self) -> None:
        self._buffers = []
        while self._files:
            os.close(self._files.popitem()[1])


class DeviceBuckets:
    """Fixed-size GPU buffers, allocated once and kept, so their IPC handles stay valid.

    CUDA IPC cannot share expandable segments, so these are off during the allocation.
    """

    def __init__(self, num_bytes: int, device: torch.device, *, has_expandable_segments: bool) -> None:
        self._device, self._has_expandable_segments = device, has_expandable_segments
        self._pool = torch.cuda.MemPool()
        self._buffers = [self._make(num_bytes) for _ in range(NUM_BUFFERS)]

    def allocate(self, index: int, num_bytes: int) -> Tensor:
        slot = index % NUM_BUFFERS
        if num_bytes > self._buffers[slot].numel():  # one row can be larger than a bucket
            self._buffers[slot] = self._make(num_bytes)
        return self._buffers[slot][:num_bytes]

    def _make(self, num_bytes: int) -> Tensor:
        if self._has_expandable_segments:
            torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        with torch.cuda.use_mem_pool(self._pool):
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        if self._has_expandable_segments:
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        return buffer

    def finish(self, slot: int) -> tuple[Tensor, dict[str, Any], Tensor]:
        torch.cuda.current_stream().synchronize()  # the server reads on another stream
        return self._buffers[slot], {}, self._buffers[slot]

    def close(self) -> None:
        self._buffers = []


def payload(request: str, handle: Tensor) -> str:
    """Return one rank's update request: a list with one named tensor, in SGLang's serializer format."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump([(request, handle)])
    return base64.b64encode(buffer.getvalue()).decode()


def parameters(shards: RankShards, blocks: Collection[str], dtype: torch.dtype) -> dict[str, tuple[Index, str]]:
    """Return the server's parameter shapes and dtypes: one per shard, and scales for tensors stored as FP8 `blocks`.

    Local tensors "name[0]", "name[1]", ... are slices of one parameter, along a new first dim.
    """
    result: dict[str, tuple[Index, str]] = {}

    def add(name: str, shape: Index, dtype: torch.dtype) -> None:
        base, bracket, index = name.partition("[")
        if bracket:
            known = result[base][0][0] if base in result else 0
            shape = (max(int(index[:-1]) + 1, known), *shape)
        result[base] = shape, str(dtype)

    for name, tensor in shards.items():
        if name in blocks:
            add(name, tensor.shape, VALUES)
            add(scales_name(name), num_blocks(tensor.shape), SCALES)
        else:
            add(name, tensor.shape, torch.float32 if name.endswith(FLOAT32) else dtype)
    return result


def padded(shards: RankShards) -> list[str]:
    """Return the tensor names with elements that no bucket fills."""
    return [name for name, t in shards.items() if sum(p.box.size for p in t.pieces) < math.prod(t.shape)]
