"""The bytes that one rank sends in a step, by kind and link, and how many groups of ranks span several nodes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from grpo_mega.planner.figures import TracedNumber, figure, product
from grpo_mega.planner.job import PlannedJob
from grpo_mega.planner.memory import elements_of, received_weights
from grpo_mega.planner.state import State
from grpo_mega.weights.layout import MegatronLayout


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
    members: dict[tuple[int, ...], list[int]] = {}
    # The keys of a rank's tp_rank, pp_rank and replica index.
    key: dict[str, Callable[[int, int, int], tuple[int, ...]]] = {
        "tp": lambda tp, pp, replica: (pp, replica),
        "cp": lambda tp, pp, replica: (tp, pp, replica // layout.cp),
        "pp": lambda tp, pp, replica: (tp, replica),
        "dp": lambda tp, pp, replica: (tp, pp),
        "etp": lambda tp, pp, replica: (pp, (replica * layout.tp + tp) // layout.etp),
        "ep": lambda tp, pp, replica: (
            pp,
            (replica * layout.tp + tp) % layout.etp,
            (replica * layout.tp + tp) // (layout.etp * layout.ep),
        ),
        "edp": lambda tp, pp, replica: (pp, (replica * layout.tp + tp) % (layout.etp * layout.ep)),
    }
    for rank in range(layout.world_size):
        tp_rank, pp_rank, dp_rank = layout.place(rank)
        members.setdefault(key[axis](tp_rank, pp_rank, dp_rank * layout.cp + layout.cp_rank(rank)), []).append(rank)
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
        received = _received_in_sync(setup)
        engines, trainers = setup.num_engine_ranks, layout.world_size
        sent = replace(received, trust="estimate")
        if setup.is_separate and engines > trainers:  # fewer ranks send than receive
            sent = figure(received.label, lambda: received * engines / trainers)
        yield _link(setup, sent, [range(setup.world_size)])


def _received_in_sync(setup: PlannedJob) -> TracedNumber:
    """Return all bytes that a rank of the engine receives in a sync: the weights, or an adapter."""
    label = "sync to the engines"
    if not setup.sends_adapter:
        return received_weights(setup, label)
    elements = elements_of(setup.trained_family, setup.shape, None).total
    return product(label, trust="exact", elements=elements, b=setup.engine_itemsize)


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
