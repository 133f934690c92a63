"""A model's shape according to its Hugging Face config, and the rows of a family's table.

`ModelShape.from_hf_config` reads the sizes from a config.json, resolved by hf_config.py. `Row` maps the Hugging Face
names of a logical tensor to its names in Megatron and in the engine, SGLang. Its op says how each of them splits the
tensor for tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from grpo_mega.errors import WeightMappingError
from grpo_mega.paths import read_json
from grpo_mega.weights.boxes import ONCE, Box, Index, Kind, LocalTensor, Piece
from grpo_mega.weights.fields import OF_FAMILIES, Field, parse_fields

# Pipeline position: with the embedding, in every layer, for every expert of every layer, or with the output layer.
Where = Literal["first", "layer", "expert", "last"]
# Layers with an MLP, or with experts; in a hybrid model layers with linear attention, or with full attention.
Span = Literal["dense", "moe", "linear", "full"]
# Tensors whose names end like this are float32 for any dtype of the model.
FLOAT32 = ("e_score_correction_bias", ".A_log", ".dt_bias")
BLOCK = 128  # rows and columns of a linear layer's block with one FP8 scale
MOST_ENGINE_RANKS = 8  # an engine does not span nodes


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
        from grpo_mega.weights.architecture import read_shape  # it needs the families, and their tables this module

        return read_shape(config)


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
    """A family's table and facts. With tied embeddings `output` uses `embedding`'s tensor, stored once.

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
    fields: str = ""  # transformers declares them for this family only: name:type=default
    aliases: Mapping[str, str] = field(default_factory=dict, hash=False)  # an alias goes before its field
    # The fields with the number of experts, the rows of an expert, and the rows of the shared expert. Every config.json
    # of the family has them, although transformers has a default for them.
    moe_fields: tuple[str, ...] = ()
    required: Mapping[str, Any] = field(default_factory=dict, hash=False)  # values without which Megatron would differ
    rope_theta: float = 1e4  # default
    rotary_share: float | None = None  # default of the rotated part of a head; None: all
    heads_divide_hidden: bool = False  # True if transformers refuses another hidden_size
    finish: Callable[[dict[str, Any]], None] | None = None  # sets and checks fields that only this family has
    multimodal: str | None = None  # model type of a multimodal model with this language model
    attention: Literal["usual", "latent", "hybrid"] = "usual"
    has_router_bias: bool = False  # routers use sigmoids and a bias per expert
    rotary: str = "llama.modeling_llama:LlamaRotaryEmbedding"  # in transformers.models
    ignores_mscale: bool = False  # transformers 5.12 leaves mscale_all_dim out of attention's scale
    served_by: str | None = None  # class in sglang.srt.models; None: only the embedded engine serves it
    served_fields: Mapping[str, Any] = field(default_factory=dict, hash=False)  # transformers drops them from configs

    @property
    def declared(self) -> Mapping[str, Field]:
        """Return all fields of config.json that transformers declares."""
        return parse_fields(OF_FAMILIES + self.fields)

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
