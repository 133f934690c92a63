"""A sync that sends only an adapter (sync.lora=adapter): A and B arrive on the leader, and the server loads them.

Each version has a new name, and every request names it. The previous adapter is unloaded. An earlier sync sent the
base, and its checksums are verified again.
"""

from __future__ import annotations

import base64
import hashlib
import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_mega.weights.apply import Bucket, Entry
from grpo_mega.weights.boxes import Index
from grpo_mega.weights.receive import mismatched_tensors, write_entries

# (request without a name, problems, version) -> problems of all ranks of the engine
Loads = Callable[[Callable[[], dict[str, Any]], list[str], int], list[str]]


@dataclass(frozen=True)
class ServedLora:
    rank: int
    alpha: float
    modules: tuple[str, ...]  # last parts of the names of the base's matrices, such as q_proj
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
    """Collects A and B of one version, and lets the engine load them. All ranks of an engine call it together."""

    def __init__(self, lora: ServedLora, dtype: torch.dtype, tp: int, device: torch.device, load: Loads) -> None:
        self._lora, self._dtype, self._tp, self._device, self._load = lora, dtype, tp, device, load
        self._entries: list[Entry] = []
        # Memory that the server's processes open. A request with the tensors would have them once per process.
        self._file = os.memfd_create("grpo_mega_adapter")
        # SGLang needs all matrices of a fused layer. A and B of the matrices that do not train stay 0.
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
        """Return the request to load the adapter. Each process of the server compares the checksums."""
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
