"""Other layouts and settings for the same job: all legal layouts, and single changes to the config."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from grpo_mega import config as configs
from grpo_mega.config import Config
from grpo_mega.config.base import divisors, tokens_on_rank
from grpo_mega.errors import ConfigError
from grpo_mega.planner.job import PlannedJob
from grpo_mega.planner.plan import Plan, make_plan
from grpo_mega.preflight import Machine, job_problems

Changes = dict[str, Any]  # values keyed by dotted config key
MAX_VPP, MAX_CP = 4, 8


@dataclass(frozen=True)
class Option:
    changes: Changes
    plan: Plan

    @property
    def flags(self) -> str:
        """Return the changes as command-line flags; empty for the config as it is."""
        return " ".join(f"--set {key}={_text(value)}" for key, value in self.changes.items())

    @property
    def rate(self) -> float:
        return float(self.plan.timing.tokens_per_second_per_gpu.value)


def suggest(setup: PlannedJob, count: int = 5) -> list[Option]:
    """Return the fastest layouts that leave plan.MARGIN free, best first; if rates are equal, the smallest pp and tp first."""
    options = [option for option in options_of(setup, _layouts(setup)) if option.plan.fits and not option.plan.is_tight]
    options.sort(key=lambda option: (-round(option.rate, 2), option.plan.setup.layout.pp, option.plan.setup.layout.tp))
    return options[:count]


def first_changes(plan: Plan, count: int = 3) -> list[Option]:
    """Return single changes that make the plan fit with plan.MARGIN free; if it already does, changes that make it faster."""
    options = [option for option in options_of(plan.setup, _single_changes(plan.setup)) if option.plan.fits]
    if plan.fits and not plan.is_tight:
        faster = 1.02 * plan.timing.tokens_per_second_per_gpu.value
        options = [option for option in options if not option.plan.is_tight and option.rate > faster]
    else:
        options = [option for option in options if option.plan.spare > max(plan.spare + 0.005, 0.0)]
    return sorted(options, key=lambda option: (option.plan.is_tight, -option.rate))[:count]


def changed(config: Config, changes: Changes) -> Config | None:
    """Return the config with these values; None if they contradict one another."""
    raw = config.model_dump(mode="json")
    for key, value in changes.items():
        node = raw
        *parents, leaf = key.split(".")
        for parent in parents:
            node = node[parent]
        node[leaf] = value
    try:
        return configs.validate(raw)
    except ConfigError:
        return None


def options_of(setup: PlannedJob, candidates: Iterable[Changes]) -> Iterator[Option]:
    """Yield an option for each candidate whose config breaks no rule."""
    was = setup.config.model_dump(mode="json")
    machine = Machine(setup.world_size, setup.gpus_per_node, setup.card)
    for changes in candidates:
        config = changed(setup.config, changes)
        if config is None or any(job_problems(config, setup.shape, machine)):
            continue
        news = {key: value for key, value in changes.items() if _get(was, key) != value}
        yield Option(news, make_plan(replace(setup, config=config)))


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
        spread = [ep for ep in divisors(dp * cp) if shape.num_experts % ep == 0] if shape.num_experts else [1]
        for vpp, ep, recompute, rollout_tp in product(chunks, spread, ("none", "selective", "full"), served):
            yield contexts[cp] | {
                "layout.tp": tp,
                "layout.pp": pp,
                "layout.vpp": vpp if vpp > 1 else None,
                "layout.dp": dp,
                "layout.sequence_parallel": tp > 1,
                "layout.layers_per_chunk": None,
                "model.recompute": recompute,
                **({"layout.ep": ep} if shape.num_experts else {}),
                **(_engine_cut(setup, rollout_tp) if setup.is_served else {}),
            }


def _single_changes(setup: PlannedJob) -> Iterator[Changes]:
    config, layout = setup.config, setup.layout
    for recompute in ("none", "selective", "full"):
        if recompute != config.model.recompute:
            yield {"model.recompute": recompute}
    if layout.tp > 1 and not config.layout.sequence_parallel:
        yield {"layout.sequence_parallel": True}
    if not config.layout.overlap_param_gather and layout.dp > 1:
        yield {"layout.overlap_grad_reduce": True, "layout.overlap_param_gather": True}
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
    if config.optimizer.moments_dtype == "float32" and config.model.dtype == "bfloat16":
        yield {"optimizer.moments_dtype": "bfloat16"}


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


def _get(raw: Any, key: str) -> Any:
    for part in key.split("."):
        raw = raw[part]
    return raw


def _text(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
