"""One rank of test_sft: the loss and the gradients of sft in each layout, compared with transformers'.

`python sft_worker.py RANK WORLD_SIZE FOLDER` reads cases.pt: the configs by name, and the expected values.
"""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from grpo_mega.config import Config
from grpo_mega.distributed.device import Device
from grpo_mega.megatron import runtime as runtimes
from grpo_mega.trainer.folder import first_start
from grpo_mega.trainer.inputs import read_inputs
from grpo_mega.trainer.parts import build_policy
from grpo_mega.trainer.sft import mean_loss, pack
from tests.distributed.layouts_worker import _gradient_differences
from tests.helpers import late_streams
from tests.helpers.ranks import run_each


def main(rank: int, world_size: int, folder: Path) -> None:
    late_streams.install()  # a missing wait shows as a wrong number
    torch.set_num_threads(1)
    configs, gradients = torch.load(folder / "cases.pt", weights_only=False)
    device = runtimes.join(next(iter(configs.values())))
    run_each(
        {name: partial(compared, name, config, gradients, device) for name, config in configs.items()},
        rank,
        world_size,
        folder,
    )


def compared(name: str, config: Config, gradients: Any, device: Device, rank: int, folder: Path) -> None:
    runtime = runtimes.arrange(config, device)
    model, _, data, _ = read_inputs(config, first_start(config.run_dir))
    policy = build_policy(config, model, runtime)
    evaluated = mean_loss(data.train, policy, runtime)
    _, batches = pack(data.train, policy)
    metrics = policy._reduced(policy.pipeline.forward_backward(policy.attach_logprobs(batches)[0], policy._loss))
    differences = _gradient_differences(SimpleNamespace(gradients=gradients), runtime, policy)  # type: ignore[arg-type]
    by_rank: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(by_rank, differences)
    if rank == 0:
        found = {"eval": evaluated, "micro_batches": float(len(batches[0])), **metrics}
        torch.save((found, {key: value for one in by_rank for key, value in one.items()}), folder / f"{name}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
