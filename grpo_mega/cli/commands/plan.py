"""`grpo-mega plan`: predict without a GPU whether a job fits in memory, and how fast it is."""

import json
from dataclasses import replace
from functools import partial

from grpo_mega import config as configs
from grpo_mega.cli.checks import Machine, Violations, find_all, resolve_dtype, start_notes
from grpo_mega.cli.checks.machine import ASSUMED, CPU, card_of
from grpo_mega.cli.checks.model import known_model, read_planned_model, read_teachers
from grpo_mega.cli.commands.options import PlanOptions
from grpo_mega.cli.planner import report, this_machine
from grpo_mega.cli.planner.job import PlannedJob, plan_on
from grpo_mega.cli.planner.plan import Plan, suggest
from grpo_mega.errors import ConfigError, UserError

FITS, DOES_NOT_FIT, ILLEGAL = 0, 1, 2


def run(options: PlanOptions) -> int:
    """Print the plan. Return 0 if the job fits, 1 if it does not, 2 if its config breaks a rule.

    Raise UserError if there is nothing to plan; with --json, the error is in the JSON instead.
    """
    try:
        setup, violations = prepare_plan(options)
    except UserError as error:
        if not options.is_json:
            raise
        setup, violations = None, Violations(list(error.lines))
    if setup is None or violations.violations:
        refusal = {
            "fits": False,
            "peak_gib": None,
            "capacity_gib": None,
            "violations": violations.violations,
            "notes": violations.notes,
            "tokens_per_second_per_gpu": None,
            "step_seconds": None,
            "gpu": options.gpu,
        }
        print(json.dumps(refusal, indent=1) if options.is_json else report.refusal_text(violations))
        return ILLEGAL
    plan = Plan(setup)
    suggestions = suggest(setup) if options.suggests else None
    if options.is_json:
        print(json.dumps(report.as_json(plan, violations, suggestions), indent=1))
    else:
        print(report.plan_text(plan, violations, suggestions))
    return FITS if plan.fits else DOES_NOT_FIT


def prepare_plan(options: PlanOptions) -> tuple[PlannedJob | None, Violations]:
    """Return the setup, valid only if no rule is violated; None if the model's shape is unknown. Raise ConfigError."""
    is_here = options.gpu == CPU
    card = None if is_here else card_of(options.gpu)
    if options.model is not None:
        known_model(options.model)
        if options.model_config is not None:
            both = f"--model {options.model} and --model-config {options.model_config}"
            raise ConfigError(f"{both} name two models; give one of them")
    for name, value in (("--gpus-per-node", options.gpus_per_node), ("--world-size", options.world_size)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}: must be at least 1")
    config, dtype_note = resolve_dtype(configs.load(options.config, list(options.overrides)), is_gpu=not is_here)
    world_size = options.world_size or config.layout.world_size
    machine = Machine(world_size, world_size if is_here else options.gpus_per_node, card)
    if is_here and options.model is None and options.model_config is None:
        violations = this_machine.find_all(config, machine)  # it lists the same violations as training
    else:
        read = partial(read_planned_model, model_config=options.model_config, name=options.model)
        violations = (this_machine.find_all if is_here else find_all)(config, machine, read)
    if (model := violations.model) is None:
        return None, violations
    violations.notes += [] if dtype_note is None else [dtype_note]
    violations.notes += [] if is_here else start_notes(config)
    nodes, rest = divmod(world_size, machine.ranks_per_node)
    if nodes and rest:
        violations.notes.append(f"{world_size} GPUs fill {nodes} nodes of {options.gpus_per_node} and part of another")
    if config.device == "cpu" and card is not None:
        violations.notes.append(f"device=cpu is ignored: the plan is for {card.title}")
    longest_prompt, longest_response = config.data.max_prompt_length, config.rollout.max_response_length
    prompt = ASSUMED.prompt_fill * longest_prompt if options.mean_prompt is None else options.mean_prompt
    response = ASSUMED.response_fill * longest_response if options.mean_response is None else options.mean_response
    for name, mean, longest in (("prompt", prompt, longest_prompt), ("response", response, longest_response)):
        if not 0 < mean <= longest:
            raise ConfigError(f"--mean-{name}: must be in (0, {longest}], got {mean:g}")
    if card is None:
        # Too little memory is no broken rule here: the plan shows what needs it.
        violations.violations = [line for line in violations.violations if not line.startswith(this_machine.MEMORY)]
        rates = this_machine.Rates()
        if not violations.violations:
            rates = this_machine.measure_rates(config, model.shape, machine.world_size)
        setup = this_machine.plan_here(config, model, machine, rates)
    else:
        setup = plan_on(card, config, model, machine)
    teachers = read_teachers(config, violations.notes)
    return replace(setup, mean_prompt=prompt, mean_response=response, teachers=teachers), violations
