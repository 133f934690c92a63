"""Check a job's config before its ranks start, and compute how long before the time limit the job must stop.

Prints the plan and a line LEAD_SECONDS=N, the time that a step, a save and its verification may take. Prints
NEEDS_NVCC=1 if SGLang runs on GPUs. Writes no files. Errors that the user must fix are one line each on stderr, with
exit code 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from grpo_mega import config as configs
from grpo_mega.cli import checks
from grpo_mega.cli.commands.options import PlanOptions, RewardOptions, add_options, read_options
from grpo_mega.cli.commands.plan import prepare_plan as plan_setup
from grpo_mega.cli.commands.train import overrides_of
from grpo_mega.cli.planner.plan import Plan
from grpo_mega.errors import UserError
from grpo_mega.text import filter_output

LEAST_LEAD_S = 600
STEP_FACTOR = 3.0  # a step may take this many times its estimate, because estimates are rough and responses grow
MARGIN_S = 180  # time for a weight sync, the last files of a save, and Slurm itself


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, RewardOptions)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--ranks-per-node", type=int, required=True)
    parser.add_argument(
        "--disk-gbps", type=float, required=True, help="GB/s that all nodes together write to the run's folder"
    )
    parser.add_argument("--gpu", default="h100")
    options = parser.parse_args()
    try:
        config = configs.load(options.config, overrides_of(read_options(RewardOptions, options)))
        checks.check_config(config, checks.Machine(options.world_size, options.ranks_per_node))
        plan_options = PlanOptions(
            options.config,
            options.overrides,
            options.gpu,
            world_size=options.world_size,
            gpus_per_node=options.ranks_per_node,
        )
        setup, findings = plan_setup(plan_options)
    except UserError as error:
        print(*(f"error: {line}" for line in error.lines), sep="\n", file=sys.stderr)
        return 2
    if config.device != "cpu" and config.rollout.is_served:
        print("NEEDS_NVCC=1")
    if setup is None or findings.violations:
        print(f"no plan: {'; '.join(findings.violations)}")
        print(f"LEAD_SECONDS={LEAST_LEAD_S}")
        return 0
    plan = Plan(setup)
    if config.device != "cpu":
        for line in describe(plan):
            print(line)
    print(f"LEAD_SECONDS={lead_seconds(plan.timing.step, plan.checkpoint / 1e9, options.disk_gbps)}")
    return 0


def describe(plan: Plan) -> Iterator[str]:
    yield f"plan: {plan.peak_gib:.1f} of {plan.capacity_gib:.1f} GiB at the peak"
    yield f"plan: a step takes about {plan.timing.step:.0f} s, a checkpoint {plan.checkpoint / 1e9:.0f} GB"
    for shortfall in plan.shortfalls:
        yield f"warning: by the plan it does not fit: {shortfall}"


def lead_seconds(step_s: float, checkpoint_gb: float, disk_gbps: float) -> int:
    """Return the time in seconds for a whole step, and for a save that is written and read back."""
    return max(LEAST_LEAD_S, round(STEP_FACTOR * step_s + 2 * checkpoint_gb / disk_gbps + MARGIN_S))


if __name__ == "__main__":
    filter_output()
    sys.exit(main())
