"""Time of a step by phase, from peak rates and assumed shares of them.

Model FLOPs come from batching/flops.py. Recompute and the fourth product of the log-probs take time, but do not count as model
FLOPs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from grpo_mega.batching import flops as model_flops
from grpo_mega.planner.batch import Batch
from grpo_mega.planner.communication import Link, largest_stage, num_passes, tokens_per_rank
from grpo_mega.planner.engine import EngineMemory, cache_bytes_per_token, sequences_per_engine
from grpo_mega.planner.figures import Number, TracedNumber, figure, product, total
from grpo_mega.planner.generation import Engines, Schedule, mean_wait
from grpo_mega.planner.job import PlannedJob
from grpo_mega.planner.lengths import Lengths
from grpo_mega.planner.state import State


@dataclass(frozen=True)
class Timing:
    phases: list[TracedNumber]  # seconds, in the order of a step
    step: TracedNumber
    decoding: TracedNumber  # one decoding step of an engine with all its sequences
    tokens_per_second_per_gpu: TracedNumber
    model_flops_share: TracedNumber  # model FLOPs in updates, relative to the bf16 peak


def timing(setup: PlannedJob, batch: Batch, links: list[Link], state: State, engine: EngineMemory) -> Timing:
    by_kind = {link.kind: link.seconds.value for link in links}
    logprobs, policy_update = _passes(setup, batch, by_kind, state)
    context = setup.mean_prompt + setup.mean_response / 2
    decoding = decoding_step(setup, engine.weights.value, engine.concurrent.value, context)
    offload, lengths = _offload(setup, state), setup.response_lengths
    training = logprobs.value + policy_update.value + offload.value
    phases = [
        _generation(setup, engine, decoding) if lengths is None else _simulated(setup, engine, decoding, lengths, training),
        logprobs,
        policy_update,
        offload,
        product("sync", "s", sync=by_kind.get("sync to the engines", 0.0)),
        product("everything else", "s", overhead=setup.assumed.step_overhead_s),
    ]
    whole, gpus, peak = total("a step", "s", phases), setup.world_size, setup.card.bf16_flops
    tokens, step, update, trainers = batch.tokens.value, whole.value, policy_update.value, setup.layout.world_size
    flops, (updates, _) = _forward_flops(setup, batch), num_passes(setup)
    rate = figure("tokens per second per GPU", "", lambda: tokens / (step * gpus))
    flops_share = figure(
        "model FLOPs of the update, of the bf16 peak", "", lambda: 3 * flops * updates / (update * trainers * peak)
    )
    return Timing(phases, whole, decoding, rate, flops_share)


def _passes(setup: PlannedJob, batch: Batch, by_kind: dict[str, float], state: State) -> tuple[TracedNumber, TracedNumber]:
    """Return the times of the log-probs and of the update."""
    layout, config, in_fp8 = setup.layout, setup.config, len(setup.layers_in_fp8)
    layers, output = _layers_seconds(setup, batch, in_fp8), _output_seconds(setup, batch)
    reference_layers = layers if config.precision.fp8_reference else _layers_seconds(setup, batch, 0)
    # Transformer Engine computes with some keys and values while it sends others.
    ring = by_kind.get("context parallel", 0.0) * (1 - setup.assumed.overlap_share * setup.uses_te)
    within = by_kind.get("tensor parallel", 0.0) + by_kind.get("experts", 0.0) + ring
    (updates, forwards), reference = num_passes(setup), int(setup.has_reference)
    taught = sum(_forward_seconds(one, batch) for one in setup.of_teachers())
    again = {"none": 0.0, "selective": 0.5, "full": 1.0}[config.model.recompute]
    # Interleaved stages overlap their sends with computation; other stages wait for them.
    pipeline = 0.0 if layout.vpp > 1 else by_kind.get("pipeline", 0.0)
    bubble, last = batch.bubble.value, setup.num_layers(layout.pp - 1) / largest_stage(setup)
    overlap = 0.5 * config.layout.overlap_grad_reduce + 0.5 * config.layout.overlap_param_gather
    reduce = by_kind.get("gradients and weights", 0.0) * (1 - setup.assumed.overlap_share * overlap)
    adam = _adam_seconds(setup, state)
    in_updates = (3 + again) * updates / ((3 + again) * updates + forwards)  # share of all passes that updates run
    share = 1 - in_updates
    logprobs = figure(
        "log-probs",
        "s",
        lambda: (
            (
                (forwards - reference) * max(layers, last * layers + output)
                + reference * max(reference_layers, last * reference_layers + output)
                + taught
            )
            / (1 - bubble)
            + (within + pipeline) * share
        ),
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


def _forward_flops(setup: PlannedJob, batch: Batch) -> float:
    """Return the model FLOPs of one forward pass over a step's tokens. Only responses go through the output layer."""
    tokens, outputs = batch.tokens.value, batch.samples.value * setup.mean_response
    pairs = tokens * setup.mean_sample / 2  # causal: on average a token sees half of its sample
    return model_flops.of_totals(setup.shape, tokens, pairs, outputs, experts_per_token=setup.experts_per_token).forward


def _layers_seconds(setup: PlannedJob, batch: Batch, num_in_fp8: int) -> float:
    """Return the time of one forward pass over a step's tokens through the layers of the largest stage."""
    card, assumed, in_fp8 = setup.card, setup.assumed, num_in_fp8 / setup.shape.num_layers
    weights = model_flops.layer_weights(setup.shape, setup.experts_per_token)
    imbalance = assumed.expert_imbalance if setup.layout.ep > 1 else 1.0
    bf16_rate = card.bf16_flops * assumed.matmul_share
    fp8_rate = (card.fp8_flops or card.bf16_flops) * assumed.fp8_matmul_share
    products = 2 * weights * imbalance * ((1 - in_fp8) / bf16_rate + in_fp8 / fp8_rate)
    # Causal: on average a token sees half of its sample. This also holds for the tokens of a context-parallel rank.
    attention = (setup.shape.q + setup.shape.v) * setup.mean_sample / (card.bf16_flops * assumed.attention_share)
    return largest_stage(setup) * tokens_per_rank(setup, batch) / setup.layout.tp * (products + attention)


def _forward_seconds(of_teacher: PlannedJob, batch: Batch) -> float:
    """Return the time of a teacher's forward pass over a step's tokens."""
    layers, output = _layers_seconds(of_teacher, batch, 0), _output_seconds(of_teacher, batch)
    return max(layers, of_teacher.num_layers(of_teacher.layout.pp - 1) / largest_stage(of_teacher) * layers + output)


def _output_seconds(setup: PlannedJob, batch: Batch) -> float:
    """Return the time to multiply the responses' hidden states by the output weight once, on the last stage."""
    tokens, shape = batch.samples.value * setup.mean_response / setup.layout.num_replicas, setup.shape
    return 2 * tokens * shape.hidden * shape.vocab / setup.layout.tp / (setup.card.bf16_flops * setup.assumed.logprob_share)


def _adam_seconds(setup: PlannedJob, state: State) -> float:
    touched = 2 * state.storage.optimizer_bytes + 4 + setup.itemsize
    rate = setup.card.hbm_bytes * setup.assumed.hbm_share
    return setup.config.batch.optimizer_steps * (state.largest_share * touched + state.gradients) / rate


def _generation(setup: PlannedJob, engine: EngineMemory, step: TracedNumber) -> TracedNumber:
    """Return the time of full batches until no sequence waits, and of a tail until the longest responses end."""
    sequences, concurrent = sequences_per_engine(setup), engine.concurrent.value
    prefill = sequences / setup.config.algorithm.group_size * setup.mean_prompt * token_seconds(setup)
    response, longest = setup.mean_response, setup.config.rollout.max_response_length
    full, last = step.value, step.at(concurrent=1)
    return figure(
        "sampling",
        "s",
        lambda: prefill + ceil(sequences / concurrent) * response * full + (longest - response) * last,
    )


def _simulated(setup: PlannedJob, engine: EngineMemory, step: TracedNumber, lengths: Lengths, training: float) -> TracedNumber:
    """Return the simulated time that a step waits until its groups are complete; see generation.py."""
    rollout, prompts, group = setup.config.rollout, setup.config.batch.prompts_per_step, setup.config.algorithm.group_size
    concurrent, without = int(engine.concurrent.value), step.at(concurrent=1, context=0)
    if not setup.is_served:  # the embedded engine takes whole groups
        concurrent = max(1, concurrent // group) * group
    engines = Engines(
        count=setup.engine_layout.num_engines,
        concurrent=concurrent,
        in_batches=not setup.is_served,
        steps=tuple(step.at(concurrent=n, context=0) for n in range(concurrent + 1)),
        per_context=step.at(concurrent=1, context=1) - without,
        per_prefill=token_seconds(setup),
    )
    num_started, ahead = rollout.num_started(prompts), rollout.num_ahead(prompts)
    schedule = Schedule(prompts, group, num_started, ahead, rollout.keeps_unfinished, rollout.max_staleness)
    waited = mean_wait(engines, lengths, setup.mean_prompt, schedule, training if ahead else 0.0)
    return product("sampling", "s", simulated=waited)


def decoding_step(setup: PlannedJob, weights: Number, concurrent: Number, context: float) -> TracedNumber:
    """Return the time in which an engine decodes one token of each sequence; `context` is their mean length in tokens.

    The times to read the weights and to multiply by them are added, because published figures of large batches show no overlap.
    """
    shape, assumed, per_token = setup.shape, setup.assumed, cache_bytes_per_token(setup)
    tp = setup.config.rollout.tp if setup.is_served else 1
    layers, hidden, b = shape.num_layers, shape.hidden, setup.engine_itemsize
    num_reduced, nvlink = 2 if tp > 1 else 0, setup.card.nvlink_bytes * assumed.nvlink_share  # all-reduces per layer
    once, latency, products = assumed.decode_step_s, assumed.all_reduce_s, token_seconds(setup)
    kernels = assumed.decode_layer_s if setup.is_served else assumed.embedded_layer_s
    hbm = setup.card.hbm_bytes * assumed.decode_hbm_share
    return figure(
        "a decoding step",
        "s",
        lambda: (
            once
            + layers * (kernels + num_reduced * (latency + 2 * concurrent * hidden * b * (tp - 1) / tp / nvlink))
            + (weights + concurrent * context * per_token) / hbm
            + concurrent * products
        ),
    )


def token_seconds(setup: PlannedJob) -> float:
    """Return the time of an engine's matrix products for one token."""
    shape, card, is_served = setup.shape, setup.card, setup.is_served
    weights = shape.num_layers * model_flops.layer_weights(shape, setup.experts_per_token) + shape.hidden * shape.vocab
    in_fp8 = is_served and setup.config.rollout.quantization is not None
    peak = (card.fp8_flops if in_fp8 else 0) or card.bf16_flops
    return 2 * weights / ((setup.config.rollout.tp if is_served else 1) * peak * setup.assumed.prefill_share)


def _offload(setup: PlannedJob, state: State) -> TracedNumber:
    moves, reference = int(setup.keeps_host_copies), int(setup.has_reference)
    weights, optimizer, rate = state.weights, state.largest_optimizer, setup.card.host_bytes * setup.assumed.host_share
    return figure("offload and onload", "s", lambda: (2 * moves * (weights + optimizer) + 3 * reference * weights) / rate)
