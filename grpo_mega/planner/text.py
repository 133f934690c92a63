"""A plan as text for a terminal of 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from grpo_mega.planner.communication import groups
from grpo_mega.planner.figures import GIB, TracedNumber
from grpo_mega.planner.memory import PHASES
from grpo_mega.planner.placement import compare
from grpo_mega.planner.plan import MARGIN, Plan, disk_bytes
from grpo_mega.planner.report import sections
from grpo_mega.planner.suggest import Option, first_changes
from grpo_mega.preflight import Findings

WIDTH = 100
_LABEL = 26


def render(plan: Plan, findings: Findings, options: Sequence[Option] | None, *, explains: bool) -> str:
    parts = [
        [_verdict(plan)],
        _wrapped(findings.notes, "note: "),
        _placement(plan),
        _batch(plan),
        _memory(plan),
        _host(plan),
        _communication(plan),
        _time(plan),
        _changes(plan),
    ]
    if options is not None:
        parts.append(_suggestions(options))
    if explains:
        parts += [*_explanation(plan), _assumptions(plan)]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def violations(findings: Findings) -> str:
    """Return the text for a config that breaks rules and therefore has no plan."""
    count = len(findings.violations)
    lines = [f"{count} rule{'s are' if count > 1 else ' is'} broken; training would refuse this config:"]
    return "\n".join([*lines, *_wrapped(findings.violations, "  - "), *_wrapped(findings.notes, "note: ")])


def _verdict(plan: Plan) -> str:
    setup, timing = plan.setup, plan.timing
    room = f"{plan.peak_gib:.1f} of {plan.capacity_gib:.1f} GiB at the peak ({plan.peak_phase})"
    if plan.fits:
        tight = f", less than the {MARGIN:.0%} that estimates need" if plan.is_tight else ""
        answer = f"FITS with {plan.spare:.0%} to spare{tight}: {room}"
    else:
        answer = f"DOES NOT FIT: {'; '.join(plan.shortfalls)}"
    rate = timing.tokens_per_second_per_gpu.value
    speed = f"A step takes about {_seconds(timing.step.value)}; {rate:,.0f} tokens per second per GPU."
    parameters = plan.checkpoint.inputs["parameters"]
    size = f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"
    title = f"{setup.shape.model_type}, {size} parameters, on {setup.world_size} x {setup.card.title}"
    return "\n".join([title, *_wrapped([answer]), speed, *_wrapped(_faster(plan))])


def _faster(plan: Plan) -> list[str]:
    """Return the sentence that names the faster placement; nothing without a distribution of lengths."""
    compared = compare(plan)
    if compared is None:
        return []
    if compared.other is None:
        name = "colocated" if plan.setup.is_separate else "separate"
        return [f"Only one placement to choose from: nothing with rollout.placement={name} fits these GPUs at this tp and pp."]
    other = compared.other.plan if compared.faster is plan else plan
    first, second = (f"{_named(one)}, {_seconds(one.timing.step.value)}" for one in (compared.faster, other))
    return [f"Expected faster: {first} per step; {second}{'' if other.fits else ', does not fit'}."]


def _named(plan: Plan) -> str:
    config = plan.setup.config
    if plan.setup.is_separate:
        return f"separate (engine_ranks={config.layout.engine_ranks}, max_staleness={config.rollout.max_staleness})"
    return "colocated with partial rollouts" if config.rollout.partial else "colocated"


def _placement(plan: Plan) -> list[str]:
    setup, layout, config = plan.setup, plan.setup.layout, plan.setup.config
    cuts = [f"tp={layout.tp}", *([f"cp={layout.cp}"] if layout.cp > 1 else []), f"pp={layout.pp}"]
    cuts += [*([f"vpp={layout.vpp}"] if layout.vpp > 1 else []), f"dp={layout.dp}"]
    cuts += [f"ep={layout.ep}"] if setup.shape.num_experts else []
    cuts += ["sequence parallel"] if config.layout.sequence_parallel else []
    nodes = "1 node" if setup.num_nodes == 1 else f"{setup.num_nodes} nodes"
    lines = [_head("Rank placement", f"{', '.join(cuts)}; {nodes} of {setup.ranks_per_node}, order {layout.order}")]
    axes = {"tp": "tensor parallel", "cp": "context parallel", "pp": "pipeline", "ep": "experts"}
    axes["dp"] = "data parallel" if layout.cp == 1 else "data and context parallel"
    for axis, name in axes.items():
        first, *others = groups(layout, axis)
        if len(first) > 1:
            lines.append(f"  {name:{_LABEL}}{len(others) + 1:>4} groups of {len(first):<4} the first: ranks {_ranks(first)}")
    sizes = ["+".join(str(len(chunk)) for chunk in setup.chunks(pp_rank)) for pp_rank in range(layout.pp)]
    lines += _wrapped([f"{'layers by stage':{_LABEL}}{', '.join(sizes)}"], "  ")
    if setup.is_served:
        number, tp = setup.engine_layout.num_engines, config.rollout.tp
        cut = f"tp={tp}" + (f", ep={config.rollout.ep}" if config.rollout.ep > 1 else "")
        place = _ranks(tuple(range(setup.first_engine_rank, setup.first_engine_rank + tp)))
        lines.append(f"  {'engines':{_LABEL}}{number:>4} of {cut}, each within a node; the first: ranks {place}")
    else:
        lines.append(f"  {'engines':{_LABEL}}{setup.num_engine_ranks:>4}, the whole model in each rank's process (embedded)")
    if setup.is_separate:
        engine_ranks = _ranks(range(setup.first_engine_rank, setup.world_size))
        lines.append(f"  {'':{_LABEL}}     on separate ranks, {engine_ranks}; the others train")
    return lines


def _row(label: str, value: str, rest: str = "") -> str:
    return f"  {label:{_LABEL}}{value:>10} {rest}".rstrip()


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and len({b - a for a, b in pairwise(ranks)}) == 1:
        step = ranks[1] - ranks[0]
        return f"{ranks[0]}-{ranks[-1]}" if step == 1 else f"{ranks[0]}, {ranks[1]} ... {ranks[-1]}"
    return ", ".join(map(str, ranks))


def _batch(plan: Plan) -> list[str]:
    b, setup, sizes, group = plan.batch, plan.setup, plan.setup.config.batch, plan.setup.config.algorithm.group_size
    tokens = f"{b.tokens.value:,.0f}"
    return [
        _head("Batch", f"mean prompt {setup.mean_prompt:g}, mean response {setup.mean_response:g} tokens (assumed or given)"),
        *_tail(plan),
        _row("samples per step", f"{b.samples.value:,}", f"= {sizes.prompts_per_step} prompts x {group}; {tokens} tokens"),
        _row("optimizer steps", f"{sizes.optimizer_steps:,}", f"= {sizes.mini_batches} mini-batches x {sizes.epochs} epochs"),
        _row(
            "micro-batches per rank",
            f"{b.micro_batches.value:,}",
            f"of up to {sizes.tokens_per_micro_batch:,} tokens per optimizer step; at most {b.most_micro_batches.value:,}",
        ),
        _row("pipeline bubble", f"{b.bubble.value:.0%}"),
    ]


def _tail(plan: Plan) -> list[str]:
    setup = plan.setup
    if setup.response_lengths is None:
        return []
    values = ", ".join(f"p{percent}={setup.response_lengths.at(percent / 100):,.0f}" for percent in (50, 90, 99))
    source = "" if setup.lengths else " (assumed; give --lengths)"
    return [f"  {'lengths of responses':{_LABEL}}{'':>4}{values} tokens{source}"]


def _memory(plan: Plan) -> list[str]:
    stage = plan.worst
    by_phase = {phase: {figure.label: figure for figure in parts} for phase, parts in stage.phases.items()}
    labels = list(dict.fromkeys(label for parts in by_phase.values() for label in parts))
    recompute = plan.setup.config.model.recompute
    layers = "Transformer Engine's layers" if plan.setup.uses_te else "local layers"
    lines = [_head("Memory of a device, GiB", f"stage {stage.pp_rank}, the fullest; recompute {recompute}; {layers}")]
    lines.append(f"  {'':{_LABEL}}" + "".join(f"{phase:>13}" for phase in PHASES))
    for label in labels:
        values = [by_phase[phase].get(label) for phase in PHASES]
        if any(figure and figure.value for figure in values):
            cells = [f"{figure.gib:.1f}" if figure and figure.value else "." for figure in values]
            lines.append(f"  {label:{_LABEL}}" + "".join(f"{cell:>13}" for cell in cells))
    lines.append(f"  {'total':{_LABEL}}" + "".join(f"{stage.totals[phase].gib:13.1f}" for phase in PHASES))
    capacity = plan.capacity_gib
    lines.append(f"  {f'of {capacity:.1f}':{_LABEL}}" + "".join(f"{stage.totals[p].gib / capacity:13.0%}" for p in PHASES))
    if len(plan.stages) > 1:
        peaks = ", ".join(f"{one.pp_rank}: {one.peak.gib:.1f}" for one in plan.stages)
        lines += _wrapped([f"{'peak by stage':{_LABEL}}{peaks}"], "  ")
    engine = plan.engine
    if plan.engine_device:
        parts = ", ".join(f"{part.label} {part.gib:.1f}" for part in plan.engine_device if part.value)
        lines += _wrapped([f"An engine's own device: {plan.engine_total.gib:.1f} of {capacity:.1f} GiB: {parts}."], "  ")
    if plan.both_fit:
        lines.append("  Policy and engine fit together: after the first update rollout.sleep=auto moves nothing any more.")
    lines += _wrapped(
        [
            f"A KV cache holds {engine.cache_tokens.value:,.0f} tokens: {engine.concurrent.value:,.0f} sequences of mean "
            f"length at once (rollout.max_concurrent={plan.setup.config.rollout.max_concurrent})."
        ],
        "  ",
    )
    return lines


def _host(plan: Plan) -> list[str]:
    host, setup = plan.host, plan.setup
    kept, asked = disk_bytes(plan)
    config = setup.config.checkpoint
    usual = setup.card.node_memory_gib * setup.ranks_per_node / 8
    parts = ", ".join(f"{figure.label} {figure.gib:.0f}" for figure in host.pinned if figure.value)
    return [
        _head("Host and disk", ""),
        _row("pinned per node", f"{host.pinned_total.gib:,.0f}", f"GiB{f': {parts}' if parts else ''}"),
        _row("most per node", f"{host.peak.gib:,.0f}", f"GiB, {host.saving.gib:,.0f} of it while a checkpoint is gathered"),
        *([_row("", "", f"more than the {usual:,.0f} GiB of a usual node")] if host.peak.gib > usual else []),
        _row(
            "a checkpoint",
            f"{plan.checkpoint.value / 1e9:,.0f}",
            f"GB; {kept / 1e9:,.0f} GB with the {config.keep} kept and the one being written",
        ),
        _row("free disk for a save", f"{asked / 1e9:,.0f}", "GB"),
    ]


def _communication(plan: Plan) -> list[str]:
    if not plan.links:
        return []
    lines = [_head("Communication per step", "sent by the busiest rank")]
    lines.append(f"  {'':{_LABEL}}{'GB':>10}{'seconds':>10}  {'link':10}groups across nodes")
    for link in plan.links:
        where = f"{link.num_crossing} of {link.num_groups}" if plan.setup.num_nodes > 1 else "one node"
        name = "network" if link.crosses else "NVLink"
        lines.append(f"  {link.kind:{_LABEL}}{link.sent.value / 1e9:10.1f}{link.seconds.value:10.1f}  {name:10}{where}")
    traffic = plan.sync_traffic
    lines += _wrapped(
        [
            f"A sync moves {traffic.moved / 1e9:,.0f} GB in all, {traffic.between_nodes / 1e9:,.0f} of it between nodes; at "
            f"most {max(traffic.received) / 1e9:.1f} GB to one rank."
        ],
        "  ",
    )
    return lines


def _time(plan: Plan) -> list[str]:
    timing = plan.timing
    lines = [_head("Time of a step", "an estimate from peak rates and assumed shares of them")]
    for phase in timing.phases:
        if phase.value:
            share = phase.value / timing.step.value
            lines.append(_row(phase.label, _seconds(phase.value), f"{share:>7.0%}  {'#' * round(40 * share)}"))
    rate, share = timing.tokens_per_second_per_gpu.value, timing.model_flops_share.value
    lines.append(_row("a step", _seconds(timing.step.value)))
    lines.append(_row("tokens per second per GPU", f"{rate:,.0f}", f"       update at {share:.0%} of the bf16 peak"))
    if plan.setup.config.rollout.is_separate and plan.setup.config.rollout.keeps_unfinished:
        lines.append("  Engines generate while the others train; sampling is the time that the trainers wait.")
    return lines


def _changes(plan: Plan) -> list[str]:
    options = first_changes(plan)
    if not options and not plan.fits:
        return [_head("What to change first", "no single change makes it fit; --suggest searches whole layouts")]
    if not options:
        return []
    purpose = "make it faster" if plan.fits and not plan.is_tight else "make room"
    return [_head("What to change first", f"single changes that {purpose}"), *_option_lines(options)]


def _suggestions(options: Sequence[Option]) -> list[str]:
    if not options:
        return [_head("Suggested layouts", f"none leaves {MARGIN:.0%} free; lower the token budget or take more GPUs")]
    return [_head("Suggested layouts", f"the fastest that leave {MARGIN:.0%} free"), *_option_lines(options)]


def _option_lines(options: Iterable[Option]) -> Iterator[str]:
    for number, option in enumerate(options, 1):
        state = "fits" if option.plan.fits else "does not fit"
        yield (
            f"  {number}. {option.rate:>8,.0f} tokens/s/GPU, {_seconds(option.plan.timing.step.value)} per step, "
            f"{option.plan.peak_gib:.1f} GiB, {option.plan.spare:.0%} to spare, {state}"
        )
        yield from _wrapped([option.flags or "the config as it is"], "     ")


def _explanation(plan: Plan) -> Iterator[list[str]]:
    for section, figures in sections(plan):
        lines = [_head(f"Formulas: {section}", "")]
        for figure in figures:
            note = "" if figure.trust == "estimate" else f" ({figure.trust})"
            lines += _wrapped([f"{figure.label} = {_value(figure)}{note}"], "  ")
            lines += _wrapped([f"= {figure.formula}"], "      ")
            inputs = ", ".join(f"{name}={_number(value)}" for name, value in figure.inputs.items())
            lines += _wrapped([f"with {inputs}"], "      ") if inputs else []
        yield lines


def _assumptions(plan: Plan) -> list[str]:
    lines = [_head("Assumptions", "preflight/cards.py")]
    for name, value, why in plan.setup.assumed.rows():
        lines += _wrapped([f"{name:22} {value:<8g} {why}"], "  ")
    card = plan.setup.card
    rates = (
        f"{card.title}: {card.memory_gib} GiB, {card.bf16_flops / 1e12:g} TFLOP/s bf16, {card.fp8_flops / 1e12:g} fp8, "
        f"HBM {card.hbm_bytes / 1e9:g} GB/s, NVLink {card.nvlink_bytes / 1e9:g}, network {card.network_bytes / 1e9:g}, "
        f"host {card.host_bytes / 1e9:g}"
    )
    return [*lines, *_wrapped([rates], "  ")]


def _value(figure: TracedNumber) -> str:
    if figure.unit == "B":
        return f"{figure.value / GIB:,.2f} GiB"
    if figure.unit == "s":
        return f"{figure.value:,.3f} s"
    return f"{_number(figure.value)} {figure.unit}".rstrip()


def _number(value: float) -> str:
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value)}"
    return f"{value:.6g}"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 1000 else f"{value / 60:.0f} min"


def _head(title: str, detail: str) -> str:
    return textwrap.shorten(f"{title} ({detail})" if detail else title, WIDTH, placeholder=" ...")


def _wrapped(texts: Iterable[str], lead: str = "") -> list[str]:
    """Return lines of at most WIDTH columns. Spaces that align a table stay."""
    return [
        line
        for one in texts
        for line in textwrap.wrap(
            one,
            WIDTH,
            initial_indent=lead,
            subsequent_indent=" " * len(lead) + ("" if lead.strip() else "  "),
            break_on_hyphens=False,
            replace_whitespace=False,
        )
    ]
