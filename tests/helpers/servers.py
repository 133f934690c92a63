"""Real SGLang servers with a tiny random model, and their processes, shared memory and ports as seen from outside."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from grpo_mega.config import RolloutConfig
from grpo_mega.processes import descendants, living
from grpo_mega.rollout.sglang.server import EngineSettings, Server

START_DEADLINE_S = 300.0  # an idle machine needs 12 s, a busy machine far more
LOADER = "tests.helpers.servers.note_names"  # the server's processes import it through PYTHONPATH
# Environment variables of a trainer's rank that its server must not inherit.
TRAINERS = {
    "RANK": "3",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "nowhere",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "ROLE_RANK": "3",
    "OMP_NUM_THREADS": "17",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "GRPO_MEGA_STOP": "x",
}
MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "dtype": "float32",
}


def write_model(folder: Path) -> Path:
    """Write a model folder with only a config. A server needs nothing else."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


def make_settings(model: Path, folder: Path, *, shows_progress: bool = False, **rollout: Any) -> EngineSettings:
    """Return engine settings. `rollout` sets keys of the config section."""
    defaults = {
        "max_concurrent": 64,
        "cache_tokens": 16384,
        "start_deadline_s": START_DEADLINE_S,
        "stall_deadline_s": 30.0,
    }
    return EngineSettings(
        rollout=RolloutConfig(**{"engine": "sglang", **defaults, **rollout}),
        model_path=model,
        dtype="float32",
        folder=folder,
        context_length=512,
        device_type="cpu",
        cores=(0, 1),
        weight_loader=LOADER,
        shows_progress=shows_progress,
    )


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def ready(server: Server, temporary: Path) -> Iterator[Server]:
    """Start a server like a trainer's rank, with its files below `temporary`, and wait until it is ready."""
    with trainers_environment(temporary):
        server.start()
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.stop()


def changed(settings: EngineSettings, changes: dict[str, Any], **others: Any) -> EngineSettings:
    """Return changed settings. `changes` set keys of the rollout section without validation."""
    return replace(settings, rollout=settings.rollout.model_copy(update=changes), **others)


@contextlib.contextmanager
def trainers_environment(temporary: Path) -> Iterator[None]:
    """Make this process look like a trainer's rank with temporary files in `temporary`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        patch.setattr(tempfile, "tempdir", str(temporary))
        patch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]), prepend=os.pathsep)
        for name, value in TRAINERS.items():
            patch.setenv(name, value)
        yield


def note_names(model: Any, named_tensors: Any) -> None:
    """Do what the suffix of a tensor's name says. SGLang calls this as a weight loader.

    .hf: load the Hugging Face tensors in this file. .save: write all parameters to this file. .restore: load the file
    of the same name with .save. Otherwise write the parameter names to the file.
    """
    import torch

    parameters = dict(model.named_parameters())
    for name, _ in named_tensors:
        path = Path(name)
        if path.suffix == ".hf":
            model.load_weights(torch.load(path).items())
        elif path.suffix == ".save":
            torch.save({key: value.detach() for key, value in parameters.items()}, path)
        elif path.suffix == ".restore":
            for key, value in torch.load(path.with_suffix(".save")).items():
                parameters[key].data.copy_(value)
        else:
            path.write_text(json.dumps(list(parameters)))


def generate(server: Server, num_tokens: int = 8, num_samples: int = 1, timeout_s: float = 60) -> list[dict[str, Any]]:
    params = {"max_new_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True, "n": num_samples}
    answer = post(
        server, "/generate", {"input_ids": [5, 6, 7], "sampling_params": params, "return_logprob": True}, timeout_s
    )
    return answer if isinstance(answer, list) else [answer]


def post(server: Server, path: str, body: dict[str, Any], timeout_s: float = 60) -> Any:
    headers = {"Content-Type": "application/json", **server.headers}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return json.loads(response.read())


@dataclass(frozen=True)
class Tree:
    """Some processes with their shared memory and ports."""

    pids: list[int]
    shared_memory: set[str]
    ports: set[tuple[int, str]]  # (port, inode); the inode tells apart later users of the same port

    @classmethod
    def below(cls, pid: int) -> Tree:
        return cls.made_of(descendants(pid))

    @classmethod
    def of(cls, server: Server) -> Tree:
        """Return the server's processes. This process may have other children, for example from other tests."""
        assert server.pid is not None
        return cls.made_of([server.pid, *descendants(server.pid)])

    @classmethod
    def made_of(cls, pids: list[int]) -> Tree:
        open_files = {file for found in pids for file in _open_files(found)}
        return cls(
            pids=pids,
            shared_memory={file for file in open_files if file.startswith("/dev/shm/")},
            ports={(port, inode) for port, inode in _listening() if f"socket:[{inode}]" in open_files},
        )

    def named(self, title: str) -> list[int]:
        """Return the processes whose command line starts with `title`."""
        return [pid for pid in self.pids if Path(f"/proc/{pid}/cmdline").read_text().startswith(title)]

    def remains(self) -> list[str]:
        alive = {process.pid for process in living()}
        found = [f"process {pid}" for pid in self.pids if pid in alive]
        found += [file for file in self.shared_memory if os.path.exists(file)]
        return found + [f"port {port}" for port, inode in _listening() if (port, inode) in self.ports]


def is_true_within(seconds: float, condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def check_gone(tree: Tree, temporary: Path, seconds: float = 20) -> None:
    assert is_true_within(seconds, lambda: not tree.remains() and not os.listdir(temporary)), (
        tree.remains(),
        os.listdir(temporary),
    )


def _open_files(pid: int) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return found


def _listening() -> list[tuple[int, str]]:
    """Return (port, inode) of every listening TCP socket."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [(int(row[1].rpartition(":")[2], 16), row[9]) for row in rows if row[3] == "0A"]
