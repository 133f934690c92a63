"""Patches of SGLang 0.5.21, only in its own processes. A test fails when a patch is no longer needed."""

from __future__ import annotations

import logging
import multiprocessing
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from grpo_mega.weights.hf_config import resolve_config

ADAPTER_KEY = "adapter"  # in the meta_info of an answer: names of the adapters that computed its tokens
STUBBED = ("torchvision", "sgl_kernel")  # SGLang imports these; a CPU-only torch has no builds of them


def hide_megatron() -> None:
    """Keep SGLang's debug dumper from importing Megatron-core, because the import takes a second, and memory on a
    GPU.
    """
    sys.modules["megatron"] = None  # type: ignore[assignment]  # makes the import fail


def fork_children() -> None:
    """Make SGLang fork its processes. By default it spawns them, and each imports everything again.

    Forking is safe without CUDA, because SGLang starts its processes before any thread or event loop.
    """
    set_start_method = multiprocessing.set_start_method

    def fork_instead(*_: Any, **__: Any) -> None:
        set_start_method("fork", force=True)

    multiprocessing.set_start_method = fork_instead


def drop_idle_warnings() -> None:
    """Keep two irrelevant messages out of the log, because users look there for the cause of a failure.

    One is a warning for each endpoint with GET and POST, every time the list of endpoints is read. The other is a
    traceback: a server that skips its warm-up calls its /freeze_gc before it listens. server.py makes this call later.
    """
    warnings.filterwarnings("ignore", message="Duplicate Operation ID")
    server_log = logging.getLogger("sglang.srt.entrypoints.http_server")
    server_log.addFilter(lambda record: "freeze_gc failed" not in record.getMessage())


def read_hybrid_configs() -> None:
    """Make SGLang read a Qwen3.5 model's config.json as the trainer does, and serve only its language model.

    SGLang reads neither layer_types nor the rotated share of a head from rope_parameters. A text has no other positions
    than the indices of its tokens, so its rotary embedding needs no mrope_section.
    """
    from sglang.srt.configs.qwen3_5 import Qwen3_5TextConfig
    from sglang.srt.utils.hf_transformers.common import _CONFIG_REGISTRY

    class HybridConfig(Qwen3_5TextConfig):
        def __init__(self, **fields: Any) -> None:
            fields = resolve_config(fields) if "model_type" in fields else fields
            if rope := fields.get("rope_parameters"):
                fields["rope_parameters"] = {name: rope[name] for name in rope if not name.startswith("mrope_")}
            super().__init__(**fields)
            self.layer_types, self.architectures = fields.get("layer_types", []), ["Qwen3_5ForCausalLM"]
            self.model_type = Qwen3_5TextConfig.model_type

        @property
        def layers_block_type(self) -> list[str]:
            return ["attention" if kind == "full_attention" else kind for kind in self.layer_types]

    _CONFIG_REGISTRY.update(dict.fromkeys(("qwen3_5", Qwen3_5TextConfig.model_type), HybridConfig))


def allow_routes_on_cpu() -> None:
    """Let a server on a CPU record router choices. Without this patch it registers their buffer with CUDA and fails."""
    from sglang.srt.mem_cache.pool_host import common

    common._cuda_host_register = lambda *_: None


def unpin_memory() -> None:
    """Let a server on a CPU apply adapters. SGLang's LoRA code pins memory, and torch refuses that without CUDA."""
    import torch

    def without_pinning(make: Any) -> Any:
        return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)

    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    torch.tensor, torch.zeros = map(without_pinning, (torch.tensor, torch.zeros))


def serve_adapters() -> None:
    """Change three things of SGLang's LoRA code.

    - Answers name the adapter that the scheduler computed them with, "none" for the base. SGLang uses the base, without
      an error, if a request names no adapter or its adapter is not in the pool, and its answers do not tell.
    - Adapters come from a file. SGLang's request has the tensors once per process.
    - Unloading does not wait until all requests of the adapter have ended. SGLang never counts the end of a request
      that was aborted in the queue, so it would wait for ever. The trainer unloads only when no request runs.
    """
    import torch
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.lora.lora_registry import LoRARegistry
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
    from sglang.srt.managers.tp_worker import BaseTpWorker

    managers: list[Any] = []
    prepare = LoRAManager.prepare_lora_batch

    def noted(manager: Any, *args: Any) -> None:
        managers[:] = [manager]
        prepare(manager, *args)

    def names(streamer: Any, requests: Sequence[Any]) -> dict[str, list[list[str]]]:
        refs = {
            i: ref.lora_name for m in managers for i, ref in m.lora_refs.items() if i in m.memory_pool.uid_to_buffer_id
        }
        return {ADAPTER_KEY: [[refs.get(request.lora_id, "none")] for request in requests]}

    async def no_wait(registry: Any, adapter: str) -> None:
        pass

    read = BaseTpWorker.deserialize_own_rank

    def opened(worker: Any, payloads: Any) -> Any:
        data = read(worker, payloads)
        return torch.load(data) if isinstance(data, str) else data

    BaseTpWorker.deserialize_own_rank = opened
    LoRARegistry.wait_for_unload = no_wait
    LoRAManager.prepare_lora_batch = noted
    SchedulerOutputStreamer.has_additional_customized_info = True
    SchedulerOutputStreamer.build_additional_customized_info = names


def install_stubs() -> None:
    """Make packages that do not exist for a CPU-only torch importable but not callable. A second call does nothing.

    Call this only in the server's processes. In other processes transformers would assume that torchvision is
    installed.
    """
    if not any(isinstance(finder, StubFinder) for finder in sys.meta_path):
        sys.meta_path.append(StubFinder())  # the last finder, so real packages win


class StubFinder(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in STUBBED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class Stub(ModuleType):
    """A module whose attributes are all stubs."""

    __version__ = "0.28.0"  # torchvision's version for torch 2.13

    def __getattr__(self, name: str) -> Stub:
        if name.startswith("__"):
            raise AttributeError(name)
        child = Stub(f"{self.__name__}.{name}")
        setattr(self, name, child)
        return child

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{self.__name__} does not exist for a CPU-only torch")
