"""Memory of a device by phase, in the order in which policy and engine take turns (run/colocation.py), and memory of a host.

Each phase is a list of figures and their sum. The gather of the optimizer's state for a checkpoint counts in the checkpoint
phase.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from grpo_mega.planner.activations import activations
from grpo_mega.planner.engine import EngineMemory, elements_of, engine_memory
from grpo_mega.planner.figures import GIB, TracedNumber, Trust, figure, product, total
from grpo_mega.planner.job import PlannedJob
from grpo_mega.planner.state import FP32, State, Storage, stage_state
from grpo_mega.rollout.routes import RouterSizes

PHASES = ("sampling", "log-probs", "update", "checkpoint", "sync")


@dataclass(frozen=True)
class StageMemory:
    """Memory of the devices of one pipeline stage."""

    pp_rank: int
    state: State
    phases: dict[str, list[TracedNumber]]
    totals: dict[str, TracedNumber]
    layer: list[TracedNumber]  # the elements that one layer keeps for its backward pass

    @property
    def peak(self) -> TracedNumber:
        return max(self.totals.values(), key=lambda figure: figure.value)

    @property
    def peak_phase(self) -> str:
        return max(self.totals, key=lambda phase: self.totals[phase].value)


def device_memory(setup: PlannedJob) -> list[StageMemory]:
    """Return the memory of each stage's devices."""
    engine = engine_memory(setup)
    return [_stage(setup, engine, pp_rank) for pp_rank in range(setup.layout.pp)]


def _stage(setup: PlannedJob, engine: EngineMemory, pp_rank: int) -> StageMemory:
    state = state_of(setup, pp_rank)
    acts = activations(setup, pp_rank)
    fixed = _fixed(setup, engine)
    trainer = [*state_figures(setup, state), *_fp8_copies_of(setup, state, pp_rank)]
    # A save gathers the optimizer's fp32 state over replicas, one part of one bucket at a time.
    gathered = product("gathered for a save", "B", elements=state.gathered, bytes=FP32)
    bucket = setup.config.sync.bucket_mib * 2**20
    count = 1 if setup.is_served or setup.is_separate else 3
    moving = product("sync buckets in flight", "B", count=count, bucket=bucket)
    awake = [] if setup.is_separate else [engine.weights, engine.cache, engine.extra]
    resident = [] if setup.takes_turns else awake[:2] if setup.is_served else awake[:1]
    stays = [] if setup.keeps_host_copies else trainer[:3]
    guests = [(teacher_weights(one, pp_rank), activations(one, pp_rank)) for one in setup.of_teachers()]
    # Teachers are on the device one at a time.
    taught = product("teacher", "B", "exact", bytes=max((weights for weights, _ in guests), default=0.0))
    vocab = setup.shape.vocab if setup.config.algorithm.has_vocab_kl and pp_rank == setup.layout.pp - 1 else 0
    hidden = max((shape.hidden for shape, _ in setup.teachers), default=0)
    head = product("teacher's output layer", "B", vocab=vocab, hidden=hidden, bytes=setup.itemsize / setup.layout.tp)
    forward = max([acts.forward_only, *(a.forward_only for _, a in guests)], key=lambda f: f.value)
    phases = {
        "sampling": [*fixed, *stays, *awake],
        "log-probs": [*fixed, *trainer, *resident, taught, *_with_slack(setup, [forward, acts.exchanged, acts.logprobs])],
        "update": [*fixed, *trainer, *resident, head, *_with_slack(setup, acts.training)],
        "checkpoint": [*fixed, *trainer, *resident, *_with_slack(setup, [gathered])],
        "sync": [*fixed, *(trainer[:1] if setup.keeps_host_copies else stays), *awake[:1], *resident[1:], moving],
    }
    if setup.is_served and not setup.is_separate and not setup.takes_turns:
        phases["sync"] = [*fixed, *trainer[:3], *resident, moving]
    totals = {phase: total(phase, "B", parts) for phase, parts in phases.items()}
    return StageMemory(pp_rank, state, phases, totals, acts.layer)


def state_of(setup: PlannedJob, pp_rank: int) -> State:
    storage = Storage.of(setup.config, setup.shape)
    return stage_state(setup.family, setup.shape, setup.layout, pp_rank, storage, setup.uses_te)


def teacher_weights(of_teacher: PlannedJob, pp_rank: int) -> float:
    """Return the bytes of a teacher's weights on a rank of a stage."""
    return float(state_of(of_teacher, pp_rank).num_parameters * of_teacher.itemsize)


def state_figures(setup: PlannedJob, state: State) -> list[TracedNumber]:
    """Return weights, gradients and optimizer state of the stage's rank that holds most."""
    config = setup.config
    trust: Trust = "unproven" if config.precision.fp8_parameters or config.optimizer.moments_dtype != "float32" else "exact"
    b, elements, fp8_elements, share = setup.itemsize, state.elements, state.fp8_elements, state.largest_share
    master, moments = state.storage.master_bytes, state.storage.moment_bytes
    return [
        figure("weights", "B", lambda: b * elements + fp8_elements, trust),
        product("gradients", "B", "exact", bytes=FP32, elements=elements + fp8_elements),
        figure("optimizer state", "B", lambda: (master + moments) * share, trust),
    ]


def _fixed(setup: PlannedJob, engine: EngineMemory) -> list[TracedNumber]:
    """Return the memory that a trainer's device holds in every phase."""
    trainer, communicator = len(communicators(setup)), setup.assumed.communicator_gib * GIB
    bucket, is_served = setup.config.sync.bucket_mib * 2**20, setup.is_served and not setup.is_separate
    served = 1 if is_served and setup.config.rollout.tp > 1 else 0  # the engine's communicators
    return [
        product("CUDA contexts", "B", count=2 if is_served else 1, context=setup.assumed.context_gib * GIB),
        figure("NCCL buffers", "B", lambda: (trainer + served) * communicator),
        product("workspaces", "B", workspace=setup.assumed.workspace_gib * GIB),
        product("sync buckets", "B", count=2 if is_served else 0, bucket=bucket),  # they stay, so handles stay valid
        *([] if setup.is_separate else [engine.asleep]),
    ]


def engine_device(setup: PlannedJob) -> list[TracedNumber]:
    """Return the memory of a separate engine's device. It is the same at all times; empty for colocated engines."""
    if not setup.is_separate:
        return []
    engine, assumed, is_served = engine_memory(setup), setup.assumed, setup.is_served
    # The groups of all ranks, of the engine's side, and of the engine.
    groups = 1 + (setup.num_engine_ranks > 1) + (is_served and setup.config.rollout.tp > 1)
    return [
        product("CUDA contexts", "B", count=2 if is_served else 1, context=assumed.context_gib * GIB),
        product("NCCL buffers", "B", groups=groups, communicator=assumed.communicator_gib * GIB),
        product("sync buckets", "B", count=2, bucket=setup.config.sync.bucket_mib * 2**20),
        engine.asleep,
        engine.weights,
        engine.cache,
        engine.extra,
    ]


def communicators(setup: PlannedJob) -> list[str]:
    """Return the names of the trainer's process groups with more than one rank."""
    layout = setup.layout
    sizes = {
        "tensor parallel": layout.tp,
        "pipeline": layout.pp,
        "context parallel": layout.cp,
        "data parallel": layout.num_replicas,
        "experts": layout.ep * layout.tp if layout.ep > 1 else 1,
        "experts' data parallel": layout.num_replicas // layout.ep if layout.ep > 1 else 1,
        "embeddings": layout.pp if setup.shape.tied else 1,
        "model parallel": layout.tp * layout.pp,  # used for the gradient norm
        "world": setup.world_size,  # used for the sync
        "trainers": layout.world_size if setup.is_separate else 1,
    }
    return [name for name, size in sizes.items() if size > 1]


def _fp8_copies_of(setup: PlannedJob, state: State, pp_rank: int) -> list[TracedNumber]:
    """Return Transformer Engine's fp8 copies of the linear weights: plain and transposed; of FP8 weights only transposed."""
    precision, elements = setup.config.precision, state.num_parameters
    in_fp8 = len(setup.layers_in_fp8) / setup.shape.num_layers
    vocab, hidden, tp = setup.shape.vocab, setup.shape.hidden, setup.layout.tp
    if precision.fp8 is None:
        return []
    ends = int(pp_rank == 0) + int(pp_rank == setup.layout.pp - 1)  # embedding and output layer stay in bf16
    copies = 1 if precision.fp8_parameters else 2
    size = figure(
        "fp8 copies of weights",
        "B",
        lambda: copies * in_fp8 * max(0, elements - ends * vocab * hidden / tp),
        "unproven",
    )
    return [size]


def _with_slack(setup: PlannedJob, parts: list[TracedNumber]) -> list[TracedNumber]:
    moving = sum(part.value for part in parts)
    return [*parts, product("fragmentation", "B", share=setup.assumed.slack_share, moving=moving)]


@dataclass(frozen=True)
class HostMemory:
    """Host memory of the node that needs most."""

    pinned: list[TracedNumber]
    pinned_total: TracedNumber
    other: list[TracedNumber]
    saving: TracedNumber  # additional memory while a checkpoint is gathered and staged
    peak: TracedNumber


def host_memory(setup: PlannedJob) -> HostMemory:
    layout = setup.layout
    states = [state_of(setup, pp_rank) for pp_rank in range(layout.pp)]
    by_node: dict[int, list[State]] = {rank // setup.gpus_per_node: [] for rank in range(setup.world_size)}
    for rank in range(layout.world_size):
        by_node[rank // setup.gpus_per_node].append(states[layout.place(rank)[1]])
    if setup.is_separate:
        engines = Counter(rank // setup.gpus_per_node for rank in range(layout.world_size, setup.world_size))
        return max((_node(setup, held, engines[node]) for node, held in by_node.items()), key=lambda host: host.peak.value)
    node = max(by_node.values(), key=lambda held: sum(s.weights + s.largest_share for s in held))
    return _node(setup, node, setup.ranks_per_node)


def _node(setup: PlannedJob, node: list[State], num_engine_ranks: int) -> HostMemory:
    """Return the host memory of a node with trainer ranks of these states and with `num_engine_ranks` generating ranks."""
    layout, assumed, engine_ranks = setup.layout, setup.assumed, num_engine_ranks
    ranks = len(node) if setup.is_separate else setup.ranks_per_node
    weights = sum(s.weights for s in node)
    optimizer = sum(s.largest_optimizer for s in node)
    moves, has_reference = int(setup.keeps_host_copies), int(setup.has_reference)
    taught = sum(max(teacher_weights(one, pp_rank) for pp_rank in range(layout.pp)) for one in setup.of_teachers())
    pinned = [
        product("weights", "B", needed=max(moves, has_reference), weights=weights),
        product("optimizer state", "B", needed=moves, optimizer=optimizer),
        product("reference", "B", needed=has_reference, weights=weights),
        product("teachers", "B", ranks=ranks, weights=taught),
    ]
    pinned_total = total("pinned per node", "B", pinned)
    workers = setup.config.rewards.num_workers
    leaders = engine_ranks // setup.config.rollout.tp if setup.is_served else engine_ranks
    processes = ranks + engine_ranks if setup.is_separate else ranks
    other = [
        product("ranks", "B", ranks=processes, each=assumed.rank_host_gib * GIB),
        product("engines", "B", ranks=engine_ranks if setup.is_served else 0, each=assumed.engine_host_gib * GIB),
        product("reward workers", "B", leaders=leaders, workers=workers, each=assumed.worker_host_gib * GIB),
    ]
    elements, algorithm = sum(s.num_parameters for s in node), setup.config.algorithm
    if setup.config.rollout.routing_replay:  # doubled, because ranks share them
        tokens = setup.config.batch.prompts_per_step * algorithm.group_size * setup.mean_sample
        shape = setup.shape
        per_token = RouterSizes(shape.num_layers, shape.num_dense, shape.num_experts, setup.experts_per_token).token_bytes
        other.append(product("recorded experts", "B", ranks=2 * ranks, tokens=tokens, per_token=per_token))
    if algorithm.averages_reference:
        other.append(product("reference's average", "B", "exact", bytes=FP32, elements=elements))
    if algorithm.has_vocab_kl:
        tokens = setup.config.batch.prompts_per_step * algorithm.group_size * setup.mean_response / layout.num_replicas
        width = max((one.shape.hidden for one in setup.of_teachers()), default=0)
        holders = min(ranks, layout.tp * layout.num_replicas)  # number of ranks of the last stage
        label = "teacher's hidden states"
        other.append(product(label, "B", ranks=holders, tokens=tokens, width=width, itemsize=setup.itemsize))
    staged = checkpoint_bytes(setup).value * ranks / layout.world_size
    copied = 0 if algorithm.averages_reference else algorithm.saved_reference_bytes(setup.itemsize)
    gathered = 3 * FP32 + copied  # bytes per element; every rank gathers
    saving = figure("while saving", "B", lambda: gathered * elements + staged)
    return HostMemory(pinned, pinned_total, other, saving, total("host peak per node", "B", [pinned_total, *other, saving]))


def checkpoint_bytes(setup: PlannedJob) -> TracedNumber:
    """Return the bytes of the weights, the fp32 masters and moments, and a reference that follows the policy."""
    parameters, b = elements_of(setup.family, setup.shape, None).total, setup.itemsize
    reference = setup.config.algorithm.saved_reference_bytes(b)
    return figure("a checkpoint", "B", lambda: parameters * (b + 12 + reference))
