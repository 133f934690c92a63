"""Run one measured conversion: `child.py KIND SOURCE OUT WORKERS`, started by benchmarks/convert.

KIND is ours, mbridge or copy (HF -> Megatron; copy only copies SOURCE's weights), or ours-back, mbridge-back (Megatron
-> HF). Imports come before the measurement. The last line is JSON: wall and cpu in seconds, extra_peak_mib above the
resident memory before, and for ours write_seconds and proof_seconds.

mbridge needs a model. It is built without initializing weights, filled by mbridge, and saved by Megatron's
dist_checkpointing without forking. For mbridge-back, dist_checkpointing loads it and mbridge writes it.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from grpo_mega.distributed.device import Device, PeakMemory
from grpo_mega.text import filter_output


def main() -> None:
    kind, source, out, workers = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    makers = {"ours": ours, "mbridge": mbridge, "copy": copy}
    act = makers[kind.removesuffix("-back")](source, out, workers, is_back=kind.endswith("-back"))
    make_ready(source)
    peak = PeakMemory(Device("cpu", torch.device("cpu")))
    before, cpu, started_at = peak.take(), sum(os.times()[:2]), time.monotonic()  # the peak has just been reset
    extra = act()
    wall, cpu = time.monotonic() - started_at, sum(os.times()[:2]) - cpu
    print(json.dumps({"wall": wall, "cpu": cpu, "extra_peak_mib": (peak.take() - before) / 2**20} | extra))
    sys.stdout.flush()
    os._exit(0)  # skip the shutdown of Megatron's groups, because it is slow


def make_ready(source: Path) -> None:
    """Flush the disk, and touch as much memory as the output will need, so that the host has assigned it."""
    os.sync()
    size = sum(p.stat().st_size for p in source.iterdir())
    with mmap.mmap(-1, size) as memory:
        for offset in range(0, size, mmap.PAGESIZE):
            memory[offset] = 1


def copy(source: Path, out: Path, workers: int, *, is_back: bool) -> Callable[[], dict[str, Any]]:
    def act() -> dict[str, Any]:
        out.mkdir()
        for path in source.glob("*.safetensors"):
            shutil.copyfile(path, out / path.name)
        return {}

    return act


def ours(source: Path, out: Path, workers: int, *, is_back: bool) -> Callable[[], dict[str, Any]]:
    from grpo_mega.checkpoint_io.convert import convert_hf_to_mcore, convert_mcore_to_hf

    convert = convert_mcore_to_hf if is_back else convert_hf_to_mcore

    def act() -> dict[str, Any]:
        report = convert(source, out, workers=workers, show_progress=False)
        return {"write_seconds": report.write_seconds, "proof_seconds": report.verify_seconds}

    return act


def mbridge(source: Path, out: Path, workers: int, *, is_back: bool) -> Callable[[], dict[str, Any]]:
    warnings.simplefilter("ignore")
    from transformers import AutoConfig

    from grpo_mega.checkpoint_io.model import read_model_files
    from grpo_mega.megatron import model as models
    from grpo_mega.megatron import runtime as runtimes
    from grpo_mega.megatron.state import InProcessSave
    from tools.benchmarks.gpu.rank import config_of

    bridges: Any = importlib.import_module("mbridge.models")
    states: Any = importlib.import_module("mbridge.core.parallel_states")
    checkpointing: Any = importlib.import_module("megatron.core.dist_checkpointing")
    parallel: Any = importlib.import_module("megatron.core.parallel_state")
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ["BENCH_PORT"]}
    config = config_of(out, {"path": str(source), "dtype": "bfloat16"}, device="cpu")
    runtime = runtimes.start(config)

    def act() -> dict[str, Any]:
        model = read_model_files(config.model)
        hf_config = AutoConfig.from_pretrained(source)
        base = bridges.Qwen3MoEBridge if model.shape.num_experts else bridges.LLaMABridge
        bridge = _named_as_local(base)(hf_config, parallel_states=states.ParallelStates.get_parallel_state())
        parts = config.model, config.layout, config.precision
        chunks = models.build_chunks(model.shape, model.family, model.hf_config, *parts, runtime)
        metadata = {
            "dp_cp_group": parallel.get_data_parallel_group(with_context_parallel=True),
            "singleton_local_shards": False,
        }
        if not is_back:
            with torch.no_grad():
                bridge.load_weights(chunks, str(source))
            out.mkdir()
            checkpointing.save(
                {"model": chunks[0].sharded_state_dict(metadata=metadata)}, str(out), InProcessSave("torch_dist", 1)
            )
        else:
            state = checkpointing.load({"model": chunks[0].sharded_state_dict(metadata=metadata)}, str(source))
            chunks[0].load_state_dict(state["model"])
            bridge.safetensor_io = bridge._get_safetensor_io(os.environ["BENCH_HF"])
            bridge.save_weights(chunks, str(out))
        return {}

    return act


def _named_as_local(base: Any) -> Any:
    """Return a bridge that maps local layer names to Transformer Engine's, because mbridge knows only the latter."""

    class Bridge(base):
        def _build_config(self) -> Any:
            fields = {"num_moe_experts": None, "num_query_groups": self.hf_config.num_key_value_heads}
            return SimpleNamespace(**fields)

        def _weight_name_mapping_mcore_local_to_global(self, model: Any, consider_ep: bool = True) -> dict[str, str]:
            names = super()._weight_name_mapping_mcore_local_to_global(model, consider_ep)
            return {local: _as_transformer_engine(name) for local, name in names.items()}

    return Bridge


def _as_transformer_engine(name: str) -> str:
    name = name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
    found = re.search(r"local_experts\.(\d+)\.(linear_fc\d)\.weight", name)
    if found:
        return name.replace(found[0], f"{found[2]}.weight{found[1]}")
    if "pre_mlp_layernorm" in name and os.environ["BENCH_KIND"] == "dense":
        return name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    return name


if __name__ == "__main__":
    filter_output()
    main()
