"""Megatron's distributed checkpoints as `Weights`: Hugging Face tensors found in the pieces in which any layout saved them.

Needs no torch. Optimizer state and whatever else a checkpoint holds is passed over.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple

from grpo_mega.errors import WeightMappingError
from grpo_mega.formats.dcp_read import METADATA, Chunk, SavedTensor, read_metadata
from grpo_mega.formats.dtypes import ITEM_BYTES, WEIGHTS
from grpo_mega.formats.megatron_names import Stored, stored_tensors
from grpo_mega.formats.sources import Extent, Files, Part, matrix
from grpo_mega.formats.torch_save import find_tensor
from grpo_mega.weights.boxes import Box, Index, Piece
from grpo_mega.weights.spec import Family, ModelShape

_ENDS = 1024  # bytes at either end of a saved piece that tell where its data is


class SavedRecord(NamedTuple):
    """The bytes of a saved piece of a tensor, and their CRC32 as saved; `name` is the first Hugging Face tensor in it."""

    name: str
    path: Path
    offset: int
    num_bytes: int
    crc: int


class MegatronWeights:
    """Raises WeightMappingError if the checkpoint is damaged or not of this model."""

    def __init__(self, folder: Path, family: Family, shape: ModelShape) -> None:
        self._folder = Path(folder)
        self._saved = read_metadata(folder)
        self._shapes = family.hf_tensors(shape)
        self._keys: dict[tuple[str, ...], str] = {}  # of a stored tensor's possible keys, the one that is there
        self._chunks: dict[str, dict[Index, list[Chunk]]] = {}  # of a key, by the places that they cover
        self._pieces: dict[str, list[tuple[Stored, Piece]]] = defaultdict(list)
        for stored in stored_tensors(family, shape):
            if stored.keys not in self._keys:
                self._keys[stored.keys] = key = self._find(stored)
                self._chunks[key] = _by_place(self._saved[key], len(stored.place))
            for piece in stored.tensor.pieces:
                self._pieces[piece.box.tensor].append((stored, piece))
        self._check_files()
        self._reader = Files()
        self._extents: dict[Chunk, Extent] = {}
        self._crcs: dict[Chunk, int] = {}

    @property
    def folder(self) -> Path:
        return self._folder

    @cached_property
    def files(self) -> list[Path]:
        return sorted({self._folder / c.file for key in self._keys.values() for c in self._saved[key].chunks})

    def shapes(self) -> dict[str, Index]:
        return self._shapes

    def dtype(self, name: str) -> str:
        return self.parts(name)[0].extent.dtype

    def parts(self, name: str) -> list[Part]:
        found = []
        for stored, piece in self._pieces[name]:
            for chunk in self._chunks[self._keys[stored.keys]].get(stored.place, ()):
                part = self._part(stored, piece, chunk)
                if part is not None:
                    found.append(part)
        return found

    def records(self) -> list[SavedRecord]:
        """Return what the weights are read from, each record once."""
        found: dict[Chunk, SavedRecord] = {}
        for name, pieces in self._pieces.items():
            for stored, piece in pieces:
                for chunk in self._chunks[self._keys[stored.keys]].get(stored.place, ()):
                    if chunk not in found and self._part(stored, piece, chunk) is not None:
                        extent = self._extents[chunk]
                        num_bytes = extent.rows * extent.row_bytes
                        found[chunk] = SavedRecord(name, extent.path, extent.offset, num_bytes, self._crcs[chunk])
        return list(found.values())

    def close(self) -> None:
        self._reader.close()

    def _part(self, stored: Stored, piece: Piece, chunk: Chunk) -> Part | None:
        """What of a piece lies in a chunk."""
        depth = len(stored.place)
        offset, shape = chunk.offset[depth:], chunk.shape[depth:]
        start = tuple(a - b for a, b in zip(piece.box.start, piece.offset, strict=True))  # of the parameter, in the HF tensor
        held = Box(
            piece.box.tensor,
            tuple(s + o for s, o in zip(start, offset, strict=True)),
            tuple(s + o + n for s, o, n in zip(start, offset, shape, strict=True)),
        )
        common = piece.box.intersect(held)
        if common is None:
            return None
        inside = tuple(a - b for a, b in zip(common.start, held.start, strict=True))
        row, column = (inside[0], 0) if len(inside) == 1 else (inside[0], inside[1])
        return Part(common, self._extent(chunk, depth, stored.place), row, column)

    def _extent(self, chunk: Chunk, depth: int, place: Index) -> Extent:
        """The matrix at a place of a chunk that may cover several."""
        if chunk not in self._extents:
            self._extents[chunk] = self._locate(chunk)
        whole, number = self._extents[chunk], 0
        for at, first, count in zip(place, chunk.offset, chunk.shape, strict=False):
            number = number * count + at - first
        rows, columns = matrix(chunk.shape[depth:])
        return Extent(whole.path, whole.offset + number * rows * columns * ITEM_BYTES[whole.dtype], whole.dtype, rows, columns)

    def _locate(self, chunk: Chunk) -> Extent:
        path = self._folder / chunk.file
        ends = min(_ENDS, chunk.length)
        head = self._reader.read(path, chunk.start, ends)
        tail = self._reader.read(path, chunk.start + chunk.length - ends, ends)

        def read(offset: int, length: int) -> bytes:
            if offset + length <= ends:
                return head[offset : offset + length]
            if offset >= chunk.length - ends:
                return tail[offset - chunk.length + ends :][:length]
            return self._reader.read(path, chunk.start + offset, length)

        try:
            found = find_tensor(read, chunk.length)
        except Exception as error:  # a damaged archive raises what it likes
            raise WeightMappingError(f"{path} is damaged at byte {chunk.start} ({error}); save the checkpoint again") from None
        if prod(found.shape) != prod(chunk.shape) or found.dtype not in WEIGHTS:
            raise WeightMappingError(
                f"{path} holds {found.dtype} {list(found.shape)} at byte {chunk.start}, where the metadata says "
                f"{list(chunk.shape)}; save the checkpoint again"
            )
        self._crcs[chunk] = found.crc
        return Extent(path, chunk.start + found.data_offset, found.dtype, *matrix(found.shape))

    def _find(self, stored: Stored) -> str:
        """The key under which the checkpoint has it. The vocabulary may be padded."""
        key = next((key for key in stored.keys if key in self._saved), None)
        if key is None:
            name = stored.keys[0]
            raise WeightMappingError(f"{self._folder} holds no {name!r}; give the config.json that belongs to this checkpoint")
        found, expected = self._saved[key].shape, (*stored.stack, *stored.tensor.shape)
        is_padded = not stored.stack and len(found) == 2 and found[0] >= expected[0] and found[1:] == expected[1:]
        if found != expected and not is_padded:
            raise WeightMappingError(
                f"{self._folder}: {key} has shape {list(found)}, but config.json means {list(expected)}; "
                "give the config.json that belongs to these weights"
            )
        return key

    def _check_files(self) -> None:
        """Every file is there and as long as its chunks say."""
        ends: dict[str, int] = defaultdict(int)
        for key in self._keys.values():
            for chunk in self._saved[key].chunks:
                ends[chunk.file] = max(ends[chunk.file], chunk.start + chunk.length)
        for name, end in ends.items():
            path = self._folder / name
            if not path.is_file():
                raise WeightMappingError(f"{path} does not exist, but {METADATA} names it; fetch the missing file")
            if path.stat().st_size < end:
                raise WeightMappingError(f"{path} is cut short: {path.stat().st_size} bytes of {end}; fetch the file again")


def _by_place(saved: SavedTensor, depth: int) -> dict[Index, list[Chunk]]:
    found: dict[Index, list[Chunk]] = defaultdict(list)
    for chunk in saved.chunks:
        for place in product(*(range(o, o + n) for o, n in zip(chunk.offset[:depth], chunk.shape[:depth], strict=True))):
            found[place].append(chunk)
    return found
