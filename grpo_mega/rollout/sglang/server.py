"""The life of one SGLang server on this machine: started, waited for, and ended on every way out.

The process started here is a guardian (server_main.py) with SGLang below it, all in one process group. However this process,
the guardian or SGLang ends, by a signal or by kill -9, the others end with it within a second. What then could still lie
around is removed by the guardian, else by `kill`, else by the next server on this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from grpo_mega.errors import ConfigError, EngineError
from grpo_mega.processes import living
from grpo_mega.rollout.sglang import leftovers
from grpo_mega.weights.spec import BLOCK

SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_FOR_A_TOKEN = 5.0
SECONDS_TO_STOP = 10.0
SECONDS_TO_DIE = 60.0
MAX_STARTS = 3
PORTS = range(20000, 30000)  # below those that the kernel gives to clients, which come and go
LINES_OF_LOG = 5

# What a trainer's launcher, allocator and NCCL are told: torchelastic's would make a server wait for ever.
NOT_INHERITED = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "OMP_NUM_THREADS"}
NOT_INHERITED |= {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"}
NOT_INHERITED |= {"NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG"}
NOT_INHERITED_PREFIXES = ("ROLE_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_", "GRPO_MEGA_")

# As if the checkpoint said so: SGLang then makes FP8 parameters and their scales, and nothing is left to be quantised there.
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}

_PORT_CONFLICT = re.compile(r"address already in use|EADDRINUSE|port \S+ is (already in use|not available)", re.IGNORECASE)
_REASONS = (  # the first line of the first kind that occurs
    re.compile(r"sglang[\w ]*: error: (?P<text>.*)"),  # of the command line's parser
    re.compile(r"(?P<text>[\w.]*(Error|Exception|Interrupt|Exit): .*)"),  # the end of a traceback
    re.compile(r".*\bERROR: +(?P<text>.*)"),
)


@dataclass(frozen=True)
class ServerSettings:
    """Raises ConfigError for an `extra` argument that is not the user's to set."""

    model_path: Path
    folder: Path  # gets server.log
    tp: int
    dtype: str  # "float32" or "bfloat16"
    device_type: str  # "cpu" or "cuda"
    base_gpu_id: int
    context_length: int
    max_running_requests: int
    max_total_tokens: int | None
    memory_fraction: float | None
    seed: int
    has_memory_saver: bool  # on a GPU: its memory can be given back while it sleeps
    cores: tuple[int, ...]  # of a server on a CPU
    weight_loader: str  # dotted path of a function in the server's processes
    extra: Mapping[str, Any] = field(default_factory=dict)  # further arguments, by SGLang's names
    quantization: str | None = None  # "fp8": linear layers come as FP8 blocks, which a server on a GPU holds as they are

    def __post_init__(self) -> None:
        assert self.cores or self.device_type != "cpu", "a server on a CPU needs cores"
        fixed = {"host", "port", "nccl_port", "served_model_name", *fixed_arguments(self)}
        for name in self.extra:
            if name.replace("-", "_") in fixed:
                raise ConfigError(f"rollout.server_args.{name} is set by the trainer; remove it")

    @property
    def holds_blocks(self) -> bool:
        """Whether its parameters are FP8 blocks. On a CPU they are of `dtype`: SGLang computes with blocks on AMX alone."""
        return self.quantization is not None and self.device_type == "cuda"


class Server:
    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._log = settings.folder / "server.log"
        self._log_start = 0
        self._num_starts = 0
        self._name = ""  # that this server alone has
        self.url = ""

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Returns at once; from any thread."""
        assert self._process is None, "the server was started before"
        self._settings.folder.mkdir(parents=True, exist_ok=True)
        port, nccl_port = free_ports(2)
        self.url = f"http://127.0.0.1:{port}"
        self._name = f"policy-{secrets.token_hex(8)}"
        self._num_starts += 1
        arguments = server_arguments(self._settings, self._name, port, nccl_port)
        with self._log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "grpo_mega.rollout.sglang.server_main", str(os.getpid()), *arguments],
                env=server_environment(os.environ, self._settings),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # a Ctrl-C is for the trainer, which stops the server when it is done
            )

    def wait_until_healthy(self, deadline_s: float, on_wait: Callable[[float], None]) -> None:
        """Returns once it has generated a token; `on_wait` is told the seconds so far every now and then.

        Raises EngineError, with the server gone, if it ends or is not ready in time. A port that someone else was
        faster to take leads to another start.
        """
        began = time.monotonic()
        while not self._generates():
            seconds = time.monotonic() - began
            if not self.is_alive():
                self.kill()
                reason = self._reason()
                if not _PORT_CONFLICT.search(reason) or self._num_starts == MAX_STARTS:
                    raise EngineError(f"the SGLang server of {self._settings.folder} did not start: {reason}; see {self._log}")
                self.start()
            elif seconds > deadline_s:
                self.kill()
                raise EngineError(
                    f"the SGLang server of {self._settings.folder} was not ready after {deadline_s:.0f} s; {self.tail()}"
                )
            on_wait(seconds)
            time.sleep(SECONDS_BETWEEN_LOOKS)

    @property
    def pid(self) -> int | None:
        """Of the guardian, the first of its processes and above all others; None when there is none."""
        return self._process.pid if self._process is not None else None

    def is_alive(self) -> bool:
        """Whether the process runs, be it of use or not."""
        if self._process is None:
            return False
        # Not poll(), which would free the process id, by which `kill` finds the others.
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def stop(self) -> None:
        """Ends the server and all its processes, which takes well below a second; may be called at any time."""
        if self._process is not None and self.is_alive():
            self._process.send_signal(signal.SIGTERM)
            until = time.monotonic() + SECONDS_TO_STOP
            while self.is_alive() and time.monotonic() < until:
                time.sleep(SECONDS_BETWEEN_LOOKS / 5)
        self.kill()

    def kill(self) -> None:
        """Kills the server and all its processes at once, also where the guardian no longer can; returns when they are gone."""
        if self._process is None:
            return
        group = self._process.pid
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self._process.wait()
        self._process = None
        until = time.monotonic() + SECONDS_TO_DIE
        while any(process.group == group for process in living()) and time.monotonic() < until:
            time.sleep(SECONDS_BETWEEN_LOOKS / 5)
        leftovers.remove_unused()

    def tail(self) -> str:
        """The last lines that this server wrote to its log, joined into one."""
        return f"{self._log} ends: " + (" | ".join(self._lines()[-LINES_OF_LOG:]) or "(empty)")

    def _lines(self) -> list[str]:
        if not self._log.exists():
            return []
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            return [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]

    def _reason(self) -> str:
        """The line of the log that says best why the server ended."""
        lines = self._lines()
        for kind in _REASONS:
            for line in lines:
                if found := kind.fullmatch(line):
                    return found["text"]
        return " | ".join(lines[-LINES_OF_LOG:]) or "it wrote nothing"

    def _generates(self) -> bool:
        if self._name not in (self._ask("/v1/models") or ""):  # it may be another server, on a port that both were to have
            return False
        params = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
        if self._ask("/generate", {"input_ids": [0], "sampling_params": params}) is None:
            return False
        self._ask("/freeze_gc", {})  # what start-up has made stays, and need not be looked through again and again
        return True

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> str | None:
        """The answer, None where there is none or a refusal; without a body by GET."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with _without_proxies.open(request, timeout=SECONDS_FOR_A_TOKEN) as response:
                return str(response.read().decode())
        except OSError:  # URLError, HTTPError and timeouts are all of this kind
            return None


_without_proxies = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def free_ports(count: int) -> list[int]:
    """Ports that no one listens on."""
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError), socket.socket() as server:
            server.bind(("", port))
            found.append(port)
        if len(found) == count:
            break
    return found


def server_arguments(settings: ServerSettings, name: str, port: int, nccl_port: int) -> list[str]:
    """The command line of SGLang. What the trainer relies on comes last, where it wins over `extra` by any other name."""
    usual = {
        "log_level": "warning",
        "stream_interval": 1_000_000,  # tokens: a sample's only message is its last
        "skip_server_warmup": True,  # `wait_until_healthy` has it generate
        "sleep_on_idle": True,  # else it keeps a core busy while the trainer trains
        "attention_backend": "torch_native" if settings.device_type == "cpu" else None,
    }
    chosen = usual | {name.replace("-", "_"): value for name, value in settings.extra.items()}
    chosen |= fixed_arguments(settings) | {"served_model_name": name}
    chosen |= {"host": "127.0.0.1", "port": port, "nccl_port": nccl_port}
    words: list[str] = []
    for name, value in chosen.items():
        if value is None or value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(json.dumps(value) if isinstance(value, Mapping) else str(value))
    return words


def fixed_arguments(settings: ServerSettings) -> dict[str, Any]:
    blocks = {"json_model_override_args": {"quantization_config": BLOCKS}} if settings.holds_blocks else {}
    return {
        "model_path": settings.model_path,
        "load_format": "dummy",  # the first sync brings the weights
        "custom_weight_loader": settings.weight_loader,
        "skip_tokenizer_init": True,
        "device": settings.device_type,
        "dtype": settings.dtype,
        "tp_size": settings.tp,
        "base_gpu_id": settings.base_gpu_id if settings.device_type == "cuda" else None,
        "context_length": settings.context_length,
        "max_running_requests": settings.max_running_requests,
        "max_total_tokens": settings.max_total_tokens,
        "mem_fraction_static": settings.memory_fraction,
        "enable_memory_saver": settings.has_memory_saver and settings.device_type == "cuda",
        "random_seed": settings.seed,
        "quantization": settings.quantization if settings.holds_blocks else None,
        **blocks,
    }


def server_environment(environ: Mapping[str, str], settings: ServerSettings) -> dict[str, str]:
    """The environment of the server's processes: the trainer's without what is meant for the trainer alone."""
    kept = {
        name: value
        for name, value in environ.items()
        if name not in NOT_INHERITED and not name.startswith(NOT_INHERITED_PREFIXES)
    }
    own = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    # Over a dead process SGLang would end only after 5 s, and on a GPU 60 s more, spent on diagnostics.
    own |= {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
    own["SGLANG_TIMEOUT_KEEP_ALIVE"] = "60"  # seconds, longer than aiohttp keeps an idle connection: it is the one to close it
    if settings.device_type == "cpu":
        own |= {"SGLANG_USE_CPU_ENGINE": "1"} | _threads(settings.cores, settings.tp)
        own["TORCHDYNAMO_DISABLE"] = "1"  # SGLang compiles a few functions of its first batch: ten seconds, and a C++ compiler
    return {"SGLANG_EXTERNAL_MODEL_PACKAGE": "grpo_mega.rollout.sglang.served_models"} | kept | own


def _threads(cores: tuple[int, ...], tp: int) -> dict[str, str]:
    """OpenMP's variables for `tp` processes that share these cores."""
    parts = [cores[i * len(cores) // tp : (i + 1) * len(cores) // tp] or (cores[i % len(cores)],) for i in range(tp)]
    # Threads that wait in a loop, as is usual, cost several times the work itself when others want the cores too.
    threads = {"OMP_NUM_THREADS": str(min(map(len, parts))), "OMP_WAIT_POLICY": "passive"}
    if tp > 1:
        threads["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, part)) for part in parts)
    return threads
