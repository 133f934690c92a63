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
    assumed, layout, config = setup.assumed, setup.layout, setup.config
    layers, output = _layers_seconds(setup, batch), _output_seconds(setup, batch)
    by_kind = {link.kind: link.seconds.value for link in links}
    within = by_kind.get("tensor parallel", 0.0) + by_kind.get("experts", 0.0)
    updates, forwards = num_passes(setup)
    again = {"none": 0.0, "selective": 0.5, "full": 1.0}[config.model.recompute]
    share = (3 + again) * updates / ((3 + again) * updates + forwards)  # of the passes, in updates
    # Interleaved stages overlap their sends; otherwise they are waited for.
    pipeline = 0.0 if layout.vpp > 1 else by_kind.get("pipeline", 0.0)
    bubble, last = batch.bubble.value, setup.num_layers(layout.pp - 1) / largest_stage(setup)
    overlap = 0.5 * config.layout.overlap_grad_reduce + 0.5 * config.layout.overlap_param_gather
    reduce = by_kind.get("gradients and weights", 0.0) * (1 - assumed.overlap_share * overlap)
    adam = _adam_seconds(setup, state)
    update = _update(layers, output, bubble, last, updates, again, within, pipeline, share, reduce, adam)
    host_rate = setup.card.host_bytes * assumed.host_share
    phases = [
        _generation(setup, engine),
        _logprobs(layers, output, bubble, last, forwards, within, pipeline, 1 - share),
        update,
        _host_copies(int(setup.keeps_host_copies), state.weights, state.largest_optimizer, int(setup.has_reference), host_rate),
        product("sync", "s", sync=by_kind.get("sync to the engines", 0.0)),
        product("everything else", "s", overhead=assumed.step_overhead_s),
    ]
    step = total("a step", "s", phases)
    rate = _rate(batch.tokens.value, step.value, setup.world_size)
    flops_share = _flops_share(_forward_flops(setup, batch), updates, update.value, setup.world_size, setup.card.bf16_flops)
    return Timing(phases, step, rate, flops_share)


def _forward_flops(setup: Setup, batch: Batch) -> float:
    """Return the model FLOPs of one forward pass over a step's tokens; only responses go through the output layer."""
    tokens, outputs = batch.tokens.value, batch.samples.value * setup.mean_response
    pairs = tokens * setup.mean_sample / 2  # causal: on average a token sees half of its sample
    return flops.of_totals(setup.shape, tokens, pairs, outputs, experts_per_token=setup.experts_per_token).forward


def _layers_seconds(setup: Setup, batch: Batch) -> float:
    """Return the time of one forward pass of a step's tokens through the layers of the fullest stage."""
    card, assumed, in_fp8 = setup.card, setup.assumed, setup.share_in_fp8
    weights = flops.layer_weights(setup.shape, setup.experts_per_token)
    imbalance = assumed.expert_imbalance if setup.layout.ep > 1 else 1.0
    bf16_rate = card.bf16_flops * assumed.matmul_share
    fp8_rate = (card.fp8_flops or card.bf16_flops) * assumed.fp8_matmul_share
    products = 2 * weights * imbalance * ((1 - in_fp8) / bf16_rate + in_fp8 / fp8_rate)
    # Causal: on average a token sees half of its sample.
    attention = 2 * setup.shape.q * setup.mean_sample / (card.bf16_flops * assumed.attention_share)
    return largest_stage(setup) * tokens_per_dp_rank(setup, batch) / setup.layout.tp * (products + attention)


def _output_seconds(setup: Setup, batch: Batch) -> float:
    """Return the time of one product of the responses' hidden states with the output weight, on the last stage."""
    tokens, shape = batch.samples.value * setup.mean_response / setup.layout.dp, setup.shape
    return 2 * tokens * shape.hidden * shape.vocab / setup.layout.tp / (setup.card.bf16_flops * setup.assumed.logprob_share)


def _adam_seconds(setup: Setup, state: State) -> float:
    touched = 2 * state.storage.optimizer_bytes + 4 + setup.itemsize
    rate = setup.card.hbm_bytes * setup.assumed.hbm_share
    return setup.config.batch.optimizer_steps * (state.largest_share * touched + state.gradients) / rate


def _generation(setup: Setup, engine: EngineMemory) -> Figure:
    """Return the time of full batches until the sequences are used up, then of a tail in which the longest responses end."""
    shape, card, assumed = setup.shape, setup.card, setup.assumed
    tp = setup.config.rollout.tp if setup.is_served else 1
    layer = assumed.decode_layer_s + (2 * assumed.all_reduce_s if tp > 1 else 0.0)
    weights = flops.layer_weights(shape, setup.experts_per_token)
    active = 2 * shape.num_layers * weights + 2 * shape.hidden * shape.vocab
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
    layers: float, output: float, bubble: Number, last: float, forwards: int, within: float, pipeline: float, share: float
) -> float:
    return forwards * max(layers, last * layers + output) / (1 - bubble) + (within + pipeline) * share


@formula("update", "s")
def _update(
    layers: float,
    output: float,
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


@formula("tokens per second per GPU")
def _rate(tokens: Number, step: Number, gpus: int) -> float:
    return tokens / (step * gpus)


@formula("model FLOPs of the update, of the bf16 peak")
def _flops_share(flops: float, updates: int, update: Number, gpus: int, peak: float) -> float:
    return 3 * flops * updates / (update * gpus * peak)
