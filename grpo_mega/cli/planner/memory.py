"""Device memory by phase, in the order in which policy and engine take turns (trainer/colocation.py), and host memory.

Each phase is a list of figures and their sum. The gather of the optimizer's state for a checkpoint counts in the
checkpoint phase.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from math import floor

from grpo_mega.cli.planner.activations import KEPT_BYTES, activations
from grpo_mega.cli.planner.job import GIB, Figure, PlannedJob, total
from grpo_mega.cli.planner.state import FP32, State, Storage, elements_of, stage_state
from grpo_mega.rollout.routes import RouterSizes

PHASES = ("sampling", "asleep", "log-probs", "update", "checkpoint", "sync")


@dataclass(frozen=True)
class StageMemory:
    """Memory of the devices of one pipeline stage."""

    pp_rank: int
    state: State
    phases: dict[str, list[Figure]]

    @cached_property
    def totals(self) -> dict[str, Figure]:
        return {phase: total(phase, parts) for phase, parts in self.phases.items()}

    @property
    def peak_phase(self) -> str:
        return max(self.totals, key=lambda phase: self.totals[phase])

    @property
    def peak(self) -> Figure:
        return self.totals[self.peak_phase]


def stage_memory(setup: PlannedJob, engine: EngineMemory, pp_rank: int) -> StageMemory:
    """Return the memory of each device of a stage. `engine` is the memory of the engine on it."""
    state, acts, fixed = state_of(setup, pp_rank), activations(setup, pp_rank), _fixed(setup, engine)
    trainer = [*_state_figures(setup, state), *_fp8_copies(setup, state, pp_rank), *_host_copies(setup, state, pp_rank)]
    # A save gathers the optimizer's fp32 state over replicas, one part of one bucket at a time.
    gathered = Figure("gathered for a save", state.gathered * FP32)
    bucket = min(setup.config.sync.bucket_mib * 2**20, engine.weights)
    moving = Figure("sync buckets in flight", (2 if setup.is_served or setup.is_separate else 5) * bucket)
    awake = [] if setup.is_separate else engine.awake
    resident = [] if setup.takes_turns else awake[:3] if setup.is_served else awake[:1]
    stays = [] if setup.keeps_host_copies else trainer if setup.card.is_cpu else trainer[:3]
    # Gradients and optimizer state return to the device with the update.
    frozen = [trainer[0], *trainer[3:]] if setup.keeps_host_copies else trainer
    teachers = setup.of_teachers()
    # Teachers are on the device one at a time.
    taught = Figure("teacher", max((_teacher_weights(one, pp_rank) for one in teachers), default=0.0))
    vocab = setup.shape.vocab if setup.config.algorithm.has_vocab_kl and pp_rank == setup.layout.pp - 1 else 0
    hidden = sum(one.shape.hidden for one in teachers)  # an update has the output layers of all teachers
    head = Figure("teachers' output layers", vocab * hidden * (setup.itemsize / setup.layout.tp))
    forward = max([acts.forward_only, *(activations(one, pp_rank).forward_only for one in teachers)])

    def with_slack(*parts: Figure) -> list[Figure]:
        return [*parts, Figure("fragmentation", setup.assumed.slack_share * sum(parts))]

    updating = with_slack(*acts.kept, acts.work, acts.exchanged, acts.logprobs)
    phases = {
        "sampling": [*fixed, *stays, *awake],
        "asleep": [*fixed, *stays, *([] if setup.takes_turns else awake)],  # between two turns; else nobody sleeps
        "log-probs": [*fixed, *frozen, *resident, taught, *with_slack(forward, acts.exchanged, acts.logprobs)],
        "update": [*fixed, *trainer, *resident, head, *updating],
        "checkpoint": [*fixed, *trainer, *resident, *with_slack(gathered)],
        "sync": [*fixed, *(trainer[:1] if setup.keeps_host_copies else stays), *awake[:1], *resident[1:], moving],
    }
    return StageMemory(pp_rank, state, phases)


def state_of(setup: PlannedJob, pp_rank: int) -> State:
    storage = Storage.of(setup.config, setup.shape)
    names = {"fused_norms": setup.uses_te, "grouped_experts": setup.groups_experts}
    state = stage_state(setup.trained_family, setup.shape, setup.layout, pp_rank, storage, **names)
    if setup.config.model.lora is None:
        return state
    base = stage_state(setup.family, setup.shape, setup.layout, pp_rank, storage, **names)
    return replace(state, frozen=base.num_parameters, fp32_elements=base.num_fp32)


def _teacher_weights(of_teacher: PlannedJob, pp_rank: int) -> float:
    """Return the bytes of a teacher's weights on a rank of a stage."""
    return float(state_of(of_teacher, pp_rank).num_parameters * of_teacher.itemsize)


def _state_figures(setup: PlannedJob, state: State) -> list[Figure]:
    """Return weights, gradients and optimizer state of the stage's rank that holds most."""
    b, elements, fp8_elements, share = setup.itemsize, state.elements, state.fp8_elements, state.largest_share
    held = elements + state.frozen
    master, moments = state.storage.master_bytes, state.storage.moment_bytes
    # Weights that stay fp32 take more bytes, and are their own masters.
    more_fp32, own_masters = (FP32 - b) * state.fp32_elements, max(state.fp32_optimizer_elements)
    return [
        Figure("weights", b * held + fp8_elements + more_fp32),
        Figure("gradients", FP32 * (elements + fp8_elements)),
        Figure("optimizer state", (master + moments) * share - master * own_masters),
    ]


def _fixed(setup: PlannedJob, engine: EngineMemory) -> list[Figure]:
    """Return the memory that a trainer's device holds in every phase."""
    trainer, communicator = len(communicators(setup)), setup.assumed.communicator_gib * GIB
    bucket, is_served = setup.config.sync.bucket_mib * 2**20, setup.is_served and not setup.is_separate
    asleep = [] if setup.is_separate else [engine.asleep]
    if setup.card.is_cpu:
        return [Figure("process", setup.assumed.context_gib * GIB), *asleep]
    served = 1 if is_served and setup.config.rollout.tp > 1 else 0  # the engine's communicators
    return [
        Figure("CUDA contexts", (2 if is_served else 1) * (setup.assumed.context_gib * GIB)),
        Figure("NCCL buffers", (trainer + served) * communicator),
        Figure("workspaces", setup.assumed.workspace_gib * GIB),
        Figure("sync buckets", (3 if is_served else 0) * bucket),  # they stay, so handles stay valid
        *asleep,
    ]


def engine_device(setup: PlannedJob) -> list[Figure]:
    """Return the memory of a separate engine's device. It is the same at all times; empty for colocated engines."""
    if not setup.is_separate:
        return []
    engine, assumed = engine_memory(setup), setup.assumed
    # The groups of all ranks, of the engine's side, and of the engine.
    groups = 1 + (setup.num_engine_ranks > 1) + (setup.config.rollout.tp > 1)
    return [
        Figure("CUDA contexts", (2 if setup.is_served else 1) * (assumed.context_gib * GIB)),
        Figure("NCCL buffers", groups * (assumed.communicator_gib * GIB)),
        Figure("sync buckets", 3 * (setup.config.sync.bucket_mib * 2**20)),
        engine.asleep,
        *engine.awake,
    ]


def communicators(setup: PlannedJob) -> list[str]:
    """Return the names of the trainer's process groups with more than one rank."""
    layout = setup.layout
    has_own = setup.shape.num_experts > 0 and layout.has_own_expert_groups
    sizes = {
        "tensor parallel": layout.tp,
        "pipeline": layout.pp,
        "context parallel": layout.cp,
        "data parallel": layout.num_replicas,
        "experts": layout.ep * layout.etp if has_own else 1,
        "experts' data parallel": layout.num_expert_replicas if has_own else 1,
        "embeddings": layout.pp if setup.shape.tied else 1,
        "model parallel": layout.tp * layout.pp,  # used for the gradient norm
        "world": setup.world_size,  # used for the sync
        "trainers": layout.world_size if setup.is_separate else 1,
    }
    return [name for name, size in sizes.items() if size > 1]


def _fp8_copies(setup: PlannedJob, state: State, pp_rank: int) -> list[Figure]:
    """Return Transformer Engine's fp8 copies of the linear weights: plain and transposed; of FP8 weights only
    transposed.
    """
    precision, elements, pp = setup.config.precision, state.num_parameters, setup.layout.pp
    if precision.fp8 is None:
        return []
    in_fp8 = len(setup.layers_in_fp8) / setup.shape.num_layers
    vocab, hidden, tp = setup.shape.vocab, setup.shape.hidden, setup.layout.tp
    ends = int(pp_rank == 0) + int(pp_rank == pp - 1)  # embedding and output layer stay in bf16
    label, size = "fp8 copies of weights", KEPT_BYTES["mxfp8"] if precision.fp8_recipe == "mxfp8" else 1.0
    copies = size if precision.fp8_parameters else 2 * size
    return [Figure(label, copies * in_fp8 * max(0, elements - ends * vocab * hidden / tp))]


def _host_copies(setup: PlannedJob, state: State, pp_rank: int) -> list[Figure]:
    """Return the copies of weights that a rank without a GPU holds in the same memory as everything else."""
    if not setup.card.is_cpu:
        return []
    algorithm, has_reference = setup.config.algorithm, int(setup.copies_reference)
    average = FP32 * state.num_parameters if algorithm.averages_reference else 0
    taught = sum(_teacher_weights(one, pp_rank) for one in setup.of_teachers())
    weights = state.weights
    # The policy's weights are copied, too, while the reference's weights are in their place.
    return [
        Figure("reference", 2 * has_reference * weights + average),
        Figure("teachers", taught),
    ]


@dataclass(frozen=True)
class EngineMemory:
    """Memory of one device of an engine."""

    weights: Figure
    cache: Figure
    cache_tokens: Figure  # tokens that one engine's cache holds
    graphs: Figure  # CUDA graphs; they sleep with the cache
    extra: Figure  # working memory while the engine generates
    asleep: Figure  # memory that stays while the engine sleeps
    concurrent: Figure  # sequences of mean length that an engine decodes at once
    shortfall: str | None = None  # reason why the engine cannot serve the longest sample

    @property
    def awake(self) -> list[Figure]:
        """Return the memory that a sleeping engine gives back, weights first."""
        return [self.weights, self.cache, self.graphs, self.extra]


def engine_memory(setup: PlannedJob) -> EngineMemory:
    """Return the memory of a device of a server, or of the embedded engine."""
    if not setup.is_served:
        return _embedded(setup)
    rollout, card, b = setup.config.rollout, setup.card, setup.engine_itemsize
    hidden, vocab, tp, concurrent = setup.shape.hidden, setup.shape.vocab, rollout.tp, rollout.max_concurrent
    weights, per_token = received_weights(setup, "engine weights"), cache_bytes_per_token(setup)
    prefill = 8192 if card.memory_gib < 160 else 16384
    cache_tokens = rollout.cache_tokens
    if cache_tokens is None and card.is_cpu:  # a server on a CPU has this default (EngineSettings.cache_tokens)
        cache_tokens = concurrent * setup.longest_sample + 256
    if cache_tokens is not None:
        cache = Figure("KV cache", cache_tokens * per_token)
    else:
        # SGLang 0.5.21's default of mem_fraction_static (srt/arg_groups/memory_hook.py): the share without its reserve.
        num_mib, graph_batch = card.memory_gib * 1024, 256 if tp < 4 and card.memory_gib < 160 else 512
        reserve = max(512 + 1.5 * prefill + tp / 8 * 1024 + 2 * graph_batch, 10 * 1024)
        fraction = rollout.memory_fraction or round((num_mib - reserve) / num_mib, 3)
        capacity, context = card.memory_gib * GIB, setup.assumed.context_gib * GIB
        # The server starts before the policy, so the free memory is the device less two contexts.
        cache = Figure("KV cache", max(0, fraction * (capacity - 2 * context) - weights))
    state, share = _state_bytes(setup), 1.0
    if state and not card.is_cpu:
        share = 1 / 1.9  # SGLang 0.5.21's default of mamba_full_memory_ratio is 0.9 of the KV cache
    tokens = Figure("tokens in a KV cache", floor(cache * share / per_token), "tokens")
    ffn = setup.shape.moe_ffn * setup.experts_per_token or setup.shape.ffn
    # server_arguments in rollout/sglang/server.py sets this number.
    states = 4 * concurrent + 1 if card.is_cpu else 0
    extra = Figure(
        "engine's working memory",
        prefill * (4 * hidden + 3 * ffn / tp) * b + 3 * concurrent * vocab * 4 + states * state,
    )
    graphs = Figure("engine's graphs", setup.assumed.graph_gib * GIB)
    asleep = Figure("engine's workspaces", setup.assumed.engine_workspace_gib * GIB)
    shortfall = None
    if tokens < setup.longest_sample:
        shortfall = (
            f"the engine's KV cache holds {tokens:.0f} tokens, but the longest sample has {setup.longest_sample}; "
            "raise rollout.tp or rollout.memory_fraction"
        )
    return EngineMemory(weights, cache, tokens, graphs, extra, asleep, _concurrent(setup, tokens), shortfall)


def received_weights(setup: PlannedJob, label: str) -> Figure:
    """Return all bytes of the weights of an engine's rank."""
    layout = replace(setup.engine_layout, num_engines=1) if setup.is_served else None
    held, b = elements_of(setup.family, setup.shape, layout), setup.engine_itemsize
    if setup.config.rollout.quantization is None:
        return Figure(label, held.total * b)
    plain, linear, blocks = held.plain, held.linear, held.blocks
    # FP8 values, and a float32 scale for each block of 128 x 128.
    return Figure(label, plain * b + linear + 4 * blocks)


def cache_bytes_per_token(setup: PlannedJob) -> int:
    """Return the bytes per token on one device. If ranks outnumber key-value heads, each rank holds one head.

    With multi-latent attention SGLang caches the latents, all of them on every rank.
    """
    shape = setup.shape
    if shape.kv_lora and setup.is_served:
        return shape.num_layers * shape.kv_down * setup.engine_itemsize
    heads = max(1, shape.num_kv_heads // setup.config.rollout.tp)
    layers = shape.num_full_layers
    return layers * heads * (shape.head_dim + (shape.v_dim or shape.head_dim)) * setup.engine_itemsize


def _state_bytes(setup: PlannedJob) -> float:
    """Return the bytes of one server's state of all layers with linear attention, on one device."""
    shape = setup.shape
    window = (shape.linear_conv - 1) * (2 * shape.linear_k + shape.linear_v) * setup.engine_itemsize
    each = FP32 * shape.linear_v * shape.linear_k_dim + window
    return len(shape.linear_layers) * each / setup.config.rollout.tp


def _embedded(setup: PlannedJob) -> EngineMemory:
    """Return the memory of transformers' model in the trainer's process. Its cache exists only while it generates."""
    shape, concurrent = setup.shape, setup.config.rollout.max_concurrent
    layers, vocab = shape.num_full_layers, shape.vocab
    # States of linear attention of a sequence, and a copy of one of them.
    state = FP32 * (len(shape.linear_layers) + 1) * shape.linear_v * shape.linear_k_dim
    elements = elements_of(setup.family, setup.shape, None).total  # the embedded engine is never quantised
    weights = Figure("engine weights", elements * setup.engine_itemsize)
    longest, per_token = setup.longest_sample, cache_bytes_per_token(setup)
    cache = Figure("KV cache", concurrent * longest * per_token)
    tokens = Figure("tokens in a KV cache", concurrent * longest, "tokens")
    # The cache of a layer grows by copying, so a second copy exists for a moment.
    extra = Figure("engine's working memory", 2 * cache / layers + concurrent * (2 * vocab * 4 + state))
    graphs, asleep = Figure("engine's graphs"), Figure("engine's workspaces")
    return EngineMemory(weights, cache, tokens, graphs, extra, asleep, _concurrent(setup, tokens))


def _concurrent(setup: PlannedJob, tokens: Figure) -> Figure:
    limit, mean, sequences = setup.config.rollout.max_concurrent, setup.mean_sample, sequences_per_engine(setup)
    return Figure("sequences decoded at once", max(1, min(limit, floor(tokens / mean), sequences)), "")


def sequences_per_engine(setup: PlannedJob) -> int:
    """Return the sequences per step on the busiest engine; a prompt's group stays on one engine."""
    num_started = setup.config.rollout.num_started(setup.config.batch.prompts_per_step)
    return -(-num_started // setup.engine_layout.num_engines) * setup.config.algorithm.group_size


@dataclass(frozen=True)
class HostMemory:
    """Host memory of the node that needs most."""

    pinned: list[Figure]
    pinned_total: Figure
    other: list[Figure]
    saving: Figure  # additional memory while a checkpoint is gathered and staged
    peak: Figure


def host_memory(setup: PlannedJob) -> HostMemory:
    if setup.card.is_cpu:
        return _machine_memory(setup)
    layout = setup.layout
    states = [state_of(setup, pp_rank) for pp_rank in range(layout.pp)]
    by_node: dict[int, list[State]] = {rank // setup.gpus_per_node: [] for rank in range(setup.world_size)}
    for rank in range(layout.world_size):
        by_node[rank // setup.gpus_per_node].append(states[layout.place(rank)[1]])
    if setup.is_separate:
        engines = Counter(rank // setup.gpus_per_node for rank in range(layout.world_size, setup.world_size))
        return max((_node(setup, held, engines[node]) for node, held in by_node.items()), key=lambda host: host.peak)
    node = max(by_node.values(), key=lambda held: sum(s.weights + s.largest_share for s in held))
    return _node(setup, node, setup.ranks_per_node)


def _machine_memory(setup: PlannedJob) -> HostMemory:
    """Return the memory of the machine without a GPU whose ranks need most: all phases of all its ranks, and
    workers.
    """
    layout, memory = setup.layout, engine_memory(setup)
    peaks = [stage_memory(setup, memory, pp_rank).peak for pp_rank in range(layout.pp)]
    engine = total("an engine's rank", engine_device(setup))
    by_node: Counter[int] = Counter()  # in bytes
    for rank in range(setup.world_size):
        trains = rank < layout.world_size
        by_node[rank // setup.gpus_per_node] += int(peaks[layout.place(rank)[1]] if trains else engine)
    leaders = min(setup.num_engine_ranks, setup.ranks_per_node) // setup.config.rollout.tp
    other = [
        Figure("ranks, at their peaks", max(by_node.values())),
        Figure("reward workers", leaders * setup.config.rewards.num_workers * (setup.assumed.worker_host_gib * GIB)),
    ]
    is_saved, staged = int(setup.config.checkpoint.interval > 0), checkpoint_bytes(setup)
    saving = Figure("while saving", is_saved * staged)
    return HostMemory([], Figure("pinned per node"), other, saving, total("host peak per node", [*other, saving]))


def _node(setup: PlannedJob, node: list[State], engine_ranks: int) -> HostMemory:
    """Return the host memory of a node with trainer ranks of these states and `engine_ranks` generating ranks."""
    layout, assumed, config = setup.layout, setup.assumed, setup.config
    algorithm, teachers = config.algorithm, setup.of_teachers()
    ranks = len(node) if setup.is_separate else setup.ranks_per_node
    weights, elements = sum(s.weights for s in node), sum(s.num_parameters for s in node)
    moves, has_reference = int(setup.keeps_host_copies), int(setup.copies_reference)
    state_bytes = node[0].storage.host_bytes if node else 0
    taught = sum(max(_teacher_weights(one, pp_rank) for pp_rank in range(layout.pp)) for one in teachers)
    pinned = [
        Figure("weights", max(moves, has_reference) * weights),
        Figure("optimizer state", moves * sum(s.largest_optimizer for s in node)),
        Figure("optimizer.cpu_offload", state_bytes * sum(s.largest_share for s in node)),
        Figure("reference", has_reference * weights),
        Figure("teachers", ranks * taught),
    ]
    workers, leaders = config.rewards.num_workers, engine_ranks // config.rollout.tp
    processes = ranks + engine_ranks if setup.is_separate else ranks
    base = float(received_weights(setup, "")) if setup.sends_adapter and setup.takes_turns else 0
    other = [
        Figure("ranks", processes * (assumed.rank_host_gib * GIB)),
        Figure("engines", (engine_ranks if setup.is_served else 0) * (assumed.engine_host_gib * GIB)),
        *([Figure("base in sleeping engines", engine_ranks * base)] if base else []),
        Figure("reward workers", leaders * workers * (assumed.worker_host_gib * GIB)),
    ]
    samples = config.batch.prompts_per_step * algorithm.group_size
    if config.rollout.routing_replay:  # doubled, because ranks share them
        shape = setup.shape
        per_token = RouterSizes(
            shape.num_layers, shape.num_dense, shape.num_experts, setup.experts_per_token
        ).token_bytes
        tokens = samples * setup.mean_sample
        other.append(Figure("recorded experts", 2 * ranks * tokens * per_token))
    if algorithm.averages_reference:
        other.append(Figure("reference's average", FP32 * elements))
    if algorithm.has_vocab_kl:
        tokens = samples * setup.mean_response / layout.num_replicas
        width = max((one.shape.hidden for one in teachers), default=0)
        holders = min(ranks, layout.tp * layout.num_replicas)  # number of ranks of the last stage
        label = "teacher's hidden states"
        other.append(Figure(label, holders * tokens * width * setup.itemsize))
    staged = checkpoint_bytes(setup) * ranks / layout.world_size
    copied = 0 if algorithm.averages_reference else algorithm.saved_reference_bytes(setup.itemsize)
    gathered = 3 * FP32 + copied  # bytes per element; every rank gathers
    saving = Figure("while saving", gathered * elements + staged)
    pinned_total = total("pinned per node", pinned)
    return HostMemory(pinned, pinned_total, other, saving, total("host peak per node", [pinned_total, *other, saving]))


def checkpoint_bytes(setup: PlannedJob) -> Figure:
    """Return the bytes of the weights, the fp32 masters and moments, and a reference that follows the policy."""
    parameters, b = elements_of(setup.trained_family, setup.shape, None).total, setup.itemsize
    reference = setup.config.algorithm.saved_reference_bytes(b)
    return Figure("a checkpoint", parameters * (b + 12 + reference))
