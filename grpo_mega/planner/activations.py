"""A rank's activations: what a layer keeps for its backward pass, how many layers wait, and what the work needs besides.

There are two sets of formulas: for Megatron's local layers with megatron/attention.py's parts, and for Transformer Engine's
(te_layers.py, where the inputs' names are explained). Tests compare both with what autograd saves, except for MoE models and
MXFP8 ("unproven"). Elements are counted for one micro-batch of `tokens` tokens; with sequence parallelism what lies between the
layers is cut into tp parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_mega.planner import te_layers
from grpo_mega.planner.figures import Figure, Number, Trust, formula, product
from grpo_mega.planner.setup import Setup

PADDING = 1.25  # of segments that attention pads to a common length (packed.MAX_PADDING), at most
TILE_TOKENS, TILE_COLUMNS = 4096, 8192  # of algorithm/logprobs.py on a GPU


@dataclass(frozen=True)
class Activations:
    """Bytes of activations of one stage."""

    saved: Figure  # waiting for their backward pass
    recomputed: Figure  # of the layer whose backward pass is under way
    work: Figure  # of that layer, what autograd does not keep
    logprobs: Figure  # tiles of logits and the hidden states they are made of; on the last stage
    forward_only: Figure  # of a pass without gradients
    layer: list[Figure]  # what one layer keeps, part by part

    @property
    def kept(self) -> list[Figure]:
        """Return what autograd keeps, at most."""
        return [self.saved, self.recomputed]

    @property
    def training(self) -> list[Figure]:
        return [*self.kept, self.work, self.logprobs]


def activations(setup: Setup, pp_rank: int, padding: float = PADDING) -> Activations:
    """Return what a rank of the stage needs; `padding` is the share by which attention lengthens segments."""
    shape, tp = setup.shape, setup.layout.tp
    h, b, s, tokens = shape.hidden, setup.itemsize, setup.sequence_parts, setup.micro_batch_tokens
    f, q = (shape.moe_ffn or shape.ffn) // tp, shape.q // tp
    is_proven = not shape.num_experts and (not setup.uses_te or te_layers.is_measured(setup.config.precision))
    parts, whole, selective = _layer(setup, pp_rank, padding)
    recompute = setup.config.model.recompute
    kept = {"none": whole, "selective": selective, "full": _fully_recomputed_layer(h, s)}[recompute]
    final = 0.0
    if pp_rank == setup.layout.pp - 1:
        final = 2.0 if setup.uses_te else 8 / b  # the final norm's; its output is among the log-probs' memory
    wide = max(experts_share(setup), 1)  # the MLP's tokens, to those of the micro-batch
    trust: Trust = "estimate" if is_proven else "unproven"
    return Activations(
        saved=_saved(tokens, b, layers_in_flight(setup, pp_rank), kept.value, final, h, s).trusted(trust),
        recomputed=_recomputed(tokens, b, whole.value, 0 if recompute == "full" else kept.value).trusted(trust),
        work=_work(tokens, b, f, wide, q, h).trusted(trust),
        logprobs=_logprobs(setup, pp_rank),
        forward_only=_forward_work(tokens, b, f, wide, q, h),
        layer=[part.trusted(trust) for part in ([*parts, whole] if kept is whole else [*parts, whole, kept])],
    )


def experts_share(setup: Setup) -> float:
    """Return the tokens on the busiest rank's experts, to those of the micro-batch; 0 for a dense model."""
    spread = setup.assumed.expert_imbalance if setup.layout.ep > 1 else 1.0
    return setup.experts_per_token * spread if setup.shape.num_experts else 0


def _layer(setup: Setup, pp_rank: int, padding: float) -> tuple[list[Figure], Figure, Figure]:
    """Return the parts of what one layer keeps, and all it keeps without and with selective recompute."""
    shape, layout = setup.shape, setup.layout
    is_moe = bool(shape.num_experts)
    h, b, s, d = shape.hidden, setup.itemsize, setup.sequence_parts, shape.head_dim
    q, kv, f = shape.q // layout.tp, max(shape.kv // layout.tp, d), (shape.moe_ffn or shape.ffn) // layout.tp
    has_qk, r, k = int(setup.family.qk_norm), experts_share(setup), setup.experts_per_token
    if not setup.uses_te:
        norms, qk = _norms(h, b, s), _qk_norms(has_qk, b, q, kv)
        base = norms.value, qk.value
        whole = _moe_layer(*base, q, kv, padding, d, r, h, f, k, s) if is_moe else _dense_layer(*base, q, kv, padding, d, f)
        return [norms, qk], whole, _recomputed_layer(*base, q, kv, d)
    x, o = te_layers.kept_bytes(setup.config.precision, b, _share_in_fp8(setup, pp_rank))
    norm, qk = te_layers.norm(h, x, b, s), te_layers.qk_norms(has_qk, d, b, q, kv)
    attention = te_layers.attention(norm.value, qk.value, o, b, q, kv, shape.num_heads // layout.tp)
    again = te_layers.recomputed_attention(norm.value, qk.value, o, b, q, kv)
    parts = [norm, qk, attention, again] if setup.config.model.recompute == "selective" else [norm, qk, attention]
    selective = te_layers.recomputed_layer(again.value, 2 if is_moe else 1, h, s)
    if is_moe:
        return parts, te_layers.moe_layer(attention.value, h, s, r, f, k), selective
    return parts, te_layers.dense_layer(attention.value, norm.value, x, b, f), selective


def _share_in_fp8(setup: Setup, pp_rank: int) -> float:
    """Return the share of a stage's layers that compute in FP8, where any do."""
    precision, num_layers = setup.config.precision, setup.shape.num_layers
    in_fp8 = range(precision.first_layers_bf16, num_layers - precision.last_layers_bf16)
    layers = [i for chunk in setup.chunks(pp_rank) for i in chunk]
    return sum(i in in_fp8 for i in layers) / len(layers)


def layers_in_flight(setup: Setup, pp_rank: int) -> int:
    """Return the layers, times micro-batches, whose activations a stage holds at most (1F1B, interleaved or not)."""
    layout = setup.layout
    sizes = [len(chunk) for chunk in setup.chunks(pp_rank)]
    if layout.vpp == 1:
        return sizes[0] * (layout.pp - pp_rank)
    # Warm-up runs (pp - p - 1) * 2 passes and pp for each further chunk, in rounds of pp micro-batches; one more is under way.
    passes = (layout.pp - pp_rank - 1) * 2 + (layout.vpp - 1) * layout.pp + 1
    num_layers = chunk = 0
    while passes > 0:
        num_layers += sizes[chunk % layout.vpp] * min(passes, layout.pp)
        passes, chunk = passes - layout.pp, chunk + 1
    return num_layers


def _logprobs(setup: Setup, pp_rank: int) -> Figure:
    if pp_rank != setup.layout.pp - 1:
        return product("log-prob tiles", "B")
    tokens, columns = setup.micro_batch_tokens, -(-setup.shape.vocab // setup.layout.tp)
    tiles = 2 if setup.config.algorithm.calculate_entropy else 1
    tile_tokens, tile_columns = min(TILE_TOKENS, tokens), min(TILE_COLUMNS, columns)
    return _logprob_tiles(tiles, tile_tokens, tile_columns, tokens, setup.shape.hidden, setup.itemsize)


# What Megatron's local layers keep, in elements per token. Norms are torch's own on a CPU: input and normalised input in fp32,
# and the output.


@formula("norms keep, per token")
def _norms(h: int, b: int, s: int) -> float:
    return 2 * h * (8 / b + 1) / s


@formula("norms of queries and keys keep, per token")
def _qk_norms(qk_norms: int, b: int, q: int, kv: int) -> float:
    return qk_norms * 8 / b * (q + kv)


@formula("a layer keeps without recompute, per token")
def _dense_layer(norms: Number, qk: Number, q: int, kv: int, padding: float, d: int, f: int) -> float:
    return norms + qk + q + 2 * padding * (q + kv) + 4 * d + 5 * f


@formula("a layer keeps without recompute, per token")
def _moe_layer(
    norms: Number, qk: Number, q: int, kv: int, padding: float, d: int, r: float, h: int, f: int, k: int, s: int
) -> float:
    return norms + qk + q + 2 * padding * (q + kv) + 4 * d + r * (2 * h + 5 * f) + k * h / s


@formula("a layer keeps with selective recompute, per token")
def _recomputed_layer(norms: Number, qk: Number, q: int, kv: int, d: int) -> float:
    return norms + qk + 3 * q + 3 * kv + 4 * d


@formula("a layer keeps with full recompute, per token")
def _fully_recomputed_layer(h: int, s: int) -> float:
    return h / s


@formula("activations saved", "B")
def _saved(tokens: int, b: int, layers: int, layer: Number, final: float, h: int, s: int) -> float:
    return tokens * b * (layers * layer + final * h / s)


@formula("activations recomputed", "B")
def _recomputed(tokens: int, b: int, whole: Number, kept: Number) -> float:
    return tokens * b * (whole - kept)


@formula("a layer at work", "B")
def _work(tokens: int, b: int, f: int, wide: float, q: int, h: int) -> float:
    # Gradients of the widest tensors, and the gathered sequence.
    return tokens * b * (2 * f * wide + 2 * q + 3 * h)


@formula("a layer at work", "B")
def _forward_work(tokens: int, b: int, f: int, wide: float, q: int, h: int) -> float:
    return tokens * b * (3 * f * wide + 3 * q + 4 * h)


@formula("log-prob tiles", "B")
def _logprob_tiles(tiles: int, tile_tokens: int, tile_columns: int, tokens: int, h: int, b: int) -> int:
    # Float32 tiles and the tile's gradient in bf16; hidden states whole and chosen, and their gradient in float32.
    return tiles * tile_tokens * tile_columns * 4 + tile_tokens * tile_columns * 2 + tokens * h * (3 * b + 4)
