"""The ops of a family's rows: how Megatron and SGLang split Hugging Face tensors over tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_mega.weights.boxes import Box, Index, LocalTensor
from grpo_mega.weights.spec import ModelShape, Shard, padded_vocab, round_up

ENGINE_VOCAB_MULTIPLE = 64  # SGLang pads a vocabulary to a multiple of this many rows


@dataclass(frozen=True)
class Copy:
    """The same tensor on both sides, split along `axis` for tensor parallelism (None: whole on every rank)."""

    dims: tuple[str, ...]
    axis: int | None = None

    def hf_shapes(self, shape: ModelShape) -> tuple[Index, ...]:
        return (shape.dims(self.dims),)

    def megatron(self, shard: Shard) -> LocalTensor:
        start, stop = [0] * len(self.dims), list(shard.shape.dims(self.dims))
        if self.axis is not None:
            width = stop[self.axis] // shard.tp_size
            start[self.axis], stop[self.axis] = width * shard.tp_rank, width * (shard.tp_rank + 1)
        box = Box(shard.names[0], tuple(start), tuple(stop))
        return shard.tensor(box.shape, [(box, (0,) * len(start))])

    engine = megatron


@dataclass(frozen=True)
class Vocab:
    """An embedding, split into equal runs of the vocabulary. Megatron pads it to a multiple of the tensor-parallel size.

    SGLang pads it to a multiple of 64. If the tensor-parallel size does not divide that, it pads to a multiple of 64 times the
    size.
    """

    def hf_shapes(self, shape: ModelShape) -> tuple[Index, ...]:
        return ((shape.vocab, shape.hidden),)

    def megatron(self, shard: Shard) -> LocalTensor:
        return self._run(shard, padded_vocab(shard.shape.vocab, shard.tp_size))

    def engine(self, shard: Shard) -> LocalTensor:
        padded = round_up(shard.shape.vocab, ENGINE_VOCAB_MULTIPLE)
        if padded % shard.tp_size:
            padded = round_up(shard.shape.vocab, ENGINE_VOCAB_MULTIPLE * shard.tp_size)
        return self._run(shard, padded)

    def _run(self, shard: Shard, padded: int) -> LocalTensor:
        width, hidden = padded // shard.tp_size, shard.shape.hidden
        start, stop = width * shard.tp_rank, min(width * (shard.tp_rank + 1), shard.shape.vocab)
        box = Box(shard.names[0], (start, 0), (stop, hidden))
        return shard.tensor((width, hidden), [(box, (0, 0))] if start < stop else [])


@dataclass(frozen=True)
class QKV:
    """Megatron's fused projection: for each key-value head its query heads, then its key, then its value.

    Ranks hold equal runs of its rows. If ranks outnumber key-value heads, a run is a part of one head's rows, and Megatron
    gathers the activations. SGLang has a rank's query heads, then its keys, then its values. If ranks outnumber key-value
    heads, neighbouring ranks hold the same head.
    """

    trailing: tuple[str, ...]  # ("hidden",) for weights, () for biases

    def hf_shapes(self, shape: ModelShape) -> tuple[Index, ...]:
        rest = shape.dims(self.trailing)
        return (shape.q, *rest), (shape.kv, *rest), (shape.kv, *rest)

    def megatron(self, shard: Shard) -> LocalTensor:
        shape = shard.shape
        rest = shape.dims(self.trailing)
        zeros = (0,) * len(rest)
        rows_of = (shape.q // shape.num_kv_heads, shape.head_dim, shape.head_dim)  # rows of q, k, v per key-value head
        width = (shape.q + 2 * shape.kv) // shard.tp_size
        first, last = width * shard.tp_rank, width * (shard.tp_rank + 1)  # this rank's rows in the whole fused tensor
        pieces, row = [], 0
        for head in range(shape.num_kv_heads):
            for name, rows in zip(shard.names, rows_of, strict=True):
                start, end = max(row, first), min(row + rows, last)
                if start < end:
                    shift = rows * head - row  # maps a row of the fused tensor to a row of the Hugging Face tensor
                    pieces.append((Box(name, (start + shift, *zeros), (end + shift, *rest)), (start - first, *zeros)))
                row += rows
        return shard.tensor((width, *rest), pieces)

    def engine(self, shard: Shard) -> LocalTensor:
        shape, tp_size = shard.shape, shard.tp_size
        rest = shape.dims(self.trailing)
        zeros = (0,) * len(rest)
        kv_parts = min(tp_size, shape.num_kv_heads)
        kv = shape.kv // kv_parts, shard.tp_rank // (tp_size // kv_parts)
        pieces, row = [], 0
        for name, (rows, part) in zip(shard.names, ((shape.q // tp_size, shard.tp_rank), kv, kv), strict=True):
            pieces.append((Box(name, (rows * part, *zeros), (rows * (part + 1), *rest)), (row, *zeros)))
            row += rows
        return shard.tensor((row, *rest), pieces)


@dataclass(frozen=True)
class GateUp:
    """The fused gated MLP input: a rank's rows of the gate projection above its rows of the up projection."""

    rows: str = "ffn"

    def hf_shapes(self, shape: ModelShape) -> tuple[Index, ...]:
        return (shape.dims((self.rows, "hidden")),) * 2

    def megatron(self, shard: Shard) -> LocalTensor:
        rows, hidden = shard.shape.dims((self.rows, "hidden"))
        rows //= shard.tp_size
        start, stop = (rows * shard.tp_rank, 0), (rows * (shard.tp_rank + 1), hidden)
        return shard.tensor((2 * rows, hidden), [(Box(name, start, stop), (rows * i, 0)) for i, name in enumerate(shard.names)])

    engine = megatron
