"""Time of a step by phase, from peak rates and assumed shares of them.

Model FLOPs come from batching/flops.py. Recompute and the fourth product of the log-probs take time, but do not count
as model FLOPs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from grpo_mega.batching import flops as model_flops
from grpo_mega.planner.communication import Link
from grpo_mega.planner.figures import Number, TracedNumber, figure, product, total
from grpo_mega.planner.generation import Engines, Lengths, StepGroups, mean_wait
from grpo_mega.planner.job import PlannedJob
from grpo_mega.planner.memory import EngineMemory, cache_bytes_per_token, sequences_per_engine
from grpo_mega.planner.state import FP32, State


@dataclass(frozen=True)
class Timing:
    phases: list[TracedNumber]  # seconds, in the order of a step
    step: TracedNumber
    decoding: TracedNumber  # one decoding step of an engine with all its sequences
    tokens_per_second_per_gpu: TracedNumber
    model_flops_share: TracedNumber  # model FLOPs in updates, relative to the bf16 peak


def timing(setup: PlannedJob, links: list[Link], state: State, engine: EngineMemory) -> Timing:
    by_kind = {link.kind: float(link.seconds) for link in links}
    logprobs, update = _passes(setup, by_kind, state)
    moves, reference = int(setup.keeps_host_copies), int(setup.copies_reference)
    weights, optimizer, rate = state.weights, state.largest_optimizer, setup.card.host_bytes * setup.assumed.host_share
    offload = figure(
        "offload and onload", lambda: (2 * moves * (weights + optimizer) + 3 * reference * weights) / rate, "s"
    )
    decoding = decoding_step(setup, engine.weights, engine.concurrent, setup.mean_prompt + setup.mean_response / 2)
    if (lengths := setup.response_lengths) is not None:
        sampling = _simulated(setup, engine, decoding, lengths, logprobs + update + offload)
    else:  # full batches until no sequence waits, and a tail until the longest responses end
        sequences, concurrent = sequences_per_engine(setup), engine.concurrent
        prefill = sequences / setup.config.algorithm.group_size * setup.mean_prompt * token_seconds(setup)
        response, longest = setup.mean_response, setup.config.rollout.max_response_length
        full, last = decoding, decoding.at(concurrent=1)
        sampling = figure(
            "sampling",
            lambda: prefill + ceil(sequences / concurrent) * response * full + (longest - response) * last,
            "s",
        )
    sync = product("sync", "s", sync=by_kind.get("sync to the engines", 0.0))
    phases = [
        sampling,
        logprobs,
        update,
        offload,
        sync,
        product("everything else", "s", overhead=setup.assumed.step_overhead_s),
    ]
    step, gpus = total("a step", phases, "s"), setup.world_size
    peak, trainers = setup.card.bf16_flops, setup.layout.world_size
    tokens, outputs, (updates, _) = setup.batch.tokens, setup.batch.samples * setup.mean_response, setup.num_passes
    pairs = tokens * setup.mean_seen
    # Only responses go through the output layer.
    flops = model_flops.of_totals(
        setup.shape, tokens, pairs, outputs, experts_per_token=setup.experts_per_token
    ).forward
    passes = _passes_of_update(setup)
    speed = figure("tokens per second per GPU", lambda: tokens / (step * gpus), "")
    flops_share = figure(
        "model FLOPs of the update, of the bf16 peak", lambda: passes * flops * updates / (update * trainers * peak), ""
    )
    return Timing(phases, step, decoding, speed, flops_share)


def _passes(setup: PlannedJob, by_kind: dict[str, float], state: State) -> tuple[TracedNumber, TracedNumber]:
    """Return the times of the log-probs and of the update."""
    layout, config, in_fp8 = setup.layout, setup.config, len(setup.layers_in_fp8)
    layers, output = _layers_seconds(setup, in_fp8), _output_seconds(setup)
    reference_layers = layers if config.precision.fp8_reference else _layers_seconds(setup, 0)
    # Transformer Engine computes with some keys and values while it sends others.
    ring = by_kind.get("context parallel", 0.0) * (1 - setup.assumed.overlap_share * setup.uses_te)
    within = by_kind.get("tensor parallel", 0.0) + by_kind.get("experts", 0.0) + ring
    (updates, forwards), reference = setup.num_passes, int(setup.has_reference)
    taught: float = 0  # a forward pass of each teacher over a step's tokens
    for one in setup.of_teachers():
        largest = _layers_seconds(one, 0)
        taught += max(largest, one.num_layers(layout.pp - 1) / one.largest_stage * largest + _output_seconds(one))
    passes, outputs = _passes_of_update(setup) + _repeated(setup), 4 if config.model.lora is None else 3
    # Interleaved stages overlap their sends with computation; other stages wait for them.
    pipeline = 0.0 if layout.vpp > 1 else by_kind.get("pipeline", 0.0)
    bubble, last = setup.batch.bubble, setup.num_layers(layout.pp - 1) / setup.largest_stage
    overlap = 0.5 * config.layout.overlap_grad_reduce + 0.5 * config.layout.overlap_param_gather
    reduce = by_kind.get("gradients and weights", 0.0) * (1 - setup.assumed.overlap_share * overlap)
    touched = 2 * state.storage.optimizer_bytes + 4 + setup.itemsize  # bytes per element in an optimizer step
    touched_bytes = config.batch.optimizer_steps * (state.largest_share * touched + state.gradients)
    adam = touched_bytes / (setup.card.hbm_bytes * setup.assumed.hbm_share)
    if config.optimizer.cpu_offload:  # gradients to the host, the steps there, weights back
        moved = state.largest_share * (FP32 + setup.itemsize) / (setup.card.host_bytes * setup.assumed.host_share)
        stepped = state.largest_share * 2 * state.storage.host_bytes / setup.assumed.cpu_adam_bytes
        adam += config.batch.optimizer_steps * (moved + stepped)
    overhead = config.batch.mini_batches * setup.batch.micro_batches * setup.largest_stage * setup.assumed.pass_layer_s
    in_updates = passes * updates / (passes * updates + forwards)  # share of all passes that updates run
    share = 1 - in_updates
    logprobs = figure(
        "log-probs",
        lambda: (
            (
                (forwards - reference) * max(layers, last * layers + output)
                + reference * max(reference_layers, last * reference_layers + output)
                + taught
                + forwards * overhead
            )
            / (1 - bubble)
            + (within + pipeline) * share
        ),
        "s",
    )
    update = figure(
        "update",
        lambda: (
            updates
            * (max(passes * layers, passes * last * layers + outputs * output) + passes * overhead)
            / (1 - bubble)
            + (within + pipeline) * in_updates
            + reduce
            + adam
        ),
        "s",
    )
    return logprobs, update


def _passes_of_update(setup: PlannedJob) -> float:
    """Return the time of an update's passes relative to a forward pass. A frozen base has no weight gradients."""
    products, attention = _layer_parts(setup)
    return 3 if setup.config.model.lora is None else 3 - products / (products + attention)


def _layer_parts(setup: PlannedJob) -> tuple[float, float]:
    """Return the times of a layer's products with weights and of attention; the unit is a bf16 FLOP at full rate."""
    weights, assumed = model_flops.layer_weights(setup.shape, setup.experts_per_token), setup.assumed
    return 2 * weights / assumed.matmul_share, _attention_flops(setup) / assumed.attention_share


def _attention_flops(setup: PlannedJob) -> float:
    """Return the FLOPs of attention for a token, as a mean over all layers. Linear attention is in `layer_weights`."""
    one = model_flops.of_totals(setup.shape, 1, setup.mean_seen, 0, experts_per_token=setup.experts_per_token)
    return one.attention / setup.shape.num_layers


def _repeated(setup: PlannedJob) -> float:
    """Return the share of a forward pass through the layers that the backward pass computes again."""
    shape, (products, attention) = setup.shape, _layer_parts(setup)
    ffn = shape.moe_ffn * setup.experts_per_token + shape.shared_ffn if shape.num_experts else shape.ffn
    mlp = 6 * shape.hidden * ffn / setup.assumed.matmul_share
    part = "moe" if shape.num_experts else "mlp"
    selected = mlp * (part in setup.recomputed) + attention * ("core_attn" in setup.recomputed)
    return setup.share_recomputed + selected / (products + attention)


def _layers_seconds(setup: PlannedJob, num_in_fp8: int) -> float:
    """Return the time of one forward pass over a step's tokens through the layers of the largest stage."""
    card, assumed, in_fp8 = setup.card, setup.assumed, num_in_fp8 / setup.shape.num_layers
    weights = model_flops.layer_weights(setup.shape, setup.experts_per_token)
    imbalance = assumed.expert_imbalance if setup.layout.ep > 1 else 1.0
    bf16_rate = card.bf16_flops * assumed.matmul_share
    fp8_rate = (card.fp8_flops or card.bf16_flops) * assumed.fp8_matmul_share
    products = 2 * weights * imbalance * ((1 - in_fp8) / bf16_rate + in_fp8 / fp8_rate)
    # The tokens of a context-parallel rank see as many others as all tokens do, on average.
    attention = _attention_flops(setup) / (card.bf16_flops * assumed.attention_share)
    return setup.largest_stage * setup.tokens_per_rank / setup.layout.tp * (products + attention)


def _output_seconds(setup: PlannedJob) -> float:
    """Return the time to multiply the responses' hidden states by the output weight once, on the last stage."""
    tokens, shape = setup.batch.samples * setup.mean_response / setup.layout.num_replicas, setup.shape
    return (
        2
        * tokens
        * shape.hidden
        * shape.vocab
        / setup.layout.tp
        / (setup.card.bf16_flops * setup.assumed.logprob_share)
    )


def _simulated(
    setup: PlannedJob, engine: EngineMemory, step: TracedNumber, lengths: Lengths, training: float
) -> TracedNumber:
    """Return the simulated time that a step waits until its groups are complete; see generation.py."""
    rollout, prompts, group = (
        setup.config.rollout,
        setup.config.batch.prompts_per_step,
        setup.config.algorithm.group_size,
    )
    concurrent, without = int(engine.concurrent), step.at(concurrent=1, context=0)
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
    schedule = StepGroups(prompts, group, num_started, ahead, rollout.keeps_unfinished, rollout.max_staleness)
    return product(
        "sampling", "s", simulated=mean_wait(engines, lengths, setup.mean_prompt, schedule, training if ahead else 0.0)
    )


def decoding_step(setup: PlannedJob, weights: Number, concurrent: Number, context: float) -> TracedNumber:
    """Return the time in which an engine decodes one token of each sequence; `context` is their mean length in tokens.

    The times to read the weights and to multiply by them are added, because published figures of large batches show no
    overlap.
    """
    shape, assumed, per_token, tp = setup.shape, setup.assumed, cache_bytes_per_token(setup), setup.config.rollout.tp
    layers, hidden, b = shape.num_layers, shape.hidden, setup.engine_itemsize
    num_reduced, nvlink = 2 if tp > 1 else 0, setup.card.nvlink_bytes * assumed.nvlink_share  # all-reduces per layer
    once, latency, products = assumed.decode_step_s, assumed.all_reduce_s, token_seconds(setup)
    kernels = assumed.decode_layer_s if setup.is_served else assumed.embedded_layer_s
    hbm = setup.card.hbm_bytes * assumed.decode_hbm_share
    return figure(
        "a decoding step",
        lambda: (
            once
            + layers * (kernels + num_reduced * (latency + 2 * concurrent * hidden * b * (tp - 1) / tp / nvlink))
            + (weights + concurrent * context * per_token) / hbm
            + concurrent * products
        ),
        "s",
    )


def token_seconds(setup: PlannedJob) -> float:
    """Return the time of an engine's matrix products for one token."""
    shape, card, rollout = setup.shape, setup.card, setup.config.rollout
    weights = shape.num_layers * model_flops.layer_weights(shape, setup.experts_per_token) + shape.hidden * shape.vocab
    in_fp8 = setup.is_served and rollout.quantization is not None
    peak = (card.fp8_flops if in_fp8 else 0) or card.bf16_flops
    return 2 * weights / (rollout.tp * peak * setup.assumed.prefill_share)
