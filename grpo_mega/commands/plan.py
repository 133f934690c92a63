"""The command `grpo-mega plan`: reads, checks, plans and prints; returns the exit code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from grpo_mega import config as configs
from grpo_mega.errors import ConfigError, UserError
from grpo_mega.formats.known_models import known_model
from grpo_mega.hardware.cards import card_of
from grpo_mega.planner import rehearsal, text
from grpo_mega.planner.plan import make_plan
from grpo_mega.planner.report import as_json, refusal
from grpo_mega.planner.setup import Setup
from grpo_mega.planner.suggest import suggest
from grpo_mega.validation.findings import Findings, find_all
from grpo_mega.validation.model import read_model

FITS, DOES_NOT_FIT, ILLEGAL = 0, 1, 2


@dataclass(frozen=True)
class Request:
    """What the command line says."""

    config: Path
    overrides: Sequence[str] = ()
    gpu: str = "h100"
    world_size: int | None = None  # None: the layout's
    gpus_per_node: int = 8
    model_config: Path | None = None
    model: str | None = None  # the name of a well-known one
    mean_prompt: float | None = None  # tokens; None: by assumption
    mean_response: float | None = None
    is_json: bool = False
    suggests: bool = False
    explains: bool = False
    rehearses: bool = False
    ranks: Sequence[int] = ()  # to rehearse; none: one of the first, middle and last pipeline stage


def run(request: Request) -> int:
    """Prints the plan. Raises UserError for what leaves nothing to plan, except with JSON, which then says so."""
    try:
        setup, findings = prepare(request)
    except UserError as error:
        if not request.is_json:
            raise
        print(json.dumps(refusal(request.gpu, [" ".join(str(error).split())], []), indent=1))
        return ILLEGAL
    if setup is None or findings.violations:
        if request.is_json:
            print(json.dumps(refusal(request.gpu, findings.violations, findings.notes), indent=1))
        else:
            print(text.violations(findings))
        return ILLEGAL
    plan = make_plan(setup)
    options = suggest(setup) if request.suggests else None
    comparisons = _rehearse(setup, request) if request.rehearses else None
    if request.is_json:
        rehearsed = {} if comparisons is None else {"rehearsal": [asdict(c) for c in comparisons]}
        print(json.dumps(as_json(plan, findings, options) | rehearsed, indent=1))
    else:
        print(text.render(plan, findings, options, explains=request.explains))
        if comparisons is not None:
            print("\n" + rehearsal.render(setup, comparisons))
    agrees = all(c.agrees for c in comparisons or ())
    return FITS if plan.fits and agrees else DOES_NOT_FIT


def _rehearse(setup: Setup, request: Request) -> list[rehearsal.Comparison]:
    fields = read_model(setup.config, request.model_config, request.model).fields
    return rehearsal.rehearse([(setup, request.ranks or rehearsal.default_ranks(setup))], fields)[0]


def prepare(request: Request) -> tuple[Setup | None, Findings]:
    """The setup, which is of use only where nothing is violated; None for a model of unknown shape. Raises ConfigError."""
    card = card_of(request.gpu)
    if request.ranks and not request.rehearses:
        raise ConfigError(f"--ranks {' '.join(map(str, request.ranks))} needs --rehearse; add it")
    if request.model is not None:
        known_model(request.model)
        if request.model_config is not None:
            both = f"--model {request.model} and --model-config {request.model_config}"
            raise ConfigError(f"{both} name two models; give one of them")
    for name, value in (("--gpus-per-node", request.gpus_per_node), ("--world-size", request.world_size)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}: must be at least 1")
    config = configs.load(request.config, list(request.overrides))
    world_size = request.world_size or config.layout.world_size
    model, findings = find_all(
        config, card, world_size, request.gpus_per_node, model_config=request.model_config, model=request.model
    )
    if model is None:
        return None, findings
    nodes, rest = divmod(world_size, request.gpus_per_node)
    if nodes and rest:
        findings.notes.append(f"{world_size} GPUs fill {nodes} nodes of {request.gpus_per_node} and a part of another")
    if config.device == "cpu":
        findings.notes.append(f"device=cpu is ignored: the plan is for {card.title}")
    setup = Setup(
        config=config,
        shape=model.shape,
        experts_per_token=model.experts_per_token,
        card=card,
        world_size=world_size,
        gpus_per_node=request.gpus_per_node,
        mean_prompt=0.0,
        mean_response=0.0,
    )
    return _with_lengths(setup, request), findings


def _with_lengths(setup: Setup, request: Request) -> Setup:
    config, assumed = setup.config, setup.assumed
    longest_prompt, longest_response = config.data.max_prompt_length, config.rollout.max_response_length
    prompt = assumed.prompt_fill * longest_prompt if request.mean_prompt is None else request.mean_prompt
    response = assumed.response_fill * longest_response if request.mean_response is None else request.mean_response
    for name, value, longest in (("prompt", prompt, longest_prompt), ("response", response, longest_response)):
        if not 0 < value <= longest:
            raise ConfigError(f"--mean-{name} {value:g} is not between 0 and the longest, {longest}; change it")
    return replace(setup, mean_prompt=prompt, mean_response=response)
