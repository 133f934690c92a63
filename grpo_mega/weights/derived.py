"""Tables derived from a family's table: an adapter's (LoRA, Hu et al. 2021, arXiv 2106.09685), and SGLang's side of a
hybrid family.

Each chosen matrix W [out, in] of a linear layer gets A [rank, in] and B [out, rank]; the layer computes
x W^T + (alpha / rank) x A^T B^T. Hugging Face names have ".lora_A" or ".lora_B" before ".weight", as in PEFT. In
Megatron a linear layer has one A, the As of its matrices stacked, and one B with the rows of the layer's weight. So
tensor parallelism cuts B where it cuts the rows of W, and A where it cuts the columns of W; what it does not cut is
whole on every rank. If a layer has a matrix without adapter, its rows of B are padding.

SGLang's rows of a hybrid family have other names and cuts than Megatron's. SGLang stacks the inputs of linear attention
in two tensors, one of queries, keys, values and gates, the other of rates and decays. It leaves "self_attn" out of the
names of full attention. It serves the language model of a multimodal model alone, under the names of a text model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from grpo_mega.config import LoraConfig, RolloutConfig, SyncConfig
from grpo_mega.errors import WeightMappingError
from grpo_mega.weights.boxes import Box, Index, LocalTensor
from grpo_mega.weights.spec import Family, ModelShape, Op, Row, Shard
from grpo_mega.weights.tables import Stacked

_IN_PROJ = "self_attention.in_proj.weight"


def served_family(family: Family, shape: ModelShape) -> Family:
    """Return the table of the parameters that SGLang has. It is the family's own unless the model is hybrid."""
    if not shape.linear_layers:
        return family
    rows = tuple(served for row in family.rows for served in _served(row))
    return replace(family, rows=rows, embedding=_renamed(family.embedding))


def sends_adapter(lora: LoraConfig | None, sync: SyncConfig, rollout: RolloutConfig, shape: ModelShape) -> bool:
    """Return True if syncs send only the adapter of model.lora, False if they send the merged weights."""
    return lora is not None and sync.lora != "merged" and not merge_reason(rollout, shape)


def merge_reason(rollout: RolloutConfig, shape: ModelShape) -> str:
    """Return why an engine gets merged weights; empty if it can apply an adapter itself."""
    if not rollout.is_served:
        return "with rollout.engine='embedded'"
    if rollout.quantization is not None:
        return f"with rollout.quantization={rollout.quantization!r}"
    if shape.num_experts or shape.kv_lora:
        return f"for {shape.model_type}, whose experts or latents SGLang adapts with kernels that need a GPU"
    if shape.linear_layers:
        return f"for {shape.model_type}, whose linear attention SGLang stacks in other parts"
    return ""


def _served(row: Row) -> Iterator[Row]:
    """Yield SGLang's rows with the weights of a row."""
    if row.megatron.endswith(_IN_PROJ):
        in_proj = cast(Stacked, row.op)
        for tensors, name in (((0, 1), "in_proj_qkvz"), ((2, 3), "in_proj_ba")):
            own = tuple((tensors.index(tensor), dim) for tensor, dim in in_proj.parts if tensor in tensors)
            hf = tuple(row.hf[tensor] for tensor in tensors)
            engine = row.hf[0].replace("in_proj_qkv", name)
            yield _renamed(replace(row, hf=hf, op=Stacked(own, in_proj.trailing), engine=engine))
    else:
        yield _renamed(row)


def _renamed(row: Row) -> Row:
    name = (row.engine or row.hf[0]).replace("model.language_model.", "model.", 1)
    return replace(row, engine=name.replace(".self_attn.", "."))


ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class _Pair:
    """The adapter of a linear layer with op `base`. `chosen`: the row's matrices that have one."""

    base: Op
    chosen: tuple[int, ...]
    rank: int

    def _weight(self, shard: Shard) -> LocalTensor:
        """Return the layer's weight on a rank. Its matrices have their indexes as names."""
        return self.base.megatron(replace(shard, names=_numbers(self.base, shard.shape)))


@dataclass(frozen=True)
class LoraA(_Pair):
    def hf_shapes(self, shape: ModelShape) -> tuple[Index, ...]:
        return tuple((self.rank, self.base.hf_shapes(shape)[i][1]) for i in self.chosen)

    def megatron(self, shard: Shard) -> LocalTensor:
        box = self._weight(shard).pieces[0].box
        start, stop = box.start[1], box.stop[1]
        boxes = [Box(name, (0, start), (self.rank, stop)) for name in shard.names]
        pieces = [(box, (k * self.rank, 0)) for k, box in enumerate(boxes)]
        return shard.tensor((len(boxes) * self.rank, stop - start), pieces)

    engine = megatron


@dataclass(frozen=True)
class LoraB(_Pair):
    def hf_shapes(self, shape: ModelShape) -> tuple[Index, ...]:
        return tuple((self.base.hf_shapes(shape)[i][0], self.rank) for i in self.chosen)

    def megatron(self, shard: Shard) -> LocalTensor:
        weight, chosen = self._weight(shard), {str(i): name for i, name in zip(self.chosen, shard.names, strict=True)}
        pieces = [
            (
                Box(chosen[p.box.tensor], (p.box.start[0], 0), (p.box.stop[0], self.rank)),
                (p.offset[0], 0),
            )
            for p in weight.pieces
            if p.box.tensor in chosen
        ]
        return shard.tensor((weight.shape[0], self.rank), pieces)

    engine = megatron


def adapter_family(family: Family, shape: ModelShape, rank: int, targets: Sequence[str]) -> Family:
    """Return the table of the adapter alone. Raise WeightMappingError for a target that the model lacks."""
    known = sorted({_short(name) for row in _linear_rows(family, shape) for name in row.hf})
    for name in () if ALL_LINEAR in targets else targets:
        if name not in known:
            raise WeightMappingError(
                f"model.lora.targets: {name!r} is no linear layer of {shape.model_type}; use {', '.join(known)}, or"
                f" {ALL_LINEAR}"
            )
    rows: list[Row] = []
    for row in _linear_rows(family, shape):
        chosen = tuple(i for i, name in enumerate(row.hf) if ALL_LINEAR in targets or _short(name) in targets)
        for letter, kind in (("A", LoraA), ("B", LoraB)) if chosen else ():
            hf = tuple(adapter_name(row.hf[i], letter) for i in chosen)
            megatron = f"{row.megatron.removesuffix('weight')}lora.{letter}"
            op = kind(row.op, chosen, rank)
            saved_as = _parts_with(chosen, row, shape) if letter == "B" else ()
            rows.append(Row(hf, megatron, op, row.where, span=row.span, saved_as=saved_as))
    return replace(family, rows=tuple(rows), has_heads=False)


def whole_layers(family: Family, shape: ModelShape, targets: Sequence[str]) -> tuple[str, ...]:
    """Return the targets with all matrices of each layer that has one, as an engine with fused layers needs them."""
    rows = [[_short(name) for name in row.hf] for row in _linear_rows(family, shape)]
    return tuple({name for row in rows if ALL_LINEAR in targets or {*row} & {*targets} for name in row})


def _parts_with(chosen: Sequence[int], row: Row, shape: ModelShape) -> tuple[str, ...]:
    """Return the suffixes of the keys of the chosen matrices' rows."""
    pieces = row.op.megatron(Shard(_numbers(row.op, shape), "", shape)).pieces
    parts = zip(row.saved_as, pieces, strict=True) if row.saved_as else ()
    return tuple(part for part, piece in parts if int(piece.box.tensor) in chosen)


def adapter_name(weight: str, letter: str) -> str:
    """Return the Hugging Face name of the adapter's A or B of a weight."""
    return f"{weight.removesuffix('weight')}lora_{letter}.weight"


def module_names(family: Family) -> list[str]:
    """Return the last parts of the names of an adapter's linear layers, such as q_proj, for PEFT's config."""
    return sorted({name.split(".lora_")[0].rpartition(".")[2] for row in family.rows for name in row.hf})


def _linear_rows(family: Family, shape: ModelShape) -> list[Row]:
    return [row for row in family.rows if row.is_linear and row.is_in(shape)]


def _numbers(op: Op, shape: ModelShape) -> tuple[str, ...]:
    return tuple(map(str, range(len(op.hf_shapes(shape)))))


def _short(name: str) -> str:
    """Return the name in model.lora.targets: q of q_proj."""
    return name.removesuffix(".weight").rpartition(".")[2].removesuffix("_proj")
