"""Megatron's distributed checkpoints as `Weights`: Hugging Face tensors, found in pieces saved by any parallel layout.

A key of a checkpoint holds a parameter of all layers, [layers, ...], or of all experts of all layers, [layers, experts,
...]. If some layers have experts and others do not, a key holds the parameter of a single layer. Each place holds the
tensor of a rank at tensor-parallel size 1, as described by the family's table. The vocabulary may be padded. Optimizer
state and everything else in the checkpoint is skipped. Needs no torch.
"""

import io
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, islice, product
from math import prod
from operator import add, sub
from pathlib import Path
from typing import Any

from isal.isal_zlib import crc32  # 13 times as fast as zlib's

from grpo_mega.checkpoint_io.dcp_read import METADATA, Chunk, SavedTensor, find_tensor, read_metadata
from grpo_mega.checkpoint_io.hf_files import extra_names
from grpo_mega.checkpoint_io.slices import BLOCK_BYTES, WEIGHTS, Extent, Files, Part, matrix, row_and_column
from grpo_mega.errors import WeightMappingError
from grpo_mega.tracking.progress import progress
from grpo_mega.weights.boxes import Box, Index, LocalTensor, Piece, alone, whole
from grpo_mega.weights.spec import Family, ModelShape, Row, Shard

KEY = "untouched."  # prefix of the keys of layers for multi-token prediction
# Megatron's local layer spec saves separate norms under the names of the norms fused into TE's linear layers.
_RENAMED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


@dataclass(frozen=True)
class Stored:
    """The part of a key that belongs to one layer or one expert."""

    keys: tuple[str, ...]  # keys of the tensor under different layer specs; the first is Transformer Engine's
    stack: Index  # leading dims of the key: (), (layers,), (experts,) or (layers, experts)
    place: Index  # index into the leading dims
    tensor: LocalTensor


def stored_tensors(family: Family, shape: ModelShape) -> Iterator[Stored]:
    """Yield all tensors of a model, layer by layer."""

    def tensors(rows: Sequence[Row]) -> list[tuple[tuple[str, ...], LocalTensor]]:
        found = []
        for row in rows:
            own, fused = (
                name.replace("layers.{i}.", "layers.").replace("local_experts.{e}.", "experts.")
                for name in (row.megatron, row.megatron_te or row.megatron)
            )
            renamed = own
            for name, saved in _RENAMED.items():
                renamed = renamed.replace(name, saved)
            if row.span == "linear":
                renamed = fused  # these layers save under the names of Transformer Engine's layers
            # The local layers of multi-latent attention rename nothing.
            keys = tuple(dict.fromkeys((fused, renamed, own) if shape.kv_lora else (fused, renamed)))
            tensor = row.op.megatron(Shard(row.hf, "", shape))
            if row.saved_as:
                parts = zip(row.saved_as, tensor.pieces, strict=True)
                found += [(tuple(f"{key}.{part}" for key in keys), alone(piece.box)) for part, piece in parts]
            else:
                found.append((keys, tensor))
        return found

    for keys, tensor in tensors([*family.heads(shape), *family.rows_of("model", shape)]):
        yield Stored(keys, (), (), tensor)
    for span, layers in shape.spans(range(shape.num_layers)):
        of_layer, of_expert = (tensors(family.rows_of(kind, shape, span)) for kind in ("layer", "expert"))
        for layer in layers:
            stack, place = stacked_layers(shape, layer)
            found = [Stored(keys, stack, place, tensor.numbered(layer, 0)) for keys, tensor in of_layer]
            for expert in range(shape.num_experts):
                dims, at = (*stack, shape.num_experts), (*place, expert)
                found += [Stored(keys, dims, at, tensor.numbered(layer, expert)) for keys, tensor in of_expert]
            prefix = "layers." if stack else f"layers.{layer}."
            for one in found:
                yield replace(one, keys=tuple(key.replace("layers.", prefix, 1) for key in one.keys))


def stored_extra(shapes: Mapping[str, Index]) -> Iterator[Stored]:
    """Yield the tensors of layers for multi-token prediction among the tensors of a checkpoint."""
    for name in extra_names(shapes):
        yield Stored((KEY + name,), (), (), alone(whole(name, shapes[name])))


def stacked_layers(shape: ModelShape, layer: int) -> tuple[Index, Index]:
    """Return the leading dims of a layer's keys, and the layer's place in them; empty if layers differ."""
    return ((), ()) if shape.has_unequal_layers else ((shape.num_layers,), (layer,))


class MegatronWeights:
    """The weights of a Megatron checkpoint. Raises WeightMappingError if it is damaged or belongs to another model."""

    def __init__(self, folder: Path, family: Family, shape: ModelShape) -> None:
        self.folder = folder
        self._saved = read_metadata(folder)
        extra = {key.removeprefix(KEY): saved.shape for key, saved in self._saved.items() if key.startswith(KEY)}
        self.shapes = family.hf_tensors(shape) | extra
        self._chunks: dict[tuple[str, ...], dict[Index, list[Chunk]]] = {}  # by keys of a stored tensor, then by place
        self._pieces: dict[str, list[tuple[Stored, Piece]]] = defaultdict(list)
        for stored in (*stored_tensors(family, shape), *stored_extra(extra)):
            if stored.keys not in self._chunks:
                by_place = self._chunks[stored.keys] = defaultdict(list)
                for chunk in self._find(stored).chunks:
                    # A chunk may cover several layers and experts.
                    ranges = map(range, chunk.offset, map(add, chunk.offset, chunk.shape))
                    for place in product(*islice(ranges, len(stored.place))):
                        by_place[place].append(chunk)
            for piece in stored.tensor.pieces:
                self._pieces[piece.box.tensor].append((stored, piece))
        ends: dict[str, int] = defaultdict(int)
        for places in self._chunks.values():
            for chunk in chain.from_iterable(places.values()):
                ends[chunk.file] = max(ends[chunk.file], chunk.start + chunk.length)
        for name, end in ends.items():
            path = self.folder / name
            if not path.is_file():
                raise WeightMappingError(f"{path} does not exist, but {METADATA} names it; fetch the missing file")
            if path.stat().st_size < end:
                raise WeightMappingError(
                    f"{path} is cut short: {path.stat().st_size} bytes of {end}; fetch the file again"
                )
        self.files = sorted(self.folder / name for name in ends)
        self._reader = Files()
        self._extents: dict[Chunk, Extent] = {}
        self._crcs: dict[Chunk, int] = {}

    def dtype(self, name: str) -> str:
        return self.parts(name)[0].extent.dtype

    def parts(self, name: str) -> list[Part]:
        return [part for _, part in self._parts(name)]

    def check(self, expected: Mapping[str, Index]) -> None:
        """Do nothing: the checkpoint was compared with the family when it was opened."""

    def check_crcs(self, workers: int, show_progress: bool = True) -> None:
        """Read every saved piece of the weights once. Raise WeightMappingError for the first piece that differs from
        its CRC32.

        torch.save stores a CRC32 for every record. Pieces saved with `torch.serialization.set_crc32_options(False)` are
        skipped.
        """
        names: dict[Chunk, str] = {}  # first tensor in each chunk
        for name in self._pieces:
            for chunk, _ in self._parts(name):
                names.setdefault(chunk, name)
        chunks = [chunk for chunk in names if self._crcs[chunk]]
        total = sum(self._extents[chunk].num_bytes for chunk in chunks)
        with progress(total, "checking", show_progress, "bytes") as bar, ThreadPoolExecutor(workers) as pool:

            def check(chunk: Chunk) -> None:
                extent = self._extents[chunk]
                block, crc = memoryview(bytearray(min(BLOCK_BYTES, extent.num_bytes))), 0
                for done in range(0, extent.num_bytes, BLOCK_BYTES):
                    view = block[: extent.num_bytes - done]
                    self._reader.read_into(extent.path, extent.offset + done, view)
                    crc = crc32(view, crc)
                if crc != self._crcs[chunk]:
                    raise WeightMappingError(
                        f"{extent.path}: {names[chunk]} is damaged: the {extent.num_bytes} bytes at offset"
                        f" {extent.offset} do not match their saved CRC32; fetch or save the checkpoint again"
                    )
                bar.advance(extent.num_bytes)

            list(pool.map(check, chunks))

    def close(self) -> None:
        self._reader.close()

    def _parts(self, name: str) -> Iterator[tuple[Chunk, Part]]:
        """Yield the parts of a Hugging Face tensor, each with its chunk."""
        for stored, piece in self._pieces[name]:
            depth = len(stored.place)
            first = tuple(map(sub, piece.box.start, piece.offset))  # start of the parameter in the Hugging Face tensor
            for chunk in self._chunks[stored.keys].get(stored.place, ()):
                start = tuple(map(add, first, chunk.offset[depth:]))
                held = Box(piece.box.tensor, start, tuple(map(add, start, chunk.shape[depth:])))
                common = piece.box.intersect(held)
                if common is not None:
                    inside = row_and_column(tuple(map(sub, common.start, start)))
                    yield chunk, Part(common, self._extent(chunk, depth, stored.place), *inside)

    def _extent(self, chunk: Chunk, depth: int, place: Index) -> Extent:
        """Return the matrix at one place of a chunk. A chunk may cover several places."""
        if chunk not in self._extents:
            path = self.folder / chunk.file
            try:
                saved = find_tensor(io.BufferedReader(_Section(self._reader, path, chunk.start, chunk.length)))
            except Exception as error:  # a damaged archive can raise any exception
                raise WeightMappingError(
                    f"{path} is damaged at byte {chunk.start} ({error}); save the checkpoint again"
                ) from None
            if prod(saved.shape) != prod(chunk.shape) or saved.dtype not in WEIGHTS:
                raise WeightMappingError(
                    f"{path} holds {saved.dtype} {list(saved.shape)} at byte {chunk.start}, but the metadata says "
                    f"{list(chunk.shape)}; save the checkpoint again"
                )
            self._crcs[chunk] = saved.crc
            self._extents[chunk] = Extent(path, chunk.start + saved.data_offset, saved.dtype, *matrix(saved.shape))
        whole, number = self._extents[chunk], 0
        for at, first, count in zip(place, chunk.offset, chunk.shape, strict=False):
            number = number * count + at - first
        one = Extent(whole.path, whole.offset, whole.dtype, *matrix(chunk.shape[depth:]))
        return replace(one, offset=whole.offset + number * one.num_bytes)

    def _find(self, stored: Stored) -> SavedTensor:
        """Return the saved tensor of a parameter in all layers and experts. The vocabulary may be padded."""
        key = next((key for key in stored.keys if key in self._saved), None)
        if key is None:
            name = stored.keys[0]
            raise WeightMappingError(
                f"{self.folder} holds no {name!r}; give the config.json that belongs to this checkpoint"
            )
        shape, expected = self._saved[key].shape, (*stored.stack, *stored.tensor.shape)
        is_padded = not stored.stack and len(shape) == 2 and shape[0] >= expected[0] and shape[1:] == expected[1:]
        if shape != expected and not is_padded:
            raise WeightMappingError(
                f"{self.folder}: {key} has shape {list(shape)}, but config.json means {list(expected)}; "
                "give the config.json that belongs to these weights"
            )
        return self._saved[key]


@dataclass(eq=False)
class _Section(io.RawIOBase):
    """A part of a file, as a separate file object."""

    files: Files
    path: Path
    start: int
    length: int
    at: int = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.length}[whence]
        if at < 0:
            raise OSError(f"offset {offset} is before the start of the file")
        self.at = at
        return at

    def readinto(self, buffer: Any) -> int:
        length = max(0, min(len(buffer), self.length - self.at))
        self.files.read_into(self.path, self.start + self.at, memoryview(buffer)[:length])
        self.at += length
        return length
