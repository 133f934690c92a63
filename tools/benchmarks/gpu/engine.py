"""Measure sleep, wake and sync of an SGLang server that shares its GPU with the trainer's weights, with Qwen3-4B's
shape.

Each round does the same as a step. The server sleeps (frees its memory), wakes its weights, receives the trainer's
weights by CUDA IPC in buckets of sync.bucket_mib, with checksums compared between both ends, and wakes its cache. The
trainer is only a set of random weights in Megatron's layout for one rank. Engine, plan, buckets and verification are
the trainer's own code. The first sync is not measured, because it also compares names and shapes.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_mega.checkpoint_io.model import ModelFiles
from grpo_mega.config import Config
from grpo_mega.distributed.device import Device
from grpo_mega.distributed.launch import only_rank
from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.megatron import runtime as runtimes
from grpo_mega.trainer.parts import build_engine, build_sync
from grpo_mega.weights.checksum import checksum
from grpo_mega.weights.families import family_of
from grpo_mega.weights.layout import MegatronLayout, megatron_shards
from grpo_mega.weights.spec import ModelShape
from tools.benchmarks import harness
from tools.benchmarks.gpu.models import MODELS, hf_config_of, layer_parameters, shape_of, vocab_parameters
from tools.benchmarks.gpu.rank import Figure, Options, config_of, finish, seconds_of

SYNC_TARGET_MS = 150.0
ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


class Trainer:
    """A stand-in for the policy: its weights, without a model."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shards = megatron_shards(family_of(shape.model_type), shape, MegatronLayout())
        generator = torch.Generator(device).manual_seed(0)
        self.weights = {
            name: torch.empty(local.shape, dtype=dtype, device=device).normal_(0.0, 0.02, generator=generator)
            for name, local in self.shards.rank_shards(0).items()
        }


def run(options: Options) -> list[Figure]:
    model = "tiny" if options.tiny else "qwen3-4b"
    kind = engine_kind(options)
    if kind is None:
        return []
    with tempfile.TemporaryDirectory(prefix="bench_gpu_") as name, only_rank():
        config = config_for(model, kind, Path(name))
        device = runtimes.join(config)
        try:
            with opened(model, config, device) as (trainer, engine, sync):
                phases, freed = rounds(trainer, engine, sync, device.torch_device, options.repeat)
                rate = checksum_rate(trainer.weights, device.torch_device, options.repeat)
        finally:
            runtimes.stop()
    case = f"{model}, {weight_bytes(model) / 2**30:.3g} GiB of bf16, {kind}"
    targets = {"sync with proof": SYNC_TARGET_MS} if kind == "sglang" and not options.tiny else {}
    found = [
        Figure("engine", case, phase, 1e3 * statistics.median(seconds), "ms", targets.get(phase))
        for phase, seconds in phases.items()
    ]
    return [
        *found,
        Figure("engine", case, "given back while it sleeps", freed, "GiB"),
        Figure("engine", case, "checksums of the weights", rate, "GB/s"),
    ]


def config_for(model: str, kind: str, folder: Path, **more: Any) -> Config:
    """Write the model's config into `folder` and return the run's config. `more` has keys of the section rollout."""
    write_config(model, folder / "model")
    rollout = {"engine": kind, "sleep": "always", "max_response_length": 512, "memory_fraction": 0.5} | more
    return config_of(folder / "run", {"path": str(folder / "model"), "dtype": "bfloat16"}, rollout=rollout)


@contextmanager
def opened(model: str, config: Config, device: Device) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the trainer's weights, a running engine, and the sync between them. The ranks must have joined."""
    runtime = runtimes.arrange(config, device)
    rendezvous, shape = Rendezvous(runtime.store, 0, 1), shape_of(model)
    files = ModelFiles(config.model.path, hf_config_of(model), shape, family_of(shape.model_type), torch.bfloat16)
    engine = build_engine(config, files, runtime, rendezvous)
    try:
        engine.wait_until_ready()
        trainer: Any = Trainer(shape, torch.bfloat16, device.torch_device)
        yield (
            trainer,
            engine,
            build_sync(config, torch.bfloat16, trainer.shards, engine.shard_layout, runtime, rendezvous),
        )
    finally:
        engine.close()


def weight_bytes(model: str) -> int:
    shape = shape_of(model)
    return 2 * (shape.num_layers * layer_parameters(shape) + vocab_parameters(shape))


def engine_kind(options: Options) -> str | None:
    """Return "sglang" if it can be measured, "embedded" without a GPU to try the code, otherwise None."""
    if not torch.cuda.is_available():
        options.say("engine: no GPU here: using the embedded engine, which neither sleeps nor wakes")
        return "embedded"
    if importlib.util.find_spec("sglang") is None:
        options.say("engine: skipped: SGLang is not installed; run tools/install_gpu.sh")
        return None
    return "sglang"


def rounds(
    trainer: Any, engine: Any, sync: Any, device: torch.device, repeat: int
) -> tuple[dict[str, list[float]], float | None]:
    """Return seconds by phase, and the GiB that sleep freed. Raise SyncError, or RuntimeError if the server failed."""
    seconds: dict[str, list[float]] = {}

    def timed(phase: str, act: Callable[[], object]) -> None:
        seconds.setdefault(phase, []).append(harness.timed(act, lambda: finish(device))()["seconds"])
        if engine.failure is not None:
            raise RuntimeError(f"the engine failed, {phase}: {engine.failure}")

    sync.sync_weights(trainer.weights, engine, version=0)
    freed: float | None = None
    for number in range(repeat):
        before = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
        timed("sleep", engine.sleep)
        if device.type == "cuda":
            freed = (torch.cuda.mem_get_info(device)[0] - before) / 2**30
        timed("wake of weights", engine.wake_weights)
        timed("sync with proof", partial(sync.sync_weights, trainer.weights, engine, version=number + 1))
        timed("wake of cache", engine.wake_cache)
    return seconds, freed


def checksum_rate(weights: Mapping[str, Tensor], device: torch.device, repeat: int) -> float:
    """Return the gigabytes per second of `checksum` over all weights. A sync verifies at this rate at both ends."""

    def sum_all() -> None:
        for tensor in weights.values():
            checksum(tensor)

    return sum(tensor.nbytes for tensor in weights.values()) / seconds_of(sum_all, device, repeat) / 1e9


def write_config(model: str, folder: Path) -> None:
    """Write a model folder that has only a config."""
    folder.mkdir(parents=True)
    fields = MODELS[model] | {"architectures": [ARCHITECTURES[MODELS[model]["model_type"]]], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(fields | {"hidden_act": "silu", "initializer_range": 0.02}))
