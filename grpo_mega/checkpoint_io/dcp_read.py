"""Read a Megatron distributed checkpoint without torch: its `.metadata` says where each piece of each tensor is.

`.metadata` is a pickle. It is read with stand-ins for the few classes that it contains; everything else becomes an
empty object, so nothing in it is ever called. Each piece is a `torch.save` file within a file: a zip archive of stored
records. Torch's own reader needs the real classes: `load_metadata` and `check_extra_state` refuse every name that is
not on their list.
"""

import io
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from grpo_mega.checkpoint_io.slices import FROM_STORAGE, FROM_TORCH, ITEM_BYTES
from grpo_mega.errors import WeightMappingError
from grpo_mega.weights.boxes import Index

METADATA = ".metadata"
_METADATA_NAMES = {
    "torch.distributed.checkpoint.metadata": """
        Metadata MetadataIndex StorageMeta TensorProperties BytesStorageMetadata ChunkStorageMetadata
        TensorStorageMetadata _MEM_FORMAT_ENCODING
    """,
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch": f"Size {' '.join(FROM_TORCH)}",
    "torch.serialization": "_get_layout",
    "collections": "OrderedDict",
    "pathlib": "PosixPath PurePosixPath",
    "pathlib._local": "PosixPath",
}
_LAYER_NAMES = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.storage", "_load_from_bytes"),
    ("megatron.core.safe_globals", "safe_load_from_bytes"),  # Megatron 0.19 replaces torch's
    ("megatron.core.extensions.transformer_engine", "TEDelayedScaling"),
}
_RECIPES = "transformer_engine.common.recipe"  # only its classes are allowed: their names start with a capital letter
_CONTAINERS: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__name__): kind for kind in (OrderedDict, defaultdict, list, dict, set, tuple, int, str)
} | {("torch", "Size"): tuple}
FORMAT = "metadata.json"
COMMON = "common.pt"


@dataclass(frozen=True)
class Chunk:
    """`tensor[offset : offset + shape]`, saved in `length` bytes of a file, starting at `start`."""

    offset: Index
    shape: Index
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class SavedTensor:
    dtype: str
    shape: Index
    chunks: tuple[Chunk, ...]


def is_distributed_checkpoint(folder: Path) -> bool:
    return (folder / METADATA).is_file() and (folder / FORMAT).is_file()


def read_metadata(folder: Path) -> dict[str, SavedTensor]:
    """Return the tensors by Megatron's key. Raise WeightMappingError if the file cannot be read."""
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        places = {(index.fqn, _index(index.offset)): info for index, info in metadata.storage_data.items()}
        tensors = {}
        for key, saved in metadata.state_dict_metadata.items():
            if not hasattr(saved, "chunks"):
                continue  # objects have no chunks
            chunks = []
            for chunk in saved.chunks:
                offset = _index(chunk.offsets)
                info = places[key, offset]
                chunks.append(Chunk(offset, _index(chunk.sizes), info.relative_path, info.offset, info.length))
            tensors[key] = SavedTensor(saved.properties.dtype, _index(saved.size), tuple(chunks))
        return tensors
    except OSError:
        raise WeightMappingError(
            f"{path} does not exist; give the folder of a Megatron distributed checkpoint"
        ) from None
    except Exception as error:  # a damaged pickle can raise any exception
        raise WeightMappingError(f"{path} cannot be read ({error!r}); save the checkpoint again") from None


def load_metadata(file: BinaryIO) -> Any:
    """Return torch's Metadata from a `.metadata` file. Raise UnpicklingError if it names another class, and call
    nothing.
    """
    return _MetadataUnpickler(file).load()


def check_extra_state(content: bytes) -> None:
    """Raise UnpicklingError if the pickled state of a layer's FP8 scales has an unexpected name. Call nothing."""
    _ExtraStateUnpickler(io.BytesIO(content)).load()


@dataclass(frozen=True)
class FoundTensor:
    """The tensor in a `torch.save` file."""

    dtype: str
    shape: Index
    data_offset: int  # bytes from the start of the file
    crc: int  # CRC32 of its bytes; 0 if torch saved none


def find_tensor(file: BinaryIO) -> FoundTensor:
    """Find the single tensor in a `torch.save` file. Raise ValueError if there is none, or if it is not contiguous."""
    try:
        records = {record.filename: record for record in zipfile.ZipFile(file).infolist()}
    except zipfile.BadZipFile:
        raise ValueError("is no archive of torch.save") from None
    [stem] = {name.rpartition("/data.pkl")[0] for name in records if name.endswith("/data.pkl")} or [""]
    pickled, data = records.get(f"{stem}/data.pkl"), records.get(f"{stem}/data/0")
    if pickled is None or data is None:
        raise ValueError("holds no tensor")
    file.seek(_begin(file, pickled))
    text = file.read(pickled.file_size)
    if pickled.CRC and zlib.crc32(text) != pickled.CRC:
        raise ValueError("describes its tensor in bytes that do not match their saved CRC32")
    dtype, shape = _unpickled(text)
    if data.file_size != prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"holds {data.file_size} bytes for a tensor {list(shape)} of {dtype}")
    return FoundTensor(dtype, shape, _begin(file, data), data.CRC)


def _index(value: Any) -> Index:
    return tuple(value) if value is not None else ()


class _Record:
    """Stands in for any class and accepts any state."""

    fqn: str
    offset: Any = None
    state_dict_metadata: dict[str, Any]
    storage_data: dict[Any, Any]

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def __hash__(self) -> int:
        return id(self)


class _Properties(_Record):
    dtype: str

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0] if isinstance(state, tuple) else state["dtype"]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in FROM_TORCH:
            return FROM_TORCH[name]
        stand_in = _Properties if name == "TensorProperties" else _Record
        return _CONTAINERS.get((module, name), stand_in)


class _MetadataUnpickler(pickle.Unpickler):
    """Creates the classes of torch's metadata, whose constructors only store arguments. Refuses all other names."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA_NAMES.get(module, "").split():
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, unexpected in a checkpoint")


class _ExtraStateUnpickler(pickle.Unpickler):
    """Creates empty objects instead of the classes in Transformer Engine's layer state. Refuses all other names."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        is_class = name.isidentifier() and name.lstrip("_")[:1].isupper()
        if (module, name) in _LAYER_NAMES or (module == _RECIPES and is_class):
            return _Record
        raise pickle.UnpicklingError(f"it names {module}.{name}, unexpected in the state of a layer")


def _begin(file: BinaryIO, record: zipfile.ZipInfo) -> int:
    """Return the offset of a record's bytes, after its local header."""
    file.seek(record.header_offset + 26)
    lengths: tuple[int, int] = struct.unpack("<HH", file.read(4))  # lengths of its name and its extra field
    return record.header_offset + 30 + sum(lengths)


@cache
def _unpickled(text: bytes) -> tuple[str, Index]:
    dtype, offset, shape, stride = _TensorUnpickler(io.BytesIO(text)).load()
    step = 1
    for n, its_step in zip(reversed(shape), reversed(stride), strict=True):
        if n > 1 and its_step != step:
            raise ValueError(f"holds a tensor that is not contiguous (strides {list(stride)})")
        step *= max(n, 1)
    if offset:
        raise ValueError(f"holds a tensor that starts at element {offset} of its storage")
    return dtype, tuple(shape)


class _TensorUnpickler(pickle.Unpickler):
    """Loads (dtype, offset, shape, stride). Refuses all names that a tensor does not need."""

    def persistent_load(self, pid: Any) -> str:
        return FROM_STORAGE[pid[1]]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda dtype, offset, shape, stride, *rest: (dtype, offset, shape, stride)
        if (module, name) == ("torch._utils", "_rebuild_tensor_v3"):
            return lambda _, offset, shape, stride, grad, hooks, dtype, *rest: (dtype, offset, shape, stride)
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in FROM_STORAGE:
            return name
        raise ValueError(f"names {module}.{name}, unexpected in a saved tensor")
