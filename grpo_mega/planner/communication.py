"""What one rank sends in a step, by kind, over which link, and how many groups of ranks that order of ranks cuts at nodes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from grpo_mega.planner.batch import Batch
from grpo_mega.planner.engine import received_weights
from grpo_mega.planner.figures import Figure, Number, figure
from grpo_mega.planner.setup import Setup
from grpo_mega.planner.state import State
from grpo_mega.weights.layout import MegatronLayout


@dataclass(frozen=True)
class Link:
    """One kind of communication."""

    kind: str
    sent: Figure  # bytes that the busiest rank sends in a step
    num_groups: int  # of ranks that talk to one another
    num_crossing: int  # of these, with ranks on several nodes
    seconds: Figure  # of one step; what overlaps with computing not taken off

    @property
    def crosses(self) -> bool:
        return self.num_crossing > 0


@functools.cache
def groups(layout: MegatronLayout, axis: str) -> tuple[tuple[int, ...], ...]:
    """Ranks that differ along one axis only: tp, pp, dp, ep (within dp) or edp (data-parallel ranks of the same experts)."""
    found: dict[tuple[int, ...], list[int]] = {}
    key: dict[str, Callable[[int, int, int], tuple[int, ...]]] = {
        "tp": lambda tp, pp, dp: (pp, dp),
        "pp": lambda tp, pp, dp: (tp, dp),
        "dp": lambda tp, pp, dp: (tp, pp),
        "ep": lambda tp, pp, dp: (tp, pp, dp // layout.ep),
        "edp": lambda tp, pp, dp: (tp, pp, dp % layout.ep),
    }
    for rank in range(layout.world_size):
        found.setdefault(key[axis](*layout.place(rank)), []).append(rank)
    return tuple(map(tuple, found.values()))


def num_crossing(setup: Setup, axis: str) -> int:
    """Groups with ranks on several nodes."""
    return sum(len({rank // setup.gpus_per_node for rank in group}) > 1 for group in groups(setup.layout, axis))


def communication(setup: Setup, batch: Batch, state: State) -> list[Link]:
    """Of a step's update and log-probs, and of the sync. `state` is that of the stage that holds most."""
    layout = setup.layout
    links = []
    if layout.tp > 1:
        links.append(_link(setup, "tensor parallel", "tp", _tensor_parallel(setup, batch)))
    if layout.pp > 1:
        links.append(_link(setup, "pipeline", "pp", _pipeline(setup, batch)))
    if layout.ep > 1:
        links.append(_link(setup, "experts", "ep", _experts(setup, batch)))
    if layout.dp > 1:
        links.append(_link(setup, "gradients and weights", "dp", _data_parallel(setup, state)))
    if setup.world_size > 1:
        links.append(_sync(setup))
    return links


def num_passes(setup: Setup) -> tuple[int, int]:
    """Of a step's tokens: forward and backward in updates; forward only, for log-probs of policy and reference."""
    batch = setup.config.batch
    return batch.epochs, int(setup.config.needs_old_logprobs) + int(setup.has_reference)


def passed_bytes(setup: Setup) -> dict[str, Number | Figure]:
    """Inputs of the formulas: hidden states of one token, and how often layers and tokens are passed."""
    updates, forwards = num_passes(setup)
    return {"b": setup.itemsize, "hidden": setup.shape.hidden, "updates": updates, "forwards": forwards}


def tokens_a_rank(setup: Setup, batch: Batch) -> float:
    """Tokens of a step that each data-parallel rank passes through the model once."""
    return batch.tokens.value / setup.layout.dp


def layers_a_stage(setup: Setup) -> int:
    """Of the stage with most."""
    layout, n = setup.layout, setup.shape.num_layers
    return max(sum(len(layout.layers_of(n, p, chunk)) for chunk in range(layout.vpp)) for p in range(layout.pp))


def _tensor_parallel(setup: Setup, batch: Batch) -> Figure:
    # A layer gathers the sequence before either block and scatters the sums behind it (without sequence parallelism an
    # all-reduce does both): 4 forward; backward the same, and with sequence parallelism each gather again for the weights.
    backward = 6 if setup.config.layout.sequence_parallel else 4
    again = {"none": 0, "selective": 2, "full": 4}[setup.config.model.recompute]
    return figure(
        "tensor parallel",
        "B",
        "(layers * (updates * (4 + backward + again) + 4 * forwards) + ends * (2 * updates + forwards))"
        " * tokens * hidden * b * (tp - 1) / tp",
        passed_bytes(setup),
        layers=layers_a_stage(setup),
        ends=2 if setup.layout.pp == 1 else 1,  # the embedding's sums, the last hidden states
        tokens=tokens_a_rank(setup, batch),
        tp=setup.layout.tp,
        backward=backward,
        again=again,
    )


def _pipeline(setup: Setup, batch: Batch) -> Figure:
    return figure(
        "pipeline",
        "B",
        "vpp * tokens * hidden * b / cut * (2 * updates + forwards)",
        passed_bytes(setup),
        vpp=setup.layout.vpp,
        tokens=tokens_a_rank(setup, batch),
        cut=setup.sequence_parts,
    )


def _experts(setup: Setup, batch: Batch) -> Figure:
    return figure(
        "experts",
        "B",
        "layers * tokens / cut * chosen * hidden * b * (ep - 1) / ep * (4 * updates + 2 * forwards)",
        passed_bytes(setup),
        layers=layers_a_stage(setup),
        tokens=tokens_a_rank(setup, batch),
        cut=setup.sequence_parts,
        chosen=setup.experts_per_token,
        ep=setup.layout.ep,
    )


def _data_parallel(setup: Setup, state: State) -> Figure:
    return figure(
        "gradients and weights",
        "B",
        "optimizer_steps * (4 * (elements + fp8_elements) + b * elements + fp8_elements) * (dp - 1) / dp",
        optimizer_steps=setup.config.batch.optimizer_steps,
        elements=state.elements,
        fp8_elements=state.fp8_elements,
        b=setup.itemsize,
        dp=setup.layout.dp,
    )


def _sync(setup: Setup) -> Link:
    """An upper bound: all of the engine's weights come from other ranks. `sync_traffic` counts them."""
    sent = replace(received_weights(setup, "sync to the engines"), trust="estimate")
    return Link("sync to the engines", sent, 1, int(setup.num_nodes > 1), link_seconds(setup, sent, setup.num_nodes > 1))


def _link(setup: Setup, kind: str, axis: str, sent: Figure) -> Link:
    crossing = num_crossing(setup, axis)
    return Link(kind, sent, len(groups(setup.layout, axis)), crossing, link_seconds(setup, sent, crossing > 0))


def link_seconds(setup: Setup, sent: Figure, crosses: bool) -> Figure:
    assumed, card = setup.assumed, setup.card
    return figure(
        f"{sent.label}, time",
        "s",
        "sent / (rate * share)",
        sent=sent,
        rate=card.network_bytes if crosses else card.nvlink_bytes,
        share=assumed.network_share if crosses else assumed.nvlink_share,
    )
