"""Hugging Face folders as `Weights`: safetensors or pytorch_model.bin, sharded or not. Block-quantised FP8 is
dequantised.

Only headers are read. A .bin is unpickled with torch's weights-only loader into tensors without memory, because they
show the offset of each tensor in the file.
"""

import zipfile
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from grpo_mega.checkpoint_io.hf_files import (
    BIN,
    BIN_INDEX,
    INDEX,
    SCALE_SUFFIX,
    SINGLE,
    TensorInfo,
    experts_in,
    extra_names,
    read_headers,
    size_of,
    weight_files,
    weight_shards,
)
from grpo_mega.checkpoint_io.slices import FP8, FROM_TORCH, ITEM_BYTES, WEIGHTS, Extent, Part, Scale, matrix
from grpo_mega.errors import WeightMappingError
from grpo_mega.paths import read_json
from grpo_mega.weights.boxes import Index, whole

_DEFAULT_BLOCK = (128, 128)
_COMPARED_BYTES = 8 << 20


class HfWeights:
    """The weights of a Hugging Face folder. `config`: content of config.json. `tensors`: all stored tensors and scales.

    Tensors that stack all experts of a layer, as in Qwen3.5's folders, are split into one per expert.

    Raises WeightMappingError if a file is missing or cut short, or if a tensor's dtype cannot be converted.
    """

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.folder, self._config = folder, config
        is_bin = not any((folder / name).exists() for name in (INDEX, SINGLE))
        self._index = folder / (BIN_INDEX if is_bin else INDEX)
        if not is_bin:
            self.files = weight_files(folder)
            self.tensors = read_headers(self.files)
        elif self._index.exists() or (folder / BIN).exists():
            self.files = weight_shards(self._index) if self._index.exists() else [folder / BIN]
            self.tensors = {name: (path, info) for path in self.files for name, info in _read_bin(path).items()}
        else:
            raise WeightMappingError(
                f"{folder} has none of {SINGLE}, {INDEX}, {BIN} and {BIN_INDEX}; give a folder with weights"
            )
        scale_names = {name + SCALE_SUFFIX for name in self.tensors}
        stored = {name: info.shape for name, (_, info) in self.tensors.items() if name not in scale_names}
        self._stacked = {
            part: (name, size, row) for name, shape in stored.items() for part, size, row in experts_in(name, shape)
        }
        whole_names = {name for name, *_ in self._stacked.values()}
        self.shapes = {name: shape for name, shape in stored.items() if name not in whole_names}
        self.shapes |= {part: size for part, (_, size, _) in self._stacked.items()}
        self._extents = {name: self._extent(name) for name in stored}

    def check(self, expected: Mapping[str, Index]) -> None:
        """Raise WeightMappingError for the first tensor that is missing, unknown (scales included), or has a wrong
        shape.
        """
        scales = {name: info.shape for name, (_, info) in self.tensors.items() if name.endswith(SCALE_SUFFIX)}
        check_shapes(self.folder, self.shapes | scales, expected)

    def check_index(self) -> None:
        """Raise WeightMappingError if the index does not name the file of each tensor."""
        weight_map = read_json(self._index)["weight_map"] if self._index.exists() else {}
        for name, file in weight_map.items():
            if name not in self.tensors or self.tensors[name][0].name != file:
                raise WeightMappingError(
                    f"{self._index} names {name!r} in {file}, but that file does not contain it; fetch index and shards"
                    " again"
                )

    @property
    def is_quantised(self) -> bool:
        return len(self._extents) < len(self.tensors)

    def dtype(self, name: str) -> str:
        extent = self._extents[self._stacked[name][0] if name in self._stacked else name]
        if extent.scale is None:
            return extent.dtype
        named = self._config.get("dtype") or self._config.get("torch_dtype") or "bfloat16"
        return FROM_TORCH.get(str(named).removeprefix("torch."), "BF16")

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def parts(self, name: str) -> list[Part]:
        stored, _, row = self._stacked.get(name, (name, (), 0))
        return [Part(whole(name, self.shapes[name]), self._extents[stored], row, 0)]

    def _extent(self, name: str) -> Extent:
        """Return the extent of a tensor, with the scales of its FP8 blocks. Raise WeightMappingError for another
        dtype.
        """
        path, info = self.tensors[name]
        rows, columns = matrix(info.shape)
        scale_name = name + SCALE_SUFFIX
        if scale_name not in self.tensors:
            if info.dtype not in WEIGHTS:
                hint = f", and there is no {scale_name}" if info.dtype == FP8 else ""
                raise WeightMappingError(
                    f"{path}: {name} has dtype {info.dtype}, none of {', '.join(WEIGHTS)}{hint}; give one that is not"
                    " quantized"
                )
            return Extent(path, info.offset, info.dtype, rows, columns)
        quantization = self._config.get("quantization_config") or {}
        height, width = map(int, quantization.get("weight_block_size") or _DEFAULT_BLOCK)
        scale_path, stored = self.tensors[scale_name]
        num_blocks = (-(-rows // height), -(-columns // width))
        if info.dtype != FP8 or stored.shape != num_blocks or stored.dtype not in WEIGHTS:
            raise WeightMappingError(
                f"{path}: {scale_name} has dtype {stored.dtype} and shape {list(stored.shape)} for {name} of"
                f" {info.dtype} {list(info.shape)}; known is {FP8} with a scale for each block of {height}x{width}"
            )
        scales = Extent(scale_path, stored.offset, stored.dtype, *matrix(stored.shape))
        return Extent(path, info.offset, info.dtype, rows, columns, Scale(scales, height, width))


def check_shapes(folder: Path, shapes: Mapping[str, Index], expected: Mapping[str, Index]) -> None:
    """Raise WeightMappingError for the first tensor that is missing, unknown, or has a wrong shape."""
    for name, shape in expected.items():
        if name not in shapes:
            bare = name.removeprefix("model.")
            other = next((other for other in shapes if other.endswith(f".{bare}")), None)
            if other is None:
                problem = f"{folder} has no tensor {name!r}"
                raise WeightMappingError(f"{problem}; fetch the checkpoint again, it is incomplete")
            raise WeightMappingError(
                f"{folder} holds {other!r} instead of {name!r}: its names have the prefix {other.removesuffix(bare)!r}"
                " of a model with more parts, such as vision; save its language model alone, and name that folder"
            )
        if shapes[name] != tuple(shape):
            raise WeightMappingError(
                f"{folder}: {name} has shape {list(shapes[name])}, but config.json means {list(shape)}; "
                "give the config.json that belongs to these weights"
            )
    # A tied output layer may be stored too. Rotary tables are derived from the config.
    known = {*expected, "lm_head.weight", *extra_names(shapes)}
    for name in sorted(set(shapes) - known):
        if name.endswith(SCALE_SUFFIX):
            raise WeightMappingError(
                f"{folder} is quantised to FP8 in blocks (it holds {name!r}), and only plain weights can be trained; "
                f"write plain weights by `grpo-mega convert {folder} OUT`, and set model.path=OUT"
            )
        if not name.endswith("rotary_emb.inv_freq"):
            raise WeightMappingError(
                f"{folder} holds {name!r}, unknown to its model type; check model_type in config.json"
            )


def check_tied(folder: Path, output: str, embedding: str, tensors: Mapping[str, tuple[Path, TensorInfo]]) -> None:
    """Raise WeightMappingError if a stored output layer differs from the embedding, although config.json ties them.

    Training would silently drop the output layer, while transformers loads such a model with both.
    """
    if output not in tensors:
        return
    (path, info), (other_path, other) = tensors[output], tensors[embedding]
    is_same, left = (info.dtype, info.shape) == (other.dtype, other.shape), prod(info.shape) * ITEM_BYTES[info.dtype]
    with path.open("rb") as file, other_path.open("rb") as other_file:
        file.seek(info.offset)
        other_file.seek(other.offset)
        while is_same and left > 0:
            size = min(left, _COMPARED_BYTES)
            is_same = file.read(size) == other_file.read(size)
            left -= size
    if not is_same:
        raise WeightMappingError(
            f"{folder}: {output} is not {embedding}, though config.json has tie_word_embeddings=true; set it to false"
        )


def _read_bin(path: Path) -> dict[str, TensorInfo]:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    size = size_of(path)
    with path.open("rb") as file:
        head = file.read(4)
    if not head or (head == b"PK\x03\x04"[: len(head)] and not zipfile.is_zipfile(path)):
        raise WeightMappingError(
            f"{path} is cut short: it ends without a zip archive's directory; fetch the file again"
        )
    infos: dict[str, TensorInfo] = {}
    try:
        with FakeTensorMode():
            tensors = torch.load(path, weights_only=True, map_location="cpu")
        for name, tensor in tensors.items():
            dtype = FROM_TORCH[str(tensor.dtype).removeprefix("torch.")]
            if not tensor.is_contiguous():
                raise ValueError(f"{name} is not contiguous")
            start = tensor.untyped_storage()._checkpoint_offset
            if start is None:
                raise ValueError("it is in the format that torch used before 1.6")
            offset = start + tensor.storage_offset() * ITEM_BYTES[dtype]
            infos[name] = TensorInfo(dtype, tuple(tensor.shape), offset)
    except Exception as error:  # unpickling can raise any exception
        reason = (str(error) or repr(error)).splitlines()[0][:200]
        raise WeightMappingError(
            f"{path} cannot be read by torch's weights-only loader ({reason}); use safetensors"
        ) from None
    for name, info in infos.items():
        if info.offset + prod(info.shape) * ITEM_BYTES[info.dtype] > size:
            raise WeightMappingError(f"{path} is cut short: it does not hold all of {name}; fetch the file again")
    return infos
