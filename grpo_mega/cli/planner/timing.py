"""Time of a step by phase, from peak rates and assumed shares of them, and the bytes that a rank sends in it.

Recompute and the fourth product of the log-probs take time, but do not count as model FLOPs (state.py). Bytes are by
kind and link, with the number of groups of ranks that span several nodes.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from grpo_mega.cli.planner.generation import Engines, Lengths, StepGroups, mean_wait
from grpo_mega.cli.planner.job import Number, PlannedJob, TracedNumber, figure, product, total
from grpo_mega.cli.planner.memory import (
    EngineMemory,
    cache_bytes_per_token,
    elements_of,
    received_weights,
    sequences_per_engine,
)
from grpo_mega.cli.planner.state import FP32, State, flops_of_totals
from grpo_mega.weights.architecture import layer_weights
from grpo_mega.weights.layout import MegatronLayout


@dataclass(frozen=True)
class Timing:
    phases: list[TracedNumber]  # seconds, in the order of a step
    step: TracedNumber
    decoding: TracedNumber  # one decoding step of an engine with all its sequences
    tokens_per_second_per_gpu: TracedNumber
    model_flops_share: TracedNumber  # model FLOPs in updates, relative to the bf16 peak


def timing(setup: PlannedJob, links: list[Link], state: State, engine: EngineMemory) -> Timing:
    by_kind = defaultdict(float, {link.kind: float(link.seconds) for link in links})
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
    sync = product("sync", "s", sync=by_kind["sync to the engines"])
    rest = product("everything else", "s", overhead=setup.assumed.step_overhead_s)
    phases = [sampling, logprobs, update, offload, sync, rest]
    step, gpus = total("a step", phases, "s"), setup.world_size
    peak, trainers = setup.card.bf16_flops, setup.layout.world_size
    tokens, outputs, (updates, _) = setup.batch.tokens, setup.batch.samples * setup.mean_response, setup.num_passes
    pairs = tokens * setup.mean_seen
    # Only responses go through the output layer.
    flops = flops_of_totals(setup.shape, tokens, pairs, outputs, experts_per_token=setup.experts_per_token).forward
    passes = _passes_of_update(setup)
    speed = figure("tokens per second per GPU", lambda: tokens / (step * gpus), "")
    flops_share = figure(
        "model FLOPs of the update, of the bf16 peak", lambda: passes * flops * updates / (update * trainers * peak), ""
    )
    return Timing(phases, step, decoding, speed, flops_share)


def _passes(setup: PlannedJob, by_kind: Mapping[str, float], state: State) -> tuple[TracedNumber, TracedNumber]:
    """Return the times of the log-probs and of the update. `by_kind` has a time for every kind of link."""
    layout, config, in_fp8 = setup.layout, setup.config, len(setup.layers_in_fp8)
    layers, output = _layers_seconds(setup, in_fp8), _output_seconds(setup)
    reference_layers = layers if config.precision.fp8_reference else _layers_seconds(setup, 0)
    # Transformer Engine computes with some keys and values while it sends others.
    ring = by_kind["context parallel"] * (1 - setup.assumed.overlap_share * setup.uses_te)
    within = by_kind["tensor parallel"] + by_kind["experts"] + ring
    (updates, forwards), reference = setup.num_passes, int(setup.has_reference)
    taught: float = 0  # a forward pass of each teacher over a step's tokens
    for one in setup.of_teachers():
        largest = _layers_seconds(one, 0)
        taught += max(largest, one.num_layers(layout.pp - 1) / one.largest_stage * largest + _output_seconds(one))
    passes, outputs = _passes_of_update(setup) + _repeated(setup), 4 if config.model.lora is None else 3
    # Interleaved stages overlap their sends with computation; other stages wait for them.
    pipeline = 0.0 if layout.vpp > 1 else by_kind["pipeline"]
    bubble, last = setup.batch.bubble, setup.num_layers(layout.pp - 1) / setup.largest_stage
    overlap = 0.5 * config.layout.overlap_grad_reduce + 0.5 * config.layout.overlap_param_gather
    reduce = by_kind["gradients and weights"] * (1 - setup.assumed.overlap_share * overlap)
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
    weights, assumed = layer_weights(setup.shape, setup.experts_per_token), setup.assumed
    return 2 * weights / assumed.matmul_share, _attention_flops(setup) / assumed.attention_share


def _attention_flops(setup: PlannedJob) -> float:
    """Return the FLOPs of attention for a token, as a mean over all layers. Linear attention is in `layer_weights`."""
    one = flops_of_totals(setup.shape, 1, setup.mean_seen, 0, experts_per_token=setup.experts_per_token)
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
    weights = layer_weights(setup.shape, setup.experts_per_token)
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
    rate = setup.card.bf16_flops * setup.assumed.logprob_share
    return 2 * tokens * shape.hidden * shape.vocab / setup.layout.tp / rate


def _simulated(
    setup: PlannedJob, engine: EngineMemory, step: TracedNumber, lengths: Lengths, training: float
) -> TracedNumber:
    """Return the simulated time that a step waits until its groups are complete; see generation.py."""
    rollout, prompts = setup.config.rollout, setup.config.batch.prompts_per_step
    group = setup.config.algorithm.group_size
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
    weights = shape.num_layers * layer_weights(shape, setup.experts_per_token) + shape.hidden * shape.vocab
    in_fp8 = setup.is_served and rollout.quantization is not None
    peak = (card.fp8_flops if in_fp8 else 0) or card.bf16_flops
    return 2 * weights / (rollout.tp * peak * setup.assumed.prefill_share)


@dataclass(frozen=True)
class Link:
    """One kind of communication."""

    sent: TracedNumber  # bytes that the busiest rank sends in a step
    num_groups: int  # number of process groups that exchange tensors
    num_crossing: int  # number of groups that span several nodes
    seconds: TracedNumber  # time per step; overlap with computation is not deducted

    @property
    def kind(self) -> str:
        return self.sent.label

    @property
    def crosses(self) -> bool:
        return self.num_crossing > 0


@functools.cache
def groups(layout: MegatronLayout, axis: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that differ only along one axis.

    The axes are tp, cp, pp, dp (includes cp); for experts etp, ep and edp (ranks with the same part of an expert).
    """
    members: dict[object, list[int]] = {}  # keyed by the rank's place along all other axes
    tp, experts = layout.tp, layout.etp * layout.ep
    for rank in range(layout.world_size):
        (tp_rank, pp, dp_rank), in_stage = layout.place(rank), layout.rank_in_stage(rank)
        key = {
            "tp": (pp, in_stage // tp),
            "cp": (pp, tp_rank, dp_rank),
            "pp": in_stage,
            "dp": (pp, tp_rank),
            "etp": (pp, in_stage // layout.etp),
            "ep": (pp, in_stage % layout.etp, in_stage // experts),
            "edp": (pp, in_stage % experts),
        }
        members.setdefault(key[axis], []).append(rank)
    return tuple(map(tuple, members.values()))


def communication(setup: PlannedJob, state: State) -> Iterator[Link]:
    """Yield the communication of a step's update, log-probs and sync. `state` is the state of the largest stage."""
    layout, config, hidden, b = setup.layout, setup.config, setup.shape.hidden, setup.itemsize
    vpp, ep, replicas = layout.vpp, layout.ep, layout.num_replicas
    expert_replicas = layout.num_expert_replicas if setup.shape.num_experts else 1
    tokens, cut, (updates, forwards) = setup.tokens_per_rank, setup.sequence_parts, setup.num_passes
    moe_layers = max(setup.num_moe_layers(pp_rank) for pp_rank in range(layout.pp))
    if layout.tp > 1:
        yield _link(setup, _tensor_parallel(setup, moe_layers), groups(layout, "tp"))
    if layout.cp > 1:
        yield _link(setup, _context_parallel(setup), groups(layout, "cp"))
    if layout.pp > 1:
        sent = figure("pipeline", lambda: vpp * tokens * hidden * b / cut * (2 * updates + forwards))
        yield _link(setup, sent, groups(layout, "pp"))
    if ep > 1:
        chosen, passes = setup.experts_per_token, 4 + 2 * mlp_repeated(setup, "moe")
        sent = figure(
            "experts",
            lambda: moe_layers * tokens / cut * chosen * hidden * b * (ep - 1) / ep * (passes * updates + 2 * forwards),
        )
        yield _link(setup, sent, groups(layout, "ep"))
    if max(replicas, expert_replicas) > 1:
        optimizer_steps, elements, fp8_elements = config.batch.optimizer_steps, state.elements, state.fp8_elements
        spread = state.spread_elements / (elements + fp8_elements)  # share of experts, which fewer ranks hold in common
        sent = figure(
            "gradients and weights",
            lambda: (
                optimizer_steps
                * (4 * (elements + fp8_elements) + b * elements + fp8_elements)
                * (1 - (1 - spread) / replicas - spread / expert_replicas)
            ),
        )
        yield _link(setup, sent, groups(layout, "dp"))
    if setup.world_size > 1:
        # This is an upper bound: all of the engine's weights come from other ranks. `plan.sync_traffic` counts them
        # exactly.
        label, engines, trainers = "sync to the engines", setup.num_engine_ranks, layout.world_size
        received = received_weights(setup, label)
        if setup.sends_adapter:
            elements = elements_of(setup.trained_family, setup.shape, None).total
            received = product(label, elements=elements, b=setup.engine_itemsize)
        sent = replace(received, trust="estimate")
        if setup.is_separate and engines > trainers:  # fewer ranks send than receive
            sent = figure(label, lambda: received * engines / trainers)
        yield _link(setup, sent, [range(setup.world_size)])


def mlp_repeated(setup: PlannedJob, part: str) -> float:
    """Return the share of the layers whose MLP ("mlp" or "moe") the backward pass computes again."""
    return 1.0 if part in setup.recomputed else setup.share_recomputed


def _link(setup: PlannedJob, sent: TracedNumber, members: Sequence[Sequence[int]]) -> Link:
    """Return the link between the ranks of each group. It is the network if any group spans several nodes."""
    assumed, card = setup.assumed, setup.card
    num_crossing = sum(len({rank // setup.gpus_per_node for rank in group}) > 1 for group in members)
    rate = card.network_bytes if num_crossing else card.nvlink_bytes
    share = assumed.network_share if num_crossing else assumed.nvlink_share
    return Link(sent, len(members), num_crossing, figure(f"{sent.label}, time", lambda: sent / (rate * share), "s"))


def _tensor_parallel(setup: PlannedJob, moe_layers: int) -> TracedNumber:
    """Return the bytes between tensor-parallel ranks.

    A layer gathers the sequence before each block and reduce-scatters the sums after it. Without sequence parallelism
    an all-reduce does both. That is 4 collectives in the forward pass and 4 in the backward pass; with sequence
    parallelism the backward pass also repeats each gather for the weight gradients. Ranks that split an expert (etp)
    gather each token once per chosen expert and keep it; their sums are reduce-scattered in fp32. Multi-latent
    attention gathers latents and the keys' rotary part; the rotary part is not gathered again.
    """
    shape, config, b, tp, layers = setup.shape, setup.config, setup.itemsize, setup.layout.tp, setup.largest_stage
    hidden, tokens, (updates, forwards) = shape.hidden, setup.tokens_per_rank, setup.num_passes
    shared = 2 if shape.shared_ffn else 0
    latents = ((shape.q_lora or hidden) + shape.kv_lora) / hidden if shape.kv_lora else 1
    of_experts = (setup.layout.etp - 1) / (tp - 1)  # relative to an exchange between all tensor-parallel ranks
    attention = 1 + latents + shape.rope_dim / hidden
    mlp = setup.experts_per_token * (1 + 4 / b) * of_experts + shared
    gathers = int(config.layout.sequence_parallel and config.model.lora is None)  # frozen weights have no gradients
    all_again, mlp_again = setup.share_recomputed, mlp_repeated(setup, "moe" if moe_layers else "mlp")
    ends = 2 if setup.layout.pp == 1 else 1  # the embedding's sums and the last hidden states
    return figure(
        "tensor parallel",
        lambda: (
            (
                layers * attention * (updates * (2 + all_again) + forwards)
                + (2 * (layers - moe_layers) + mlp * moe_layers) * (updates * (2 + mlp_again) + forwards)
                + gathers * updates * (layers * latents + layers - moe_layers + moe_layers * shared / 2)
                + ends * (2 * updates + forwards)
            )
            * (tokens * hidden * b * (tp - 1) / tp)
        ),
    )


def _context_parallel(setup: PlannedJob) -> TracedNumber:
    """Return the bytes between context-parallel ranks: each sends the keys and values of its tokens to all others.

    This happens once in the forward pass, by a gather or from neighbour to neighbour (Transformer Engine's p2p), and
    once more if attention is recomputed. In the backward pass the gradients return in the same way, and p2p sends keys
    and values again. With a2a each rank sends the others their heads of queries, keys and values, and receives the
    output of its tokens. The backward pass does the same with gradients.
    """
    tp, cp, b, kv, layers = setup.layout.tp, setup.layout.cp, setup.itemsize, setup.keys_and_values, setup.largest_stage
    tokens, (updates, forwards), q = setup.tokens_per_rank, setup.num_passes, setup.shape.q // tp
    label, again = "context parallel", 1.0 if "core_attn" in setup.recomputed else setup.share_recomputed
    if setup.uses_te and setup.config.layout.cp_comm_type == "a2a":
        passes = updates * (2 + again) + forwards
        return figure(label, lambda: layers * tokens * (2 * q + kv) * b * (cp - 1) / cp * passes)
    again += int(setup.uses_te)
    return figure(label, lambda: layers * tokens * kv * b * (cp - 1) * (updates * (2 + again) + forwards))
