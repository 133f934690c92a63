"""A model's shape according to its Hugging Face config, and the rows of a family's table.

`ModelShape.from_hf_config` reads the sizes from a config.json, resolved by hf_config.py. `Row` maps the Hugging Face
names of a logical tensor to its names in Megatron and in the engine, SGLang. Its op says how each of them splits the
tensor for tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from grpo_mega.errors import WeightMappingError
from grpo_mega.paths import read_json
from grpo_mega.weights.boxes import ONCE, Box, Index, Kind, LocalTensor, Piece
from grpo_mega.weights.hf_config import HYBRID, HYBRID_MOE, LATENT, MOE_FIELDS, attention_windows, resolve_config

# Pipeline position: with the embedding, in every layer, for every expert of every layer, or with the output layer.
Where = Literal["first", "layer", "expert", "last"]
# Layers with an MLP, or with experts; in a hybrid model layers with linear attention, or with full attention.
Span = Literal["dense", "moe", "linear", "full"]
# Tensors whose names end like this are float32 for any dtype of the model.
FLOAT32 = ("e_score_correction_bias", ".A_log", ".dt_bias")
BLOCK = 128  # rows and columns of a linear layer's block with one FP8 scale
MOST_ENGINE_RANKS = 8  # an engine does not span nodes

_SHARED = (*LATENT, "glm4_moe")  # model types with shared experts and first dense layers
_LINEAR_FIELDS = {
    "linear_k_heads": "linear_num_key_heads",
    "linear_v_heads": "linear_num_value_heads",
    "linear_k_dim": "linear_key_head_dim",
    "linear_v_dim": "linear_value_head_dim",
    "linear_conv": "linear_conv_kernel_dim",
}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer. Tables use the names of the derived sizes as dims.

    With multi-latent attention every head has a separate key and value, computed from a latent of `kv_lora` elements.
    `head_dim` is then the width of queries and keys; their last `rope_dim` elements are rotated.
    """

    model_type: str
    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    num_experts: int = 0  # per layer after the first `num_dense`; 0 for a dense model
    moe_ffn: int = 0
    num_dense: int = 0  # number of first layers of an MoE model with an MLP instead of experts
    shared_ffn: int = 0  # rows of the shared experts' MLP, which every token uses
    kv_lora: int = 0  # 0: no multi-latent attention
    q_lora: int = 0  # width of the queries' latent; 0: queries are computed from the hidden state
    rope_dim: int = 0
    v_dim: int = 0  # width of a head's value
    qk_norm: int = 0  # width of the norms of queries and keys, for families whose models differ in it
    windows: tuple[int, ...] = ()  # tokens that a token sees in each layer, itself included; 0: all; (): all everywhere
    linear_layers: tuple[int, ...] = ()  # layers of a hybrid model with linear attention (gated delta net)
    linear_k_heads: int = 0
    linear_v_heads: int = 0
    linear_k_dim: int = 0  # width of a linear-attention head's query and key
    linear_v_dim: int = 0
    linear_conv: int = 0  # tokens that the convolution of linear attention sees

    @property
    def q(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def v(self) -> int:
        return self.num_heads * (self.v_dim or self.head_dim)

    @property
    def q_from_hidden(self) -> int:
        return 0 if self.q_lora else self.q

    @property
    def kv_down(self) -> int:
        return self.kv_lora + self.rope_dim

    @property
    def kv_down_alone(self) -> int:
        return 0 if self.q_lora else self.kv_down

    @property
    def kv_down_fused(self) -> int:
        return self.kv_down if self.q_lora else 0  # SGLang fuses it with the queries' latent

    @property
    def kv_up(self) -> int:
        return self.num_heads * (self.head_dim - self.rope_dim + self.v_dim)

    @property
    def linear_k(self) -> int:
        return self.linear_k_heads * self.linear_k_dim

    @property
    def linear_v(self) -> int:
        return self.linear_v_heads * self.linear_v_dim

    @property
    def one(self) -> int:
        return 1

    @property
    def shared_gates(self) -> int:
        """Return the rows of the gate of shared experts; 0 if they have none."""
        return int(bool(self.num_experts and self.linear_layers))

    @property
    def num_full_layers(self) -> int:
        """Return the number of layers with full attention."""
        return self.num_layers - len(self.linear_layers)

    @property
    def has_unequal_layers(self) -> bool:
        """Return True if layers have different tensors. Megatron's checkpoints then have separate keys per layer."""
        return bool(self.num_dense or self.linear_layers)

    def dims(self, names: tuple[str, ...]) -> Index:
        return tuple(getattr(self, name) for name in names)

    def spans(self, layers: range) -> list[tuple[Span, range]]:
        """Return the runs of equal layers among `layers`, in their order."""
        if self.linear_layers:
            is_linear = set(self.linear_layers).__contains__
            groups = (list(run) for _, run in groupby(layers, is_linear))
            return [("linear" if is_linear(run[0]) else "full", range(run[0], run[-1] + 1)) for run in groups]
        border = self.num_dense if self.num_experts else self.num_layers
        dense, moe = range(layers.start, min(layers.stop, border)), range(max(layers.start, border), layers.stop)
        spans: list[tuple[Span, range]] = [("dense", dense), ("moe", moe)]
        return [(span, run) for span, run in spans if run]

    def layers_with(self, span: Span | None) -> list[int]:
        """Return the model's layers of this kind; all layers for None."""
        runs = self.spans(range(self.num_layers))
        return [layer for kind, run in runs for layer in run if span in (kind, None)]

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> ModelShape:
        """Read the contents of a config.json. Raise WeightMappingError with the name of a missing or wrong field."""
        config = resolve_config(config)

        def field(name: str, default: int | None = None) -> int:
            value = config.get(name) or default
            if value is None:
                raise WeightMappingError(
                    f"config.json has no field {name!r}; is it the config of a causal language model?"
                )
            if not isinstance(value, int) or value < 1:
                raise WeightMappingError(f"config.json has {name}={value!r}; it must be a positive whole number")
            return value

        model_type = config.get("model_type")
        if not isinstance(model_type, str):
            raise WeightMappingError(
                f"config.json has model_type {model_type!r}; is it the config of a causal language model?"
            )
        heads = field("num_attention_heads")
        kv_heads = field("num_key_value_heads", heads)
        if heads % kv_heads:
            raise WeightMappingError(
                f"config.json has num_key_value_heads={kv_heads}; it must divide num_attention_heads={heads}"
            )
        more: dict[str, Any] = {"windows": attention_windows(config)}
        if model_type in MOE_FIELDS:
            experts, rows, *_ = MOE_FIELDS[model_type]
            more |= {"num_experts": field(experts), "moe_ffn": field(rows)}
            _check_every_layer_has_experts(config)
        head_dim = field("head_dim", field("hidden_size") // heads)
        if model_type == "glm4_moe" and config.get("use_qk_norm"):
            more["qk_norm"] = head_dim
        if model_type in LATENT:
            q_lora = 0 if config.get("q_lora_rank") is None else field("q_lora_rank")
            more |= {"kv_lora": field("kv_lora_rank"), "q_lora": q_lora}
            more |= {"rope_dim": field("qk_rope_head_dim"), "v_dim": field("v_head_dim")}
            head_dim, kv_heads = field("qk_nope_head_dim") + more["rope_dim"], heads
        if model_type in HYBRID:
            more |= _linear_attention(config) | {name: field(key) for name, key in _LINEAR_FIELDS.items()}
        if model_type in _SHARED:
            more["num_dense"] = config.get("first_k_dense_replace") or 0
            more["shared_ffn"] = more["moe_ffn"] * field("n_shared_experts")
            if not 0 <= more["num_dense"] < field("num_hidden_layers"):
                raise WeightMappingError(
                    f"config.json has first_k_dense_replace={more['num_dense']}; it must leave experts in one of the "
                    f"num_hidden_layers={field('num_hidden_layers')} at least"
                )
        return cls(
            model_type=model_type,
            num_layers=field("num_hidden_layers"),
            hidden=field("hidden_size"),
            ffn=field("intermediate_size", more.get("moe_ffn")),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab=field("vocab_size"),
            tied=bool(config.get("tie_word_embeddings", False)),
            **more,
        )


def _linear_attention(config: dict[str, Any]) -> dict[str, Any]:
    """Return the layers with linear attention, and the rows of a shared expert. Raise WeightMappingError if layers or
    heads are not supported.
    """
    types = config["layer_types"]
    layers = tuple(i for i, kind in enumerate(types) if kind == "linear_attention")
    if len(layers) in (0, len(types)):
        raise WeightMappingError(
            "config.json has only one kind of layer_types; linear_attention and full_attention are supported together,"
            " so name another model"
        )
    k_heads, v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if v_heads % k_heads:
        raise WeightMappingError(
            f"config.json has linear_num_key_heads={k_heads}; it must divide linear_num_value_heads={v_heads}"
        )
    shared_ffn = config["shared_expert_intermediate_size"] if config["model_type"] in HYBRID_MOE else 0
    return {"linear_layers": layers, "shared_ffn": shared_ffn}


def _check_every_layer_has_experts(config: dict[str, Any]) -> None:
    for name, value in (("decoder_sparse_step", 1), ("mlp_only_layers", []), ("moe_layer_freq", 1)):
        found = config.get(name)
        if found and found != value:
            raise WeightMappingError(
                f"config.json has {name}={found!r}; only {value!r} is supported, so use another model"
            )


class Rows(NamedTuple):
    """A run of rows of a Hugging Face tensor."""

    name: str
    start: int
    num_rows: int


@dataclass(frozen=True)
class Shard:
    """The input of an op: the tensor `local` of one tensor-parallel rank, made from the Hugging Face tensors
    `names`.
    """

    names: tuple[str, ...]
    local: str
    shape: ModelShape
    tp_size: int = 1
    tp_rank: int = 0

    def tensor(self, shape: Index, pieces: Iterable[tuple[Box, Index]]) -> LocalTensor:
        """Return a local tensor of this shape with each box at its offset."""
        return LocalTensor(shape, tuple(Piece(box, self.local, offset) for box, offset in pieces))

    def stack(self, runs: Iterable[Rows], trailing: tuple[str, ...]) -> LocalTensor:
        """Return a local tensor of runs of rows, one below the other. `trailing`: the dims after the rows."""
        rest, pieces, row = self.shape.dims(trailing), [], 0
        zeros = (0,) * len(rest)
        for name, start, num_rows in runs:
            pieces.append((Box(name, (start, *zeros), (start + num_rows, *rest)), (row, *zeros)))
            row += num_rows
        return self.tensor((row, *rest), pieces)


class Op(Protocol):
    """Maps the Hugging Face tensors of a row to one tensor of Megatron and one of the engine."""

    def hf_shapes(self, shape: ModelShape) -> tuple[Index, ...]:
        """Return the shape of each Hugging Face tensor of the row, in the row's order."""
        ...

    def megatron(self, shard: Shard) -> LocalTensor:
        """Return the tensor of one tensor-parallel rank of Megatron."""
        ...

    def engine(self, shard: Shard) -> LocalTensor:
        """Return the tensor of one tensor-parallel rank of SGLang."""
        ...


@dataclass(frozen=True)
class Row:
    """One logical tensor of a family. In names {i} is the layer, {e} the expert; Megatron counts both from a rank's
    first.

    If a dim of the row is 0 in a model's shape, the model does not have the tensor.
    """

    hf: tuple[str, ...]
    megatron: str
    op: Op
    where: Where = "layer"
    megatron_te: str | None = None  # Megatron's name if Transformer Engine fuses the norm into the linear layer
    # SGLang's name; None: the (first) Hugging Face name. Rows with the same name are stacked.
    engine: str | None = None
    # True for the weight of a linear layer of attention, MLP or an expert; FP8 quantises these.
    is_linear: bool = False
    span: Span | None = None  # layers that have the row; None: all
    saved_as: tuple[
        str, ...
    ] = ()  # suffixes of the keys of its pieces, if Megatron's checkpoints store them separately

    @property
    def kind(self) -> Kind:
        return self.where if self.where in ("layer", "expert") else "model"

    def is_in(self, shape: ModelShape) -> bool:
        """Return True if a model of this shape has the tensor."""
        return all(all(size) for size in self.op.hf_shapes(shape))


@dataclass(frozen=True)
class Family:
    """A family's table. With tied embeddings `output` uses `embedding`'s tensor, and the checkpoint stores it only
    once.

    `engine_ties`: SGLang then has only that parameter, too. Otherwise it has a separate output layer. `stacks_experts`:
    written folders have two tensors for all experts of a layer. Such folders are read for any family.
    """

    rows: tuple[Row, ...]
    embedding: Row
    output: Row
    qkv_bias: bool = False
    qk_norm: bool = False
    engine_ties: bool = True
    stacks_experts: bool = False
    has_heads: bool = True  # False for the table of an adapter, which has neither embedding nor output layer

    def heads(self, shape: ModelShape) -> tuple[Row, ...]:
        """Return the rows of the embedding and the output layer that a checkpoint stores."""
        if not self.has_heads:
            return ()
        return (self.embedding,) if shape.tied else (self.embedding, self.output)

    def rows_of(self, kind: Kind, shape: ModelShape, span: Span | None = None) -> list[Row]:
        """Return the model's rows of a kind; with `span`, only rows of these layers."""
        return [
            row
            for row in self.rows
            if row.kind == kind and (span is None or row.span in (span, None)) and row.is_in(shape)
        ]

    def linear_rows(self, shape: ModelShape) -> list[Row]:
        """Return the rows of the model's tensors that SGLang quantises to FP8.

        Embedding, output layer, norms, routers and biases are never among them. The MLP of the first layers and shared
        experts are not if a node's ranks could not split their rows into whole blocks. SGLang splits them over all
        ranks of an engine, and experts may be spread instead. GLM-4.5-Air's first MLP has 85.5 blocks.
        """
        widths: dict[Span | None, int] = {"dense": shape.ffn, "moe": shape.shared_ffn}
        return [
            row
            for row in self.rows
            if row.is_linear
            and row.is_in(shape)
            and (row.kind == "expert" or widths.get(row.span, 0) % (BLOCK * MOST_ENGINE_RANKS) == 0)
        ]

    def linear_tensors(self, shape: ModelShape) -> frozenset[str]:
        """Return the Hugging Face names of `linear_rows`, with {i} and {e}."""
        return frozenset(name for row in self.linear_rows(shape) for name in row.hf)

    def plain_modules(self, shape: ModelShape) -> list[str]:
        """Return the names of the linear layers that are no `linear_rows`, layer by layer, for SGLang."""
        quantised = self.linear_tensors(shape)
        return [
            name.format(i=i).removesuffix(".weight")
            for row in self.rows
            if row.is_linear and row.span is not None and row.kind == "layer"
            for i in shape.layers_with(row.span)
            for name in row.hf
            if name not in quantised
        ]

    def hf_tensors(self, shape: ModelShape) -> dict[str, Index]:
        """Return name and shape of every tensor of the checkpoint."""
        tensors: dict[str, Index] = {}
        for row in (
            *self.heads(shape),
            *self.rows_of("model", shape),
            *self.rows_of("layer", shape),
            *self.rows_of("expert", shape),
        ):
            shapes = row.op.hf_shapes(shape)
            for i in shape.layers_with(row.span) if row.kind != "model" else ONCE:
                for e in range(shape.num_experts) if row.kind == "expert" else ONCE:
                    tensors |= {n.format(i=i, e=e): s for n, s in zip(row.hf, shapes, strict=True)}
        return tensors


def padded_vocab(vocab: int, tp_size: int) -> int:
    """Return the vocabulary rounded up to a multiple of the tensor-parallel size."""
    return round_up(vocab, tp_size)


def num_blocks(shape: Index) -> Index:
    """Return the number of FP8 blocks along each dim; the last block may be smaller."""
    return tuple(-(-size // BLOCK) for size in shape)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of config.json. Raise WeightMappingError if it is missing or not JSON."""
    path = Path(folder) / "config.json"
    try:
        config = read_json(path)
    except FileNotFoundError:
        raise WeightMappingError(f"{path} does not exist; give the folder of a Hugging Face checkpoint") from None
    except OSError as error:
        raise WeightMappingError(f"{path} cannot be read ({error.strerror}); restore the file") from None
    except ValueError as error:
        raise WeightMappingError(f"{path} is not JSON ({error}); restore the file") from None
    if not isinstance(config, dict):
        raise WeightMappingError(f"{path} holds a JSON {type(config).__name__}, not an object; restore the file")
    return config
