"""SGLang's side of a hybrid family: rows whose names and cuts differ from Megatron's.

SGLang stacks the inputs of linear attention in two tensors, one of queries, keys, values and gates, the other of rates
and decays. It leaves "self_attn" out of the names of full attention. It serves the language model of a multimodal model
alone, under the names of a text model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

from grpo_mega.weights.boxes import LocalTensor
from grpo_mega.weights.families import GatedQKV, Stacked
from grpo_mega.weights.spec import Family, ModelShape, Row, Shard

_IN_PROJ, _QKV = "self_attention.in_proj.weight", "self_attention.linear_qkv.weight"


@dataclass(frozen=True)
class ServedGatedQKV(GatedQKV):
    """The query and the gate of each head of a rank, one head after the other, then its keys, then its values."""

    def engine(self, shard: Shard) -> LocalTensor:
        doubled = replace(shard.shape, num_heads=2 * shard.shape.num_heads)
        return super(GatedQKV, self).engine(replace(shard, shape=doubled))


def served_family(family: Family, shape: ModelShape) -> Family:
    """Return the table of the parameters that SGLang has. It is the family's own unless the model is hybrid."""
    if not shape.linear_layers:
        return family
    rows = tuple(served for row in family.rows for served in _served(row))
    return replace(family, rows=rows, embedding=_renamed(family.embedding))


def _served(row: Row) -> Iterator[Row]:
    """Yield SGLang's rows with the weights of a row."""
    if row.megatron.endswith(_IN_PROJ):
        in_proj = cast(Stacked, row.op)
        for tensors, name in (((0, 1), "in_proj_qkvz"), ((2, 3), "in_proj_ba")):
            own = tuple((tensors.index(tensor), dim) for tensor, dim in in_proj.parts if tensor in tensors)
            hf = tuple(row.hf[tensor] for tensor in tensors)
            engine = row.hf[0].replace("in_proj_qkv", name)
            yield _renamed(replace(row, hf=hf, op=Stacked(own, in_proj.trailing), engine=engine))
    elif row.megatron.endswith(_QKV):
        yield _renamed(replace(row, op=ServedGatedQKV(("hidden",))))
    else:
        yield _renamed(row)


def _renamed(row: Row) -> Row:
    name = (row.engine or row.hf[0]).replace("model.language_model.", "model.", 1)
    return replace(row, engine=name.replace(".self_attn.", "."))
