"""Memory of a device by phase, in the order in which policy and engine take turns (see colocation.py), and a node's host.

Each phase is a list of figures, and their sum. The checkpoint's gather of the optimizer's state is counted in its own phase.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_mega.planner.activations import activations
from grpo_mega.planner.engine import EngineMemory, engine_memory, weight_elements
from grpo_mega.planner.figures import GIB, Figure, Trust, figure, total
from grpo_mega.planner.setup import Setup
from grpo_mega.planner.state import FP32, State, Storage, stage_state

PHASES = ("sampling", "log-probs", "update", "checkpoint", "sync")


@dataclass(frozen=True)
class StageMemory:
    """Of the devices of one pipeline stage."""

    pp_rank: int
    state: State
    phases: dict[str, list[Figure]]
    totals: dict[str, Figure]

    @property
    def peak(self) -> Figure:
        return max(self.totals.values(), key=lambda figure: figure.value)

    @property
    def peak_phase(self) -> str:
        return max(self.totals, key=lambda phase: self.totals[phase].value)


def device_memory(setup: Setup) -> list[StageMemory]:
    """By stage."""
    engine = engine_memory(setup)
    return [_stage(setup, engine, pp_rank) for pp_rank in range(setup.layout.pp)]


def _stage(setup: Setup, engine: EngineMemory, pp_rank: int) -> StageMemory:
    state = state_of(setup, pp_rank)
    weights, gradients, optimizer = state_figures(setup, state)
    acts = activations(setup, pp_rank)
    fixed = [*_contexts(setup), engine.asleep]
    trainer = [weights, gradients, optimizer, *_fp8_copies(setup, state, pp_rank), _workspace(setup)]
    awake = [engine.weights, engine.cache, engine.extra]
    resident = [] if setup.takes_turns else awake[:2] if setup.is_served else awake[:1]
    stays = [] if setup.keeps_host_copies else trainer[:3]
    phases = {
        "sampling": [*fixed, *stays, *awake],
        "log-probs": [*fixed, *trainer, *resident, *_with_slack(setup, [acts.forward_only, acts.logprobs])],
        "update": [*fixed, *trainer, *resident, *_with_slack(setup, acts.training)],
        "checkpoint": [*fixed, *trainer, *resident, *_with_slack(setup, [_gather(setup, state)])],
        "sync": [*fixed, *(trainer[:1] if setup.keeps_host_copies else stays), *awake[:1], *resident[1:], _buckets(setup)],
    }
    if setup.is_served and not setup.takes_turns:
        phases["sync"] = [*fixed, *trainer[:3], *resident, _buckets(setup)]
    return StageMemory(pp_rank, state, phases, {phase: total(phase, "B", parts) for phase, parts in phases.items()})


def state_of(setup: Setup, pp_rank: int) -> State:
    storage = Storage.of(setup.config, setup.shape)
    return stage_state(setup.family, setup.shape, setup.layout, pp_rank, storage, setup.uses_te)


def state_figures(setup: Setup, state: State) -> list[Figure]:
    """Weights, gradients and optimizer state of the rank that holds most of its stage."""
    config = setup.config
    trust: Trust = "unproven" if config.precision.fp8_parameters or config.optimizer.moments_dtype != "float32" else "exact"
    return [
        figure(
            "weights",
            "B",
            "b * elements + fp8_elements",
            trust=trust,
            b=setup.itemsize,
            elements=state.elements,
            fp8_elements=state.fp8_elements,
        ),
        figure("gradients", "B", "4 * elements", trust="exact", elements=state.elements + state.fp8_elements),
        figure(
            "optimizer state",
            "B",
            "(master + moments) * share",
            trust=trust,
            master=state.master_bytes,
            moments=state.moment_bytes,
            share=state.largest_share,
        ),
    ]


def _contexts(setup: Setup) -> list[Figure]:
    context = setup.assumed.context_gib * GIB
    communicator = setup.assumed.communicator_gib * GIB
    return [
        figure("CUDA contexts", "B", "count * context", count=2 if setup.is_served else 1, context=context),
        figure(
            "NCCL buffers",
            "B",
            "(trainer + engine) * communicator",
            trainer=len(communicators(setup)),
            engine=1 if setup.is_served and setup.config.rollout.tp > 1 else 0,
            communicator=communicator,
        ),
    ]


def communicators(setup: Setup) -> list[str]:
    """The trainer's groups of several ranks between which tensors move."""
    layout = setup.layout
    sizes = {
        "tensor parallel": layout.tp,
        "pipeline": layout.pp,
        "data parallel": layout.dp,
        "experts": layout.ep * layout.tp if layout.ep > 1 else 1,
        "experts' data parallel": layout.dp // layout.ep if layout.ep > 1 else 1,
        "embeddings": layout.pp if setup.shape.tied else 1,
        "model parallel": layout.tp * layout.pp,  # the gradient norm
        "world": layout.world_size,  # the sync
    }
    return [name for name, size in sizes.items() if size > 1]


def _workspace(setup: Setup) -> Figure:
    return figure("workspaces", "B", "workspace", workspace=setup.assumed.workspace_gib * GIB)


def _fp8_copies(setup: Setup, state: State, pp_rank: int) -> list[Figure]:
    """Transformer Engine's fp8 copies of the linear weights, as they are and transposed; of weights in FP8 the latter alone."""
    precision, shape, layout = setup.config.precision, setup.shape, setup.layout
    if precision.fp8 is None:
        return []
    in_fp8 = (shape.num_layers - precision.first_layers_bf16 - precision.last_layers_bf16) / shape.num_layers
    return [
        figure(
            "fp8 copies of weights",
            "B",
            "copies * in_fp8 * max(0, elements - ends * vocab * hidden / tp)",
            trust="unproven",
            copies=1 if precision.fp8_parameters else 2,
            in_fp8=max(0.0, in_fp8),
            elements=state.num_parameters,
            ends=int(pp_rank == 0) + int(pp_rank == layout.pp - 1),  # embedding and output layer, which stay in bf16
            vocab=shape.vocab,
            hidden=shape.hidden,
            tp=layout.tp,
        )
    ]


def _with_slack(setup: Setup, parts: list[Figure]) -> list[Figure]:
    moving = sum(part.value for part in parts)
    return [*parts, figure("fragmentation", "B", "share * moving", share=setup.assumed.slack_share, moving=moving)]


def _gather(setup: Setup, state: State) -> Figure:
    """A save gathers each part of the optimizer's state over data-parallel ranks, fp32, one part at a time."""
    return figure(
        "gathered for a save",
        "B",
        "(1 + 1 / dp) * elements * 4",
        dp=setup.layout.dp,
        elements=state.elements + state.fp8_elements,
    )


def _buckets(setup: Setup) -> Figure:
    return figure("sync buckets", "B", "3 * bucket", bucket=setup.config.sync.bucket_mib * 2**20)  # two received, one sent


@dataclass(frozen=True)
class HostMemory:
    """Of the node that needs most."""

    pinned: list[Figure]
    pinned_total: Figure
    other: list[Figure]
    saving: Figure  # beyond that, while a checkpoint is gathered and staged
    peak: Figure


def host_memory(setup: Setup) -> HostMemory:
    layout, ranks, assumed = setup.layout, setup.ranks_per_node, setup.assumed
    states = [state_of(setup, pp_rank) for pp_rank in range(layout.pp)]
    by_node: dict[int, list[State]] = {}
    for rank in range(layout.world_size):
        by_node.setdefault(rank // setup.gpus_per_node, []).append(states[layout.place(rank)[1]])
    node = max(by_node.values(), key=lambda found: sum(s.weights + s.largest_share for s in found))
    weights = sum(s.weights for s in node)
    optimizer = sum(s.largest_share * (s.master_bytes + s.moment_bytes) for s in node)
    moves = int(setup.keeps_host_copies)
    pinned = [
        figure("weights", "B", "needed * weights", needed=max(moves, int(setup.has_reference)), weights=weights),
        figure("optimizer state", "B", "needed * optimizer", needed=moves, optimizer=optimizer),
        figure("reference", "B", "needed * weights", needed=int(setup.has_reference), weights=weights),
    ]
    pinned_total = total("pinned a node", "B", pinned)
    leaders = ranks // setup.config.rollout.tp if setup.is_served else ranks
    other = [
        figure("ranks", "B", "ranks * each", ranks=ranks, each=assumed.rank_host_gib * GIB),
        figure("engines", "B", "ranks * each", ranks=ranks if setup.is_served else 0, each=assumed.engine_host_gib * GIB),
        figure(
            "reward workers",
            "B",
            "leaders * workers * each",
            leaders=leaders,
            workers=setup.config.rewards.num_workers,
            each=assumed.worker_host_gib * GIB,
        ),
    ]
    saving = figure(
        "while saving",
        "B",
        "gathered * elements + staged",
        gathered=3 * FP32,  # on every rank
        elements=sum(s.num_parameters for s in node),
        staged=checkpoint_bytes(setup).value * ranks / layout.world_size,
    )
    return HostMemory(pinned, pinned_total, other, saving, total("host peak a node", "B", [pinned_total, *other, saving]))


def checkpoint_bytes(setup: Setup) -> Figure:
    """Weights, and masters and moments in fp32."""
    return figure(
        "a checkpoint",
        "B",
        "parameters * (b + 12)",
        parameters=weight_elements(setup.family, setup.shape, None),
        b=setup.itemsize,
    )
