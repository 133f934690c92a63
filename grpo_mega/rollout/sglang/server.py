"""One SGLang server on this machine: its settings, and its process: start it, wait for it, and always stop it.

The process started here is a guardian (server_main.py) with SGLang below it, all in one process group. If this process,
the guardian or SGLang ends, even by kill -9, the other two end within a second. The guardian removes left-over files.
If it cannot, `kill` or the next server on this machine removes them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mega import processes
from grpo_mega.config import RolloutConfig
from grpo_mega.distributed.environment import CORES_VARIABLE, cuda_runtime_of_torch, loopback_sockets, server_cache
from grpo_mega.distributed.launch import LINES_OF_LOG, free_ports, log_lines, log_tail
from grpo_mega.errors import ConfigError, EngineError
from grpo_mega.http_client import NoReply, send
from grpo_mega.processes import SECONDS_TO_DIE, living
from grpo_mega.rollout.routes import RouterSizes
from grpo_mega.rollout.sglang import server_main
from grpo_mega.rollout.sglang.buckets import ServedLora
from grpo_mega.tracking.progress import phase
from grpo_mega.weights.spec import BLOCK

SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_FOR_A_TOKEN = 5.0
MOST_BYTES = 1 << 20  # maximum response size during the start
SECONDS_TO_STOP = 10.0
MAX_STARTS = 3
PORTS = range(20000, 30000)  # does not overlap distributed.launch's ports

# Launcher, allocator and NCCL variables set for the trainer. With torchelastic's variables a server would hang.
NOT_INHERITED = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"}
NOT_INHERITED |= {"OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"}
NOT_INHERITED |= {"NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG"}
NOT_INHERITED_PREFIXES = ("ROLE_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_", "GRPO_MEGA_")

_PORT_CONFLICT = re.compile(
    r"address already in use|EADDRINUSE|port \S+ is (already in use|not available)", re.IGNORECASE
)
_REASONS = (  # the first pattern with a match counts, and its first matching line
    re.compile(r"sglang[\w ]*: error: (?P<text>.*)"),  # an error from the command line's parser
    re.compile(r"(?P<text>[\w.]*(Error|Exception|Interrupt|Exit): .*)"),  # a traceback's last line
    re.compile(r".*\bERROR: +(?P<text>.*)"),
)

CACHE_MARGIN = 256  # additional KV cache tokens, for partial pages and the server's warm-up
# SGLang refuses inputs that reach the last tokens in its context length. A turn or a resumed sample may need them.
INPUT_MARGIN = 6
LOADER = "grpo_mega.rollout.sglang.loader.load"
SEEDED_BY = "enable_deterministic_inference"  # with this server argument SGLang uses a seed per sample

# The quantization_config of an FP8 checkpoint. With it SGLang creates FP8 parameters and scales and quantises nothing
# itself.
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}


@dataclass(frozen=True)
class EngineSettings:
    """Engine settings. Raises ConfigError if rollout.server_args sets an argument that the trainer sets."""

    rollout: RolloutConfig
    model_path: Path
    dtype: str  # "float32" or "bfloat16"
    folder: Path  # directory for server.log
    context_length: int
    device_type: str  # "cpu" or "cuda"
    rank: int = 0
    world_size: int = 1
    base_gpu_id: int = 0  # the GPU used by the engine's first rank
    cores: tuple[int, ...] = ()  # CPU cores for a server without a GPU
    seed: int = 0
    is_hybrid: bool = False  # some layers use linear attention
    routers: RouterSizes | None = None  # the model's routers; None if their choices are not recorded
    plain_modules: tuple[str, ...] = ()  # linear layers that are not quantised (Family.plain_modules)
    lora: ServedLora | None = None  # the adapter, when syncs send only the adapter
    verify: bool = True  # compare checksums after each sync
    weight_loader: str = LOADER  # dotted path to a function in the server's processes
    shows_progress: bool = False  # print a line from time to time while the server starts

    def __post_init__(self) -> None:
        assert self.cores or self.device_type != "cpu", "a server on a CPU needs cores"
        fixed = {"host", "port", "api_key", "served_model_name", *self.fixed_arguments()}
        fixed |= {"nccl_port", "dist_init_addr", "nnodes", "node_rank"}
        for name in self.rollout.server_args:
            if name.replace("-", "_") in fixed:
                raise ConfigError(f"rollout.server_args.{name} is set by the trainer; remove it")

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
    def leader_deadline_s(self) -> float:
        """Return how long other ranks wait for the leader. It is longer than the leader waits for its server."""
        return 2 * self.stall_deadline_s(is_cold=True) + 10.0

    def stall_deadline_s(self, *, is_cold: bool) -> float:
        """Return how many seconds without an event are allowed before the server's health is checked.

        A server that has not finished a phase yet compiles kernels, and reads nothing meanwhile.
        """
        rollout = self.rollout
        return max(rollout.stall_deadline_s, rollout.start_deadline_s) if is_cold else rollout.stall_deadline_s

    @property
    def has_memory_saver(self) -> bool:
        """Return True if the server can release its memory while it sleeps. It needs a GPU."""
        return self.device_type == "cuda" and self.rollout.sleep != "never" and not self.rollout.is_separate

    @property
    def holds_blocks(self) -> bool:
        """Return True if parameters are FP8 blocks. On a CPU they have `dtype`, because SGLang's FP8 blocks need AMX
        there.
        """
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
        quantization = BLOCKS | ({"modules_to_not_convert": [*self.plain_modules]} if self.plain_modules else {})
        blocks = {"json_model_override_args": {"quantization_config": quantization}} if self.holds_blocks else {}
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
            "context_length": self.context_length + INPUT_MARGIN,
            "max_running_requests": self.rollout.max_concurrent,
            "max_total_tokens": self.cache_tokens,
            "mem_fraction_static": self.rollout.memory_fraction,
            "enable_memory_saver": self.has_memory_saver,
            "random_seed": self.seed,
            "enable_return_routed_experts": self.routers is not None,
            "quantization": self.rollout.quantization if self.holds_blocks else None,
            **blocks,
            **({} if self.lora is None else self.lora.server_arguments(self.device_type)),
            # Keeps an adapter's base in host memory while the server sleeps.
            "enable_weights_cpu_backup": self.lora is not None and self.has_memory_saver,
        }


class Server:
    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._log = settings.folder / "server.log"
        self._log_start = 0
        self._num_starts = 0
        self._name = ""  # unique among servers
        self.url = ""
        self.key = secrets.token_hex(32)  # the server refuses requests without it, so other users cannot call it
        self.private_folder = Path()  # the server processes' temporary directory, closed to other users

    def start(self) -> None:
        """Launch the server and return at once. This may be called from any thread."""
        assert self._process is None, "the server was started before"
        self._settings.folder.mkdir(parents=True, exist_ok=True)
        (port,) = free_ports(1, PORTS)
        self.url = f"http://127.0.0.1:{port}"
        self._name = f"policy-{secrets.token_hex(8)}"
        self._num_starts += 1
        arguments = server_arguments(self._settings, self._name, port)
        self.private_folder, lock = processes.make_folder()
        # On CPUs with AMX, SGLang names its shared memory by MASTER_ADDR and MASTER_PORT, so the port must be unique.
        own = {server_main.KEY_VARIABLE: self.key, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        owner = [str(os.getpid()), str(self.private_folder), str(lock)]
        with self._log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "grpo_mega.rollout.sglang.server_main", *owner, *arguments],
                env=server_environment(os.environ, self._settings) | own,
                pass_fds=(lock,),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C must reach only the trainer, and the trainer stops the server
            )
        os.close(lock)  # the server's processes keep the lock

    def wait_until_healthy(self) -> None:
        """Wait until the server has generated a token.

        If the server ends or is not ready in time, stop it and raise EngineError. If another process has taken its
        port, start it again with another port.
        """
        deadline_s = self._settings.rollout.start_deadline_s
        with phase("waiting for the SGLang server", self._settings.shows_progress, int(deadline_s), "seconds") as bar:
            started_at, num_shown = time.monotonic(), 0
            while not self._generates():
                seconds = time.monotonic() - started_at
                if not self.is_alive():
                    self.kill()
                    reason = self._reason()
                    if not _PORT_CONFLICT.search(reason) or self._num_starts == MAX_STARTS:
                        raise self._failed(f"did not start: {reason}; see {self._log}")
                    self.start()
                elif seconds > deadline_s:
                    raise self._failed(f"was not ready after {deadline_s:.0f} s; {self.tail()}")
                bar.advance(int(seconds) - num_shown)
                num_shown = int(seconds)
                time.sleep(SECONDS_BETWEEN_LOOKS)
            if self._settings.device_type == "cuda":  # a CPU compiles no kernels
                rest_s = deadline_s - (time.monotonic() - started_at)
                if self._ask("/generate", warm_up(self._settings), max(rest_s, SECONDS_FOR_A_TOKEN)) is None:
                    raise self._failed(
                        "generated no token for its longest prompt within"
                        f" rollout.start_deadline_s={deadline_s:.0f} s; {self.tail()}"
                    )

    @property
    def headers(self) -> dict[str, str]:
        """Return the HTTP headers that every request needs."""
        return {"Authorization": f"Bearer {self.key}"}

    @property
    def pid(self) -> int | None:
        """Return the guardian's process id, the ancestor of all server processes; None if it does not run."""
        return self._process.pid if self._process is not None else None

    def is_alive(self) -> bool:
        """Return True if the guardian runs, healthy or not."""
        if self._process is None:
            return False
        # poll() would free the process id, but `kill` needs the id to find the other processes.
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def stop(self) -> None:
        """Stop the server and all its processes, in well below a second. This may be called at any time."""
        if self._process is not None and self.is_alive():
            self._process.send_signal(signal.SIGTERM)
            _wait_while(self.is_alive, SECONDS_TO_STOP)
        self.kill()

    def kill(self) -> None:
        """Kill the server and all its processes, even without a guardian, and wait until they are gone."""
        if self._process is None:
            return
        group = self._process.pid
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self._process.wait()
        self._process = None
        _wait_while(lambda: any(process.group == group for process in living()), SECONDS_TO_DIE)
        server_main.remove_unused()

    def tail(self) -> str:
        """Return the last lines in this server's log, joined into one."""
        return log_tail(self._log, self._log_start)

    def _failed(self, problem: str) -> EngineError:
        """Kill the server, and return its error."""
        self.kill()
        return EngineError(f"the SGLang server of {self._settings.folder} {problem}")

    def _reason(self) -> str:
        """Return the log line that says why the server ended."""
        lines = log_lines(self._log, self._log_start)
        for kind in _REASONS:
            for line in lines:
                if match := kind.fullmatch(line):
                    return match["text"]
        return " | ".join(lines[-LINES_OF_LOG:]) or "it wrote nothing"

    def _generates(self) -> bool:
        if self._name not in (self._ask("/v1/models") or ""):  # another server may have taken the port
            return False
        params = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
        if self._ask("/generate", {"input_ids": [0], "sampling_params": params}) is None:
            return False
        self._ask("/freeze_gc", {})  # the garbage collector need not visit the objects of the start again
        return True

    def _ask(
        self, path: str, body: dict[str, Any] | None = None, deadline_s: float = SECONDS_FOR_A_TOKEN
    ) -> str | None:
        """Return the response to a POST, or to a GET if `body` is None; None when refused or unanswered."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self.headers}
        try:
            reply = send(self.url + path, data, headers, deadline_s=deadline_s, most_bytes=MOST_BYTES)
        except NoReply:
            return None
        return reply.body.decode(errors="replace") if 200 <= reply.status < 300 and reply.is_whole else None


def _wait_while(condition: Callable[[], bool], most_s: float) -> None:
    until = time.monotonic() + most_s
    while condition() and time.monotonic() < until:
        time.sleep(SECONDS_BETWEEN_LOOKS / 5)


def warm_up(settings: EngineSettings) -> dict[str, Any]:
    """Return a request that makes the server compile the kernels for the run's first phase.

    It uses the run's sampling parameters and a full-length prompt, because kernels depend on both.
    """
    rollout = settings.rollout
    num_tokens = 2  # the first is of the prefill, the second of the decoding
    params = {
        "max_new_tokens": num_tokens,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k or -1,
        "ignore_eos": True,
    }
    length = settings.context_length - rollout.max_response_length - 1
    return {"input_ids": [0] * length, "sampling_params": params, "return_logprob": True}


def server_arguments(settings: EngineSettings, name: str, port: int) -> list[str]:
    """Return SGLang's command line. The trainer's arguments come last, so they override the user's."""
    usual = {
        "log_level": "warning",
        "stream_interval": 1_000_000,  # tokens; a sample sends only its last message
        "skip_server_warmup": True,  # `wait_until_healthy` generates a token
        "sleep_on_idle": True,  # otherwise the server keeps a core busy while the trainer trains
        "attention_backend": "torch_native" if settings.device_type == "cpu" else None,
        # Logits in float32, as the trainer's, instead of rounded to bf16. A GPU's product has them at no cost; a CPU
        # would copy the whole weight in every step.
        "enable_fp32_lm_head": settings.device_type == "cuda" and settings.dtype == "bfloat16",
    }
    if settings.is_hybrid and settings.device_type == "cpu":
        # Other strategies and the overlap need a GPU. SGLang runs only a third as many samples as it has states.
        usual |= {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}
        usual |= {"max_mamba_cache_size": 4 * settings.rollout.max_concurrent}
    chosen = usual | {name.replace("-", "_"): value for name, value in settings.rollout.server_args.items()}
    chosen |= settings.fixed_arguments() | {"served_model_name": name, "host": "127.0.0.1", "port": port}
    words: list[str] = []
    for name, value in chosen.items():
        if value is None or value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if isinstance(value, list):
            words += value
        elif value is not True:
            words.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return words


def server_environment(environ: Mapping[str, str], settings: EngineSettings) -> dict[str, str]:
    """Return the server processes' environment: the trainer's, without variables that are only for the trainer.

    The processes are all on this machine, so they use the loopback interface.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if name not in NOT_INHERITED and not name.startswith(NOT_INHERITED_PREFIXES)
    }
    own = {
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        # The trainer's temporary folder is removed with the trainer, so the server needs another one.
        "TMPDIR": str(processes.shared_folder()),
        # When a process dies, SGLang would otherwise spend 5 s on diagnostics before it ends, and 60 s more on a GPU.
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for INPUT_MARGIN; no sequence reaches into it
        "SGLANG_MAMBA_CONV_DTYPE": settings.dtype,  # hybrid models keep a convolution's last inputs
        "SGLANG_TIMEOUT_KEEP_ALIVE": "60",  # seconds; longer than aiohttp's, because aiohttp must close it
        **loopback_sockets(),
    }
    if settings.device_type == "cpu":
        cores, tp = settings.cores, settings.rollout.tp
        # Cores per tensor-parallel process.
        parts = [
            cores[i * len(cores) // tp : (i + 1) * len(cores) // tp] or (cores[i % len(cores)],) for i in range(tp)
        ]
        own |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": str(min(map(len, parts))),
            # By default waiting threads spin, which on busy cores costs several times the work itself.
            "OMP_WAIT_POLICY": "passive",
            # Otherwise the first batch compiles a few functions, in 10 s and with a C++ compiler.
            "TORCHDYNAMO_DISABLE": "1",
        }
        if tp > 1:
            own["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, part)) for part in parts)
    else:
        usual = {
            "SGLANG_CACHE_DIR": str(server_cache(environ)),
            # A restarted server shares its GPUs with trainers, so their free memory may differ.
            "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
            # For some models, such as GLM-4.5, SGLang turns TF32 on. The trainer's routers compute in full fp32.
            "NVIDIA_TF32_OVERRIDE": "0",
        }
        if settings.has_memory_saver:
            usual["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"  # graphs sleep too (engine.py)
            # SGLang preloads the memory saver's library, which needs the CUDA runtime before torch loads it.
            if folder := cuda_runtime_of_torch():
                own["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (kept.get("LD_LIBRARY_PATH"), str(folder))))
        if settings.holds_blocks:
            # By default DeepGEMM compiles kernels for up to 16,384 row counts per shape, which takes 10 to 20 minutes.
            usual |= {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "false", "SGLANG_JIT_DEEPGEMM_FAST_WARMUP": "true"}
        kept = usual | kept
        if rank_cores := environ.get(CORES_VARIABLE):
            own[CORES_VARIABLE] = rank_cores
    return {"SGLANG_EXTERNAL_MODEL_PACKAGE": "grpo_mega.rollout.sglang.served_models"} | kept | own
