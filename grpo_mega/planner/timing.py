"""Time of a step by phase, from peak rates and the stated shares of them.

Model FLOPs are those of batching/flops.py: what is computed again for recompute, and the fourth product of the log-probs, is
work but not utilisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from grpo_mega.batching import flops
from grpo_mega.planner.batch import Batch
from grpo_mega.planner.communication import Link, largest_stage, num_passes, tokens_per_dp_rank
from grpo_mega.planner.engine import EngineMemory, cache_bytes_per_token, sequences_per_engine
from grpo_mega.planner.figures import Figure, Number, formula, product, total
from grpo_mega.planner.setup import Setup
from grpo_mega.planner.state import State


@dataclass(frozen=True)
class Timing:
    phases: list[Figure]  # seconds, in the order of a step
    step: Figure
    tokens_per_second_per_gpu: Figure
    model_flops_share: Figure  # of the bf16 peak, in updates


def timing(setup: Setup, batch: Batch, links: list[Link], state: State, engine: EngineMemory) -> Timing:
    assumed, layout, peak = setup.assumed, setup.layout, setup.card.bf16_flops
    layers, output = _layer_seconds(setup, batch).value, _output_seconds(setup, batch).value
    by_kind = {link.kind: link.seconds.value for link in links}
    within = by_kind.get("tensor parallel", 0.0) + by_kind.get("experts", 0.0)
    updates, forwards = num_passes(setup)
    again = {"none": 0.0, "selective": 0.5, "full": 1.0}[setup.config.model.recompute]
    share = (3 + again) * updates / ((3 + again) * updates + forwards)  # of the passes, in updates
    # Interleaved stages overlap their sends; otherwise they are waited for.
    pipeline = 0.0 if layout.vpp > 1 else by_kind.get("pipeline", 0.0)
    bubble, last = batch.bubble.value, setup.num_layers(layout.pp - 1) / largest_stage(setup)
    reduce, adam = _exposed(setup, by_kind.get("gradients and weights", 0.0)), _adam_seconds(setup, state)
    update = _update(layers, output, bubble, last, updates, again, within, pipeline, share, reduce, adam)
    phases = [
        _generation(setup, engine),
        _logprobs(layers, output, bubble, last, forwards, within, pipeline, 1 - share),
        update,
        _offload(setup, state),
        product("sync", "s", sync=by_kind.get("sync to the engines", 0.0)),
        product("everything else", "s", overhead=assumed.step_overhead_s),
    ]
    step = total("a step", "s", phases)
    rate = _rate(batch.tokens.value, step.value, setup.world_size)
    flops_share = _flops_share(forward_flops(setup, batch), updates, update.value, setup.world_size, peak)
    return Timing(phases, step, rate, flops_share)


def active_weights(setup: Setup) -> int:
    """Return the weights of one layer that multiply a token."""
    return flops.layer_weights(setup.shape, setup.experts_per_token)


def forward_flops(setup: Setup, batch: Batch) -> float:
    """Return the model FLOPs of one forward pass over a step's tokens; only responses go through the output layer."""
    tokens, outputs = batch.tokens.value, batch.samples.value * setup.mean_response
    pairs = tokens * setup.mean_sample / 2  # causal: on average a token sees half of its sample
    return flops.of_totals(setup.shape, tokens, pairs, outputs, experts_per_token=setup.experts_per_token).forward


def _layer_seconds(setup: Setup, batch: Batch) -> Figure:
    """Return the time of one forward pass of a step's tokens through the layers of the fullest stage."""
    precision, card, assumed, n = setup.config.precision, setup.card, setup.assumed, setup.shape.num_layers
    in_fp8 = 0.0
    if precision.fp8 is not None:
        in_fp8 = max(0, n - precision.first_layers_bf16 - precision.last_layers_bf16) / n
    return _layers_forward(
        layers=largest_stage(setup),
        tokens=tokens_per_dp_rank(setup, batch),
        tp=setup.layout.tp,
        weights=active_weights(setup),
        imbalance=assumed.expert_imbalance if setup.layout.ep > 1 else 1.0,
        in_fp8=in_fp8,
        bf16=card.bf16_flops,
        matmul_share=assumed.matmul_share,
        fp8=card.fp8_flops or card.bf16_flops,
        fp8_share=assumed.fp8_matmul_share,
        q=setup.shape.q,
        length=setup.mean_sample,  # causal: on average a token sees half of it
        attention_share=assumed.attention_share,
    )


def _output_seconds(setup: Setup, batch: Batch) -> Figure:
    """Return the time of one product of the responses' hidden states with the output weight, on the last stage."""
    tokens, shape = batch.samples.value * setup.mean_response / setup.layout.dp, setup.shape
    return _output_forward(
        tokens, shape.hidden, shape.vocab, setup.layout.tp, setup.card.bf16_flops, setup.assumed.logprob_share
    )


def _exposed(setup: Setup, seconds: float) -> float:
    """Return the seconds of data-parallel communication that computing does not hide."""
    hidden = setup.assumed.overlap_share
    layout = setup.config.layout
    return seconds * (1 - hidden * (0.5 * layout.overlap_grad_reduce + 0.5 * layout.overlap_param_gather))


def _adam_seconds(setup: Setup, state: State) -> float:
    touched = 2 * (state.master_bytes + state.moment_bytes) + 4 + setup.itemsize
    rate = setup.card.hbm_bytes * setup.assumed.hbm_share
    return setup.config.batch.optimizer_steps * (state.largest_share * touched + state.gradients) / rate


def _generation(setup: Setup, engine: EngineMemory) -> Figure:
    """Return the time of full batches until the sequences are used up, then of a tail in which the longest responses end."""
    shape, card, assumed = setup.shape, setup.card, setup.assumed
    tp = setup.config.rollout.tp if setup.is_served else 1
    layer = assumed.decode_layer_s + (2 * assumed.all_reduce_s if tp > 1 else 0.0)
    active = 2 * shape.num_layers * active_weights(setup) + 2 * shape.hidden * shape.vocab
    peak, sequences = card.bf16_flops * assumed.prefill_share, sequences_per_engine(setup)
    return _sampling(
        prefill=sequences / setup.config.algorithm.group_size * setup.mean_prompt * active / (tp * peak),
        sequences=sequences,
        concurrent=engine.concurrent.value,
        response=setup.mean_response,
        overhead=assumed.decode_step_s + shape.num_layers * (layer if setup.is_served else assumed.embedded_layer_s),
        weights=engine.weights.value,
        context=setup.mean_prompt + setup.mean_response / 2,
        per_token=cache_bytes_per_token(setup),
        hbm=card.hbm_bytes * assumed.hbm_share,
        flops=active,
        tp=tp,
        peak=peak,
        longest=setup.config.rollout.max_response_length,
    )


def _offload(setup: Setup, state: State) -> Figure:
    optimizer = state.largest_share * (state.master_bytes + state.moment_bytes)
    rate = setup.card.host_bytes * setup.assumed.host_share
    return _host_copies(int(setup.keeps_host_copies), state.weights, optimizer, int(setup.has_reference), rate)


@formula("sampling", "s")
def _sampling(
    prefill: float,
    sequences: int,
    concurrent: Number,
    response: float,
    overhead: float,
    weights: Number,
    context: float,
    per_token: int,
    hbm: float,
    flops: int,
    tp: int,
    peak: float,
    longest: int,
) -> float:
    return (
        prefill
        + ceil(sequences / concurrent)
        * response
        * (overhead + max((weights + concurrent * context * per_token) / hbm, concurrent * flops / tp / peak))
        + (longest - response) * (overhead + weights / hbm)
    )


@formula("log-probs", "s")
def _logprobs(
    layers: Number, output: Number, bubble: Number, last: float, forwards: int, within: float, pipeline: float, share: float
) -> float:
    return forwards * max(layers, last * layers + output) / (1 - bubble) + (within + pipeline) * share


@formula("update", "s")
def _update(
    layers: Number,
    output: Number,
    bubble: Number,
    last: float,
    updates: int,
    again: float,
    within: float,
    pipeline: float,
    share: float,
    reduce: float,
    adam: float,
) -> float:
    return (
        updates * max((3 + again) * layers, (3 + again) * last * layers + 4 * output) / (1 - bubble)
        + (within + pipeline) * share
        + reduce
        + adam
    )


@formula("offload and onload", "s")
def _host_copies(moves: int, weights: int, optimizer: int, reference: int, rate: float) -> float:
    return (2 * moves * (weights + optimizer) + 3 * reference * weights) / rate


@formula("layers, forward", "s")
def _layers_forward(
    layers: int,
    tokens: float,
    tp: int,
    weights: int,
    imbalance: float,
    in_fp8: float,
    bf16: float,
    matmul_share: float,
    fp8: float,
    fp8_share: float,
    q: int,
    length: float,
    attention_share: float,
) -> float:
    return (
        layers
        * tokens
        / tp
        * (
            2 * weights * imbalance * ((1 - in_fp8) / (bf16 * matmul_share) + in_fp8 / (fp8 * fp8_share))
            + 2 * q * length / (bf16 * attention_share)
        )
    )


@formula("output layer, forward", "s")
def _output_forward(tokens: float, hidden: int, vocab: int, tp: int, bf16: float, share: float) -> float:
    return 2 * tokens * hidden * vocab / tp / (bf16 * share)


@formula("tokens per second per GPU")
def _rate(tokens: Number, step: Number, gpus: int) -> float:
    return tokens / (step * gpus)


@formula("model FLOPs of the update, of the bf16 peak")
def _flops_share(flops: float, updates: int, update: Number, gpus: int, peak: float) -> float:
    return 3 * flops * updates / (update * gpus * peak)
