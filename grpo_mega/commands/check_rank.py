"""One rank of `check`: run all cases of a launch, one after another in the same processes.

`python -m grpo_mega.commands.check_rank FOLDER` reads cases.pt and groups.pt (written by the first launch). It writes an
outcome.pt and a Hugging Face checkpoint for each case.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mega import console
from grpo_mega.commands.check import Case, Outcome, SampleKey
from grpo_mega.config import Config
from grpo_mega.megatron import runtime as runtimes
from grpo_mega.megatron.gather import gather_responses
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.observe.timers import Timers
from grpo_mega.run.batches import assign_advantages, attach_logprobs, pack
from grpo_mega.run.job import open_job
from grpo_mega.run.model_files import build_policy, export_policy, read_model
from grpo_mega.types import Group, PackedBatch, Sample


def main(folder: Path) -> None:
    cases: dict[int, Case] = torch.load(folder / "cases.pt", weights_only=False)
    first = next(iter(cases.values())).config
    if not (folder / "groups.pt").exists():  # the first launch has a single rank
        _generate(first, folder)
    device = runtimes.join(first)
    for index, case in cases.items():
        groups: list[Group] = torch.load(folder / "groups.pt", weights_only=False)
        runtime = runtimes.arrange(case.config, device)
        run_case(case, groups[::-1] if case.reverse_groups else groups, runtime, folder / str(index))
    dist.barrier()
    runtimes.stop()


def run_case(case: Case, groups: list[Group], runtime: Runtime, folder: Path) -> None:
    """Write the case's outcome to `folder`. All ranks of the layout call this."""
    model = read_model(case.config)
    policy = build_policy(case.config, model, runtime)
    samples = [sample for group in groups for sample in group.samples]
    if not policy.algorithm.has_kl_reward:
        assign_advantages(case.config, policy.algorithm, groups)
    batches = pack(case.config, groups, policy)
    batches = attach_logprobs(case.config, groups, batches, policy, runtime, Timers())
    logprobs = {
        name: _by_sample(name, batches, samples, runtime) for name in ("old_logprobs", "ref_logprobs", "teacher_logprobs")
    }
    updates = policy.update(batches)
    export_policy(policy, model, folder / "hf")
    if runtime.rank == 0:
        torch.save(Outcome(updates, logprobs, folder / "hf"), folder / "outcome.pt")


def _by_sample(
    name: str, batches: Sequence[Sequence[PackedBatch]], samples: Sequence[Sample], runtime: Runtime
) -> dict[SampleKey, Tensor]:
    """Return every sample's values, on every rank; an empty dict if none were computed.

    The keys (prompt and index) do not depend on the order of packing.
    """
    has_values = torch.tensor(float(any(getattr(b, name) is not None for mini in batches for b in mini)))
    if not runtime.max(has_values.to(runtime.device.torch_device)):
        return {}
    values = gather_responses(lambda batch: getattr(batch, name), batches, samples, runtime)
    return {(s.prompt.id, s.index): part for s, part in zip(samples, values, strict=True)}


def _generate(config: Config, folder: Path) -> None:
    """Generate and score the responses to the config's first prompts, and write them to `folder`."""
    with open_job(config.model_copy(update={"run_dir": folder / "run"})) as job:
        job.colocation.sync_weights(version=0)
        prompts = [turn.prompt for turn in job.draw(0)]
        fresh = [Group(prompt, []) for prompt in prompts[: config.batch.prompts_per_step]]
        groups, _ = job.rollouts.score(job.rollouts.generate(fresh, 0, "sampling"))
    torch.save(groups, folder / "groups.pt")


if __name__ == "__main__":
    console.install()
    main(Path(sys.argv[1]))
