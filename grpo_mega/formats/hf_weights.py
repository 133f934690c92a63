"""Hugging Face folders as `Weights`: safetensors, sharded or not, or pytorch_model.bin; block-quantised FP8 is dequantised.

Only headers are read. A .bin is unpickled with torch's weights-only loader onto tensors without memory, which shows where in
the file each tensor lies.
"""

from __future__ import annotations

import json
import zipfile
from math import prod
from pathlib import Path
from typing import Any

from grpo_mega.errors import WeightMappingError
from grpo_mega.formats.dtypes import FP8, FROM_TORCH, ITEM_BYTES, WEIGHTS
from grpo_mega.formats.hf_files import INDEX, SCALE_SUFFIX, SINGLE, shards_of, weight_files
from grpo_mega.formats.safetensors_files import TensorInfo, read_headers
from grpo_mega.formats.slices import Extent, Part, Scale, matrix, whole
from grpo_mega.weights.boxes import Index

BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_DEFAULT_BLOCK = (128, 128)


class HfWeights:
    """`config` is the contents of config.json, `tensors` all stored tensors, scales too, with their files.

    Raises WeightMappingError for files that are missing or cut short, and for tensors of a dtype that cannot be converted.
    """

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._folder, self._config = Path(folder), config
        is_bin = not any((folder / name).exists() for name in (INDEX, SINGLE))
        self._index = folder / (BIN_INDEX if is_bin else INDEX)
        self._files = _bin_files(folder) if is_bin else weight_files(folder)
        if is_bin:
            self.tensors = {name: (path, info) for path in self._files for name, info in _read_bin(path).items()}
        else:
            self.tensors = read_headers(self._files)
        self._block = _block_size(config)
        scales = {name + SCALE_SUFFIX for name in self.tensors}
        self._shapes = {name: info.shape for name, (_, info) in self.tensors.items() if name not in scales}
        for name in self._shapes:
            self._check_dtype(name)

    def check_index(self) -> None:
        """Raise WeightMappingError if the index does not name the file of each tensor."""
        weight_map = json.loads(self._index.read_text())["weight_map"] if self._index.exists() else {}
        for name, file in weight_map.items():
            if name not in self.tensors or self.tensors[name][0].name != file:
                raise WeightMappingError(
                    f"{self._index} names {name!r} in {file}, which does not hold it; fetch index and shards again"
                )

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def files(self) -> list[Path]:
        return self._files

    @property
    def is_quantised(self) -> bool:
        return len(self._shapes) < len(self.tensors)

    def shapes(self) -> dict[str, Index]:
        return self._shapes

    def dtype(self, name: str) -> str:
        info = self.tensors[name][1]
        return self._compute_dtype() if self._scale_of(name) else info.dtype

    def parts(self, name: str) -> list[Part]:
        path, info = self.tensors[name]
        scale = None
        scale_name = self._scale_of(name)
        if scale_name:
            scale_path, scale_info = self.tensors[scale_name]
            scale = Scale(Extent(scale_path, scale_info.offset, scale_info.dtype, *matrix(scale_info.shape)), *self._block)
        return [Part(whole(name, info.shape), Extent(path, info.offset, info.dtype, *matrix(info.shape), scale), 0, 0)]

    def _scale_of(self, name: str) -> str | None:
        scale = name + SCALE_SUFFIX
        return scale if scale in self.tensors else None

    def _compute_dtype(self) -> str:
        named = self._config.get("dtype") or self._config.get("torch_dtype") or "bfloat16"
        return FROM_TORCH.get(str(named).removeprefix("torch."), "BF16")

    def _check_dtype(self, name: str) -> None:
        path, info = self.tensors[name]
        scale = self._scale_of(name)
        if scale is None and info.dtype not in WEIGHTS:
            wanted = f"none of {', '.join(WEIGHTS)}" + (f", and there is no {name}{SCALE_SUFFIX}" if info.dtype == FP8 else "")
            raise WeightMappingError(f"{path}: {name} has dtype {info.dtype}, {wanted}; give one that is not quantized")
        if scale is None:
            return
        stored, (rows, columns) = self.tensors[scale][1], matrix(info.shape)
        expected = (-(-rows // self._block[0]), -(-columns // self._block[1]))
        if info.dtype != FP8 or stored.shape != expected or stored.dtype not in WEIGHTS:
            raise WeightMappingError(
                f"{path}: {scale} has dtype {stored.dtype} and shape {list(stored.shape)} for {name} of {info.dtype} "
                f"{list(info.shape)}; known is {FP8} with a scale for each block of {self._block[0]}x{self._block[1]}"
            )


def _block_size(config: dict[str, Any]) -> tuple[int, int]:
    quantization = config.get("quantization_config") or {}
    rows, columns = quantization.get("weight_block_size") or _DEFAULT_BLOCK
    return int(rows), int(columns)


def _bin_files(folder: Path) -> list[Path]:
    index = folder / BIN_INDEX
    if index.exists():
        return shards_of(index)
    if (folder / BIN).exists():
        return [folder / BIN]
    raise WeightMappingError(f"{folder} has none of {SINGLE}, {INDEX}, {BIN} and {BIN_INDEX}; give a folder with weights")


def _read_bin(path: Path) -> dict[str, TensorInfo]:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    if _is_cut_archive(path):
        raise WeightMappingError(f"{path} is cut short: it ends without a zip archive's directory; fetch the file again")
    try:
        with FakeTensorMode():
            tensors = torch.load(path, weights_only=True, map_location="cpu")
        infos = {name: _located(name, tensor) for name, tensor in tensors.items()}
    except Exception as error:  # unpickling raises what it likes
        reason = (str(error) or repr(error)).splitlines()[0][:200]
        raise WeightMappingError(f"{path} cannot be read by torch's weights-only loader ({reason}); use safetensors") from None
    size = path.stat().st_size
    for name, info in infos.items():
        if info.offset + prod(info.shape) * ITEM_BYTES[info.dtype] > size:
            raise WeightMappingError(f"{path} is cut short: it does not hold all of {name}; fetch the file again")
    return infos


def _is_cut_archive(path: Path) -> bool:
    """Return True if a file is empty, or begins as an archive of torch.save and does not end as one."""
    with path.open("rb") as file:
        head = file.read(4)
    return not head or (head == b"PK\x03\x04"[: len(head)] and not zipfile.is_zipfile(path))


def _located(name: str, tensor: Any) -> TensorInfo:
    dtype = FROM_TORCH[str(tensor.dtype).removeprefix("torch.")]
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous")
    begin = tensor.untyped_storage()._checkpoint_offset
    if begin is None:
        raise ValueError("it is in the format that torch used before 1.6")
    return TensorInfo(dtype, tuple(tensor.shape), begin + tensor.storage_offset() * ITEM_BYTES[dtype])
