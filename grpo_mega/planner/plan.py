"""A plan: whether a job will run, where its ranks are, how much memory it needs and how long a step takes.

`Plan` takes a PlannedJob whose config breaks no rule (see preflight/findings.py). Everything else is arithmetic, done when it
is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from grpo_mega.planner.communication import Link, communication
from grpo_mega.planner.figures import TracedNumber, total
from grpo_mega.planner.job import PlannedJob
from grpo_mega.planner.memory import (
    EngineMemory,
    HostMemory,
    StageMemory,
    checkpoint_bytes,
    device_memory,
    engine_device,
    engine_memory,
    host_memory,
)
from grpo_mega.planner.state import State
from grpo_mega.planner.timing import Timing, timing
from grpo_mega.weights.layout import engine_shards, hf_shards, megatron_shards
from grpo_mega.weights.plan import Traffic, plan_transfers

MARGIN = 0.08  # share of the device that a plan should leave free, because estimates may be off by that much


@dataclass(frozen=True)
class Plan:
    setup: PlannedJob

    @cached_property
    def stages(self) -> list[StageMemory]:
        return device_memory(self.setup)

    @cached_property
    def worst(self) -> StageMemory:
        """Return the stage with the highest peak; of equal peaks (generation), the stage with the least room in training."""
        return max(self.stages, key=lambda stage: (stage.peak, stage.totals["update"]))

    @cached_property
    def largest_state(self) -> State:
        return max((stage.state for stage in self.stages), key=lambda state: state.elements + state.fp8_elements)

    @cached_property
    def engine(self) -> EngineMemory:
        return engine_memory(self.setup)

    @cached_property
    def engine_device(self) -> list[TracedNumber]:
        """Return the memory of a separate engine's device; empty if engines are colocated."""
        return engine_device(self.setup)

    @cached_property
    def engine_total(self) -> TracedNumber:
        return total("an engine's own device", self.engine_device)

    @cached_property
    def links(self) -> list[Link]:
        return communication(self.setup, self.largest_state)

    @cached_property
    def timing(self) -> Timing:
        return timing(self.setup, self.links, self.largest_state, self.engine)

    @cached_property
    def host(self) -> HostMemory:
        return host_memory(self.setup)

    @cached_property
    def checkpoint(self) -> TracedNumber:
        return checkpoint_bytes(self.setup)

    @property
    def peak_gib(self) -> float:
        return max(self.worst.peak.gib, self.engine_total.gib)

    @property
    def peak_phase(self) -> str:
        return self.worst.peak_phase if self.worst.peak.gib >= self.engine_total.gib else "engine's own device"

    @property
    def capacity_gib(self) -> float:
        return self.setup.card.memory_gib

    @property
    def spare(self) -> float:
        """Return the share of the device that the peak leaves free; negative if the plan does not fit."""
        return 1 - self.peak_gib / self.capacity_gib

    @property
    def shortfalls(self) -> list[str]:
        """Return the reasons why the job does not run although no rule is broken."""
        worst, capacity = self.worst, self.capacity_gib
        reasons = [self.engine.shortfall] if self.engine.shortfall else []
        if self.engine_total.gib > capacity:
            reasons.append(f"an engine's own device takes {self.engine_total.gib:.1f} GiB of {capacity:.1f}")
        if worst.peak.gib > capacity:
            largest = max(worst.phases[worst.peak_phase])
            reasons.append(
                f"{worst.peak_phase} takes {worst.peak.gib:.1f} GiB of {capacity:.1f} on pipeline stage "
                f"{worst.pp_rank}, most of it {largest.label} ({largest.gib:.1f} GiB)"
            )
        return reasons

    @property
    def fits(self) -> bool:
        return not self.shortfalls

    @property
    def is_tight(self) -> bool:
        return self.fits and self.spare < MARGIN

    @property
    def both_fit(self) -> bool:
        """Return True if sleep=auto will find after the first update that policy and engine need not take turns."""
        engine = self.engine.weights.gib + self.engine.cache.gib + self.engine.extra.gib
        training = max(stage.totals["update"].gib for stage in self.stages)
        is_asked = self.setup.takes_turns and self.setup.config.rollout.sleep == "auto"
        return is_asked and training + engine <= (1 - MARGIN) * self.capacity_gib

    @cached_property
    def sync_traffic(self) -> Traffic:
        """Return the sync's traffic between ranks, counted transfer by transfer."""
        setup, family, shape = self.setup, self.setup.family, self.setup.shape
        source = megatron_shards(family, shape, setup.layout, fused_norms=setup.uses_te and not shape.num_experts)
        quantise = setup.config.rollout.quantization is not None
        if setup.is_served:
            target = engine_shards(family, shape, setup.engine_layout, setup.num_engine_ranks, quantise=quantise)
        else:
            target = hf_shards(family, shape, setup.num_engine_ranks, quantise=quantise)
        target = target.after(setup.first_engine_rank)
        return plan_transfers(source, target, ranks_per_node=setup.gpus_per_node).traffic(setup.engine_itemsize)
