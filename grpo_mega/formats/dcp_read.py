"""Reading the `.metadata` of a Megatron distributed checkpoint: which piece of which tensor lies where. Needs no torch.

The file is a pickle. It is read with stand-ins for the few classes it is made of, and everything else it names becomes an empty
object: nothing of it is ever called.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mega.errors import WeightMappingError
from grpo_mega.formats.dtypes import FROM_TORCH
from grpo_mega.weights.boxes import Index

METADATA = ".metadata"
FORMAT = "metadata.json"
COMMON = "common.pt"


@dataclass(frozen=True)
class Chunk:
    """`tensor[offset : offset + shape]`, saved in `length` bytes of a file from `start` on."""

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
            return _tensors(_Unpickler(file).load())
    except OSError:
        raise WeightMappingError(f"{path} does not exist; give the folder of a Megatron distributed checkpoint") from None
    except Exception as error:  # a damaged pickle raises what it likes
        raise WeightMappingError(f"{path} cannot be read ({error!r}); save the checkpoint again") from None


def _tensors(metadata: _Record) -> dict[str, SavedTensor]:
    places = {(index.fqn, _index(index.offset)): info for index, info in metadata.storage_data.items()}
    tensors = {}
    for key, saved in metadata.state_dict_metadata.items():
        if not hasattr(saved, "chunks"):
            continue  # an object, not a tensor
        chunks = []
        for chunk in saved.chunks:
            offset = _index(chunk.offsets)
            info = places[key, offset]
            chunks.append(Chunk(offset, _index(chunk.sizes), info.relative_path, info.offset, info.length))
        tensors[key] = SavedTensor(saved.properties.dtype, _index(saved.size), tuple(chunks))
    return tensors


def _index(value: Any) -> Index:
    return tuple(value) if value is not None else ()


class _Record:
    """Stands in for any class: takes whatever state it is given."""

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
        if (module, name) == ("torch", "Size"):
            return tuple
        known = {"collections": (OrderedDict, defaultdict), "builtins": (list, dict, set, tuple, int, str)}.get(module, ())
        stand_in = _Properties if name == "TensorProperties" else _Record
        return next((kind for kind in known if kind.__name__ == name), stand_in)
