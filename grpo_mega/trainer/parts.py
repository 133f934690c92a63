"""Build the parts of a job from its config: the policy, the engine, and the weight sync that fills the engine."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo_mega.checkpoint_io import adapter
from grpo_mega.checkpoint_io.checkpoints import latest, read_manifest
from grpo_mega.checkpoint_io.dcp_read import is_distributed_checkpoint
from grpo_mega.checkpoint_io.megatron_weights import MegatronWeights
from grpo_mega.checkpoint_io.model import ModelFiles, read_model_files
from grpo_mega.checkpoint_io.reader import CheckpointReader, random_reader
from grpo_mega.config import Config, RolloutConfig
from grpo_mega.distributed.device import PeakMemory
from grpo_mega.distributed.environment import ALLOCATOR, cuda_compiler
from grpo_mega.distributed.launch import num_cores
from grpo_mega.distributed.libraries import describe
from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.distributed.versions import installed_set
from grpo_mega.errors import raise_all
from grpo_mega.megatron.loaded_kernels import attention_notes, in_use
from grpo_mega.megatron.model import shards_of, uses_transformer_engine
from grpo_mega.megatron.offload import Teacher
from grpo_mega.megatron.policy import Policy
from grpo_mega.megatron.precision import DTYPES
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.paths import CHECKPOINTS, ENGINES
from grpo_mega.rollout.embedded.engine import EmbeddedEngine
from grpo_mega.rollout.engine import Engine, NoEngine, Sampling
from grpo_mega.rollout.routes import RouterSizes
from grpo_mega.rollout.sessions.agents import AgentWorkers
from grpo_mega.rollout.sessions.conversations import Conversations
from grpo_mega.rollout.sessions.tool_schemas import tool_schemas
from grpo_mega.rollout.sglang.buckets import DeviceBuckets, HostBuckets, ServedLora
from grpo_mega.rollout.sglang.client import check_server
from grpo_mega.rollout.sglang.engine import SGLangEngine
from grpo_mega.rollout.sglang.requirements import compiler_problems, served_card_problems
from grpo_mega.rollout.sglang.server import EngineSettings
from grpo_mega.tracking.progress import GIB, FreeMemory, phase
from grpo_mega.tracking.run_log import Hooks, RunLog, open_run_log
from grpo_mega.trainer.colocation import GpuMemory, WeightSync
from grpo_mega.trainer.folder import changed_settings, merge_changed_settings, truncate_logs_after
from grpo_mega.weights.boxes import Box
from grpo_mega.weights.derived import adapter_family, module_names, sends_adapter, whole_layers
from grpo_mega.weights.layout import EngineLayout, ShardLayout, engine_shards, hf_shards
from grpo_mega.weights.plan import plan_transfers


def build_policy(config: Config, model: ModelFiles, runtime: Runtime) -> Policy:
    """Build the policy and its teachers. The policy gets the checkpoint's weights, or random weights from the seed."""
    policy = Policy(config, model.shape, model.family, model.hf_config, runtime)
    load = partial(policy.load, read_adapter=adapter.read(config.model.adapter) if config.model.adapter else None)
    _read_start(config, model, load)
    for name, settings in config.teachers.items():
        if settings.url is None:
            theirs = read_model_files(config.model.model_copy(update={"path": settings.path}))
            with phase(f"loading the teacher {name}", runtime.rank == 0 and config.log.progress):
                teacher = Teacher(config, theirs.shape, theirs.family, theirs.hf_config, runtime, model.shape.vocab)
                theirs.read_weights(teacher.load)
            policy.teachers[name] = teacher
        else:
            with runtime.raise_on_all_ranks():
                check_server(name, settings.url)
    return policy


def _read_start(config: Config, model: ModelFiles, load: Callable[[Callable[[Box], torch.Tensor]], None]) -> None:
    """Load the weights that a run starts from: the model's, or random ones from the seed."""
    if config.model.init == "random":
        load(random_reader(model.family.hf_tensors(model.shape), config.seed, model.hf_config.initializer_range))
    else:
        model.read_weights(load)


def load_saved(config: Config, policy: Policy, model: ModelFiles, folder: Path) -> None:
    """Fill the weights from `folder`, a model or a checkpoint's state. With model.lora such a state is an adapter."""
    if not policy.lora.parameters or not is_distributed_checkpoint(folder) or folder == model.folder:
        model.read_weights(policy.load_weights, folder)
        return
    with CheckpointReader(MegatronWeights(folder, policy.lora.family, model.shape)) as saved:
        _read_start(config, model, partial(policy.load_weights, read_adapter=saved.read))


def build_engine(config: Config, model: ModelFiles, runtime: Runtime, rendezvous: Rendezvous) -> Engine:
    """Build the engine of this rank. If the rank leads a server, launch it; `wait_until_ready` waits for it."""
    if not runtime.generates:
        return NoEngine(_engine_side(config, model, runtime), runtime.device.torch_device)
    if config.rollout.is_served:
        return _sglang(config, model, runtime, rendezvous)
    return EmbeddedEngine(
        model.hf_config,
        model.family,
        model.shape,
        DTYPES[config.engine_dtype],
        runtime.device,
        config.rollout.max_concurrent,
        rank=runtime.rank - runtime.first_engine_rank,
        world_size=runtime.num_ranks - runtime.first_engine_rank,
        verify=config.sync.verify,
        quantise=config.rollout.quantization is not None,
    )


def build_sync(
    config: Config,
    dtype: torch.dtype,
    trainer: ShardLayout,
    engine: ShardLayout,
    runtime: Runtime,
    rendezvous: Rendezvous,
) -> WeightSync:
    """Plan the transfer from the trainer's layout to the engine's layout. Return the sync that executes it."""
    return WeightSync(
        plan_transfers(trainer, engine.after(runtime.first_engine_rank), ranks_per_node=ranks_per_node()),
        dtype,
        int(config.sync.bucket_mib * 2**20),
        partial(rendezvous.all_gather, deadline_s=config.rollout.start_deadline_s),
        verify=config.sync.verify,
        ranks=runtime.everyone,
        shows_progress=runtime.rank == 0 and config.log.progress,
    )


def build_adapter_sync(
    config: Config, model: ModelFiles, runtime: Runtime, rendezvous: Rendezvous
) -> WeightSync | None:
    """Return the sync that sends only the adapter; None if syncs send merged weights."""
    lora, shape, size = config.model.lora, model.shape, runtime.num_ranks - runtime.first_engine_rank
    if lora is None or not sends_adapter(lora, config.sync, config.rollout, shape):
        return None
    family = adapter_family(model.family, shape, lora.rank, lora.targets)
    trainer, leaders = (
        shards_of(family, shape, config.model, runtime),
        hf_shards(family, shape, size, tp=config.rollout.tp),
    )
    return build_sync(config, DTYPES[config.engine_dtype], trainer, leaders, runtime, rendezvous)


def training_sampling(config: Config, model: ModelFiles, tokenizer: Any) -> Sampling:
    """Return the sampling parameters of training."""
    return Sampling(
        group_size=config.algorithm.group_size,
        temperature=config.rollout.temperature,
        max_response_length=config.rollout.max_response_length,
        stop_token_ids=model.stop_ids(tokenizer, config.rollout.stop_token_ids),
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        seed=config.seed,
        vocab_size=model.shape.vocab,
        with_routes=bool(config.rollout.routing_replay),
        longest_first=config.rollout.longest_first,
    )


def open_agents(rollout: RolloutConfig, code_dir: Path | None) -> AgentWorkers | AbstractContextManager[None]:
    """Start the workers that run agents and tools, as a context manager. Return an empty one without agents."""
    if not rollout.has_agents:
        return nullcontext()
    return AgentWorkers(rollout, code_dir, schemas=tool_schemas(rollout, code_dir))


def open_conversations(
    config: Config,
    tokenizer: Any,
    decode: Callable[[Sequence[int]], str],
    sampling: Sampling,
    workers: AgentWorkers | None,
    warn: Callable[[str], None],
) -> Conversations | None:
    """Open the endpoint at which agents talk to this rank's engine. Return None without workers. Raise ConfigError."""
    if workers is None:
        return None
    rollout, cp = config.rollout, config.layout.cp
    # One micro-batch has all segments of a sample. Context parallelism pads each by at most 2 tokens per rank.
    most = cp * (config.batch.tokens_per_micro_batch - (2 * rollout.max_turns if cp > 1 else 0))
    return Conversations(
        tokenizer,
        decode,
        sampling,
        workers,
        max_turns=rollout.max_turns,
        max_context=config.data.max_prompt_length + rollout.max_response_length,
        max_tokens=most if config.algorithm.has_sequence_sums else sys.maxsize,
        tool_format=rollout.tool_format,
        warn=warn,
    )


def drives_engine(num_engine_ranks: int, tp: int) -> bool:
    """Return True on the first rank of each engine. The environment has the rank, so no process group is needed."""
    rank = int(os.environ.get("RANK", "0"))
    if num_engine_ranks:
        rank -= int(os.environ["WORLD_SIZE"]) - num_engine_ranks
    return rank >= 0 and rank % tp == 0


def make_room(engine: Engine, runtime: Runtime, rollout: RolloutConfig, peak: PeakMemory) -> GpuMemory | None:
    """On a GPU, wait for the server and make it sleep, so the policy has room. Return None on a CPU or without a
    server.
    """
    if rollout.is_separate or not (engine.is_server and runtime.device.is_cuda):
        return None
    before = torch.cuda.mem_get_info()[0]
    with runtime.raise_on_all_ranks():
        engine.wait_until_ready()
    memory = GpuMemory(runtime.device.torch_device, before - torch.cuda.mem_get_info()[0], peak)
    if rollout.sleep != "never":
        engine.sleep()
    return memory


def measure_free_memory(
    config: Config, model: ModelFiles, runtime: Runtime, plan_free: Callable[..., Mapping[str, float]] | None
) -> FreeMemory | None:
    """Return the measure of a trainer's free GPU memory, with the figures of `plan_free` (run_log.Hooks)."""
    if not (runtime.trains and runtime.device.is_cuda):
        return None
    device = runtime.device.torch_device

    def smallest(values: list[float]) -> list[float]:
        found = torch.tensor(values)
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return found.tolist()

    free = FreeMemory(lambda: torch.cuda.mem_get_info(device)[0], smallest)
    if plan_free is not None:
        total, fields = torch.cuda.mem_get_info(device)[1] / GIB, model.hf_config.to_dict()
        uses_te = uses_transformer_engine(runtime)
        free.planned = plan_free(config, model.shape, fields, runtime.num_ranks, ranks_per_node(), total, uses_te)
    return free


def open_log(config: Config, runtime: Runtime, notes: Sequence[str], hooks: Hooks) -> RunLog:
    """Open the log. Remove lines after the last checkpoint, because the run repeats these steps.

    Log the set of package versions, the kernels in use, the loaded libraries and the variables that change numbers, the
    settings that differ from the defaults, notes on the data, and the settings that a resume changed.
    """
    changes: list[str] = []
    if runtime.rank == 0:
        checkpoint = latest(config.run_dir / CHECKPOINTS)
        truncate_logs_after(config.run_dir, read_manifest(checkpoint).step if checkpoint else -1)
        changes = merge_changed_settings(config)
    log = open_run_log(config, runtime.rank, hooks)
    log.message(f"versions: set {installed_set().record}")
    kernels = (in_use(runtime.device).line(), *attention_notes)
    for message in (*kernels, describe(), changed_settings(config), *notes, *changes):
        log.message(message)
    return log


def ranks_per_node() -> int:
    """Return the number of ranks per node. torchrun and our launcher set it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def _sglang(config: Config, model: ModelFiles, runtime: Runtime, rendezvous: Rendezvous) -> SGLangEngine:
    rollout, device = config.rollout, runtime.device
    rank, world_size = runtime.rank - runtime.first_engine_rank, runtime.num_ranks - runtime.first_engine_rank
    if device.is_cuda:
        index = device.torch_device
        capability, name = torch.cuda.get_device_capability(index), torch.cuda.get_device_name(index)
        raise_all(compiler_problems(rollout, cuda_compiler(os.environ)))
        raise_all(served_card_problems(rollout, config.engine_dtype, capability, name))
    engine, tp_rank = divmod(rank, rollout.tp)
    first_local = int(os.environ.get("LOCAL_RANK", "0")) - tp_rank
    # On a CPU the server uses the cores of its ranks, because they wait while it generates.
    here = sorted(os.sched_getaffinity(0))
    share = max(rollout.tp, num_cores() * rollout.tp // ranks_per_node())
    folder = config.run_dir / ENGINES / str(engine)
    folder.mkdir(parents=True, exist_ok=True)
    settings = EngineSettings(
        rollout=rollout,
        model_path=config.model.path,
        dtype=config.engine_dtype,
        folder=folder,
        context_length=config.data.max_prompt_length + rollout.max_response_length + 1,
        device_type=device.type,
        rank=rank,
        world_size=world_size,
        base_gpu_id=first_local,
        cores=tuple(here[(first_local + i) % len(here)] for i in range(min(share, len(here)))),
        seed=config.seed + engine,
        is_hybrid=bool(model.shape.linear_layers),
        routers=RouterSizes.of(model.shape, model.hf_config) if rollout.routing_replay else None,
        plain_modules=tuple(model.family.plain_modules(model.shape)),
        lora=served_lora(config, model),
        verify=config.sync.verify,
        shows_progress=rank == 0 and config.log.progress,
    )
    buckets: HostBuckets | DeviceBuckets = HostBuckets()
    if device.is_cuda:
        allocator = "".join(os.environ.get(name, "") for name in ALLOCATOR)
        buckets = DeviceBuckets(
            int(config.sync.bucket_mib * 2**20),
            device.torch_device,
            has_expandable_segments="expandable_segments:True" in allocator,
        )
    return SGLangEngine(settings, _engine_side(config, model, runtime), rendezvous, buckets)


def served_lora(config: Config, model: ModelFiles) -> ServedLora | None:
    """Return the adapter that a server loads in addition to its base; None if syncs send merged weights."""
    lora, family, shape = config.model.lora, model.family, model.shape
    if lora is None or not sends_adapter(lora, config.sync, config.rollout, shape):
        return None
    served = adapter_family(family, shape, lora.rank, whole_layers(family, shape, lora.targets))
    return ServedLora(lora.rank, lora.alpha, tuple(module_names(served)), served.hf_tensors(shape))


def _engine_side(config: Config, model: ModelFiles, runtime: Runtime) -> ShardLayout:
    """Return the layout of the engine ranks."""
    rollout, size = config.rollout, runtime.num_ranks - runtime.first_engine_rank
    quantise = rollout.quantization is not None
    if not rollout.is_served:
        return hf_shards(model.family, model.shape, size, quantise=quantise)
    layout = EngineLayout(rollout.tp, size // rollout.tp, rollout.ep)
    return engine_shards(model.family, model.shape, layout, size, quantise=quantise)
