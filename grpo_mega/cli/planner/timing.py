"""A rough time of each phase of a step: FLOPs or bytes, over a peak rate times a measured or assumed share of it.

Communication inside a pass, stragglers and imbalance are not counted. They are as much a part of the share as the
kernels are. Only decoding has more terms, because latencies decide there; it is fitted to published figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from grpo_mega.cli.planner.job import Figure, PlannedJob, total
from grpo_mega.cli.planner.memory import (
    EngineMemory,
    cache_bytes_per_token,
    elements_of,
    received_weights,
    sequences_per_engine,
)
from grpo_mega.cli.planner.state import Flops, State, flops_of_totals
from grpo_mega.weights.architecture import layer_weights


@dataclass(frozen=True)
class Timing:
    phases: list[Figure]  # seconds, in the order of a step
    step: Figure
    tokens_per_second_per_gpu: Figure


def timing(setup: PlannedJob, state: State, engine: EngineMemory) -> Timing:
    """Return the times of a step. `state` is the state of the largest stage."""
    config, assumed, (updates, _) = setup.config, setup.assumed, setup.num_passes
    logprobs = _logprobs(setup)
    update = updates * update_passes(setup) * forward_seconds(setup, setup.layers_in_fp8)
    if config.optimizer.cpu_offload:
        stepped = 2 * state.storage.host_bytes * state.largest_share / assumed.cpu_adam_bytes
        update += config.batch.optimizer_steps * stepped
    moved = 2 * setup.keeps_host_copies * (state.weights + state.largest_optimizer)
    moved += 3 * setup.copies_reference * state.weights
    offload = moved / (setup.card.host_bytes * assumed.link_share)
    sampling = sampling_seconds(setup, engine)
    if config.rollout.num_ahead(config.batch.prompts_per_step):  # engines generate while the others train
        sampling = max(0.0, sampling - logprobs - update - offload)
    phases = [
        Figure("sampling", sampling, "s"),
        Figure("log-probs", logprobs, "s"),
        Figure("update", update, "s"),
        Figure("offload and onload", offload, "s"),
        Figure("sync", sync_seconds(setup), "s"),
        Figure("everything else", assumed.step_overhead_s, "s"),
    ]
    step = total("a step", phases, "s")
    rate = setup.batch.tokens / (step * setup.world_size)
    return Timing(phases, step, Figure("tokens per second per GPU", rate, ""))


def forward_flops(setup: PlannedJob) -> Flops:
    """Return the operations of a forward pass over a step's tokens. Only responses go through the output layer."""
    tokens, outputs = setup.batch.tokens, setup.batch.samples * setup.mean_response
    pairs = tokens * setup.mean_seen
    return flops_of_totals(setup.shape, tokens, pairs, outputs, experts_per_token=setup.experts_per_token)


def forward_seconds(setup: PlannedJob, in_fp8: range) -> float:
    """Return the time of a forward pass over a step's tokens, with the pipeline's bubble."""
    faster = 1 + (setup.assumed.fp8_speed - 1) * len(in_fp8) / setup.shape.num_layers
    rate = setup.layout.world_size * setup.card.bf16_flops * setup.assumed.pass_share * faster
    return forward_flops(setup).forward / rate / (1 - setup.batch.bubble)


def _logprobs(setup: PlannedJob) -> float:
    """Return the time of the passes without gradients: of the policy, the reference and the teachers."""
    reference, in_fp8 = int(setup.has_reference), setup.layers_in_fp8
    of_reference = in_fp8 if setup.config.precision.fp8_reference else range(0)
    seconds = (setup.num_passes[1] - reference) * forward_seconds(setup, in_fp8)
    seconds += reference * forward_seconds(setup, of_reference)
    return seconds + sum(forward_seconds(one, range(0)) for one in setup.of_teachers())


def update_passes(setup: PlannedJob) -> float:
    """Return the operations of an update relative to a forward pass: backward counts twice, and recomputation once.

    A frozen base has no weight gradients.
    """
    shape, flops, recomputed = setup.shape, forward_flops(setup), setup.recomputed
    ffn = shape.moe_ffn * setup.experts_per_token + shape.shared_ffn if shape.num_experts else shape.ffn
    mlp = 6 * setup.batch.tokens * shape.num_layers * shape.hidden * ffn
    again = setup.share_recomputed * (flops.linear + flops.attention)
    again += mlp * (("moe" if shape.num_experts else "mlp") in recomputed)
    again += flops.attention * ("core_attn" in recomputed)
    frozen = 0 if setup.config.model.lora is None else flops.linear + flops.output
    return 3 + (again - frozen) / flops.forward


def sampling_seconds(setup: PlannedJob, engine: EngineMemory) -> float:
    """Return the time of a step's samples: full batches of mean length, then the longest response alone.

    If unfinished samples continue in the next step, no step waits for the longest one.
    """
    config, response, concurrent = setup.config, setup.mean_response, engine.concurrent
    sequences: float = sequences_per_engine(setup)
    prefill = sequences / config.algorithm.group_size * setup.mean_prompt * token_seconds(setup)
    context = setup.mean_prompt + response / 2
    full = decoding_step(setup, engine.weights, concurrent, context)
    if config.rollout.keeps_unfinished:
        prompts = config.batch.prompts_per_step
        share = prompts / config.rollout.num_started(prompts)  # share of the started samples that a step finishes
        return share * (prefill + sequences / concurrent * response * full)
    last = decoding_step(setup, engine.weights, 1, context)
    tail = (config.rollout.max_response_length - response) * last
    return prefill + ceil(sequences / concurrent) * response * full + tail


def decoding_step(setup: PlannedJob, weights: float, concurrent: float, context: float) -> float:
    """Return the time in which an engine decodes one token of each sequence; `context` is their mean length in tokens.

    The times to read the weights and to multiply by them are added, because published figures of large batches show no
    overlap.
    """
    assumed, card, tp = setup.assumed, setup.card, setup.config.rollout.tp
    kernels = assumed.decode_layer_s if setup.is_served else assumed.embedded_layer_s
    if tp > 1:  # two all-reduces
        exchanged = 2 * concurrent * setup.shape.hidden * setup.engine_itemsize * (tp - 1) / tp
        kernels += 2 * (assumed.all_reduce_s + exchanged / (card.nvlink_bytes * assumed.link_share))
    read = weights + concurrent * context * cache_bytes_per_token(setup)
    overhead = assumed.decode_step_s + setup.shape.num_layers * kernels
    return overhead + read / (card.hbm_bytes * assumed.decode_hbm_share) + concurrent * token_seconds(setup)


def token_seconds(setup: PlannedJob) -> float:
    """Return the time of an engine's matrix products for one token."""
    shape, card, rollout = setup.shape, setup.card, setup.config.rollout
    weights = shape.num_layers * layer_weights(shape, setup.experts_per_token) + shape.hidden * shape.vocab
    in_fp8 = setup.is_served and rollout.quantization is not None
    peak = (card.fp8_flops if in_fp8 else 0) or card.bf16_flops
    return 2 * weights / (rollout.tp * peak * setup.assumed.prefill_share)


def sync_seconds(setup: PlannedJob) -> float:
    """Return the time of a sync in which all of an engine rank's weights come from other ranks: an upper bound."""
    if setup.world_size == 1:
        return 0.0
    received: float = received_weights(setup, "")
    if setup.sends_adapter:
        received = elements_of(setup.trained_family, setup.shape, None).total * setup.engine_itemsize
    if setup.is_separate:  # if fewer ranks send than receive, each sends more
        received *= max(1.0, setup.num_engine_ranks / setup.layout.world_size)
    rate = setup.card.network_bytes if setup.num_nodes > 1 else setup.card.nvlink_bytes
    return received / (rate * setup.assumed.link_share)
