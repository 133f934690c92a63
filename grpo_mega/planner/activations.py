"""Activations of a rank: per layer, over all layers in flight, and working memory.

There are two sets of formulas: one for Megatron's local layers with the modules of megatron/attention.py, and one for
Transformer Engine's layers (te_layers.py, which explains the names of the inputs). Tests compare both with the tensors that
autograd saves, except for MXFP8 ("unproven"). Elements are counted for one micro-batch of `tokens` tokens. With sequence
parallelism the tensors between the layers are split into tp parts. Tokens on a rank's experts assume balanced routing, times an
assumed imbalance.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_mega.planner import te_layers
from grpo_mega.planner.figures import TracedNumber, Trust, figure, product
from grpo_mega.planner.job import PlannedJob

PADDING = 1.25  # largest factor by which attention pads segments to a common length (packed.MAX_PADDING)
TILE_TOKENS, TILE_COLUMNS = 4096, 8192  # tile size in algorithm/logprobs.py on a GPU


@dataclass(frozen=True)
class Activations:
    """Bytes of activations of one stage."""

    saved: TracedNumber  # kept until their backward pass
    recomputed: TracedNumber  # kept by the layer whose backward pass is running
    work: TracedNumber  # working memory of that layer, which autograd does not keep
    exchanged: TracedNumber  # keys, values and results that its attention exchanges with other context-parallel ranks
    logprobs: TracedNumber  # tiles of logits, and their hidden states; on the last stage only
    forward_only: TracedNumber  # working memory in a pass without gradients
    layer: list[TracedNumber]  # elements that one layer keeps, part by part

    @property
    def kept(self) -> list[TracedNumber]:
        """Return the largest memory that autograd keeps."""
        return [self.saved, self.recomputed]

    @property
    def training(self) -> list[TracedNumber]:
        return [*self.kept, self.work, self.exchanged, self.logprobs]


def activations(setup: PlannedJob, pp_rank: int, padding: float = PADDING) -> Activations:
    """Return the activations of a rank of the stage; `padding` is the factor by which attention lengthens segments."""
    shape, tp = setup.shape, setup.layout.tp
    h, b, s, tokens = shape.hidden, setup.itemsize, setup.sequence_parts, setup.micro_batch_tokens
    f, q = (shape.moe_ffn or shape.ffn) // tp, shape.q // tp
    is_proven = not setup.uses_te or te_layers.is_measured(setup.config.precision)
    trust: Trust = "estimate" if is_proven else "unproven"
    parts, unrecomputed, selective = _layer(setup, pp_rank, padding)
    recompute, layers = setup.config.model.recompute, layers_in_flight(setup, pp_rank)
    if recompute == "full":
        kept_layer = figure("a layer keeps with full recompute, per token", "", lambda: h / s)
    else:
        kept_layer = selective if recompute == "selective" else unrecomputed
    final = 0.0
    if pp_rank == setup.layout.pp - 1:
        final = 2.0 if setup.uses_te else 8 / b  # kept by the final norm; its output is part of the log-probs' memory
    wide = max(experts_share(setup), 1)  # tokens in the MLP relative to tokens in the micro-batch
    # The experts' outputs, and with tensor parallelism an fp32 copy for the reduce-scatter.
    combined = experts_share(setup) * (1 + (4 / b if tp > 1 else 0)) * h
    layer, whole = kept_layer.value, unrecomputed.value
    kept = 0 if recompute == "full" else layer
    shown = [*parts, unrecomputed] if kept_layer is unrecomputed else [*parts, unrecomputed, kept_layer]
    return Activations(
        saved=figure("activations saved", "B", lambda: tokens * b * (layers * layer + final * h / s), trust),
        # When a layer is recomputed, the backward pass has already freed the final norm's tensors.
        recomputed=figure("activations recomputed", "B", lambda: tokens * b * max(0, whole - kept - final * h / s), trust),
        # Gradients of the widest tensors, and the gathered sequence.
        work=figure("a layer at work", "B", lambda: tokens * b * (2 * f * wide + 2 * q + 3 * h + combined), trust),
        exchanged=_exchanged(setup),
        logprobs=_logprobs(setup, pp_rank),
        forward_only=figure("a layer at work", "B", lambda: tokens * b * (3 * f * wide + 3 * q + 4 * h + combined)),
        layer=[part.trusted(trust) for part in shown],
    )


def experts_share(setup: PlannedJob) -> float:
    """Return the tokens on the busiest rank's experts relative to the micro-batch's tokens; 0 for a dense model."""
    spread = setup.assumed.expert_imbalance if setup.layout.ep > 1 else 1.0
    return setup.experts_per_token * spread if setup.shape.num_experts else 0


def _layer(setup: PlannedJob, pp_rank: int, padding: float) -> tuple[list[TracedNumber], TracedNumber, TracedNumber]:
    """Return the parts that one layer keeps, and its total without recompute and with selective recompute."""
    shape, tp = setup.shape, setup.layout.tp
    h, b, s, d = shape.hidden, setup.itemsize, setup.sequence_parts, shape.head_dim
    q, kv, f, fs = shape.q // tp, max(shape.kv // tp, d), (shape.moe_ffn or shape.ffn) // tp, shape.shared_ffn // tp
    r, router, has_qk = experts_share(setup), te_layers.router_elements(setup), int(setup.family.qk_norm or shape.qk_norm > 0)
    if setup.uses_te:
        return te_layers.layer(setup, q, kv, f, r, _share_in_fp8(setup, pp_rank))
    # Context-parallel attention keeps chunks without padding, each with the keys before it.
    padded, keys = (padding, padding) if setup.layout.cp == 1 else (1.0, setup.layout.cp + 0.5)
    if shape.kv_lora:
        return _latent_layer(setup, pp_rank, padded, keys)
    # Elements per token that Megatron's local layers keep. Norms are torch's norms on a CPU: they keep input and normalised
    # input in fp32, and the output.
    both_norms = figure("norms keep, per token", "", lambda: 2 * h * (8 / b + 1) / s)
    qk_norms = figure("norms of queries and keys keep, per token", "", lambda: has_qk * 8 / b * (q + kv))
    norms, qk = both_norms.value, qk_norms.value
    label = "a layer keeps without recompute, per token"
    dense = figure(label, "", lambda: norms + qk + q + 2 * (padded * q + keys * kv) + 4 * d + 5 * f)
    moe = figure(
        label,
        "",
        lambda: norms + qk + q + 2 * (padded * q + keys * kv) + 4 * d + r * (h + 6 * f + 4 / b) + router + 5 * fs,
    )
    selective = figure("a layer keeps with selective recompute, per token", "", lambda: norms + qk + 3 * q + 3 * kv + 4 * d)
    return [both_norms, qk_norms], moe if shape.num_experts else dense, selective


def _latent_layer(
    setup: PlannedJob, pp_rank: int, padded: float, keys: float
) -> tuple[list[TracedNumber], TracedNumber, TracedNumber]:
    """Return the same for local layers with multi-latent attention, averaged over a stage's layers with and without experts.

    With recompute only the recomputed layer counts. The formula assumes the largest one.
    """
    shape, tp, b, s = setup.shape, setup.layout.tp, setup.itemsize, setup.sequence_parts
    h, q, v, latents = shape.hidden, shape.q // tp, shape.v // tp, shape.q_lora + shape.kv_lora
    f, fe, fs, angles = shape.ffn // tp, shape.moe_ffn // tp, shape.shared_ffn // tp, 4 * shape.rope_dim
    r, router = experts_share(setup), te_layers.router_elements(setup)
    moe = setup.num_moe_layers(pp_rank) / setup.num_layers(pp_rank)
    if setup.config.model.recompute != "none" and moe:
        moe = 1.0
    norms = figure("norms of a layer and its latents keep, per token", "", lambda: (2 * h + latents) * (8 / b + 1) / s)
    attention, routed = norms.value, r * (h + 6 * fe + 4 / b) + router
    whole = figure(
        "a layer keeps without recompute, per token",
        "",
        lambda: attention + angles + v + 2 * (padded + keys) * q + moe * (routed + 5 * fs) + (1 - moe) * 5 * f,
    )
    selective = figure("a layer keeps with selective recompute, per token", "", lambda: attention + angles + 2 * (q + v))
    return [norms], whole, selective


def _share_in_fp8(setup: PlannedJob, pp_rank: int) -> float:
    """Return the share of a stage's layers that compute in FP8."""
    layers = [i for chunk in setup.chunks(pp_rank) for i in chunk]
    return sum(i in setup.layers_in_fp8 for i in layers) / len(layers)


def layers_in_flight(setup: PlannedJob, pp_rank: int) -> int:
    """Return the largest number of layers times micro-batches whose activations a stage holds (1F1B, interleaved or not)."""
    layout = setup.layout
    sizes = [len(chunk) for chunk in setup.chunks(pp_rank)]
    if layout.vpp == 1:
        return sizes[0] * (layout.pp - pp_rank)
    # Warm-up runs (pp - p - 1) * 2 passes and pp for each further chunk, in rounds of pp micro-batches; one more is running.
    passes = (layout.pp - pp_rank - 1) * 2 + (layout.vpp - 1) * layout.pp + 1
    num_layers = chunk = 0
    while passes > 0:
        num_layers += sizes[chunk % layout.vpp] * min(passes, layout.pp)
        passes, chunk = passes - layout.pp, chunk + 1
    return num_layers


def _exchanged(setup: PlannedJob) -> TracedNumber:
    """Return the keys, values and partial results that attention exchanges with other context-parallel ranks.

    Local layers hold the keys and values of all ranks. In the backward pass they also hold the gradients, before and after
    reordering. Transformer Engine's p2p keeps each rank's keys and values and their partial output in the forward pass, until
    all have arrived. In the backward pass it has two buffers for keys, values and their gradients, and the gradients of one
    part. a2a keeps tensors of the size of the rank's queries, keys, values and output, and in the backward pass their
    gradients.
    """
    tokens, b, cp = setup.micro_batch_tokens, setup.itemsize, setup.layout.cp
    q, kv = setup.shape.q // setup.layout.tp, setup.keys_and_values
    label = "exchanged keys and values"
    if cp == 1:
        return product(label, "B")
    if setup.uses_te and setup.config.layout.cp_comm_type == "a2a":
        return figure(label, "B", lambda: tokens * b * 2 * (2 * q + kv))
    if setup.uses_te:
        return figure(label, "B", lambda: tokens * b * max(cp * (kv + q), 5 * kv + q))
    return figure(label, "B", lambda: tokens * b * kv * (3 * cp + 0.5))


def _logprobs(setup: PlannedJob, pp_rank: int) -> TracedNumber:
    if pp_rank != setup.layout.pp - 1:
        return product("log-prob tiles", "B")
    tokens, h, b = setup.micro_batch_tokens, setup.shape.hidden, setup.itemsize
    tiles = 2 if setup.config.algorithm.calculate_entropy else 1
    tile_tokens, tile_columns = min(TILE_TOKENS, tokens), min(TILE_COLUMNS, -(-setup.shape.vocab // setup.layout.tp))
    # Float32 tiles and the tile's gradient in bf16; all hidden states, the selected ones, and their gradient in float32.
    return figure(
        "log-prob tiles",
        "B",
        lambda: tiles * tile_tokens * tile_columns * 4 + tile_tokens * tile_columns * 2 + tokens * h * (3 * b + 4),
    )
