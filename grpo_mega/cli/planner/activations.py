"""Activations of a rank: per layer, over all layers in flight, and working memory.

There are three sets of formulas: for Transformer Engine's layers, and for Megatron's local layers with the modules of
megatron/attention.py, without and with multi-latent attention. Tests compare all of them with the tensors that autograd
saves, except for MXFP8, which cannot be measured without a GPU: its formula is a tensorwise layer with the
scales of blocks of 32. Elements of `b` bytes are counted for one micro-batch of `tokens` tokens. With sequence
parallelism the tensors between the layers are split into tp parts. Tokens on a rank's experts assume balanced routing,
times an assumed imbalance.

Names in the formulas: h: hidden size; q, kv, f, fs: a rank's part of queries, keys, MLP rows and the shared expert's
rows; heads: the rank's query heads; d: width of a head; s: tp, or 1 if the sequence is not split; r: tokens on this
rank's experts relative to the micro-batch; x: bytes per element that one of Transformer Engine's linear layers keeps of
its input, scales included; o: bytes per element that the layer after attention keeps in FP8 instead of its input, 0 if
it keeps the input.
"""

from collections.abc import Callable
from dataclasses import dataclass

from grpo_mega.cli.planner.job import Figure, PlannedJob
from grpo_mega.weights.spec import BLOCK

PADDING = 1.25  # largest factor by which attention pads segments to a common length (attention.MAX_PADDING)
TILE_TOKENS, TILE_COLUMNS = 4096, 8192  # tile size in algorithm/logprobs.py on a GPU
CPU_TILE = (1024, 4096)  # tile size there on a CPU
KEPT_BYTES = {"delayed": 1.0, "tensorwise": 1.0, "blockwise": 1 + 4 / BLOCK, "mxfp8": 1 + 1 / 32}

# Elements per token that one layer keeps without recompute, and with selective recompute.
Layer = tuple[float, float]


@dataclass(frozen=True)
class Activations:
    """Bytes of activations of one stage."""

    saved: Figure  # kept until their backward pass
    recomputed: Figure  # kept by the layer whose backward pass is running
    work: Figure  # working memory of that layer, which autograd does not keep
    exchanged: Figure  # keys, values and results that its attention exchanges with other context-parallel ranks
    logprobs: Figure  # tiles of logits, and their hidden states; on the last stage only
    forward_only: Figure  # working memory in a pass without gradients

    @property
    def kept(self) -> list[Figure]:
        """Return the largest memory that autograd keeps."""
        return [self.saved, self.recomputed]


def activations(setup: PlannedJob, pp_rank: int, padding: float = PADDING) -> Activations:
    """Return the activations of a rank of the stage; `padding` is the factor by which attention lengthens segments."""
    h, b, s, tokens = setup.shape.hidden, setup.itemsize, setup.sequence_parts, setup.micro_batch_tokens
    q, _, f, _, share, _ = _sizes(setup)
    recompute = setup.config.model.recompute
    # Layers in flight that are recomputed whole, and the other layers.
    again = layers_in_flight(setup, pp_rank, setup.num_recomputed)
    others = layers_in_flight(setup, pp_rank) - again
    if setup.uses_te:
        one = _te_latent_layer(setup, pp_rank) if setup.shape.kv_lora else _te_layer(setup, pp_rank)
    else:
        one = _latent_layer(setup, pp_rank, padding) if setup.shape.kv_lora else _local_layer(setup, padding)
    if setup.shape.linear_layers:
        one = _hybrid_layer(setup, pp_rank, padding, one)
    whole, selective = one
    layer = selective if recompute == "selective" else whole
    # When the backward pass reaches the recomputed layers, it has freed the kept layers, which come later in the chunk.
    kept = 0 if recompute == "full" and not others else layer
    # The final norm's tensors; its output is part of the log-probs' memory.
    final = 0.0 if pp_rank < setup.layout.pp - 1 else 2.0 if setup.uses_te else 8 / b
    wide = max(share, 1)  # tokens in the MLP relative to tokens in the micro-batch
    # The experts' outputs, and where ranks split an expert an fp32 copy for the reduce-scatter.
    combined = share * (1 + (4 / b if setup.layout.etp > 1 else 0)) * h
    at_work = "a layer at work"
    return Activations(
        saved=Figure("activations saved", tokens * b * (others * layer + again * (h / s) + final * h / s)),
        # When a layer is recomputed, the backward pass has already freed the final norm's tensors.
        recomputed=Figure("activations recomputed", tokens * b * max(0, whole - kept - final * h / s)),
        # Gradients of the widest tensors, and the gathered sequence.
        work=Figure(at_work, tokens * b * (2 * f * wide + 2 * q + 3 * h + combined)),
        exchanged=_exchanged(setup),
        logprobs=_logprobs(setup, pp_rank),
        forward_only=Figure(at_work, tokens * b * (3 * f * wide + 3 * q + 4 * h + combined)),
    )


def _sizes(setup: PlannedJob) -> tuple[int, int, int, int, float, float]:
    """Return q, kv, f, fs, r and the elements that routing keeps per token.

    They are indices and weights of a token's experts, and a mask over all experts.
    """
    shape, tp, etp, chosen = setup.shape, setup.layout.tp, setup.layout.etp, setup.experts_per_token
    kv, f = max(shape.kv // tp, shape.head_dim), (shape.moe_ffn // etp if shape.num_experts else shape.ffn // tp)
    imbalance = setup.assumed.expert_imbalance if setup.layout.ep > 1 else 1.0
    r = chosen * imbalance * etp / tp if shape.num_experts else 0
    router = (20 * chosen + 5 * shape.num_experts) / (setup.itemsize * setup.sequence_parts)
    return shape.q // tp, kv, f, shape.shared_ffn // tp, r, router


def _moe_share(setup: PlannedJob, pp_rank: int) -> float:
    """Return the share of a stage's layers that have experts. With recompute one such layer stands for all."""
    share = setup.num_moe_layers(pp_rank) / setup.num_layers(pp_rank)
    return 1.0 if setup.config.model.recompute != "none" and share else share


def _te_layer(setup: PlannedJob, pp_rank: int) -> Layer:
    """Return what one of Transformer Engine's layers keeps: each term is a tensor that its Python kept on fake
    tensors.
    """
    h, b, s, d = setup.shape.hidden, setup.itemsize, setup.sequence_parts, setup.shape.head_dim
    q, kv, *_ = _sizes(setup)
    heads = setup.shape.num_heads // setup.layout.tp
    x, o = _fp8_bytes(setup, pp_rank)
    # The norm's input, its output as the linear layer keeps it, and statistics in fp32.
    norm = (1 + x / b) * h / s + 4 / (b * s)
    has_qk = int(setup.family.qk_norm or setup.shape.qk_norm > 0)
    # The inputs of both norms, and statistics per head.
    qk_norms = has_qk * (1 + 4 / (d * b)) * (q + kv)
    # The last term is the softmax statistics in fp32.
    attention = norm + qk_norms + (2 + o / b) * q + 2 * kv + 4 * heads / b
    # Rotated queries and keys; the values are a view that keeps the whole qkv product.
    recomputed = norm + qk_norms + (2 + (o or b) / b) * q + 3 * kv
    return _with_te_mlp(setup, pp_rank, attention, recomputed)


def _te_latent_layer(setup: PlannedJob, pp_rank: int) -> Layer:
    """Return the same with multi-latent attention."""
    shape, tp, b, s = setup.shape, setup.layout.tp, setup.itemsize, setup.sequence_parts
    h, q, v, heads = shape.hidden, shape.q // tp, shape.v // tp, shape.num_heads // tp
    q_lora, kv_lora, rope = shape.q_lora, shape.kv_lora, shape.rope_dim
    x, o = _fp8_bytes(setup, pp_rank)
    # In FP8 the projections of queries and of keys and values each keep a copy of the norm's output.
    copies = 2 if setup.config.precision.fp8 else 1
    norm = (1 + copies * x / b) * h / s + 4 / (b * s)
    # The norms' inputs, outputs and statistics.
    latents = ((1 + x / b) * (q_lora + kv_lora) + (2 if q_lora else 1) * 4 / b) / s
    # Rotary angles of queries and keys, queries, keys, values, the output, and softmax statistics in fp32.
    attention = norm + latents + 4 * rope + 2 * q + (2 + o / b) * v + 4 * heads / b
    recomputed = norm + latents + 4 * rope + 2 * q + (1 + (o or b) / b) * v
    return _with_te_mlp(setup, pp_rank, attention, recomputed)


def _with_te_mlp(setup: PlannedJob, pp_rank: int, attention: float, recomputed: float) -> Layer:
    """Return what a layer of Transformer Engine keeps, with an MLP and the norm before it.

    `recomputed` is what attention keeps if its core is recomputed. Layers with and without experts are averaged over a
    stage. With recompute only the recomputed layer counts. The formula assumes one with experts.
    """
    shape, b, s, h, chosen = setup.shape, setup.itemsize, setup.sequence_parts, setup.shape.hidden, setup.recomputed
    _, _, fe, fs, r, router = _sizes(setup)
    f, (x, o) = shape.ffn // setup.layout.tp, _fp8_bytes(setup, pp_rank)
    moe = _moe_share(setup, pp_rank)
    # The MLP keeps both halves of its first product, and their gated product in the form that the second linear layer
    # keeps. Router, experts and shared experts share the output of the norm before them.
    dense = (1 + x / b) * h / s + 4 / (b * s) + (2 + x / b) * f
    inputs = 2 * h / s + 4 / (b * s)
    shared = (2 + x / b) * fs + (o / b * h / s if fs else 0.0)
    routed = router + r * (x / b * h + (2 + x / b) * fe + 4 / b)
    mlp = (1 - moe) * dense + moe * (inputs + routed + shared)
    # What stays with selective recomputation: the input of a recomputed MLP, and everything that is not recomputed.
    dense_stays = h / s if "mlp" in chosen else dense
    experts_stay = inputs
    if "moe" not in chosen:
        experts_stay += routed + shared - int("layernorm" in chosen) * h / s - int("moe_act" in chosen) * r * x / b * fe
    first = recomputed if "core_attn" in chosen else attention
    return attention + mlp, first + (1 - moe) * dense_stays + moe * experts_stay


def _fp8_bytes(setup: PlannedJob, pp_rank: int) -> tuple[float, float]:
    """Return x and o, x as a mean over the stage's layers."""
    precision, b = setup.config.precision, setup.itemsize
    layers = [i for chunk in setup.chunks(pp_rank) for i in chunk]
    in_fp8 = sum(i in setup.layers_in_fp8 for i in layers) / len(layers)
    x = KEPT_BYTES[precision.fp8_recipe] * in_fp8 + b * (1 - in_fp8)
    return x, 1.0 if precision.fp8 and precision.fp8_recipe == "delayed" else 0.0


def _local_layer(setup: PlannedJob, padding: float) -> Layer:
    """Return what one of Megatron's local layers keeps.

    Norms are torch's norms on a CPU: they keep input and normalised input in fp32, and the output.
    """
    h, b, s, d = setup.shape.hidden, setup.itemsize, setup.sequence_parts, setup.shape.head_dim
    q, kv, f, fs, r, router = _sizes(setup)
    fs = fs if setup.shape.num_experts else f  # every token passes a dense MLP, as it passes a shared expert
    has_qk = int(setup.family.qk_norm or setup.shape.qk_norm > 0)
    padded, keys = _lengthened(setup, padding)
    norms = 2 * h * (8 / b + 1) / s
    qk = has_qk * 8 / b * (q + kv)
    whole = norms + qk + q + 2 * (padded * q + keys * kv) + 4 * d + r * (h + 6 * f + 4 / b) + router + 5 * fs
    chosen = setup.recomputed
    core = 3 * q + 3 * kv if "core_attn" in chosen else q + 2 * (padded * q + keys * kv)
    has_mlp = ("moe" if setup.shape.num_experts else "mlp") not in chosen
    mlp = has_mlp * (r * (h + 6 * f + 4 / b) + router + 5 * fs)
    inputs = 2 * h / s if "layernorm" in chosen else norms
    return whole, inputs + qk + core + 4 * d + mlp


def _latent_layer(setup: PlannedJob, pp_rank: int, padding: float) -> Layer:
    """Return the same with multi-latent attention, averaged over a stage's layers with and without experts.

    With recompute only the recomputed layer counts. The formula assumes the largest one.
    """
    shape, tp, b, s = setup.shape, setup.layout.tp, setup.itemsize, setup.sequence_parts
    q, _, fe, fs, r, router = _sizes(setup)
    h, v, f, angles = shape.hidden, shape.v // tp, shape.ffn // tp, 4 * shape.rope_dim
    latents = shape.q_lora + shape.kv_lora
    padded, keys = _lengthened(setup, padding)
    moe = _moe_share(setup, pp_rank)
    attention = (2 * h + latents) * (8 / b + 1) / s
    routed = r * (h + 6 * fe + 4 / b) + router
    whole = attention + angles + v + 2 * (padded + keys) * q + moe * (routed + 5 * fs) + (1 - moe) * 5 * f
    chosen = setup.recomputed
    core = 2 * (q + v) if "core_attn" in chosen else v + 2 * (padded + keys) * q
    mlp = moe * (routed + 5 * fs) * ("moe" not in chosen) + (1 - moe) * 5 * f * ("mlp" not in chosen)
    saved = 2 * h / s * (8 / b) if "layernorm" in chosen else 0.0  # fp32 copies in the layer's two norms
    return whole, attention - saved + angles + core + mlp


def _hybrid_layer(setup: PlannedJob, pp_rank: int, padding: float, full: Layer) -> Layer:
    """Return the mean of a stage's layers, if some have linear attention in plain torch: an upper bound with FLA.

    `full` is a layer with full attention. With full recompute only the recomputed layer counts, and one with linear
    attention is larger. The numbers of the recurrence are measured: products of each chunk of 64 tokens, in fp32.
    """
    shape, tp, b = setup.shape, setup.layout.tp, setup.itemsize
    whole, selective = full
    heads, k, v = shape.linear_v_heads // tp, shape.linear_k_dim, shape.linear_v_dim
    num_linear = layers_in_flight(setup, pp_rank, lambda chunk: len({*chunk} & {*shape.linear_layers}))
    share = num_linear / layers_in_flight(setup, pp_rank)
    if setup.config.model.recompute == "full" and share:
        share = 1.0
    rows = (2 * shape.linear_k + shape.linear_v) // tp
    recurrence = (
        padding * (heads * (392 + 10 * k + 3 * v + k * v / 64) * 4 / b + (1 + 8 / b) * rows)
        + rows
        + (2 + 8 / b) * heads * v
    )
    gate = 3 * (shape.q // tp)
    return whole + share * recurrence + (1 - share) * gate, selective + share * recurrence + (1 - share) * gate


def _lengthened(setup: PlannedJob, padding: float) -> tuple[float, float]:
    """Return the lengths of queries and of keys in attention, relative to the micro-batch.

    Context-parallel attention keeps chunks without padding, each with the keys before it. In layers with a sliding
    window a run of queries keeps about as many keys before it.
    """
    cut = sum(0 < window < setup.longest_on_rank for window in setup.shape.windows) / setup.shape.num_layers
    return (padding, padding + cut) if setup.layout.cp == 1 else (1.0, setup.layout.cp + 0.5)


def layers_in_flight(setup: PlannedJob, pp_rank: int, count: Callable[[range], int] = len) -> int:
    """Return the largest number of layers times micro-batches whose activations a stage holds (1F1B, interleaved or
    not). `count` returns the number of a chunk's layers that matter.
    """
    layout = setup.layout
    sizes = [count(chunk) for chunk in setup.chunks(pp_rank)]
    if layout.vpp == 1:
        return sizes[0] * (layout.pp - pp_rank)
    # Warm-up runs (pp - p - 1) * 2 passes and pp for each further chunk, in rounds of pp micro-batches; one more is
    # running.
    passes = (layout.pp - pp_rank - 1) * 2 + (layout.vpp - 1) * layout.pp + 1
    return sum(sizes[i // layout.pp % layout.vpp] for i in range(passes))


def _exchanged(setup: PlannedJob) -> Figure:
    """Return the keys, values and partial results that attention exchanges with other context-parallel ranks.

    Local layers hold the keys and values of all ranks. In the backward pass they also hold the gradients, before and
    after reordering. Transformer Engine's p2p keeps each rank's keys and values and their partial output in the forward
    pass, until all have arrived. In the backward pass it has two buffers for keys, values and their gradients, and the
    gradients of one part. a2a keeps tensors of the size of the rank's queries, keys, values and output, and in the
    backward pass their gradients.
    """
    tokens, b, cp = setup.micro_batch_tokens, setup.itemsize, setup.layout.cp
    q, kv = setup.shape.q // setup.layout.tp, setup.keys_and_values
    label = "exchanged keys and values"
    if cp == 1:
        return Figure(label)
    if setup.uses_te and setup.config.layout.cp_comm_type == "a2a":
        return Figure(label, tokens * b * 2 * (2 * q + kv))
    if setup.uses_te:
        return Figure(label, tokens * b * max(cp * (kv + q), 5 * kv + q))
    return Figure(label, tokens * b * kv * (3 * cp + 0.5))


def _logprobs(setup: PlannedJob, pp_rank: int) -> Figure:
    label = "log-prob tiles"
    if pp_rank != setup.layout.pp - 1:
        return Figure(label)
    tokens, h, b = setup.micro_batch_tokens, setup.shape.hidden, setup.itemsize
    tiles = 2 if setup.config.algorithm.calculate_entropy else 1
    most_tokens, most_columns = CPU_TILE if setup.card.is_cpu else (TILE_TOKENS, TILE_COLUMNS)
    tile_tokens, tile_columns = min(most_tokens, tokens), min(most_columns, -(-setup.shape.vocab // setup.layout.tp))
    # Float32 tiles and the tile's gradient in bf16; all hidden states, the selected ones, and their gradient in
    # float32.
    return Figure(
        label, tiles * tile_tokens * tile_columns * 4 + tile_tokens * tile_columns * 2 + tokens * h * (3 * b + 4)
    )
