"""The state of a rank, exact to the byte, and the floating-point operations of a step, from a model's shape.

The state is parameters, gradients and optimizer state of a rank, and elements of an engine, from the shape tables.
Megatron lays out a chunk's parameters in buffers, in reverse order. Each parameter starts at a multiple of 64 elements,
and each bucket ends at a multiple of lcm(128, replicas); replicas are the data- and context-parallel ranks. Weights and
fp32 gradients are whole buffers with padding. The optimizer holds this rank's share of each bucket without padding.
Experts have separate buffers unless their replicas are the replicas of other weights (etp=tp, ep=1), and so have
weights in FP8, and weights that stay fp32 in a bf16 model. The latter are their own masters.

Floating-point operations are counted by formulas, for the model FLOPs utilisation (MFU). A matrix product of [m, k] and
[k, n] counts 2 m k n; nothing else counts. In a forward pass over segments of n tokens:

  linear     2 x tokens x weights that multiply a token, in each layer: hidden x (q + 2 kv) + q x hidden for attention
             (or the matrices to and from its latents), and 3 x hidden x ffn for a gated MLP, or hidden x experts for
             the router and 3 x hidden x moe_ffn for each chosen expert, and the same for shared ones (+ their gate)
  attention  2 x (q + v) for each pair of a query and a key that it sees, n (n + 1) / 2 of them in a segment, in each
             layer with full attention; in a layer with a sliding window of w < n tokens, w (w + 1) / 2 + (n - w) w;
             linear attention counts as linear, with 4 products of a head's state per token
  output     2 x hidden x vocab for each token that needs a log-prob

A backward pass counts twice the forward. Recomputation (activations, logits) and lookups do not count.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from grpo_mega.checkpoint_io.slices import item_bytes
from grpo_mega.config import Config
from grpo_mega.weights.architecture import layer_weights
from grpo_mega.weights.boxes import Block
from grpo_mega.weights.layout import EngineLayout, MegatronLayout, engine_blocks, hf_blocks, megatron_blocks
from grpo_mega.weights.spec import FLOAT32, Family, ModelShape, num_blocks, round_up

START_MULTIPLE, END_MULTIPLE = 64, 128  # elements
SMALLEST_BUCKET, BUCKET_PER_RANK = 40_000_000, 1_000_000  # elements, if gradients are reduced while others are computed
FP32 = 4

# Modules in the order in which Megatron registers them. The first part that a name contains sets its place.
_ORDER = """
    embedding. input_layernorm
    dt_bias A_log in_proj.layer_norm_weight in_proj.weight in_proj.lora conv1d out_norm out_proj
    linear_proj linear_qkv.layer_norm_weight linear_qkv.weight linear_qkv.bias linear_qkv.lora
    linear_q_proj linear_q_down_proj linear_q_up_proj.layer_norm_weight linear_q_up_proj
    linear_kv_down_proj linear_kv_up_proj.layer_norm_weight linear_kv_up_proj q_layernorm kv_layernorm k_layernorm
    pre_mlp_layernorm mlp.router gate_weight linear_fc1.layer_norm_weight linear_fc1 linear_fc2
    final_layernorm output_layer
    """.split()  # noqa: SIM905  # a list of texts is three times as long
_LINEAR = re.compile(r"\.linear_\w+\.weight\d*$")  # weights of linear layers, which FP8 quantises


@dataclass(frozen=True)
class Storage:
    """Bytes per element of a policy."""

    itemsize: int  # bytes per weight
    is_overlapped: bool  # layout.overlap_grad_reduce, which splits buffers into buckets
    master_bytes: int  # bytes of the fp32 master per element; 0 if the weights are the masters
    moment_bytes: int  # bytes of both moments per element
    host_bytes: int  # bytes of master, moments and gradient per element that stay on the host
    fp8_layers: range | None  # layers whose linear weights are stored in FP8

    @classmethod
    def of(cls, config: Config, shape: ModelShape) -> Storage:
        optimizer, precision = config.optimizer, config.precision
        fp8_layers = range(precision.first_layers_bf16, shape.num_layers - precision.last_layers_bf16)
        return cls(
            itemsize=item_bytes(config.model.resolved_dtype),
            is_overlapped=config.layout.overlap_grad_reduce,
            master_bytes=FP32 if config.model.resolved_dtype == "bfloat16" and not optimizer.cpu_offload else 0,
            moment_bytes=0 if optimizer.cpu_offload else 2 * item_bytes(optimizer.moments_dtype),
            host_bytes=4 * FP32 if optimizer.cpu_offload else 0,
            fp8_layers=fp8_layers if precision.fp8_parameters else None,
        )

    @property
    def optimizer_bytes(self) -> int:
        """Return the bytes of master and moments per element."""
        return self.master_bytes + self.moment_bytes


@dataclass(frozen=True)
class Parameter:
    name: str  # Megatron's name, with its chunk
    size: int  # elements on this rank
    is_alone: bool  # has a separate bucket, because two stages share the embedding
    is_spread: bool  # weight of an expert whose replicas are other ranks than the replicas of other weights
    layer: int | None  # layer index in the model

    @property
    def is_fp32(self) -> bool:
        """Return True if the weight is fp32 for any dtype of the model."""
        return self.name.endswith(FLOAT32)


@dataclass(frozen=True)
class Buffer:
    """A chunk's parameters of one kind in one contiguous buffer."""

    size: int  # elements, padding included
    shares: tuple[int, ...]  # elements in each replica's optimizer
    largest_bucket: int  # elements, padding included
    is_fp8: bool = False
    is_spread: bool = False
    is_fp32: bool = False


@dataclass(frozen=True)
class State:
    """State of the ranks of one pipeline stage. Only their shares of the optimizer differ."""

    num_parameters: int  # without padding
    elements: int  # with padding, without FP8 elements
    fp8_elements: int  # with padding
    spread_elements: int  # elements and fp8_elements of experts with separate buffers
    optimizer_elements: tuple[int, ...]  # per rank of the stage (MegatronLayout.rank_in_stage)
    gathered: float  # elements on the device while a save gathers a bucket: the whole bucket and this rank's share
    storage: Storage
    fp32_elements: int  # elements of `elements` or `frozen` in fp32, in a bf16 model
    fp32_optimizer_elements: tuple[int, ...]  # elements of `optimizer_elements` in fp32, in a bf16 model
    num_fp32: int  # fp32 parameters without padding, in a bf16 model

    frozen: int = 0  # elements of the base, with model.lora; most other numbers are then the adapter's

    @property
    def weights(self) -> int:
        """Return the bytes of the weights."""
        fp32 = self.fp32_elements * (FP32 - self.storage.itemsize)
        return (self.elements + self.frozen) * self.storage.itemsize + self.fp8_elements + fp32

    @property
    def gradients(self) -> int:
        """Return the bytes of the fp32 gradients."""
        return (self.elements + self.fp8_elements) * FP32

    def optimizer(self, rank_in_stage: int) -> int:
        """Return the bytes of masters and moments after Adam has created them."""
        everything = self.optimizer_elements[rank_in_stage] * self.storage.optimizer_bytes
        return everything - self.fp32_optimizer_elements[rank_in_stage] * self.storage.master_bytes

    @property
    def largest_share(self) -> int:
        return max(self.optimizer_elements)

    @property
    def largest_optimizer(self) -> int:
        """Return the bytes of masters and moments on the rank with the largest share."""
        return max(map(self.optimizer, range(len(self.optimizer_elements))))


@functools.cache
def stage_state(
    family: Family,
    shape: ModelShape,
    layout: MegatronLayout,
    pp_rank: int,
    storage: Storage,
    **names: bool,
) -> State:
    """Return the state of each rank of a stage. `names`: fused_norms and grouped_experts, as in `megatron_shards`."""
    rank = next(r for r in range(layout.world_size) if layout.place(r) == (0, pp_rank, 0))
    chunks = chunk_parameters(family, shape, layout, rank, **names)
    buffers: list[Buffer] = []
    for i, chunk in enumerate(chunks):
        # Only the first chunk of the first stage has several buckets.
        has_buckets = storage.is_overlapped and i + pp_rank == 0
        bucket_size = max(SMALLEST_BUCKET, BUCKET_PER_RANK * layout.num_replicas) if has_buckets else None
        kinds: dict[tuple[bool, bool, bool], list[Parameter]] = {}
        for parameter in chunk:
            is_fp8 = parameter.layer in (storage.fp8_layers or ()) and bool(_LINEAR.search(parameter.name))
            kinds.setdefault((parameter.is_spread, is_fp8, parameter.is_fp32 and storage.itemsize < FP32), []).append(
                parameter
            )
        for (is_spread, is_fp8, is_fp32), chosen in sorted(kinds.items()):
            dp_size = layout.num_expert_replicas if is_spread else layout.num_replicas
            one = buffer_of(chosen, dp_size, bucket_size)
            buffers.append(replace(one, is_fp8=is_fp8, is_spread=is_spread, is_fp32=is_fp32))
    shares, fp32_shares = ([0] * (layout.tp * layout.num_replicas) for _ in range(2))
    for buffer in buffers:
        for rank_in_stage in range(len(shares)):  # ranks with the same index among their replicas are neighbours
            share = buffer.shares[rank_in_stage * len(buffer.shares) // len(shares)]
            shares[rank_in_stage] += share
            fp32_shares[rank_in_stage] += share * buffer.is_fp32
    return State(
        num_parameters=sum(p.size for chunk in chunks for p in chunk),
        elements=sum(b.size for b in buffers if not b.is_fp8),
        fp8_elements=sum(b.size for b in buffers if b.is_fp8),
        spread_elements=sum(b.size for b in buffers if b.is_spread),
        optimizer_elements=tuple(shares),
        gathered=max((1 + 1 / len(b.shares)) * b.largest_bucket for b in buffers),
        storage=storage,
        fp32_elements=sum(b.size for b in buffers if b.is_fp32),
        fp32_optimizer_elements=tuple(fp32_shares),
        num_fp32=sum(p.size for chunk in chunks for p in chunk if p.is_fp32) * (storage.itemsize < FP32),
    )


def chunk_parameters(
    family: Family, shape: ModelShape, layout: MegatronLayout, rank: int, **names: bool
) -> list[list[Parameter]]:
    """Return a rank's parameters by chunk, in the order of Megatron's modules. `names` are as in `stage_state`."""
    chunks: list[list[tuple[tuple[int, ...], Parameter]]] = [[] for _ in range(layout.vpp)]
    for block in megatron_blocks(family, shape, layout, rank, **names):
        for name, tensor in block.tensors.items():
            if not name.endswith("expert_bias"):
                chunk = int(name.partition(".")[0].removeprefix("chunk"))
                chunks[chunk] += _repeated(block, name, math.prod(tensor.shape), shape, layout)
    return [[parameter for _, parameter in sorted(chunk, key=itemgetter(0))] for chunk in chunks]


def buffer_of(parameters: Sequence[Parameter], dp_size: int, bucket_size: int | None) -> Buffer:
    """Return the layout of one buffer as Megatron computes it (_ParamAndGradBuffer), with each rank's optimizer
    share.
    """
    end_multiple = math.lcm(dp_size, END_MULTIPLE)
    shares = [0] * dp_size
    bucket_start = position = largest_bucket = 0  # in elements
    spans: list[tuple[int, int]] = []

    def close() -> None:
        nonlocal bucket_start, position, largest_bucket
        position = round_up(position, end_multiple)
        largest_bucket = max(largest_bucket, position - bucket_start)
        width = (position - bucket_start) // dp_size
        for first, last in spans:
            for rank in range((first - bucket_start) // width, (last - 1 - bucket_start) // width + 1):
                low = bucket_start + rank * width
                shares[rank] += min(last, low + width) - max(first, low)
        bucket_start = position
        spans.clear()

    for parameter in reversed(parameters):
        position = round_up(position, START_MULTIPLE)
        if parameter.is_alone and spans:
            close()
        spans.append((position, position + parameter.size))
        position += parameter.size
        if parameter.is_alone or (bucket_size is not None and position - bucket_start >= bucket_size):
            close()
    if spans:
        close()
    return Buffer(position, tuple(shares), largest_bucket)


def _repeated(
    block: Block, name: str, size: int, shape: ModelShape, layout: MegatronLayout
) -> Iterator[tuple[tuple[int, ...], Parameter]]:
    """Yield the parameters of a block's tensor, each with its sort key within the chunk."""
    order = next(i for i, part in enumerate(_ORDER) if part in name)
    is_alone = shape.tied and layout.pp > 1 and ("embedding." in name or "output_layer" in name)
    is_spread = block.kind == "expert" and layout.has_own_expert_groups
    if block.kind == "model":
        yield ((0 if "embedding." in name else 2, 0, order), Parameter(name, size, is_alone, False, None))
        return
    experts = _ORDER.index("mlp.router") + 1
    for layer in block.layers:
        i = layer - block.first_layer
        for e in range(len(block.experts)):
            place: tuple[int, ...] = (1, i, order)
            if block.kind == "expert":  # grouped experts are in one module per linear layer
                place = (1, i, experts, e, order) if "local_experts" in name else (1, i, experts, order, e)
            if "shared_experts" in name:
                place = (1, i, experts + 1, order)
            yield place, Parameter(name.format(i=i, e=e), size, is_alone, is_spread, layer)


@dataclass(frozen=True)
class Elements:
    """Numbers of elements that a rank of an engine holds."""

    plain: int
    linear: int  # elements of linear layers; rollout.quantization applies to them
    blocks: int  # number of FP8 blocks in the linear layers

    @property
    def total(self) -> int:
        return self.plain + self.linear


@functools.cache
def elements_of(family: Family, shape: ModelShape, layout: EngineLayout | None) -> Elements:
    """Return the exact number of elements on an engine's rank; without a layout, of all Hugging Face tensors."""
    linear_names = family.linear_tensors(shape)
    plain = linear = num_scales = 0
    for block in engine_blocks(family, shape, layout, 0) if layout else hf_blocks(family, shape):
        places = len(block.layers) * len(block.experts)
        for tensor in block.tensors.values():
            if any(piece.box.tensor in linear_names for piece in tensor.pieces):
                linear += places * math.prod(tensor.shape)
                num_scales += places * sum(math.prod(num_blocks(piece.box.shape)) for piece in tensor.pieces)
            else:
                plain += places * math.prod(tensor.shape)
    return Elements(plain, linear, num_scales)


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one forward pass, by part."""

    linear: float  # float, because counts may be means
    attention: float
    output: float

    @property
    def forward(self) -> float:
        return self.linear + self.attention + self.output

    @property
    def training(self) -> float:
        """Return the operations of forward and backward."""
        return 3 * self.forward


def flops_of_totals(
    shape: ModelShape, num_tokens: float, num_pairs: float, num_outputs: float, *, experts_per_token: int = 0
) -> Flops:
    """Count a pass from totals: tokens, pairs of a query and a key that it sees (the mean over layers), and tokens
    through the output layer.
    """
    return Flops(
        linear=2 * num_tokens * shape.num_layers * layer_weights(shape, experts_per_token),
        attention=2 * (shape.q + shape.v) * num_pairs * shape.num_full_layers,
        output=2 * shape.hidden * shape.vocab * num_outputs,
    )


def unseen_pairs(shape: ModelShape, length: float) -> float:
    """Return the pairs of a segment that sliding windows hide from causal attention, as a mean over the layers."""
    beyond = [max(0, length - window) if window else 0 for window in shape.windows]
    return sum(n * (n + 1) / 2 for n in beyond) / shape.num_layers if any(beyond) else 0
