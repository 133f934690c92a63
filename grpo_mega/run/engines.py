"""Building the engine that the config names, and the sync that fills it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from grpo_mega.config import Config, RolloutConfig
from grpo_mega.distributed.launch import num_cores
from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.errors import ConfigError
from grpo_mega.hardware.device import PeakMemory
from grpo_mega.hardware.fp8 import check_served_card
from grpo_mega.megatron.policy import Policy
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.observe.progress import SECONDS_BETWEEN_LINES
from grpo_mega.rollout.embedded.engine import EmbeddedEngine
from grpo_mega.rollout.engine import Engine
from grpo_mega.rollout.sglang.buckets import DeviceBuckets, HostBuckets
from grpo_mega.rollout.sglang.engine import Options, SGLangEngine
from grpo_mega.rollout.sglang.link import Limits
from grpo_mega.rollout.sglang.server import ServerSettings
from grpo_mega.rollout.sglang.update import LOADER, Place
from grpo_mega.sync.memory import GpuMemory
from grpo_mega.sync.weight_sync import WeightSync
from grpo_mega.validation.preflight import engine_rank_problems
from grpo_mega.weights.layout import EngineLayout, engine_shards
from grpo_mega.weights.plan import plan_transfers
from grpo_mega.weights.spec import Family, ModelShape

CPU_ROWS = 32  # to whose multiple SGLang pads each rank's part of an MLP on a CPU
CACHE_MARGIN = 256  # tokens of KV cache beyond what the sequences need: pages and the server's own warm-up


def build_engine(
    config: Config,
    hf_config: Any,
    family: Family,
    shape: ModelShape,
    dtype: torch.dtype,
    runtime: Runtime,
    rendezvous: Rendezvous,
) -> Engine:
    """The engine of this rank. A server has begun to start where the rank leads one; `wait_until_ready` ends that."""
    if config.rollout.engine == "sglang":
        return _sglang(config, family, shape, dtype, runtime, rendezvous)
    return EmbeddedEngine(
        hf_config,
        family,
        shape,
        dtype,
        runtime.device,
        config.rollout.max_concurrent,
        rank=runtime.rank,
        world_size=runtime.layout.world_size,
        prove=config.sync.prove,
        quantise=config.rollout.quantization is not None,
    )


def build_sync(config: Config, dtype: torch.dtype, policy: Policy, engine: Engine, rendezvous: Rendezvous) -> WeightSync:
    """The plan from the trainer's layout to the engine's, and what carries it out."""
    return WeightSync(
        plan_transfers(policy.shard_layout(), engine.shard_layout(), ranks_per_node=ranks_per_node()),
        dtype,
        int(config.sync.bucket_mib * 2**20),
        partial(rendezvous.all_gather, deadline_s=config.rollout.start_deadline_s),
        prove=config.sync.prove,
    )


def make_room(engine: Engine, runtime: Runtime, rollout: RolloutConfig, peak: PeakMemory) -> GpuMemory | None:
    """On a GPU a server takes its memory first and then sleeps, so that the policy can be built; None on a CPU."""
    if not runtime.device.is_cuda or rollout.engine == "embedded":
        return None
    before = torch.cuda.mem_get_info()[0]
    with runtime.together():
        engine.wait_until_ready()
    memory = GpuMemory(runtime.device.torch_device, before - torch.cuda.mem_get_info()[0], peak)
    if rollout.sleep != "never":
        engine.sleep()
    return memory


def check_padding(shape: ModelShape, tp: int) -> None:
    """Raises ConfigError for a model that SGLang would pad on a CPU, where no checkpoint's tensors fit its own."""
    rows = shape.moe_ffn or shape.ffn
    if rows % (CPU_ROWS * tp):
        raise ConfigError(
            f"SGLang pads an MLP of {rows} rows on a CPU, where rollout.tp={tp} wants a multiple of {CPU_ROWS * tp}; "
            "use rollout.engine=embedded, or another model"
        )
    if shape.num_kv_heads % tp:
        raise ConfigError(
            f"SGLang pads {shape.num_kv_heads} key-value heads on a CPU, where rollout.tp={tp} does not divide them; "
            "use a divisor of them, or rollout.engine=embedded"
        )


def ranks_per_node() -> int:
    """As the launcher says; torchrun and our own set it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def _sglang(
    config: Config, family: Family, shape: ModelShape, dtype: torch.dtype, runtime: Runtime, rendezvous: Rendezvous
) -> SGLangEngine:
    rollout, device, world_size = config.rollout, runtime.device, runtime.layout.world_size
    for problem in engine_rank_problems(rollout.tp, world_size, ranks_per_node()):
        raise ConfigError(problem)
    if device.is_cuda:
        index = device.torch_device
        check_served_card(
            rollout, config.model.dtype, torch.cuda.get_device_capability(index), torch.cuda.get_device_name(index)
        )
    else:
        check_padding(shape, rollout.tp)
    place = Place(runtime.rank // rollout.tp, runtime.rank % rollout.tp, rollout.tp, runtime.rank)
    layout = EngineLayout(rollout.tp, world_size // rollout.tp)
    first_local = int(os.environ.get("LOCAL_RANK", "0")) - place.tp_rank
    longest = config.data.max_prompt_length + rollout.max_response_length
    cache_tokens = rollout.cache_tokens
    if cache_tokens is None and not device.is_cuda:
        cache_tokens = rollout.max_concurrent * longest + CACHE_MARGIN
    folder = config.run_dir / "engines" / str(place.engine)
    folder.mkdir(parents=True, exist_ok=True)
    settings = ServerSettings(
        model_path=config.model.path,
        folder=folder,
        tp=rollout.tp,
        dtype=config.model.dtype,
        device_type=device.type,
        base_gpu_id=first_local,
        context_length=longest + 1,
        max_running_requests=rollout.max_concurrent,
        max_total_tokens=cache_tokens,
        memory_fraction=rollout.memory_fraction,
        seed=config.seed + place.engine,
        has_memory_saver=device.is_cuda and rollout.sleep != "never",
        cores=_cores(first_local, rollout.tp),
        weight_loader=LOADER,
        extra=rollout.server_args,
        quantization=rollout.quantization,
    )
    limits = Limits(rollout.max_concurrent, rollout.start_deadline_s, rollout.stall_deadline_s, rollout.phase_deadline_s)
    options = Options(limits, layout.num_engines, config.sync.prove, _waiting(runtime.rank == 0 and config.log.progress))
    buckets = _buckets(device.is_cuda, int(config.sync.bucket_mib * 2**20), device.torch_device)
    side = engine_shards(family, shape, layout, world_size, quantise=rollout.quantization is not None)
    return SGLangEngine(settings, options, place, side, rendezvous, buckets)


def _buckets(is_cuda: bool, num_bytes: int, device: torch.device) -> HostBuckets | DeviceBuckets:
    if not is_cuda:
        return HostBuckets()
    setting = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    return DeviceBuckets(num_bytes, device, has_expandable_segments="expandable_segments:True" in setting)


def _cores(first_local: int, tp: int) -> tuple[int, ...]:
    """The cores of a server on a CPU: those of its ranks, which wait while it samples."""
    here = sorted(os.sched_getaffinity(0))
    share = max(tp, num_cores() * tp // ranks_per_node())
    return tuple(here[(first_local + i) % len(here)] for i in range(min(share, len(here))))


def _waiting(is_shown: bool) -> Callable[[float], None]:
    """Prints a line from time to time while a server starts."""
    last = 0.0

    def on_wait(seconds: float) -> None:
        nonlocal last
        if is_shown and seconds - last >= SECONDS_BETWEEN_LINES:
            last = seconds
            print(f"waiting for the SGLang server: {seconds:.0f} s", flush=True)

    return on_wait
