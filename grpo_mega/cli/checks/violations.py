"""Find every rule that a config breaks, each with its remedy, before any rank starts or device is taken. Never imports
torch.

Child processes render the chat template, import the user's functions, and ask torch if it sees a GPU that
`device` needs or finds.

If something is missing on this machine (weights, tokenizer, data, SGLang, Transformer Engine), a job that runs here
breaks a rule. A plan for other machines may be made on a laptop, so it only gets a note. If something is here and
broken, both break a rule. Checks that need the tokenizer itself or the weights' values run on the ranks before the
first step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from grpo_mega import user_code
from grpo_mega.checkpoint_io.hf_files import WEIGHT_SUFFIXES
from grpo_mega.cli.checks.layout import (
    engine_problems,
    engine_rank_problems,
    layout_problems,
    recompute_problems,
    world_size_problems,
)
from grpo_mega.cli.checks.machine import Machine
from grpo_mega.cli.checks.model import (
    Model,
    check_model_files,
    check_weights,
    fact_problems,
    facts_of,
    lora_problems,
    position_problems,
    read_model,
    sync_problems,
)
from grpo_mega.cli.checks.precision import bf16_layer_problems, block_problems, installed_problems, variable_problems
from grpo_mega.cli.checks.tokenizer import check_tokenizer_files, vocabulary_difference
from grpo_mega.config import AlgorithmConfig, Config, ModelConfig, RewardsConfig
from grpo_mega.config.base import broken_rules, settings_of
from grpo_mega.data.load import check_data
from grpo_mega.data.rows import MissingColumn, find_value, read_conversations
from grpo_mega.distributed.environment import gpu_sign, unusable_gpu_problems, uses_gpu
from grpo_mega.distributed.kernels import card_problems, context_problems, dispatcher_problems, latent_problems
from grpo_mega.distributed.versions import installed_set
from grpo_mega.errors import UserError, raise_all, with_error
from grpo_mega.rewards import registry
from grpo_mega.rewards.code import hidden_python, missing_sandbox
from grpo_mega.rewards.worker import import_problems
from grpo_mega.rollout.sessions.tool_schemas import agent_problems
from grpo_mega.rollout.sglang.requirements import compiler_problems, padding_problems, served_card_problems
from grpo_mega.weights.hf_config import resolve_config
from grpo_mega.weights.spec import ModelShape, read_config


@dataclass
class Violations:
    """Broken rules and notes, and the model that was read (None if it cannot be read)."""

    violations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    model: Model | None = None

    def take(self, problems: Iterable[str]) -> bool:
        """Add the problems, each once, and the UserError that may end them. Return True if there are none.

        Two rules may find the same problem. They name the value in the same words, and remedies after a semicolon.
        """
        found = list(with_error(problems))
        for problem in found:
            if all(problem.partition(";")[0] != known.partition(";")[0] for known in self.violations):
                self.violations.append(problem)
        return not found

    def run(self, check: Callable[[], object]) -> bool:
        """Add the UserError that `check` raises. Return True if it raises none."""
        try:
            check()
        except UserError as error:
            return self.take(error.lines)
        return True


def find_violations(config: Config, machine: Machine) -> list[str]:
    """Return every rule that the config breaks on this machine, one line each."""
    return find_all(config, machine).violations


def check_config(config: Config, machine: Machine) -> None:
    """Raise ConfigError with every rule that the config breaks on this machine."""
    raise_all(find_violations(config, machine))


def find_all(config: Config, machine: Machine, read: Callable[[Config], Model] = read_model) -> Violations:
    """Return everything wrong with the config on these machines or missing here. `read` returns the model or raises
    UserError.

    Rules that need the model's shape are skipped if the model cannot be read.
    """
    violations = Violations()
    if machine.is_here:
        violations.take(unusable_gpu_problems(config.device, os.environ))
        if config.device == "auto" and machine.cuda is not None and gpu_sign(os.environ) is None:
            violations.notes.append(
                f"device=auto: torch is built for CUDA {machine.cuda}, but this machine shows no NVIDIA GPU, so the run"
                " uses the CPU; device: cuda refuses that, and device: cpu hides this line"
            )
        violations.take(variable_problems(config))
    violations.take(broken_rules(config, {"a training step": True}))
    violations.take(reward_problems(config.rewards, config.code_dir))
    violations.take(agent_problems(config.rollout, config.code_dir))
    if machine.is_here:
        _check_sandbox(config, violations)
    try:
        violations.model = read(config)
    except UserError as error:
        violations.take(error.lines)
    model = violations.model
    if model is not None:
        violations.notes += [] if model.note is None else [model.note]
        violations.take(position_problems(config, model.fields))
    violations.take(job_problems(config, model.shape if model else None, machine))
    if machine.is_here and model is not None and config.rollout.is_served and not uses_gpu(config.device, os.environ):
        violations.take(padding_problems(model.shape, config.rollout.tp))
    _check_packages(config, machine, violations)
    if model is not None and model.is_here:
        _check_files(config, model.shape, machine, violations)
    paths = [source.path for source in (*config.data.train, *config.data.heldout_sources.values())]
    folders = {path: Path(path.rpartition("@")[0] or path) for path in paths}  # without the name of a split
    missing = [p for p in paths if p.startswith("hub:") or not (Path(p).exists() or folders[p].is_dir())]
    prompts_per_step, is_sft = config.batch.prompts_per_step, config.algorithm.is_sft
    if missing and not machine.is_here:
        violations.notes.append(f"data not on this machine, not checked: {', '.join(missing)}")
    elif violations.run(lambda: check_data(config.data, prompts_per_step, config.rollout, is_sft=is_sft)):
        violations.take(row_problems(config))
    return violations


def job_problems(config: Config, shape: ModelShape | None, machine: Machine) -> Iterator[str]:
    """Yield the broken rules that need no file. Without a shape, skip the rules that need the model."""
    rollout, card = config.rollout, machine.card
    yield from world_size_problems(config.layout, machine.world_size)
    if card is not None:
        yield from context_problems(config)
        yield from card_problems(config.precision, card.capability, card.title)
        yield from dispatcher_problems(config.layout, config.model.resolved_dtype, card.capability, card.title)
    if shape is not None:
        yield from cut_problems(config, shape)
        if machine.transformer_engine is not None and config.device != "cpu":
            yield from latent_problems(shape, *machine.gpu(config.device))
    if rollout.is_served:
        if card is not None:
            yield from served_card_problems(rollout, config.engine_dtype, card.capability, card.title)
        per_node = min(machine.world_size, machine.ranks_per_node)
        yield from engine_rank_problems(rollout.tp, machine.world_size, per_node, config.layout.engine_ranks)


def cut_problems(config: Config, shape: ModelShape) -> Iterator[str]:
    """Yield the reasons why the model cannot be split over the trainer's ranks, into FP8 blocks, or over an engine's
    ranks.
    """
    yield from layout_problems(config.layout, shape)
    yield from fact_problems(config, shape)
    yield from recompute_problems(config, shape)
    yield from engine_problems(config.rollout, config.layout, shape)
    yield from bf16_layer_problems(config.precision, config.layout, shape.num_layers)
    yield from block_problems(config.precision, config.layout, shape)


def _check_packages(config: Config, machine: Machine, violations: Violations) -> None:
    missing = violations if machine.is_here else Violations()
    versions = installed_set()
    missing.take(versions.problems)
    missing.take(installed_problems(config, machine))
    if machine.is_here and config.device == "cuda":
        missing.take(compiler_problems(config.rollout, machine.compiler))
    violations.notes += versions.notes if machine.is_here else [f"here: {problem}" for problem in missing.violations]


def _check_files(config: Config, shape: ModelShape, machine: Machine, violations: Violations) -> None:
    """Check weights and tokenizer in model.path, and the teachers. The folder has at least a config.json."""
    folder = config.model.path
    violations.take(lora_problems(config.model, shape))
    violations.take(sync_problems(config, shape))
    if config.model.init == "checkpoint":
        if machine.is_here or _has_weights(folder):
            violations.run(lambda: check_weights(folder, shape))
        else:
            violations.notes.append(f"model.path={folder} has no weights here: not checked")
    if machine.is_here or any(path.name.startswith(("tokenizer", "vocab")) for path in folder.iterdir()):
        has_tools = bool(config.rollout.tools)
        if not violations.run(lambda: check_tokenizer_files(folder, shape.vocab, has_tools=has_tools)):
            return  # teachers are compared with the tokenizer
    else:
        violations.notes.append(f"model.path={folder} has no tokenizer here: not checked")
    if machine.is_here or all(teacher.url or _has_weights(teacher.path) for teacher in config.teachers.values()):
        violations.take(teacher_problems(config, shape))


def reward_problems(rewards: RewardsConfig, code_dir: Path | None) -> Iterator[str]:
    """Yield problems of each reward function's name, module or options. Import user functions in a child process."""
    to_import = []
    for function in rewards.functions:
        try:
            registry.check_rewards(function.name, function.options, rewards.step_splitter, rewards.deadline_s)
        except UserError as error:
            yield from error.lines
            continue
        if function.name not in registry.BUILT_IN:
            try:
                user_code.check_exists(function.name, code_dir)
                to_import.append(function)
            except UserError as error:
                yield from (f"reward function {line}" for line in error.lines)
    if to_import:
        yield from import_problems(to_import, rewards.step_splitter, code_dir)


def teacher_problems(config: Config, shape: ModelShape) -> Iterator[str]:
    """Yield the problems of each teacher for a policy of this shape."""
    for name, settings in config.teachers.items():
        key = f"teachers.{name}.path"
        try:
            theirs = check_model_files(ModelConfig(path=settings.path, init="random" if settings.url else "checkpoint"))
            check_tokenizer_files(settings.path, theirs.vocab)
        except UserError as error:
            yield from (line.replace("model.path", key) for line in error.lines)
            continue
        if difference := vocabulary_difference(settings.path, config.model.path):
            yield (
                f"{key}={settings.path}: must have the tokenizer of model.path={config.model.path}, but {difference}; "
                "name a teacher of the policy's tokenizer"
            )
        elif theirs.vocab < shape.vocab:
            yield (
                f"{key}={settings.path}: must have the vocabulary of model.path={config.model.path}, but vocab_size is "
                f"{theirs.vocab} there and {shape.vocab} here, so it lacks some tokens; name a larger one"
            )
        problems = list(position_problems(config, resolve_config(read_config(settings.path))))
        if settings.url is None:
            # The layers per chunk follow from the teacher's size.
            changes: dict[str, object] = {"layers_per_chunk": None, "dp": config.layout.dp or config.layout.least_dp}
            layout = config.layout.model_copy(update=changes | ({} if theirs.num_experts else {"ep": 1, "etp": 1}))
            facts = facts_of(theirs, is_served=False) | {"a model with experts": False}  # a teacher may have them
            others = broken_rules(config, facts, theirs.model_type)
            problems += [*layout_problems(layout, theirs)]
            problems += [line for line in others if line.startswith(("layout.", "batch."))]
        yield from (f"{key}={settings.path}: {problem}" for problem in problems)


def row_problems(config: Config) -> Iterator[str]:
    """Yield the first row of each training set that names no teacher, if rows choose their teacher."""
    column = config.data.teacher_column
    if column is None:
        return
    for source in config.data.train:
        for row in read_conversations(source, config.data):
            value = None
            with suppress(MissingColumn):
                value = find_value(row.extras, column)
            if str(value) not in config.teachers:
                yield f"{row.place}: {column}={value!r} names no teacher; use one of {', '.join(config.teachers)}"
                break


def _check_sandbox(config: Config, violations: Violations) -> None:
    """Note that programs of the model are not isolated on this machine, or refuse them if they cannot run at all."""
    programs = [f"rewards.functions: {f.name}" for f in config.rewards.functions if f.name in registry.OF_PROGRAMS]
    programs += ["rollout.tools: python"] if "python" in config.rollout.tools else []
    if not programs:
        return
    if hidden := hidden_python():
        problem = f"{programs[0]}: the model's programs run as another user, who cannot enter {hidden}, a folder of"
        violations.take([f"{problem} this Python; install Python where all users can read it"])
    elif reason := missing_sandbox():
        violations.notes.append(
            f"{programs[0]}: this kernel allows no namespaces ({reason}), so the model's programs can use the network,"
            " read files and signal processes of their user; run in a container without network, or allow user"
            " namespaces"
        )


def start_notes(config: Config) -> list[str]:
    """Return notes on what the run leaves unread: the weights of its model, keys of its algorithm."""
    path, notes = config.model.path, list(unread_keys(config))
    if config.model.init == "random" and _has_weights(path):
        notes.append(
            f"model.init=random: the weights in {path} are not read, and training starts from random ones; leave it out"
        )
    return notes


def unread_keys(config: Config) -> Iterator[str]:
    """Yield a line for each key of the algorithm that nothing reads although its value is not the recipe's."""
    by_recipe = config.model_copy(update={"algorithm": AlgorithmConfig(recipe=config.algorithm.recipe)})
    usual = settings_of(by_recipe)
    for line in broken_rules(config, only_unused=True):
        if line.partition(" ")[0] not in usual:
            yield line


def _has_weights(folder: Path) -> bool:
    return folder.is_dir() and any(path.name.endswith(WEIGHT_SUFFIXES) for path in folder.iterdir())
