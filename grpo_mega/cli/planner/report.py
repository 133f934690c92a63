"""A plan as sections of figures, printed as JSON or as text for a terminal of 100 columns.

The JSON has the fields that scripts need most at the top level, then every figure and assumption. The text has the same
figures with notes.
"""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from grpo_mega.cli.checks import Violations
from grpo_mega.cli.planner.job import Figure
from grpo_mega.cli.planner.memory import PHASES
from grpo_mega.cli.planner.plan import MARGIN, Option, Plan, first_changes
from grpo_mega.cli.planner.state import elements_of
from grpo_mega.weights.layout import MegatronLayout

WIDTH, LABEL_WIDTH = 100, 26
# Words of the text, and what they are called in a plan for ranks on a CPU.
WITHOUT_GPU = {
    "per GPU": "per rank",
    "tokens/s/GPU": "tokens/s/rank",
    "Memory of a device": "Memory of a rank",
    "of peak rates": "of measured rates",
}
AXES = ("tp", "pp", "vpp", "cp", "dp", "ep", "etp")


@dataclass(frozen=True)
class ReportSection:
    """Figures of one subject."""

    name: str
    figures: list[Figure]
    detail: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)  # keyed by a figure's label
    remarks: Iterable[str] = ()


def sections(plan: Plan) -> Iterator[ReportSection]:
    """Yield all figures by section, except for the memory of a trainer's device."""
    setup, engine, host, timing = plan.setup, plan.engine, plan.host, plan.timing
    yield _batch(plan)
    at_once = f"of mean length (rollout.max_concurrent={setup.config.rollout.max_concurrent})"
    yield ReportSection("engine", [engine.cache_tokens, engine.concurrent], notes={engine.concurrent.label: at_once})
    if plan.engine_device:
        room = f"{plan.engine_total.gib:.1f} of {plan.capacity_gib:.1f} GiB"
        yield ReportSection("memory, engine's own device", [*plan.engine_device, plan.engine_total], room)
    usual = setup.card.node_memory_gib * setup.ranks_per_node / 8
    notes = {host.saving.label: "while a checkpoint is gathered"}
    if host.peak.gib > usual and not setup.card.is_cpu:
        notes[host.peak.label] = f"more than the {usual:,.0f} GiB of a usual node"
    yield ReportSection(
        "host memory", [*host.pinned, host.pinned_total, *host.other, host.saving, host.peak], "per node", notes
    )
    size, keep = f"{plan.checkpoint / 1e9:,.0f} GB", setup.config.checkpoint.keep
    all_sizes = f"{plan.checkpoint * (keep + 1) / 1e9:,.0f} GB"
    kept = f"= {size}; {all_sizes} with the {keep} kept and the one being written"
    remarks = [f"A save needs {size} of free disk."]
    yield ReportSection("checkpoint", [plan.checkpoint], notes={plan.checkpoint.label: kept}, remarks=remarks)
    shares = {phase.label: phase / timing.step for phase in timing.phases}
    yield ReportSection(
        "time",
        [*timing.phases, timing.step, timing.tokens_per_second_per_gpu],
        "of a step; rough: operations and bytes over shares of peak rates",
        {label: f"{share:>7.0%}  {'#' * round(40 * share)}".rstrip() for label, share in shares.items()},
        _time_remarks(plan),
    )


def _batch(plan: Plan) -> ReportSection:
    setup, batch, sizes = plan.setup, plan.setup.batch, plan.setup.config.batch
    notes = {
        batch.samples.label: f"= {sizes.prompts_per_step} prompts x {setup.config.algorithm.group_size}",
        batch.micro_batches.label: f"of up to {sizes.tokens_per_micro_batch:,} tokens per optimizer step",
    }
    remarks = [f"{sizes.optimizer_steps:,} optimizer steps = {sizes.mini_batches} mini-batches x {sizes.epochs} epochs"]
    means = f"mean prompt {setup.mean_prompt:g}, mean response {setup.mean_response:g} tokens (assumed or given)"
    return ReportSection("batch", [*batch], means, notes, remarks)


def _time_remarks(plan: Plan) -> Iterator[str]:
    """Yield remarks of the text alone, because the traffic of a sync takes a second to count for 512 ranks."""
    if plan.setup.is_separate and plan.setup.config.rollout.keeps_unfinished:
        yield "Engines generate while the others train; sampling is the time that the trainers wait."
    if plan.setup.world_size > 1:
        traffic = plan.sync_traffic
        yield (
            f"A sync moves {traffic.moved / 1e9:,.0f} GB in all, {traffic.between_nodes / 1e9:,.0f} of it between"
            f" nodes; at most {max(traffic.received) / 1e9:.1f} GB to one rank."
        )


def as_json(plan: Plan, violations: Violations, options: Sequence[Option] | None) -> dict[str, Any]:
    setup, layout = plan.setup, plan.setup.layout
    places = [(rank, layout.place(rank)) for rank in range(layout.world_size)]
    by_name = {f"memory, {phase}": [*parts, plan.worst.totals[phase]] for phase, parts in plan.worst.phases.items()}
    by_name |= {section.name: section.figures for section in sections(plan)}
    suggestions = {} if options is None else {"suggestions": [_option_json(option) for option in options]}
    return {
        "fits": plan.fits,
        "peak_gib": round(plan.peak_gib, 3),
        "capacity_gib": plan.capacity_gib,
        "spare": round(plan.spare, 4),
        "is_tight": plan.is_tight,
        "both_fit": plan.both_fit,
        "free_gib": {phase: round(free, 3) for phase, free in plan.free_gib.items()},
        "violations": [],
        "shortfalls": plan.shortfalls,
        "notes": violations.notes,
        "tokens_per_second_per_gpu": round(plan.timing.tokens_per_second_per_gpu, 3),
        "step_seconds": round(plan.timing.step, 3),
        "gpu": setup.card.name,
        "world_size": setup.world_size,
        "peak_phase": plan.peak_phase,
        "peak_stage": plan.worst.pp_rank,
        "layout": {axis: getattr(layout, axis) for axis in AXES},
        "ranks": [{"tp": tp, "cp": layout.cp_rank(rank), "pp": pp, "dp": dp} for rank, (tp, pp, dp) in places],
        "stages": [
            {
                "stage": stage.pp_rank,
                "weights_bytes": stage.state.weights,
                "gradients_bytes": stage.state.gradients,
                "optimizer_bytes": [stage.state.optimizer(rank) for rank in range(layout.tp * layout.num_replicas)],
                "phases_gib": {phase: round(figure.gib, 3) for phase, figure in stage.totals.items()},
            }
            for stage in plan.stages
        ],
        "change_first": [_option_json(option) for option in first_changes(plan)],
        "figures": {name: [figure.as_json() for figure in figures] for name, figures in by_name.items()},
        "assumptions": {name: {"value": value, "why": why} for name, value, why in setup.assumed.rows()},
    } | suggestions


def _option_json(option: Option) -> dict[str, Any]:
    return {
        "flags": option.flags,
        "fits": option.plan.fits,
        "peak_gib": round(option.plan.peak_gib, 2),
        "step_seconds": round(option.plan.timing.step, 2),
        "tokens_per_second_per_gpu": round(option.rate, 2),
    }


def plan_text(plan: Plan, violations: Violations, options: Sequence[Option] | None) -> str:
    batch, *rest = map(_section_lines, sections(plan))
    parts = [_verdict(plan), _wrapped(violations.notes, "note: "), _ranks_lines(plan), batch, _memory(plan), *rest]
    changes = first_changes(plan)
    if changes or not plan.fits:
        detail = "no single change makes it fit; --suggest searches whole layouts"
        if changes:
            detail = f"single changes that {'make it faster' if plan.fits and not plan.is_tight else 'make room'}"
        parts.append([_head("What to change first", detail), *_option_lines(changes)])
    if options is not None:
        none = f"none leaves {MARGIN:.0%} free; lower the token budget or take more GPUs"
        detail = f"the fastest that leave {MARGIN:.0%} free" if options else none
        parts.append([_head("Suggested layouts", detail), *_option_lines(options)])
    text = "\n\n".join("\n".join(lines) for lines in parts if lines)
    for words, without_gpu in WITHOUT_GPU.items() if plan.setup.card.is_cpu else ():
        text = text.replace(words, without_gpu)
    return text


def refusal_text(violations: Violations) -> str:
    """Return the text for a config that breaks rules and therefore has no plan."""
    count = len(violations.violations)
    head = f"{count} rule{'s are' if count > 1 else ' is'} broken; training would refuse this config:"
    return "\n".join([head, *_wrapped(violations.violations, "  - "), *_wrapped(violations.notes, "note: ")])


def _section_lines(section: ReportSection) -> list[str]:
    lines = [_head(section.name.capitalize(), section.detail)]
    for figure in section.figures:
        value = f"{figure:,.0f} {figure.unit}".rstrip()
        if figure.unit == "B":
            value = f"{figure.gib:,.1f} GiB"
        elif figure.unit == "s":
            value = _seconds(figure)
        elif not figure.unit and 0 < figure < 1:  # a share
            value = f"{figure:.0%}"
        lines += _wrapped([_row(figure.label, value, section.notes.get(figure.label, ""))], "  ")
    return [*lines, *_wrapped(section.remarks, "  ")]


def _row(label: str, value: str, *notes: str) -> str:
    return " ".join([f"{label:{LABEL_WIDTH}}{value:>14}", *filter(None, notes)]).rstrip()


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value < 10 else f"{value:.0f} s" if value < 1000 else f"{value / 60:.0f} min"


def _head(title: str, detail: str) -> str:
    return textwrap.shorten(f"{title} ({detail})" if detail else title, WIDTH, placeholder=" ...")


def _wrapped(texts: Iterable[str], lead: str = "") -> list[str]:
    """Return lines of at most WIDTH columns. Spaces that align a table stay."""
    hanging = " " * len(lead) + ("" if lead.strip() else "  ")
    wrapper = textwrap.TextWrapper(
        WIDTH, initial_indent=lead, subsequent_indent=hanging, break_on_hyphens=False, replace_whitespace=False
    )
    return [line for one in texts for line in wrapper.wrap(one)]


def _verdict(plan: Plan) -> list[str]:
    setup, timing = plan.setup, plan.timing
    if plan.fits:
        tight = f", less than the {MARGIN:.0%} that estimates need" if plan.is_tight else ""
        room = f"{plan.peak_gib:.1f} of {plan.capacity_gib:.1f} GiB at the peak ({plan.peak_phase})"
        answer = f"FITS with {plan.spare:.0%} to spare{tight}: {room}"
    else:
        answer = f"DOES NOT FIT: {'; '.join(plan.shortfalls)}"
    speed = (
        f"A step takes about {_seconds(timing.step)}; {timing.tokens_per_second_per_gpu:,.0f} tokens per second per"
        " GPU."
    )
    parameters = elements_of(setup.trained_family, setup.shape, None).total
    size = f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"
    place = f"{setup.world_size} {'ranks of' if setup.card.is_cpu else 'x'} {setup.card.title}"
    title = f"{setup.shape.model_type}, {size} parameters, on {place}"
    return [title, *_wrapped([answer]), speed]


def _ranks_lines(plan: Plan) -> list[str]:
    setup, layout, config = plan.setup, plan.setup.layout, plan.setup.config
    axes = AXES if setup.shape.num_experts else AXES[:-1]
    cuts = [f"{axis}={getattr(layout, axis)}" for axis in axes] + [
        "sequence parallel"
    ] * config.layout.sequence_parallel
    lines, nodes = [], "1 node" if setup.num_nodes == 1 else f"{setup.num_nodes} nodes"
    replicas = "data parallel" if layout.cp == 1 else "data and context parallel"
    names = {"tp": "tensor parallel", "cp": "context parallel", "pp": "pipeline", "ep": "experts", "dp": replicas}
    for axis, name in names.items():
        first, *others = rank_groups(layout, axis)
        if len(first) > 1:
            lines.append(_row(name, f"{len(others) + 1} groups of {len(first)};", f"the first: ranks {_ranks(first)}"))
    sizes = ["+".join(str(len(chunk)) for chunk in setup.chunks(pp_rank)) for pp_rank in range(layout.pp)]
    lines.append(_row("layers by stage", "", ", ".join(sizes)))
    if setup.is_served:
        cut = f"tp={config.rollout.tp}" + (f", ep={config.rollout.ep}" if config.rollout.ep > 1 else "")
        place = _ranks(range(setup.first_engine_rank, setup.first_engine_rank + config.rollout.tp))
        engines = f"{setup.engine_layout.num_engines} of {cut}, each within a node; the first: ranks {place}"
    else:
        engines = f"{setup.num_engine_ranks}, the whole model in each rank's process (embedded)"
    lines.append(_row("engines", "", engines))
    if setup.is_separate:
        ranks = _ranks(range(setup.first_engine_rank, setup.world_size))
        lines.append(_row("", "", f"on separate ranks, {ranks}; the others train"))
    head = _head("Rank placement", f"{', '.join(cuts)}; {nodes} of {setup.ranks_per_node}, order {layout.order}")
    return [head, *_wrapped(lines, "  ")]


def rank_groups(layout: MegatronLayout, axis: str) -> list[list[int]]:
    """Return the groups of ranks that differ only along one axis: tp, cp, pp, ep, or dp, which includes cp."""
    members: dict[object, list[int]] = {}  # keyed by the rank's place along all other axes
    for rank in range(layout.world_size):
        (tp_rank, pp, dp_rank), in_stage = layout.place(rank), layout.rank_in_stage(rank)
        key = {
            "tp": (pp, in_stage // layout.tp),
            "cp": (pp, tp_rank, dp_rank),
            "pp": in_stage,
            "dp": (pp, tp_rank),
            "ep": (pp, in_stage % layout.etp, in_stage // (layout.etp * layout.ep)),
        }
        members.setdefault(key[axis], []).append(rank)
    return list(members.values())


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and len({b - a for a, b in pairwise(ranks)}) == 1:
        step = ranks[1] - ranks[0]
        return f"{ranks[0]}-{ranks[-1]}" if step == 1 else f"{ranks[0]}, {ranks[1]} ... {ranks[-1]}"
    return ", ".join(map(str, ranks))


def _memory(plan: Plan) -> list[str]:
    """Return the figures of all phases as one table, with a column per phase."""
    stage, capacity = plan.worst, plan.capacity_gib
    by_phase = {phase: {figure.label: figure.gib for figure in parts} for phase, parts in stage.phases.items()}
    totals = {phase: figure.gib for phase, figure in stage.totals.items()}
    layers = "Transformer Engine's layers" if plan.setup.uses_te else "local layers"
    detail = f"stage {stage.pp_rank}, the fullest; recompute {plan.setup.config.model.recompute}; {layers}"

    def line(label: str, cells: Iterable[str]) -> str:
        return f"  {label:{LABEL_WIDTH}}" + "".join(f"{cell:>12}" for cell in cells)

    lines = [_head("Memory of a device, GiB", detail), line("", PHASES)]
    for label in dict.fromkeys(label for parts in by_phase.values() for label in parts):
        values = [by_phase[phase].get(label, 0) for phase in PHASES]
        if any(values):
            lines.append(line(label, (f"{value:.1f}" if value else "." for value in values)))
    lines.append(line("total", (f"{totals[phase]:.1f}" for phase in PHASES)))
    lines.append(line(f"of {capacity:.1f}", (f"{totals[phase] / capacity:.0%}" for phase in PHASES)))
    peaks = ", ".join(f"{one.pp_rank}: {one.peak.gib:.1f}" for one in plan.stages)
    lines += _wrapped([f"{'peak by stage':{LABEL_WIDTH}}{peaks}"], "  ")
    if plan.both_fit:
        lines.append(
            "  Policy and engine fit together: after the first update rollout.sleep=auto moves nothing any more."
        )
    return lines


def _option_lines(options: Iterable[Option]) -> Iterator[str]:
    for number, option in enumerate(options, 1):
        state = "fits" if option.plan.fits else "does not fit"
        yield (
            f"  {number}. {option.rate:>8,.0f} tokens/s/GPU, {_seconds(option.plan.timing.step)} per step, "
            f"{option.plan.peak_gib:.1f} GiB, {option.plan.spare:.0%} to spare, {state}"
        )
        yield from _wrapped([option.flags or "the config as it is"], "     ")
