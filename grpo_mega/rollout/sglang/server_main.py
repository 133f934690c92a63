"""Run one SGLang server below a guardian: `python -m grpo_mega.rollout.sglang.server_main PID FOLDER LOCK
SGLANG-ARGUMENT ...`.

PID is the process that owns the server, FOLDER is its temporary folder, and LOCK is the descriptor that locks the
folder for all processes that inherit it. The server's key is in the environment.

The process forks. The child is SGLang. The parent, the guardian, imports nothing heavy and adopts every orphan below
it. When SGLang ends, the owner is gone or a signal arrives, the guardian kills all processes below it, removes their
files and exits, with SGLang's exit code, or with 0 if the owner or a signal ended it. When the guardian dies, the
kernel kills SGLang, and then its children.

SGLang 0.5.21 and 0.5.23 are patched here, only in their own processes. A test fails when a patch is no longer needed.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from grpo_mega import processes
from grpo_mega.distributed.environment import CORES_VARIABLE
from grpo_mega.processes import adopt_orphans, die_with_parent, kill_descendants
from grpo_mega.weights.hf_config import resolve_config

KEY_VARIABLE = "GRPO_MEGA_SERVER_KEY"  # not an argument, because all users can see a process's arguments
SECONDS_BETWEEN_LOOKS = 0.2
SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_PREFIXES = ("sglang_loads_", "sgl_shm_")  # SGLang's load snapshots and message queues
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(owner: int, folder: str, lock: int, arguments: Sequence[str]) -> int:
    watched = {*_STOP_SIGNALS, signal.SIGCHLD}
    if cores := os.environ.pop(CORES_VARIABLE, None):  # the owner is bound to the cores of one of the server's GPUs
        os.sched_setaffinity(0, map(int, cores.split(",")))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)  # blocked signals stay pending until sigtimedwait
    adopt_orphans()
    remove_unused()
    key = os.environ.pop(KEY_VARIABLE, None)
    guardian = os.getpid()
    server = os.fork()
    if server == 0:
        die_with_parent(guardian)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        # Otherwise torch's store would listen on all addresses, on the port --nccl-port.
        os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{folder}/store"
        _serve_and_exit([*arguments, f"--api-key={key}"] if key else arguments)
    code = _wait_for_end(server, owner, watched)
    kill_descendants()
    os.close(lock)
    remove_unused()
    return code


def remove_unused() -> None:
    """Remove temporary directories and shared memory left by dead servers.

    SGLang ends its processes via SIGKILL even without an error, so it never cleans up. Each server has a directory from
    processes.py. While any of its processes lives, the directory is locked and the server's shared memory is open. An
    unlocked directory, or memory that no process has open, belongs to a dead server, so servers need not be recorded.
    """
    processes.remove_unused_folders()
    segments = [path for path in SHARED_MEMORY.glob("*") if path.name.startswith(SHARED_MEMORY_PREFIXES)]
    in_use = set()
    for link in glob.iglob("/proc/[0-9]*/fd/*") if segments else ():
        with contextlib.suppress(OSError):
            in_use.add(os.readlink(link))
    for segment in segments:
        if str(segment) not in in_use:
            with contextlib.suppress(OSError):
                segment.unlink()


def serve(arguments: Sequence[str]) -> None:
    """Run SGLang until it ends."""
    gc.disable()  # imports leave no garbage, but the collector takes a seventh of their time
    prepare_server()
    sys.argv = ["sglang", *arguments]  # SGLang's error messages start with this name
    from sglang.launch_server import run_server
    from sglang.srt.entrypoints import http_server  # noqa: F401  # otherwise imported in run_server, with the collector on
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    patch_sglang(arguments)
    gc.enable()
    gc.freeze()
    try:
        run_server(prepare_server_args(list(arguments)))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def prepare_server() -> None:
    """Patch an SGLang process before it first imports SGLang. Every spawned process needs this."""
    hide_megatron()
    drop_idle_warnings()
    if _is_on_cpu():
        install_stubs()
        fork_children()
        hide_cuda()


def patch_sglang(arguments: Sequence[str]) -> None:
    """Apply the patches that these server arguments need, after the first SGLang import."""
    read_hybrid_configs()
    if "--enable-return-routed-experts" in arguments and _is_on_cpu():
        allow_routes_on_cpu()
    if "--enable-lora" in arguments:
        serve_adapters()
        if _is_on_cpu():
            unpin_memory()


def _is_on_cpu() -> bool:
    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"


def _serve_and_exit(arguments: Sequence[str]) -> NoReturn:
    """Run SGLang, then exit without the interpreter's clean-up, because some libraries write pages to the log there."""
    code = 1
    try:
        serve(arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        with contextlib.suppress(OSError):  # the log's disk may be full
            traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait_for_end(server: int, owner: int, watched: set[signal.Signals]) -> int:
    while os.getppid() == owner:
        received = signal.sigtimedwait(watched, SECONDS_BETWEEN_LOOKS)
        if received is not None and received.si_signo in _STOP_SIGNALS:
            return 0
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if ended[0] == server:
                    code = os.waitstatus_to_exitcode(ended[1])
                    return code if code >= 0 else 128 - code
    return 0


ADAPTER_KEY = "adapter"  # in an answer's meta_info: names of the adapters that computed its tokens
STUBBED = ("torchvision", "sgl_kernel")  # SGLang imports these; a CPU-only torch has no builds of them


def hide_megatron() -> None:
    """Keep SGLang's debug dumper from importing Megatron-core, because that takes a second, and memory on a GPU."""
    sys.modules["megatron"] = None  # type: ignore[assignment]  # makes the import fail


def hide_cuda() -> None:
    """Make a CUDA build of torch look like a CPU build.

    SGLang asks torch, not its device setting, when it releases memory, loads NCCL for ranks that share a model, and
    places a hybrid model's states.
    """
    import torch

    torch.version.cuda = None
    torch.get_device_module = lambda device=None: torch.cpu  # type: ignore[assignment]


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

    One is a warning for each endpoint with GET and POST, every time the endpoint list is read. The other is a
    traceback: a server that skips its warm-up calls its /freeze_gc before it listens. server.py makes this call later.
    """
    warnings.filterwarnings("ignore", message="Duplicate Operation ID")
    server_log = logging.getLogger("sglang.srt.entrypoints.http_server")
    server_log.addFilter(lambda record: "freeze_gc failed" not in record.getMessage())


def read_hybrid_configs() -> None:
    """Make SGLang read a Qwen3.5 model's config.json as the trainer does, and serve only its language model.

    SGLang reads neither layer_types nor a head's rotated share from rope_parameters. In text, positions are token
    indices, so the rotary embedding needs no mrope_section.
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
    """Change three things in SGLang's LoRA code.

    - Answers name the adapter that the scheduler computed them with, "none" for the base. SGLang uses the base, without
      an error, if a request names no adapter or its adapter is not in the pool, and its answers do not tell.
    - Adapters come from a file. SGLang's request would hold the tensors once per process.
    - Unloading does not wait until the adapter's requests have ended. SGLang never counts a request that was aborted in
      the queue as ended, so it would wait for ever. The trainer unloads only when no request runs.
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


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:]))
if __name__ == "__mp_main__":  # a process that SGLang spawned; SGLang itself calls prctl only seconds later
    die_with_parent(os.getppid())
    prepare_server()
    patch_sglang(sys.argv)
