"""Verify that a layout does not change the numbers: train on the same samples in several layouts and compare with one
rank.

`check(config, layouts)` generates one rollout with a single rank. For every layout it then computes log-probs of policy
and reference, takes three optimizer steps on these samples, and compares log-probs, metrics and weights with the single
rank. Layouts of equal world size share one launch of ranks. They run all of its cases, one after another in the same
processes.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_mega import config as configs
from grpo_mega.cli.commands.options import CheckOptions
from grpo_mega.cli.commands.train import print_notes, rank_imports
from grpo_mega.config import Config
from grpo_mega.distributed.environment import uses_gpu
from grpo_mega.distributed.launch import current_rank, ends_at_first, launch_processes
from grpo_mega.errors import EXIT_INTERRUPTED, ConfigError, raise_all
from grpo_mega.processes import private_folder
from grpo_mega.tracking.progress import phase
from grpo_mega.types import Group, StepMetrics
from grpo_mega.weights.boxes import Box

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_mega.megatron.runtime import Runtime

UPDATES = 3
LAYOUTS = '"tp=2 pp=2 tp=2,pp=2"'
SampleKey = tuple[int, int]  # prompt id, index in its group; it does not depend on the order of packing
# Covers the rounding of sharp models; a wrong layout is off by far more.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Case:
    """One training on the same samples, with the layout, token budget and algorithm of `config`."""

    name: str
    config: Config

    @property
    def world_size(self) -> int:
        return self.config.layout.world_size


@dataclass
class Outcome:
    """The results of a case. Log-probs cover the response tokens of each sample."""

    updates: list[StepMetrics]
    logprobs: dict[str, dict[SampleKey, Tensor]]  # keyed by old_, ref_ or teacher_logprobs, then sample; [response_len]
    checkpoint: Path  # the weights after the updates, as a Hugging Face folder


@dataclass(frozen=True)
class Difference:
    """The largest differences of a case from the baseline, each relative to the scale of the compared values."""

    name: str
    loss: float  # over all updates, relative to the mean absolute log-prob, the scale of one token's term
    grad_norm: float  # relative difference
    logprobs: float  # largest difference of a token, relative to the mean absolute log-prob (at least 1 nat)
    ref_logprobs: float
    weights: float  # norm of the difference, relative to the norm of the weights
    metrics: float  # largest difference of all other update metrics, relative to their size (at least 1)
    clipped_tokens: float  # largest difference of their number in an update
    num_tokens: float  # number in the largest update

    def is_within(self, tolerance: float) -> bool:
        """Return True if rounding explains the differences.

        If a ratio is close to a clip bound, the last bits decide whether the token counts as clipped. With ratios
        spread over an interval of about 1, this concerns a share `tolerance` of all tokens.
        """
        parts = (self.loss, self.logprobs, self.ref_logprobs, self.weights)
        derived = (self.grad_norm, self.metrics)  # sums and exponentials of the other values, so rounding adds up
        is_close = all(p <= tolerance for p in parts) and all(d <= 10 * tolerance for d in derived)
        return is_close and self.clipped_tokens <= 1.5 + tolerance * self.num_tokens


def run(options: CheckOptions) -> int:
    """Print how far each layout's numbers are from a single rank's. Return 1 if rounding does not explain a
    difference.
    """
    config, layouts = configs.load(options.config, list(options.overrides)), options.layouts.split()
    if not layouts:
        raise ConfigError(f"--layouts={options.layouts!r}: must name a layout; write it like {LAYOUTS}")
    print_notes([f"comparing {options.layouts} with one rank"])
    from grpo_mega.cli.checks import resolve_dtype  # an error of the config itself is found without numpy and rich

    config, note = resolve_dtype(config, uses_gpu(config.device, os.environ))
    if note is not None:
        print_notes([note])
    differences, tolerance = check(config, layouts), TOLERANCE[config.model.resolved_dtype]
    print(outcome_table(differences, tolerance))
    return 0 if all(d.is_within(tolerance) for d in differences) else 1


def check(config: Config, layouts: Sequence[str]) -> list[Difference]:
    """Return the differences of each layout ("tp=2,pp=2") from a single rank. Raise ConfigError for a bad layout."""
    batch = config.batch.model_copy(update={"epochs": UPDATES, "mini_batches": 1})
    config = config.model_copy(update={"batch": batch, "run_dir": Path("unused")})
    with phase("checking the config, the model's files and the data", config.log.progress):
        cases = find_cases(config, layouts)
    with private_folder() as folder:
        baseline, *outcomes = run_cases(cases, folder)
        return [
            compare_outcomes(case.name, outcome, baseline) for case, outcome in zip(cases[1:], outcomes, strict=True)
        ]


def find_cases(config: Config, layouts: Sequence[str]) -> list[Case]:
    """Return a case for a single rank and one for each layout. Raise ConfigError with all problems of all cases."""
    from grpo_mega.cli import checks
    from grpo_mega.cli.planner import this_machine

    cases: list[Case] = []
    problems: list[str] = []
    notes: dict[str, None] = {}  # each once, in order
    for name, text in [("one rank", "tp=1"), *((text, text) for text in layouts)]:
        try:
            case = Case(name, with_layout(config, text))
        except ConfigError as error:
            problems += error.lines
            continue
        found = this_machine.find_all(case.config, checks.this_machine(case.config.layout))
        problems += found.violations
        notes |= dict.fromkeys(found.notes)
        cases.append(case)
    raise_all(problems)
    print_notes(notes)
    return cases


def with_layout(config: Config, text: str) -> Config:
    """Return the config with a layout like "tp=2,pp=2,sequence_parallel=true". Other keys of the layout have their
    defaults.
    """
    raw = config.model_dump(mode="json")
    raw["layout"], raw["rollout"]["placement"] = {}, "colocated"
    for part in text.split(","):  # commas within a list are written as ";"
        if not re.fullmatch("[a-z_]+=.+", part.strip()):
            raise ConfigError(f"--layouts {text}: {part!r} must be like tp=2; write layouts like {LAYOUTS}")
        configs.apply_override(raw, f"layout.{part.strip().replace(';', ',')}")
    return configs.validate(raw)


def run_cases(cases: Sequence[Case], folder: Path) -> list[Outcome]:
    """Return the outcome of every case, with one launch per world size. The first case, a single rank, generates the
    groups.
    """
    import torch

    for world_size in dict.fromkeys(case.world_size for case in cases):
        members = {i: case for i, case in enumerate(cases) if case.world_size == world_size}
        code = launch_processes(run_members, (members, folder), world_size, folder / f"logs-{world_size}")
        if code == EXIT_INTERRUPTED:
            raise SystemExit(code)
        if code:
            names = [c.name for i, c in members.items() if not (folder / str(i) / "outcome.pt").exists()]
            failed = names[0] if names else "the end of the launch"
            raise ConfigError(f"{failed}: its ranks ended with code {code}; see above")
    return [torch.load(folder / str(i) / "outcome.pt", weights_only=False) for i in range(len(cases))]


def run_members(launched: tuple[Mapping[int, Case], Path]) -> None:
    """Run all cases of a launch, keyed by their index, as one rank. Write the groups, if they are missing, and each
    case's outcome and checkpoint to the folder.
    """
    with ends_at_first("ending; no layout is compared"):
        members, folder = launched
        first = next(iter(members.values())).config
        with rank_imports(first):
            import torch
            import torch.distributed as dist

            from grpo_mega.megatron import runtime as runtimes
            from grpo_mega.trainer.job import open_job

        if not (folder / "groups.pt").exists():  # the first launch has a single rank
            print("check: generating samples on one rank", flush=True)
            with open_job(first.model_copy(update={"run_dir": folder / "run"})) as job:
                job.colocation.sync_weights(version=0)
                prompts = [turn.prompt for turn in job.draw(0)][: first.batch.prompts_per_step]
                generated = job.rollouts.generate([Group(prompt, []) for prompt in prompts], 0, "sampling")
                torch.save(job.rollouts.score(generated)[0], folder / "groups.pt")
        device = runtimes.join(first)
        for index, case in members.items():
            if not current_rank():
                print(f"check: {case.name}", flush=True)
            groups: list[Group] = torch.load(folder / "groups.pt", weights_only=False)
            runtime = runtimes.arrange(case.config, device)
            run_case(case, groups, runtime, folder / str(index))
        dist.barrier()
        runtimes.stop()


def run_case(case: Case, groups: list[Group], runtime: Runtime, folder: Path) -> None:
    """Write the case's outcome to `folder`. All ranks of the layout call this."""
    import torch

    from grpo_mega.checkpoint_io.model import read_model_files
    from grpo_mega.tracking.progress import Pace, Timers
    from grpo_mega.trainer.batches import assign_advantages, attach_logprobs, gather_responses, pack, update_policy
    from grpo_mega.trainer.export import export_policy
    from grpo_mega.trainer.parts import build_policy

    model = read_model_files(case.config.model)
    policy = build_policy(case.config, model, runtime)
    samples = [sample for group in groups for sample in group.samples]
    if not policy.algorithm.has_kl_reward:
        assign_advantages(case.config.rollout, case.config.rewards, policy.algorithm, groups)
    batches = pack(case.config, groups, policy)
    is_shown = runtime.rank == 0 and case.config.log.progress
    batches = attach_logprobs(case.config, groups, batches, policy, runtime, Timers(), shows_progress=is_shown)
    outcome = Outcome([], {"old_logprobs": {}, "ref_logprobs": {}, "teacher_logprobs": {}}, folder / "hf")
    for name, by_sample in outcome.logprobs.items():
        values_of = attrgetter(name)
        has_values = torch.tensor(float(any(values_of(b) is not None for mini in batches for b in mini)))
        if runtime.max(has_values.to(runtime.device.torch_device)):
            values = gather_responses(values_of, batches, samples, runtime)
            by_sample.update({(s.prompt.id, s.index): part for s, part in zip(samples, values, strict=True)})
    outcome.updates = update_policy(case.config.batch, policy, batches, Pace(), is_shown)
    export_policy(policy, model, outcome.checkpoint)
    if runtime.rank == 0:
        torch.save(outcome, folder / "outcome.pt")


def compare_outcomes(name: str, outcome: Outcome, baseline: Outcome) -> Difference:
    import torch

    from grpo_mega.checkpoint_io.reader import open_hf_reader

    pairs = list(zip(baseline.updates, outcome.updates, strict=True))
    # A dropped mini-batch has no grad_norm.
    grad_norms = [(a.get("grad_norm", 0.0), b.get("grad_norm", 0.0)) for a, b in pairs]
    scale = max(1.0, float(torch.cat(list(baseline.logprobs["old_logprobs"].values())).abs().mean()))
    difference = norm = 0.0  # squared norms of the checkpoints' difference and of the baseline
    with open_hf_reader(outcome.checkpoint) as new_reader, open_hf_reader(baseline.checkpoint) as old_reader:
        for tensor in sorted(old_reader.names):
            shape = old_reader.shape(tensor)
            box = Box(tensor, (0,) * len(shape), shape)
            was = old_reader.read(box).double()
            difference += float((new_reader.read(box).double() - was).norm() ** 2)
            norm += float(was.norm() ** 2)
    return Difference(
        name=name,
        loss=_worst(abs(a["loss/total"] - b["loss/total"]) for a, b in pairs) / scale,
        grad_norm=_worst(abs(a - b) / max(a, 1e-12) for a, b in grad_norms),
        logprobs=_largest(outcome.logprobs["old_logprobs"], baseline.logprobs["old_logprobs"]) / scale,
        ref_logprobs=_largest(outcome.logprobs["ref_logprobs"], baseline.logprobs["ref_logprobs"]) / scale,
        weights=(difference / norm) ** 0.5,
        metrics=_worst(
            abs(a[name] - b[name]) / max(1.0, abs(a[name]))
            for a, b in pairs
            for name in a
            if not name.startswith(("clip/", "loss/total")) and name != "grad_norm"  # other fields have these
        ),
        clipped_tokens=_worst(abs(a["clip/fraction"] - b["clip/fraction"]) * a["num_tokens"] for a, b in pairs),
        num_tokens=max(a["num_tokens"] for a, _ in pairs),
    )


def outcome_table(differences: Sequence[Difference], tolerance: float) -> str:
    """Return the differences as text, one line per layout."""
    columns = ("loss", "grad_norm", "logprobs", "ref_logprobs", "weights", "metrics", "clipped_tokens")
    width = max(len("layout"), *(len(d.name) for d in differences))
    lines = [f"{'layout':{width}}  " + "  ".join(f"{c:>14}" for c in columns)]
    for d in differences:
        values = "  ".join(f"{getattr(d, c):14.1e}" for c in columns)
        lines.append(f"{d.name:{width}}  {values}  {'same' if d.is_within(tolerance) else 'DIFFERS'}")
    return "\n".join(lines)


def _largest(new: dict[SampleKey, Tensor], old: dict[SampleKey, Tensor]) -> float:
    assert set(new) == set(old), "not the same samples"
    return _worst(float((new[key] - old[key]).abs().max()) for key in old if len(old[key]))


def _worst(values: Iterable[float]) -> float:
    """Return the maximum, or NaN if there is one (max() might skip it); 0 without values."""
    all_values = list(values)
    return math.nan if any(map(math.isnan, all_values)) else max(all_values, default=0.0)
