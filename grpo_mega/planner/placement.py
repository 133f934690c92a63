"""Compare the two placements on the same GPUs: engines on the trainer's devices, or on separate devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from grpo_mega.planner.job import PlannedJob
from grpo_mega.planner.plan import Plan
from grpo_mega.planner.suggest import Changes, Option, options_of


@dataclass(frozen=True)
class Comparison:
    """A plan and the best plan that fits with the other placement; None if none fits."""

    plan: Plan
    other: Option | None

    @property
    def plans(self) -> list[Plan]:
        return [self.plan, *([self.other.plan] if self.other else [])]

    @property
    def faster(self) -> Plan:
        if self.other is None or (self.plan.fits and self.plan.timing.step.value <= self.other.plan.timing.step.value):
            return self.plan
        return self.other.plan


def compare(plan: Plan) -> Comparison | None:
    """Return the comparison; None without a distribution of lengths, because the longest responses decide."""
    setup = replace(plan.setup, lengths=plan.setup.response_lengths)
    if setup.lengths is None:
        return None
    fitting = [option for option in options_of(setup, _others(setup)) if option.plan.fits]
    return Comparison(plan, _fastest(fitting))


def _fastest(options: Sequence[Option]) -> Option | None:
    """Return the fastest option by a search with shrinking strides.

    With fewer engine ranks generation takes longer; with more engine ranks training does.
    """
    place, stride = len(options) // 2, len(options) // 2
    while stride:
        near = [other for other in (place, place - stride, place + stride) if 0 <= other < len(options)]
        place = min(near, key=lambda other: options[other].plan.timing.step.value)
        stride //= 2
    return options[place] if options else None


def _others(setup: PlannedJob) -> Iterator[Changes]:
    """Yield the changes that switch to the other placement, with the same tp, cp and pp."""
    layout, rollout, world = setup.layout, setup.config.rollout, setup.world_size
    unit = layout.tp * layout.cp * layout.pp
    if setup.is_separate:
        yield {"layout.engine_ranks": 0, "layout.dp": world // unit, "rollout.placement": "colocated"}
        return
    for ranks in range(rollout.tp, world, rollout.tp):
        yield {
            "layout.engine_ranks": ranks,
            "layout.dp": (world - ranks) // unit,
            "rollout.placement": "separate",
            "rollout.partial": False,
            "rollout.oversample": 1.0,
            "rollout.max_staleness": rollout.max_staleness if rollout.partial else 1,
        }
