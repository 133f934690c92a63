"""One rank of the layout tests: `python megatron_worker.py RANK WORLD_SIZE FOLDER` runs the cases of cases.json in
turn.

Each case fills a model of the case's layout with NaN, loads a converted checkpoint into it with Megatron's loader, and
saves it with Megatron's saver. Then it builds the policy from the converted checkpoint as in training, saves policy and
optimizer, restores them, and compares the policy with the policy built from the Hugging Face folder.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo_mega import config as configs
from grpo_mega.checkpoint_io.model import read_model_files
from grpo_mega.distributed.device import Device
from grpo_mega.megatron import model as models
from grpo_mega.megatron import runtime as runtimes
from grpo_mega.megatron.state import InProcessSave
from grpo_mega.trainer.parts import build_policy
from tests.helpers.ranks import run_each

# isort: split
from megatron.core import dist_checkpointing, parallel_state


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    cases: list[dict[str, Any]] = json.loads((folder / "cases.json").read_text())
    device = runtimes.join(_config(cases[0], "hf"))
    named = {f"layout {number}": partial(load_and_save, case, device) for number, case in enumerate(cases)}
    if run_each(named, rank, world_size, folder):
        dist.barrier()
        runtimes.stop()


def load_and_save(case: dict[str, Any], device: Device, rank: int, folder: Path) -> None:
    config = _config(case, "megatron")
    runtime = runtimes.arrange(config, device)
    model = read_model_files(config.model)
    parts = config.model, config.layout, config.precision
    chunks = models.build_chunks(model.shape, model.family, model.hf_config, *parts, runtime)
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.fill_(float("nan"))
    _load(chunks, Path(case["megatron"]))
    out = Path(case["out"])
    if runtime.rank == 0:
        out.mkdir()
    dist.barrier()
    dist_checkpointing.save(_state(chunks), str(out), sharded_strategy=InProcessSave("torch_dist", 1))

    policy = build_policy(config, model, runtime)
    trained = out.with_name(f"{out.name}-trained")
    if runtime.rank == 0:
        trained.mkdir()
    dist.barrier()
    policy.save(trained)
    for tensor in policy.tensors().values():
        tensor.detach().zero_()
    policy.restore(trained)
    loaded = policy.tensors()
    expected_config = _config(case, "hf")
    expected = build_policy(expected_config, read_model_files(expected_config.model), runtime).tensors()
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), (case["layout"], name)


def _config(case: dict[str, Any], source: str) -> configs.Config:
    return configs.Config.model_validate(
        {
            "steps": 1,
            "device": "cpu",
            "run_dir": "unused",
            "data": {"train": "unused.jsonl"},
            "model": {"path": case[source], "dtype": case["dtype"]},
            "layout": case["layout"],
        }
    )


def _load(chunks: list[Any], folder: Path) -> None:
    state = dist_checkpointing.load(_state(chunks), str(folder))
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(state[f"model{index}"])


def _state(chunks: list[Any]) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"dp_cp_group": group, "singleton_local_shards": False}
    return {f"model{index}": chunk.sharded_state_dict(metadata=metadata) for index, chunk in enumerate(chunks)}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
