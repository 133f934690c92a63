"""The families' tables, keyed by the `model_type` of config.json, and the ops of their rows.

An op says how Megatron and SGLang split Hugging Face tensors over tensor-parallel ranks. Most rows are shared by
families. A family that names its tensors as Llama does is one line.

Megatron's names of experts are the names in SequentialMLP, where each expert is a separate module; layout.py derives
TEGroupedMLP's names. The engine has one parameter, [experts, ...], for the same part of all experts of a layer, in the
layout of SGLang's Triton kernels. The part of a rank's e-th expert is "parameter[e]".

DeepSeek's models and glm4_moe_lite have multi-latent attention: queries, keys and values are computed from latents.
Latents are whole on every tensor-parallel rank; the matrices after them are split by heads. deepseek_v3 and GLM's
models add a bias per expert to the router's scores when they choose experts. No optimizer changes it.

Qwen3.5's hybrid models have layers of linear attention (gated delta net, arXiv 2412.06464), and after every few of them
a layer of full attention. Its MoE models have a gate, a single row, for the shared expert. A multimodal model's table
has the tensors of its language model only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from grpo_mega.errors import WeightMappingError
from grpo_mega.text import nearest
from grpo_mega.weights.boxes import Box, Index, LocalTensor
from grpo_mega.weights.hf_config import MULTIMODAL
from grpo_mega.weights.spec import Family, ModelShape, Op, Row, Rows, Shard, Span, padded_vocab, round_up

_ENGINE_VOCAB_MULTIPLE = 64  # SGLang pads a vocabulary to a multiple of this many rows
_HF = "model.layers.{i}."
_MCORE = "decoder.layers.{i}."
_TEXT, _NESTED_TEXT = "model.", "model.language_model."  # prefixes of a language model, alone and in a multimodal one


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
        return self._run(shard, padded_vocab(shard.shape.vocab, shard.tp_size))

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


EMBEDDING = Row(("model.embed_tokens.weight",), "embedding.word_embeddings.weight", Vocab(), "first")
OUTPUT = Row(("lm_head.weight",), "output_layer.weight", Vocab(), "last")
FINAL_NORM = Row(("model.norm.weight",), "decoder.final_layernorm.weight", Copy(("hidden",)), "last")


def _row(hf: str, megatron: str, dims: str, axis: int | None = None, *, engine: str | None = None) -> Row:
    """Return the row of one weight of a layer: a linear layer [rows, columns] split along `axis`, or a norm."""
    op = Copy(tuple(dims.split()), axis)
    return Row((f"{_HF}{hf}.weight",), f"{_MCORE}{megatron}.weight", op, engine=engine, is_linear=len(op.dims) == 2)


def _qkv(kind: str, trailing: tuple[str, ...]) -> Row:
    return Row(
        tuple(f"{_HF}self_attn.{x}_proj.{kind}" for x in "qkv"),
        f"{_MCORE}self_attention.linear_qkv.{kind}",
        QKV(trailing),
        engine=f"{_HF}self_attn.qkv_proj.{kind}",
        is_linear=kind == "weight",
    )


def _qk_norms(width: str) -> tuple[Row, ...]:
    return tuple(_row(f"self_attn.{x}_norm", f"self_attention.{x}_layernorm", width) for x in "qk")


def _mlp(
    block: str = "mlp", rows: str = "ffn", span: Span | None = None, *, hf_block: str | None = None
) -> tuple[Row, ...]:
    hf = hf_block or block
    fused = Row(
        (f"{_HF}{hf}.gate_proj.weight", f"{_HF}{hf}.up_proj.weight"),
        f"{_MCORE}{block}.linear_fc1.weight",
        gate_up(rows),
        engine=f"{_HF}{hf}.gate_up_proj.weight",
        is_linear=True,
        span=span,
    )
    return fused, replace(_row(f"{hf}.down_proj", f"{block}.linear_fc2", f"hidden {rows}", 1), span=span)


def _router(block: str = "mlp", span: Span | None = None) -> Row:
    return replace(_row(f"{block}.gate", "mlp.router", "num_experts hidden"), is_linear=False, span=span)


def _experts(
    block: str = "mlp", parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"), span: Span | None = None
) -> tuple[Row, ...]:
    """Return the rows of the experts. `parts` are the Hugging Face names of an expert's gate, up and down
    projection.
    """
    gate, up, down = (f"{_HF}{block}.experts.{{e}}.{part}.weight" for part in parts)

    def row(hf: tuple[str, ...], megatron: str, op: Op, engine: str) -> Row:
        megatron = f"{_MCORE}mlp.experts.local_experts.{{e}}.{megatron}.weight"
        return Row(
            hf, megatron, op, "expert", engine=f"{_HF}{block}.experts.{engine}[{{e}}]", is_linear=True, span=span
        )

    return (
        row((gate, up), "linear_fc1", gate_up("moe_ffn"), "w13_weight"),
        row((down,), "linear_fc2", Copy(("hidden", "moe_ffn"), axis=1), "w2_weight"),
    )


def _latent_norm(latent: str, width: str) -> Row:
    row = _row(f"self_attn.{latent}_a_layernorm", f"self_attention.{latent}_layernorm", width)
    return replace(row, megatron_te=f"{_MCORE}self_attention.linear_{latent}_up_proj.layer_norm_weight")


_INPUT_NORM = _row("input_layernorm", "input_layernorm", "hidden")
_MLP_NORM = _row("post_attention_layernorm", "pre_mlp_layernorm", "hidden")
_QKV_BIAS = _qkv("bias", ())

ATTENTION = (
    replace(_INPUT_NORM, megatron_te=_MCORE + "self_attention.linear_qkv.layer_norm_weight"),
    _qkv("weight", ("hidden",)),
    _row("self_attn.o_proj", "self_attention.linear_proj", "hidden q", 1),
)
_FUSED_MLP_NORM = replace(_MLP_NORM, megatron_te=_MCORE + "mlp.linear_fc1.layer_norm_weight")
MLP = (_FUSED_MLP_NORM, *_mlp())
_DENSE = (*ATTENTION, *MLP, FINAL_NORM)

_FUSED = _HF + "self_attn.fused_qkv_a_proj_with_mqa.weight"  # used if the queries have a latent too
_KV_DOWN = "self_attn.kv_a_proj_with_mqa", "self_attention.linear_kv_down_proj"
_LATENT_ATTENTION = (
    _INPUT_NORM,
    _row("self_attn.q_proj", "self_attention.linear_q_proj", "q_from_hidden hidden", 0),
    _row("self_attn.q_a_proj", "self_attention.linear_q_down_proj", "q_lora hidden", engine=_FUSED),
    _latent_norm("q", "q_lora"),
    _row("self_attn.q_b_proj", "self_attention.linear_q_up_proj", "q q_lora", 0),
    _row(*_KV_DOWN, "kv_down_fused hidden", engine=_FUSED),
    _row(*_KV_DOWN, "kv_down_alone hidden"),
    _latent_norm("kv", "kv_lora"),
    _row("self_attn.kv_b_proj", "self_attention.linear_kv_up_proj", "kv_up kv_lora", 0),
    _row("self_attn.o_proj", "self_attention.linear_proj", "hidden v", 1),
)
# First layers with an MLP, then layers with experts and shared experts.
_DENSE_THEN_MOE = (
    replace(_FUSED_MLP_NORM, span="dense"),
    *_mlp(span="dense"),
    replace(_MLP_NORM, span="moe"),  # router and experts share its output, so no linear layer has it
    _router(span="moe"),
    *_mlp("mlp.shared_experts", "shared_ffn", "moe"),
    *_experts(span="moe"),
    FINAL_NORM,
)
_ROUTER_BIAS = Row(
    (_HF + "mlp.gate.e_score_correction_bias",), _MCORE + "mlp.router.expert_bias", Copy(("num_experts",)), span="moe"
)

_QKV_PARTS = (0, "linear_k"), (0, "linear_k"), (0, "linear_v")
_QKV_KEYS = "query", "key", "value"


def _linear_attention() -> tuple[Row, ...]:
    def row(hf: str, megatron: str, op: Op, saved_as: tuple[str, ...] = ()) -> Row:
        hf_names = tuple(f"{_HF}linear_attn.{name}" for name in hf.split())
        name, is_linear = f"{_MCORE}self_attention.{megatron}", "_proj" in megatron
        return Row(hf_names, name, op, is_linear=is_linear, span="linear", saved_as=saved_as)

    heads = Copy(("linear_v_heads",), 0)
    z_b_a = (1, "linear_v"), (2, "linear_v_heads"), (3, "linear_v_heads")
    in_proj = Stacked((*_QKV_PARTS, *z_b_a), ("hidden",))
    in_names = " ".join(f"in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
    return (
        replace(_INPUT_NORM, megatron_te=_MCORE + "self_attention.in_proj.layer_norm_weight", span="linear"),
        row("dt_bias", "dt_bias", heads),
        row("A_log", "A_log", heads),
        row(in_names, "in_proj.weight", in_proj, (*_QKV_KEYS, "z", "beta", "alpha")),
        row("conv1d.weight", "conv1d.weight", Stacked(_QKV_PARTS, ("one", "linear_conv")), _QKV_KEYS),
        row("norm.weight", "out_norm.weight", Copy(("linear_v_dim",))),
        row("out_proj.weight", "out_proj.weight", Copy(("hidden", "linear_v"), 1)),
    )


_FULL_ATTENTION = tuple(
    replace(row, span="full", op=GatedQKV(("hidden",)) if "linear_qkv" in row.megatron else row.op)
    for row in (*ATTENTION, *_qk_norms("head_dim"))
)

_GATED_MOE = (
    _MLP_NORM,
    _router(),
    *_mlp("mlp.shared_experts", "shared_ffn", hf_block="mlp.shared_expert"),
    Row(
        (_HF + "mlp.shared_expert_gate.weight",),
        _MCORE + "mlp.shared_experts.gate_weight",
        Copy(("shared_gates", "hidden")),
    ),
    *_experts(),
    FINAL_NORM,
)

_LLAMA = Family(_DENSE, EMBEDDING, OUTPUT)
_DEEPSEEK_V3 = Family((*_LATENT_ATTENTION, *_DENSE_THEN_MOE, _ROUTER_BIAS), EMBEDDING, OUTPUT)
FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family((*_LATENT_ATTENTION, *_DENSE_THEN_MOE), EMBEDDING, OUTPUT),
    "deepseek_v3": _DEEPSEEK_V3,
    "glm4_moe": Family(
        (*ATTENTION, _QKV_BIAS, *_qk_norms("qk_norm"), *_DENSE_THEN_MOE, _ROUTER_BIAS),
        EMBEDDING,
        OUTPUT,
        qkv_bias=True,
        engine_ties=False,
    ),
    "glm4_moe_lite": replace(_DEEPSEEK_V3, engine_ties=False),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": Family(
        (
            *(*ATTENTION, _MLP_NORM, _router("block_sparse_moe")),
            *(*_experts("block_sparse_moe", ("w1", "w3", "w2")), FINAL_NORM),
        ),
        EMBEDDING,
        OUTPUT,
        engine_ties=False,
    ),
    "qwen2": Family((*_DENSE, _QKV_BIAS), EMBEDDING, OUTPUT, qkv_bias=True),
    "qwen3": Family((*_DENSE, *_qk_norms("head_dim")), EMBEDDING, OUTPUT, qk_norm=True),
    "qwen3_5_text": Family((*_linear_attention(), *_FULL_ATTENTION, *MLP, FINAL_NORM), EMBEDDING, OUTPUT, qk_norm=True),
    "qwen3_5_moe_text": Family(
        (*_linear_attention(), *_FULL_ATTENTION, *_GATED_MOE), EMBEDDING, OUTPUT, qk_norm=True, stacks_experts=True
    ),
    "qwen3_moe": Family(
        (*ATTENTION, _MLP_NORM, _router(), *_experts(), FINAL_NORM, *_qk_norms("head_dim")),
        EMBEDDING,
        OUTPUT,
        qk_norm=True,
        engine_ties=False,
    ),
}


def family_of(model_type: str) -> Family:
    """Return the family of a model type. Raise WeightMappingError if the model type has no table."""
    if model_type in MULTIMODAL:
        return _renamed(FAMILIES[MULTIMODAL[model_type]])
    if model_type not in FAMILIES:
        hint = nearest(str(model_type), FAMILIES)
        raise WeightMappingError(
            f"model_type {model_type!r} is not known; {hint}known are {', '.join(sorted([*FAMILIES, *MULTIMODAL]))}"
        )
    return FAMILIES[model_type]


def _renamed(family: Family) -> Family:
    """Return the table of a multimodal model with this language model."""

    def renamed(row: Row) -> Row:
        return replace(row, hf=tuple(name.replace(_TEXT, _NESTED_TEXT, 1) for name in row.hf))

    output = family.output  # lm_head has no prefix
    return replace(family, rows=tuple(map(renamed, family.rows)), embedding=renamed(family.embedding), output=output)
