"""Time of a step by phase, from peak rates and the stated shares of them.

Model FLOPs are those of batching/flops.py: what is computed again for recompute, and the fourth product of the log-probs, is
work but not utilisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from grpo_mega.batching import flops as model_flops
from grpo_mega.planner.batch import Batch
from grpo_mega.planner.communication import Link, largest_stage, num_passes, tokens_per_dp_rank
from grpo_mega.planner.engine import EngineMemory, cache_bytes_per_token, sequences_per_engine
from grpo_mega.planner.figures import Figure, figure, product, total
from grpo_mega.planner.setup import Setup
from grpo_mega.planner.state import State


@dataclass(frozen=True)
class Timing:
    phases: list[Figure]  # seconds, in the order of a step
    step: Figure
    tokens_per_second_per_gpu: Figure
    model_flops_share: Figure  # of the bf16 peak, in updates


def timing(setup: Setup, batch: Batch, links: list[Link], state: State, engine: EngineMemory) -> Timing:
    by_kind = {link.kind: link.seconds.value for link in links}
    logprobs, policy_update = _passes(setup, batch, by_kind, state)
    phases = [
        _generation(setup, engine),
        logprobs,
        policy_update,
        _offload(setup, state),
        product("sync", "s", sync=by_kind.get("sync to the engines", 0.0)),
        product("everything else", "s", overhead=setup.assumed.step_overhead_s),
    ]
    whole, gpus, peak = total("a step", "s", phases), setup.world_size, setup.card.bf16_flops
    tokens, step, update = batch.tokens.value, whole.value, policy_update.value
    flops, (updates, _) = _forward_flops(setup, batch), num_passes(setup)
    rate = figure("tokens per second per GPU", "", lambda: tokens / (step * gpus))
    flops_share = figure(
        "model FLOPs of the update, of the bf16 peak", "", lambda: 3 * flops * updates / (update * gpus * peak)
    )
    return Timing(phases, whole, rate, flops_share)


def _passes(setup: Setup, batch: Batch, by_kind: dict[str, float], state: State) -> tuple[Figure, Figure]:
    """Return the times of the log-probs and of the update."""
    layout, config = setup.layout, setup.config
    layers, output = _layers_seconds(setup, batch), _output_seconds(setup, batch)
    within = by_kind.get("tensor parallel", 0.0) + by_kind.get("experts", 0.0)
    updates, forwards = num_passes(setup)
    again = {"none": 0.0, "selective": 0.5, "full": 1.0}[config.model.recompute]
    # Interleaved stages overlap their sends; otherwise they are waited for.
    pipeline = 0.0 if layout.vpp > 1 else by_kind.get("pipeline", 0.0)
    bubble, last = batch.bubble.value, setup.num_layers(layout.pp - 1) / largest_stage(setup)
    overlap = 0.5 * config.layout.overlap_grad_reduce + 0.5 * config.layout.overlap_param_gather
    reduce = by_kind.get("gradients and weights", 0.0) * (1 - setup.assumed.overlap_share * overlap)
    adam = _adam_seconds(setup, state)
    in_updates = (3 + again) * updates / ((3 + again) * updates + forwards)  # share of the passes that updates make
    share = 1 - in_updates
    logprobs = figure(
        "log-probs",
        "s",
        lambda: forwards * max(layers, last * layers + output) / (1 - bubble) + (within + pipeline) * share,
    )
    update = figure(
        "update",
        "s",
        lambda: (
            updates * max((3 + again) * layers, (3 + again) * last * layers + 4 * output) / (1 - bubble)
            + (within + pipeline) * in_updates
            + reduce
            + adam
        ),
    )
    return logprobs, update


def _forward_flops(setup: Setup, batch: Batch) -> float:
    """Return the model FLOPs of one forward pass over a step's tokens; only responses go through the output layer."""
    tokens, outputs = batch.tokens.value, batch.samples.value * setup.mean_response
    pairs = tokens * setup.mean_sample / 2  # causal: on average a token sees half of its sample
    return model_flops.of_totals(setup.shape, tokens, pairs, outputs, experts_per_token=setup.experts_per_token).forward


def _layers_seconds(setup: Setup, batch: Batch) -> float:
    """Return the time of one forward pass of a step's tokens through the layers of the fullest stage."""
    card, assumed, in_fp8 = setup.card, setup.assumed, len(setup.layers_in_fp8) / setup.shape.num_layers
    weights = model_flops.layer_weights(setup.shape, setup.experts_per_token)
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
    shape, assumed = setup.shape, setup.assumed
    tp = setup.config.rollout.tp if setup.is_served else 1
    layer = assumed.decode_layer_s + (2 * assumed.all_reduce_s if tp > 1 else 0.0)
    overhead = assumed.decode_step_s + shape.num_layers * (layer if setup.is_served else assumed.embedded_layer_s)
    layer_weights = model_flops.layer_weights(shape, setup.experts_per_token)
    flops = 2 * shape.num_layers * layer_weights + 2 * shape.hidden * shape.vocab
    peak, hbm = setup.card.bf16_flops * assumed.prefill_share, setup.card.hbm_bytes * assumed.hbm_share
    sequences, concurrent = sequences_per_engine(setup), engine.concurrent.value
    prefill = sequences / setup.config.algorithm.group_size * setup.mean_prompt * flops / (tp * peak)
    response, longest = setup.mean_response, setup.config.rollout.max_response_length
    weights, per_token, context = engine.weights.value, cache_bytes_per_token(setup), setup.mean_prompt + response / 2
    return figure(
        "sampling",
        "s",
        lambda: (
            prefill
            + ceil(sequences / concurrent)
            * response
            * (overhead + max((weights + concurrent * context * per_token) / hbm, concurrent * flops / tp / peak))
            + (longest - response) * (overhead + weights / hbm)
        ),
    )


def _offload(setup: Setup, state: State) -> Figure:
    moves, reference = int(setup.keeps_host_copies), int(setup.has_reference)
    weights, optimizer, rate = state.weights, state.largest_optimizer, setup.card.host_bytes * setup.assumed.host_share
    return figure("offload and onload", "s", lambda: (2 * moves * (weights + optimizer) + 3 * reference * weights) / rate)
