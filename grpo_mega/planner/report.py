"""A plan as JSON: the fields that scripts need most at the top level, then every figure with its formula and inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from grpo_mega.planner.figures import TracedNumber
from grpo_mega.planner.placement import compare
from grpo_mega.planner.plan import Plan, disk_bytes
from grpo_mega.planner.suggest import Option, first_changes
from grpo_mega.preflight import Findings
from grpo_mega.weights.layout import MegatronLayout


def as_json(plan: Plan, findings: Findings, options: Sequence[Option] | None) -> dict[str, Any]:
    setup, layout = plan.setup, plan.setup.layout
    kept, asked = disk_bytes(plan)
    report: dict[str, Any] = {
        "fits": plan.fits,
        "peak_gib": round(plan.peak_gib, 3),
        "capacity_gib": plan.capacity_gib,
        "spare": round(plan.spare, 4),
        "is_tight": plan.is_tight,
        "both_fit": plan.both_fit,
        "violations": [],
        "shortfalls": plan.shortfalls,
        "notes": findings.notes,
        "tokens_per_second_per_gpu": round(plan.timing.tokens_per_second_per_gpu.value, 3),
        "step_seconds": round(plan.timing.step.value, 3),
        "gpu": setup.card.name,
        "world_size": setup.world_size,
        "num_nodes": setup.num_nodes,
        "peak_phase": plan.peak_phase,
        "peak_stage": plan.worst.pp_rank,
        "layout": {"tp": layout.tp, "pp": layout.pp, "vpp": layout.vpp, "cp": layout.cp, "dp": layout.dp, "ep": layout.ep},
        "ranks": [_place(layout, rank) for rank in range(layout.world_size)],
        "engine_ranks": setup.config.layout.engine_ranks,
        "engines": setup.engine_layout.num_engines,
        "stages": [
            {
                "stage": stage.pp_rank,
                "weights_bytes": stage.state.weights,
                "gradients_bytes": stage.state.gradients,
                "optimizer_bytes": [stage.state.optimizer(replica) for replica in range(layout.num_replicas)],
                "phases_gib": {phase: round(figure.gib, 3) for phase, figure in stage.totals.items()},
            }
            for stage in plan.stages
        ],
        "kv_cache_tokens": int(plan.engine.cache_tokens.value),
        "engine_device_gib": round(plan.engine_total.gib, 3),
        "placement": _placement(plan),
        "pinned_gib_a_node": round(plan.host.pinned_total.gib, 1),
        "host_peak_gib_a_node": round(plan.host.peak.gib, 1),
        "checkpoint_gb": round(plan.checkpoint.value / 1e9, 1),
        "checkpoints_held_gb": round(kept / 1e9, 1),
        "free_disk_asked_gb": round(asked / 1e9, 1),
        "communication": [
            {
                "kind": link.kind,
                "sent_bytes": link.sent.value,
                "link": "network" if link.crosses else "nvlink",
                "groups": link.num_groups,
                "groups_across_nodes": link.num_crossing,
                "seconds": link.seconds.value,
            }
            for link in plan.links
        ],
        "change_first": [_option(option) for option in first_changes(plan)],
        "figures": {section: [figure.as_json() for figure in figures] for section, figures in sections(plan)},
        "assumptions": {name: {"value": value, "why": why} for name, value, why in setup.assumed.rows()},
    }
    if options is not None:
        report["suggestions"] = [_option(option) for option in options]
    return report


def refusal(gpu: str, violations: Sequence[str], notes: Sequence[str]) -> dict[str, Any]:
    """Return the JSON for a config that breaks a rule and therefore has no plan."""
    return {
        "fits": False,
        "peak_gib": None,
        "capacity_gib": None,
        "violations": list(violations),
        "notes": list(notes),
        "tokens_per_second_per_gpu": None,
        "step_seconds": None,
        "gpu": gpu,
    }


def sections(plan: Plan) -> Iterator[tuple[str, list[TracedNumber]]]:
    """Yield all figures by section. Memory figures are for the stage with the highest peak."""
    yield "batch", plan.batch.figures
    for phase, parts in plan.worst.phases.items():
        yield f"memory, {phase}", [*parts, plan.worst.totals[phase]]
    yield "activations of a layer", plan.worst.layer
    yield "engine", [plan.engine.cache_tokens, plan.engine.concurrent]
    if plan.engine_device:
        yield "memory, engine's own device", [*plan.engine_device, plan.engine_total]
    host = plan.host
    yield "host memory", [*host.pinned, host.pinned_total, *host.other, host.saving, host.peak]
    yield "checkpoint", [plan.checkpoint]
    yield "communication", [figure for link in plan.links for figure in (link.sent, link.seconds)]
    timing = plan.timing
    yield "time", [timing.decoding, *timing.phases, timing.step, timing.tokens_per_second_per_gpu, timing.model_flops_share]


def _place(layout: MegatronLayout, rank: int) -> dict[str, int]:
    tp_rank, pp_rank, dp_rank = layout.place(rank)
    return {"tp": tp_rank, "cp": layout.cp_rank(rank), "pp": pp_rank, "dp": dp_rank}


def _placement(plan: Plan) -> dict[str, Any] | None:
    """Return the faster placement with both times; None if there is no distribution of lengths."""
    compared = compare(plan)
    if compared is None:
        return None
    faster, placements = compared.faster.setup.config, {p.setup.config.rollout.placement: p for p in compared.plans}
    return {
        "faster": faster.rollout.placement,
        "engine_ranks": faster.layout.engine_ranks,
        "max_staleness": faster.rollout.max_staleness if compared.faster.setup.is_separate else None,
        "step_seconds": {name: round(one.timing.step.value, 3) for name, one in placements.items()},
        "other": compared.other and _option(compared.other),
    }


def _option(option: Option) -> dict[str, Any]:
    return {
        "flags": option.flags,
        "fits": option.plan.fits,
        "peak_gib": round(option.plan.peak_gib, 2),
        "step_seconds": round(option.plan.timing.step.value, 2),
        "tokens_per_second_per_gpu": round(option.rate, 2),
    }
