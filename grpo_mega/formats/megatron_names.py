"""Under which keys Megatron's distributed checkpoints keep a family's tensors; needs no torch.

A key holds a parameter of all layers, [layers, ...], or of all experts of all layers, [layers, experts, ...]. What stands at a
place of it is what a rank has at tensor-parallel size 1, as the family's table says; the vocabulary may be padded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from grpo_mega.weights.boxes import Box, Index, LocalTensor, Piece
from grpo_mega.weights.spec import Family, ModelShape, Row, kind_of

# Megatron's local layer spec saves its own norms under the names that they have fused into Transformer Engine's linear layers.
_RENAMED = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


@dataclass(frozen=True)
class Stored:
    """One layer's, or one expert's, part of a key."""

    keys: tuple[str, ...]  # the same tensor has other keys under other layer specs; the first is Transformer Engine's
    stack: Index  # the key's leading dims: (), (layers,) or (layers, experts)
    place: Index  # in them
    tensor: LocalTensor

    @property
    def name(self) -> str:
        return f"{self.keys[0]}{list(self.place) if self.place else ''}"


def stored_tensors(family: Family, shape: ModelShape) -> Iterator[Stored]:
    """All tensors of a model, layer by layer."""
    heads = (family.embedding,) if shape.tied else (family.embedding, family.output)
    rows = [(row, _tensor(row, shape)) for row in (*heads, *family.rows)]
    for row, tensor in rows:
        if kind_of(row) == "model":
            yield Stored(keys_of(row), (), (), tensor)
    for layer in range(shape.num_layers):
        for row, tensor in rows:
            if kind_of(row) == "layer":
                yield Stored(keys_of(row), (shape.num_layers,), (layer,), _named(tensor, layer, 0))
        for expert in range(shape.num_experts):
            for row, tensor in rows:
                if kind_of(row) == "expert":
                    stack = (shape.num_layers, shape.num_experts)
                    yield Stored(keys_of(row), stack, (layer, expert), _named(tensor, layer, expert))


def keys_of(row: Row) -> tuple[str, ...]:
    if kind_of(row) == "expert":
        return (_stacked(row.megatron).replace("local_experts.{e}.", "experts."),)
    name = _stacked(row.megatron)
    renamed = name
    for own, saved in _RENAMED.items():
        renamed = renamed.replace(own, saved)
    return tuple(dict.fromkeys((_stacked(row.megatron_te or row.megatron), renamed)))


def _stacked(name: str) -> str:
    return name.replace("layers.{i}.", "layers.")


def _tensor(row: Row, shape: ModelShape) -> LocalTensor:
    return row.op.megatron(row.hf, "", shape, 1, 0)


def _named(tensor: LocalTensor, layer: int, expert: int) -> LocalTensor:
    def named(box: Box) -> Box:
        return Box(box.tensor.format(i=layer, e=expert), box.start, box.stop)

    return LocalTensor(tensor.shape, tuple(Piece(named(p.box), p.local, p.offset) for p in tensor.pieces))
