"""The settings of one SGLang engine, on one of its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mega.config import RolloutConfig
from grpo_mega.errors import ConfigError
from grpo_mega.rollout.routes import RouterSizes
from grpo_mega.weights.spec import BLOCK

CACHE_MARGIN = 256  # additional tokens of KV cache, for partial pages and the server's warm-up
LOADER = "grpo_mega.rollout.sglang.loader.load"
SEEDED_BY = "enable_deterministic_inference"  # with this server argument SGLang uses a seed per sample

# The quantization_config of an FP8 checkpoint. With it SGLang creates FP8 parameters and scales and quantises nothing itself.
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}


@dataclass(frozen=True)
class EngineSettings:
    """Settings of an engine. Raises ConfigError if rollout.server_args sets an argument that the trainer sets."""

    rollout: RolloutConfig
    model_path: Path
    dtype: str  # "float32" or "bfloat16"
    folder: Path  # folder of server.log
    context_length: int
    device_type: str  # "cpu" or "cuda"
    rank: int = 0
    world_size: int = 1
    base_gpu_id: int = 0  # GPU of the engine's first rank
    cores: tuple[int, ...] = ()  # CPU cores of a server without a GPU
    seed: int = 0
    routers: RouterSizes | None = None  # the model's routers; None if their choices are not recorded
    verify: bool = True  # compare checksums after each sync
    weight_loader: str = LOADER  # dotted path of a function in the server's processes
    shows_progress: bool = False  # print a line from time to time while the server starts

    def __post_init__(self) -> None:
        assert self.cores or self.device_type != "cpu", "a server on a CPU needs cores"
        fixed = {"host", "port", "api_key", "served_model_name", *self.fixed_arguments()}
        fixed |= {"nccl_port", "dist_init_addr", "nnodes", "node_rank"}
        for name in self.rollout.server_args:
            if name.replace("-", "_") in fixed:
                raise ConfigError(f"rollout.server_args.{name} is set by the trainer; remove it")

    @property
    def engine(self) -> int:
        return self.rank // self.rollout.tp

    @property
    def num_engines(self) -> int:
        return self.world_size // self.rollout.tp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.rollout.tp

    @property
    def leader(self) -> int:
        """Return the rank that starts the server and calls it."""
        return self.rank - self.tp_rank

    @property
    def is_leader(self) -> bool:
        return self.tp_rank == 0

    @property
    def leader_deadline_s(self) -> float:
        """Return how long other ranks wait for the leader. It is longer than the leader waits for its server."""
        return 2 * self.rollout.stall_deadline_s + 10.0

    @property
    def has_memory_saver(self) -> bool:
        """Return True if the server can release its memory while it sleeps. It needs a GPU."""
        return self.device_type == "cuda" and self.rollout.sleep != "never" and not self.rollout.is_separate

    @property
    def holds_blocks(self) -> bool:
        """Return True if parameters are FP8 blocks. On a CPU they have `dtype`, because SGLang's FP8 blocks need AMX there."""
        return self.rollout.quantization is not None and self.device_type == "cuda"

    @property
    def is_seeded(self) -> bool:
        return bool(self.rollout.server_args.get(SEEDED_BY, False))

    @property
    def cache_tokens(self) -> int | None:
        if self.rollout.cache_tokens is None and self.device_type == "cpu":
            return self.rollout.max_concurrent * (self.context_length - 1) + CACHE_MARGIN
        return self.rollout.cache_tokens

    def fixed_arguments(self) -> dict[str, Any]:
        """Return the server arguments that the trainer relies on."""
        blocks = {"json_model_override_args": {"quantization_config": BLOCKS}} if self.holds_blocks else {}
        return {
            "model_path": self.model_path,
            "load_format": "dummy",  # the first sync brings the weights
            "custom_weight_loader": self.weight_loader,
            "skip_tokenizer_init": True,
            "device": self.device_type,
            "dtype": self.dtype,
            "disable_shared_experts_fusion": True,  # otherwise SGLang appends shared experts to the routed experts
            "ep_size": self.rollout.ep,
            "tp_size": self.rollout.tp,
            "base_gpu_id": self.base_gpu_id if self.device_type == "cuda" else None,
            "context_length": self.context_length,
            "max_running_requests": self.rollout.max_concurrent,
            "max_total_tokens": self.cache_tokens,
            "mem_fraction_static": self.rollout.memory_fraction,
            "enable_memory_saver": self.has_memory_saver,
            "random_seed": self.seed,
            "enable_return_routed_experts": self.routers is not None,
            "quantization": self.rollout.quantization if self.holds_blocks else None,
            **blocks,
        }
