"""One rank of test_conversations: losses and gradients of multi-turn batches in each layout, against the oracle's.

`python conversations_worker.py RANK WORLD_SIZE FOLDER` reads cases.pt: the groups, per layout the config of the policy
and the configs of all recipes, and per recipe the expected gradients. The folder also has the weights of the reference
(with which the policy is built), of the policy before the update ("before"), and in the update ("now").
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from grpo_mega.checkpoint_io.model import read_model_files
from grpo_mega.config import Config
from grpo_mega.distributed.device import Device
from grpo_mega.megatron import runtime as runtimes
from grpo_mega.tracking.progress import Timers
from grpo_mega.trainer.batches import assign_advantages, attach_logprobs, pack
from grpo_mega.trainer.parts import build_policy
from tests.distributed.layouts_worker import _gradient_differences
from tests.helpers import late_streams
from tests.helpers.ranks import run_each


@dataclass(frozen=True)
class Layout:
    policy: Config  # builds the policy with a reference and a teacher
    recipes: dict[str, Config]


def main(rank: int, world_size: int, folder: Path) -> None:
    late_streams.install()  # a missing wait shows as a wrong number
    torch.set_num_threads(1)
    layouts, gradients = torch.load(folder / "cases.pt", weights_only=False)
    device = runtimes.join(next(iter(layouts.values())).policy)
    run_each(
        {name: partial(compared, name, layout, gradients, device) for name, layout in layouts.items()},
        rank,
        world_size,
        folder,
    )


def compared(name: str, layout: Layout, gradients: Any, device: Device, rank: int, folder: Path) -> None:
    runtime = runtimes.arrange(layout.policy, device)
    model = read_model_files(layout.policy.model)
    policy = build_policy(layout.policy, model, runtime)
    found = {}
    for recipe, config in layout.recipes.items():
        policy._config, policy.algorithm = config, config.algorithm
        groups = torch.load(folder / "groups.pt", weights_only=False)
        model.read_weights(policy.load_weights, folder / "before")
        if not config.algorithm.has_kl_reward:
            assign_advantages(config.rollout, config.rewards, config.algorithm, groups)
        batches = pack(config, groups, policy)
        batches = attach_logprobs(config, groups, batches, policy, runtime, Timers())
        model.read_weights(policy.load_weights, folder / "now")
        policy._heads = {key: one.head_VG for key, one in policy.teachers.items()}
        metrics = policy._reduced(policy.pipeline.forward_backward(batches[0], policy._loss))
        differences = _gradient_differences(SimpleNamespace(gradients=gradients[recipe]), runtime, policy)  # type: ignore[arg-type]
        by_rank: list[dict[str, float]] = [{}] * dist.get_world_size()
        dist.all_gather_object(by_rank, differences)
        metrics["micro_batches"] = float(len(batches[0]))
        found[recipe] = metrics, {key: value for one in by_rank for key, value in one.items()}
    if rank == 0:
        torch.save(found, folder / f"{name}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
