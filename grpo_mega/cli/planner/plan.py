"""A plan: whether a job will run, where its ranks are, how much memory it needs and how long a step takes.

`Plan` takes a PlannedJob whose config breaks no rule (cli/checks/violations.py). Everything else is arithmetic, done
when it is asked for. Other plans for the same job: all legal layouts, and single changes to the config.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from grpo_mega import config as configs
from grpo_mega.cli.checks import job_problems
from grpo_mega.cli.planner.job import Figure, PlannedJob, total
from grpo_mega.cli.planner.memory import (
    EngineMemory,
    HostMemory,
    StageMemory,
    checkpoint_bytes,
    engine_device,
    engine_memory,
    host_memory,
    stage_memory,
)
from grpo_mega.cli.planner.state import State
from grpo_mega.cli.planner.timing import Timing, timing
from grpo_mega.config.base import divisors, tokens_on_rank
from grpo_mega.errors import ConfigError
from grpo_mega.weights.layout import engine_shards, hf_shards, megatron_shards
from grpo_mega.weights.plan import Traffic, plan_transfers

MARGIN = 0.08  # share of the device that a plan should leave free, because estimates may be off by that much
Changes = dict[str, Any]  # values keyed by "section.key"
NUM_SUGGESTED, NUM_FIRST_CHANGES = 5, 3
MAX_VPP, MAX_CP = 4, 8


@dataclass(frozen=True)
class Plan:
    setup: PlannedJob

    @cached_property
    def stages(self) -> list[StageMemory]:
        return [stage_memory(self.setup, self.engine, pp_rank) for pp_rank in range(self.setup.layout.pp)]

    @cached_property
    def worst(self) -> StageMemory:
        """Return the stage with the highest peak; of equal peaks (generation), the stage with the least room in
        training.
        """
        return max(self.stages, key=lambda stage: (stage.peak, stage.totals["update"]))

    @cached_property
    def largest_state(self) -> State:
        return max((stage.state for stage in self.stages), key=lambda state: state.elements + state.fp8_elements)

    @cached_property
    def engine(self) -> EngineMemory:
        return engine_memory(self.setup)

    @cached_property
    def engine_device(self) -> list[Figure]:
        """Return the memory of a separate engine's device; empty if engines are colocated."""
        return engine_device(self.setup)

    @cached_property
    def engine_total(self) -> Figure:
        return total("an engine's own device", self.engine_device)

    @cached_property
    def timing(self) -> Timing:
        return timing(self.setup, self.largest_state, self.engine)

    @cached_property
    def host(self) -> HostMemory:
        return host_memory(self.setup)

    @cached_property
    def checkpoint(self) -> Figure:
        return checkpoint_bytes(self.setup)

    @property
    def peak_gib(self) -> float:
        if self.setup.card.is_cpu:  # the ranks of a machine share its memory with reward workers
            return self.host.peak.gib / self.setup.ranks_per_node
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
        if self.setup.card.is_cpu:
            return [*reasons, self.host_shortfall] if self.peak_gib > capacity else reasons
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
    def host_shortfall(self) -> str:
        """Return what the ranks of a machine without a GPU need, and what it has."""
        setup, worst = self.setup, self.worst
        largest = max(worst.phases[worst.peak_phase])
        ranks = f"{setup.ranks_per_node} rank{'s' if setup.ranks_per_node > 1 else ''}"
        return (
            f"{ranks} on this machine need about {self.host.peak.gib:.1f} GiB, but it has "
            f"{self.capacity_gib * setup.ranks_per_node:.1f} (most of it in {worst.peak_phase}: {largest.label}, "
            f"{largest.gib:.1f} GiB per rank); use fewer ranks, a smaller batch.tokens_per_micro_batch, "
            "model.recompute=full or a smaller model"
        )

    @property
    def free_gib(self) -> dict[str, float]:
        """Return the memory that a trainer's device has left in each phase of tracking/timers.FreeMemory."""
        phases = {
            "generation": ("sampling",),
            "asleep": ("asleep",),
            "training": ("log-probs", "update", "checkpoint"),
            "sync": ("sync",),
        }
        return {
            name: self.capacity_gib - max(stage.totals[one].gib for stage in self.stages for one in parts)
            for name, parts in phases.items()
        }

    @property
    def fits(self) -> bool:
        return not self.shortfalls

    @property
    def is_tight(self) -> bool:
        return self.fits and self.spare < MARGIN

    @property
    def both_fit(self) -> bool:
        """Return True if sleep=auto will find after the first update that policy and engine need not take turns."""
        engine = sum(figure.gib for figure in self.engine.awake)
        training = max(stage.totals["update"].gib for stage in self.stages)
        is_asked = self.setup.takes_turns and self.setup.config.rollout.sleep == "auto"
        return is_asked and training + engine <= (1 - MARGIN) * self.capacity_gib

    @cached_property
    def sync_traffic(self) -> Traffic:
        """Return the sync's traffic between ranks, counted transfer by transfer."""
        setup, shape = self.setup, self.setup.shape
        family = setup.trained_family if setup.sends_adapter else setup.family
        source = megatron_shards(family, shape, setup.layout, fused_norms=setup.uses_te)
        quantise = setup.config.rollout.quantization is not None
        if setup.sends_adapter:
            target = hf_shards(family, shape, setup.num_engine_ranks, tp=setup.config.rollout.tp)
        elif setup.is_served:
            target = engine_shards(family, shape, setup.engine_layout, setup.num_engine_ranks, quantise=quantise)
        else:
            target = hf_shards(family, shape, setup.num_engine_ranks, quantise=quantise)
        target = target.after(setup.first_engine_rank)
        return plan_transfers(source, target, ranks_per_node=setup.gpus_per_node).traffic(setup.engine_itemsize)


@dataclass(frozen=True)
class Option:
    changes: Changes
    plan: Plan

    @property
    def flags(self) -> str:
        """Return the changes as command-line flags; empty for the config as it is."""
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in self.changes.items()}
        return " ".join(f"--set {key}={text}" for key, text in texts.items())

    @property
    def rate(self) -> float:
        return float(self.plan.timing.tokens_per_second_per_gpu)

    def coarse_rate(self, other: float) -> int:
        """Return the rate in steps of 2% of another rate."""
        return round(self.rate / other * 50)


def suggest(setup: PlannedJob) -> list[Option]:
    """Return the fastest layouts that leave MARGIN free, best first.

    Times count no communication, so of equal rates the layout that communicates least comes first.
    """
    options = [option for option in _options(setup, _layouts(setup)) if option.plan.fits and not option.plan.is_tight]
    best = max((option.rate for option in options), default=1.0)

    def rank(option: Option) -> tuple[int, ...]:
        layout = option.plan.setup.layout
        return -option.coarse_rate(best), layout.pp, layout.tp, layout.cp, layout.ep

    return sorted(options, key=rank)[:NUM_SUGGESTED]


def first_changes(plan: Plan) -> list[Option]:
    """Return single changes that make the plan fit with MARGIN free; if it already does, changes that make it
    faster.
    """
    now = float(plan.timing.tokens_per_second_per_gpu)
    options = [option for option in _options(plan.setup, _single_changes(plan.setup)) if option.plan.fits]
    if plan.fits and not plan.is_tight:
        options = [option for option in options if not option.plan.is_tight and option.rate > 1.02 * now]
    else:
        options = [option for option in options if option.plan.spare > max(plan.spare + 0.005, 0.0)]
    return sorted(options, key=lambda option: (option.plan.is_tight, -option.coarse_rate(now)))[:NUM_FIRST_CHANGES]


def _options(setup: PlannedJob, candidates: Iterable[Changes]) -> Iterator[Option]:
    """Yield an option for each candidate whose config breaks no rule."""
    for changes in candidates:
        raw, news = setup.config.model_dump(mode="json"), {}
        for key, value in changes.items():
            section, name = key.split(".")
            if raw[section][name] != value:
                raw[section][name] = news[key] = value
        try:
            config = configs.validate(raw)
        except ConfigError:  # the values contradict one another
            continue
        if not any(job_problems(config, setup.shape, setup.machine)):
            yield Option(news, Plan(replace(setup, config=config)))


def _layouts(setup: PlannedJob) -> Iterator[Changes]:
    """Yield all layouts that the trainer ranks and the node allow. Tensor parallelism stays within a node."""
    shape, world = setup.shape, setup.layout.world_size
    node = divisors(setup.ranks_per_node)
    served = node if setup.is_served else [1]
    contexts = {setup.layout.cp: {}, **dict(_contexts(setup, range(1, MAX_CP + 1)))}
    for tp, pp, cp in product(node, divisors(world), contexts):
        if world % (tp * pp * cp) or pp > shape.num_layers:
            continue
        dp = world // (tp * pp * cp)
        chunks = [v for v in range(1, MAX_VPP + 1) if v == 1 or (pp > 1 and shape.num_layers % (pp * v) == 0)]
        spread = [ep for ep in divisors(tp * dp * cp) if shape.num_experts % ep == 0] if shape.num_experts else [1]
        for vpp, ep, recompute, rollout_tp in product(chunks, spread, ("none", "selective", "full"), served):
            yield contexts[cp] | {
                "layout.tp": tp,
                "layout.pp": pp,
                "layout.vpp": vpp if vpp > 1 else None,
                "layout.dp": dp,
                "layout.sequence_parallel": tp > 1,
                "layout.layers_per_chunk": None,
                **_recompute(setup, recompute),
                **({"layout.ep": ep} if shape.num_experts else {}),
                **({"layout.etp": 1} if setup.layout.etp > 1 else {}),
                **(_engine_cut(setup, rollout_tp) if setup.is_served else {}),
            }


def _recompute(setup: PlannedJob, recompute: str) -> Changes:
    """Return changes to `recompute`. Settings that belong to the present one return to their defaults."""
    model = setup.config.model
    own = ("recompute_modules", "recompute_num_layers") if recompute != model.recompute else ()
    return {"model.recompute": recompute} | {f"model.{name}": None for name in own if getattr(model, name) is not None}


def _single_changes(setup: PlannedJob) -> Iterator[Changes]:
    config, layout = setup.config, setup.layout
    for recompute in ("none", "selective", "full"):
        if recompute != config.model.recompute:
            yield _recompute(setup, recompute)
    if config.model.recompute == "full" and config.model.recompute_num_layers is None:
        smallest = min(map(len, setup.chunks(0)))
        if smallest > 1:
            yield {"model.recompute_num_layers": smallest // 2}
    if layout.tp > 1 and not config.layout.sequence_parallel:
        yield {"layout.sequence_parallel": True}
    for factor in (0.5, 2.0):
        budget = round(config.batch.tokens_per_micro_batch * factor)
        if budget >= setup.longest_on_rank:
            yield {"batch.tokens_per_micro_batch": budget}
    if setup.is_served:
        for rollout_tp in divisors(setup.ranks_per_node):
            if rollout_tp != config.rollout.tp:
                yield _engine_cut(setup, rollout_tp)
        yield {"rollout.max_concurrent": 2 * config.rollout.max_concurrent}
        for fraction in (0.6, 0.7, 0.75):
            yield {"rollout.memory_fraction": fraction}
    for cp, context in _contexts(setup, (2 * layout.cp, 4 * layout.cp)):
        if layout.num_replicas % cp == 0:
            yield context | {"layout.dp": layout.num_replicas // cp}
    for tp, pp in ((2 * layout.tp, layout.pp), (layout.tp, 2 * layout.pp), (2 * layout.tp, layout.pp // 2)):
        if pp and layout.world_size % (tp * pp * layout.cp) == 0 and tp <= setup.ranks_per_node:
            dp = layout.world_size // (tp * pp * layout.cp)
            yield {"layout.tp": tp, "layout.pp": pp, "layout.dp": dp, "layout.sequence_parallel": tp > 1}
    if config.optimizer.moments_dtype == "float32" and config.model.resolved_dtype == "bfloat16":
        yield {"optimizer.moments_dtype": "bfloat16"}
        if not config.optimizer.cpu_offload and not config.precision.fp8_parameters:
            yield {"optimizer.cpu_offload": True}


def _contexts(setup: PlannedJob, sizes: Iterable[int]) -> Iterator[tuple[int, Changes]]:
    """Yield other sizes of context parallelism, with the same micro-batch tokens over all ranks.

    Yield none if the longest sample leaves room to halve the token budget instead.
    """
    now, budget = setup.layout.cp, setup.config.batch.tokens_per_micro_batch
    for cp in sizes:
        least, scaled = tokens_on_rank(setup.longest_sample, cp), -(-budget * now // cp)
        if cp != now and 2 * setup.longest_on_rank > budget and scaled >= least:
            yield cp, {"layout.cp": cp, "batch.tokens_per_micro_batch": scaled}


def _engine_cut(setup: PlannedJob, tp: int) -> Changes:
    """Return `tp` for the engines, with as many expert parts as now or fewer."""
    return {"rollout.tp": tp, "rollout.ep": min(tp, setup.config.rollout.ep)}
