"""The ops and rows that families share.

An op says how Megatron and SGLang split Hugging Face tensors over tensor-parallel ranks.

Megatron's names of experts are the names in SequentialMLP, where each expert is a separate module; layout.py derives
TEGroupedMLP's names. The engine has one parameter, [experts, ...], for the same part of all experts of a layer, in the
layout of SGLang's Triton kernels. The part of a rank's e-th expert is "parameter[e]".

In multi-latent attention queries, keys and values are computed from latents. Latents are whole on every tensor-parallel
rank; the matrices after them are split by heads. `ROUTER_BIAS` is added per expert to the router's scores when experts
are chosen. No optimizer changes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from grpo_mega.weights.boxes import Box, Index, LocalTensor
from grpo_mega.weights.spec import ModelShape, Op, Row, Rows, Shard, Span, round_up

_ENGINE_VOCAB_MULTIPLE = 64  # SGLang pads a vocabulary to a multiple of this many rows
HF = "model.layers.{i}."
MCORE = "decoder.layers.{i}."


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
    """An embedding, split into equal runs of the vocabulary. Megatron pads it to a multiple of the tensor-parallel
    size.

    SGLang pads it to a multiple of 64. If the tensor-parallel size does not divide that, it pads to a multiple of 64
    times the size.
    """

    def hf_shapes(self, shape: ModelShape) -> tuple[Index, ...]:
        return ((shape.vocab, shape.hidden),)

    def megatron(self, shard: Shard) -> LocalTensor:
        return self._run(shard, round_up(shard.shape.vocab, shard.tp_size))

    def engine(self, shard: Shard) -> LocalTensor:
        padded = round_up(shard.shape.vocab, _ENGINE_VOCAB_MULTIPLE)
        if padded % shard.tp_size:
            padded = round_up(shard.shape.vocab, _ENGINE_VOCAB_MULTIPLE * shard.tp_size)
        return self._run(shard, padded)

    def _run(self, shard: Shard, padded: int) -> LocalTensor:
        width, hidden = padded // shard.tp_size, shard.shape.hidden
        start, stop = width * shard.tp_rank, min(width * (shard.tp_rank + 1), shard.shape.vocab)
        box = Box(shard.names[0], (start, 0), (stop, hidden))
        return shard.tensor((width, hidden), [(box, (0, 0))] if start < stop else [])


@dataclass(frozen=True)
class QKV:
    """Megatron's fused projection: for each key-value head its query heads, then its key, then its value.

    Ranks hold equal runs of its rows. If ranks outnumber key-value heads, a run is a part of one head's rows, and
    Megatron gathers the activations. SGLang has a rank's query heads, then its keys, then its values. If ranks
    outnumber key-value heads, neighbouring ranks hold the same head.
    """

    trailing: tuple[str, ...]  # ("hidden",) for weights, () for biases

    def hf_shapes(self, shape: ModelShape) -> tuple[Index, ...]:
        rest = shape.dims(self.trailing)
        return (shape.q, *rest), (shape.kv, *rest), (shape.kv, *rest)

    def megatron(self, shard: Shard) -> LocalTensor:
        fused = list(self._fused_rows(shard.shape, *shard.names))
        width = sum(run.num_rows for run in fused) // shard.tp_size
        first, last = width * shard.tp_rank, width * (shard.tp_rank + 1)  # this rank's rows in the whole fused tensor
        runs, row = [], 0
        for name, start, num_rows in fused:
            low, high = max(row, first), min(row + num_rows, last)
            if low < high:
                runs.append(Rows(name, start + low - row, high - low))
            row += num_rows
        return shard.stack(runs, self.trailing)

    def engine(self, shard: Shard) -> LocalTensor:
        shape, tp_size = shard.shape, shard.tp_size
        kv_parts = min(tp_size, shape.num_kv_heads)
        kv = shape.kv // kv_parts, shard.tp_rank // (tp_size // kv_parts)
        parts = zip(shard.names, ((shape.q // tp_size, shard.tp_rank), kv, kv), strict=True)
        return shard.stack((Rows(name, width * part, width) for name, (width, part) in parts), self.trailing)

    def _fused_rows(self, shape: ModelShape, query: str, key: str, value: str) -> Iterator[Rows]:
        """Yield the runs of rows of Megatron's fused tensor on one rank."""
        query_rows, width = shape.q // shape.num_kv_heads, shape.head_dim
        for head in range(shape.num_kv_heads):
            yield Rows(query, query_rows * head, query_rows)
            yield Rows(key, width * head, width)
            yield Rows(value, width * head, width)


@dataclass(frozen=True)
class GatedQKV(QKV):
    """The same with an output gate. q_proj has for each head its query, then its gate, and so has SGLang. Megatron has
    for each key-value head its queries, then their gates, then key and value. Ranks of Megatron must not outnumber
    key-value heads.
    """

    def hf_shapes(self, shape: ModelShape) -> tuple[Index, ...]:
        q, *others = super().hf_shapes(shape)
        return (2 * q[0], *q[1:]), *others

    def engine(self, shard: Shard) -> LocalTensor:
        doubled = replace(shard.shape, num_heads=2 * shard.shape.num_heads)
        return super().engine(replace(shard, shape=doubled))

    def _fused_rows(self, shape: ModelShape, query: str, key: str, value: str) -> Iterator[Rows]:
        heads, width = shape.num_heads // shape.num_kv_heads, shape.head_dim
        for group in range(shape.num_kv_heads):
            first, last = 2 * heads * group, 2 * heads * (group + 1)
            for i in (*range(first, last, 2), *range(first + 1, last, 2)):  # the queries, then their gates
                yield Rows(query, width * i, width)
            yield Rows(key, width * group, width)
            yield Rows(value, width * group, width)


@dataclass(frozen=True)
class Stacked:
    """Parts of Hugging Face tensors, one below the other. A rank holds its rows of each part.

    `parts`: the index of the part's tensor in the row, and the dim with its number of rows.
    """

    parts: tuple[tuple[int, str], ...]
    trailing: tuple[str, ...]

    def hf_shapes(self, shape: ModelShape) -> tuple[Index, ...]:
        rows = [0] * len({tensor for tensor, _ in self.parts})
        for tensor, dim in self.parts:
            rows[tensor] += getattr(shape, dim)
        return tuple((n, *shape.dims(self.trailing)) for n in rows)

    def megatron(self, shard: Shard) -> LocalTensor:
        runs, firsts = [], [0] * len(shard.names)
        for tensor, dim in self.parts:
            num_rows = getattr(shard.shape, dim)
            width = num_rows // shard.tp_size
            runs.append(Rows(shard.names[tensor], firsts[tensor] + width * shard.tp_rank, width))
            firsts[tensor] += num_rows
        return shard.stack(runs, self.trailing)

    engine = megatron


def gate_up(rows: str) -> Stacked:
    """Return the op of the fused gated MLP input: a rank's rows of the gate projection, then of the up projection."""
    return Stacked(((0, rows), (1, rows)), ("hidden",))


HEADS = (
    Row(("model.embed_tokens.weight",), "embedding.word_embeddings.weight", Vocab(), "first"),
    Row(("lm_head.weight",), "output_layer.weight", Vocab(), "last"),
)
FINAL_NORM = Row(("model.norm.weight",), "decoder.final_layernorm.weight", Copy(("hidden",)), "last")


def weight(hf: str, megatron: str, dims: str, axis: int | None = None, *, engine: str | None = None) -> Row:
    """Return the row of one weight of a layer: a linear layer [rows, columns] split along `axis`, or a norm."""
    op = Copy(tuple(dims.split()), axis)
    return Row((f"{HF}{hf}.weight",), f"{MCORE}{megatron}.weight", op, engine=engine, is_linear=len(op.dims) == 2)


def _qkv(kind: str, trailing: tuple[str, ...]) -> Row:
    return Row(
        tuple(f"{HF}self_attn.{x}_proj.{kind}" for x in "qkv"),
        f"{MCORE}self_attention.linear_qkv.{kind}",
        QKV(trailing),
        engine=f"{HF}self_attn.qkv_proj.{kind}",
        is_linear=kind == "weight",
    )


def qk_norms(width: str) -> tuple[Row, ...]:
    return tuple(weight(f"self_attn.{x}_norm", f"self_attention.{x}_layernorm", width) for x in "qk")


def mlp(
    block: str = "mlp", rows: str = "ffn", span: Span | None = None, *, hf_block: str | None = None
) -> tuple[Row, ...]:
    hf = hf_block or block
    fused = Row(
        (f"{HF}{hf}.gate_proj.weight", f"{HF}{hf}.up_proj.weight"),
        f"{MCORE}{block}.linear_fc1.weight",
        gate_up(rows),
        engine=f"{HF}{hf}.gate_up_proj.weight",
        is_linear=True,
        span=span,
    )
    return fused, replace(weight(f"{hf}.down_proj", f"{block}.linear_fc2", f"hidden {rows}", 1), span=span)


def router(block: str = "mlp", span: Span | None = None) -> Row:
    return replace(weight(f"{block}.gate", "mlp.router", "num_experts hidden"), is_linear=False, span=span)


def experts(
    block: str = "mlp", parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"), span: Span | None = None
) -> tuple[Row, ...]:
    """Return the rows of the experts. `parts` are the Hugging Face names of an expert's gate, up and down
    projection.
    """
    gate, up, down = (f"{HF}{block}.experts.{{e}}.{part}.weight" for part in parts)

    def row(hf: tuple[str, ...], megatron: str, op: Op, engine: str) -> Row:
        megatron = f"{MCORE}mlp.experts.local_experts.{{e}}.{megatron}.weight"
        return Row(hf, megatron, op, "expert", engine=f"{HF}{block}.experts.{engine}[{{e}}]", is_linear=True, span=span)

    return (
        row((gate, up), "linear_fc1", gate_up("moe_ffn"), "w13_weight"),
        row((down,), "linear_fc2", Copy(("hidden", "moe_ffn"), axis=1), "w2_weight"),
    )


def _latent_norm(latent: str, width: str) -> Row:
    row = weight(f"self_attn.{latent}_a_layernorm", f"self_attention.{latent}_layernorm", width)
    return replace(row, megatron_te=f"{MCORE}self_attention.linear_{latent}_up_proj.layer_norm_weight")


INPUT_NORM = weight("input_layernorm", "input_layernorm", "hidden")
MLP_NORM = weight("post_attention_layernorm", "pre_mlp_layernorm", "hidden")
QKV_BIAS = _qkv("bias", ())

ATTENTION = (
    replace(INPUT_NORM, megatron_te=MCORE + "self_attention.linear_qkv.layer_norm_weight"),
    _qkv("weight", ("hidden",)),
    weight("self_attn.o_proj", "self_attention.linear_proj", "hidden q", 1),
)
_FUSED_MLP_NORM = replace(MLP_NORM, megatron_te=MCORE + "mlp.linear_fc1.layer_norm_weight")
MLP = (_FUSED_MLP_NORM, *mlp())
DENSE = (*ATTENTION, *MLP, FINAL_NORM)

_FUSED = HF + "self_attn.fused_qkv_a_proj_with_mqa.weight"  # used if the queries have a latent too
_KV_DOWN = "self_attn.kv_a_proj_with_mqa", "self_attention.linear_kv_down_proj"
LATENT_ATTENTION = (
    INPUT_NORM,
    weight("self_attn.q_proj", "self_attention.linear_q_proj", "q_from_hidden hidden", 0),
    weight("self_attn.q_a_proj", "self_attention.linear_q_down_proj", "q_lora hidden", engine=_FUSED),
    _latent_norm("q", "q_lora"),
    weight("self_attn.q_b_proj", "self_attention.linear_q_up_proj", "q q_lora", 0),
    weight(*_KV_DOWN, "kv_down_fused hidden", engine=_FUSED),
    weight(*_KV_DOWN, "kv_down_alone hidden"),
    _latent_norm("kv", "kv_lora"),
    weight("self_attn.kv_b_proj", "self_attention.linear_kv_up_proj", "kv_up kv_lora", 0),
    weight("self_attn.o_proj", "self_attention.linear_proj", "hidden v", 1),
)
# First layers with an MLP, then layers with experts and shared experts.
DENSE_THEN_MOE = (
    replace(_FUSED_MLP_NORM, span="dense"),
    *mlp(span="dense"),
    replace(MLP_NORM, span="moe"),  # router and experts share its output, so no linear layer has it
    router(span="moe"),
    *mlp("mlp.shared_experts", "shared_ffn", "moe"),
    *experts(span="moe"),
    FINAL_NORM,
)
ROUTER_BIAS = Row(
    (HF + "mlp.gate.e_score_correction_bias",), MCORE + "mlp.router.expert_bias", Copy(("num_experts",)), span="moe"
)
