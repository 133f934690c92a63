"""Every rule that a config breaks, each with its remedy, from the same generators that training uses.

If something is only missing on this machine (weights, tokenizer, data, SGLang, Transformer Engine), it is a note, because a
plan may be made on a laptop. If it is here and broken, it is a violation, as in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from grpo_mega.config import Config
from grpo_mega.data.load import check_data
from grpo_mega.errors import UserError
from grpo_mega.formats.hf_files import WEIGHT_SUFFIXES
from grpo_mega.hardware.cards import Card
from grpo_mega.preflight.engine import engine_rank_problems, missing_engine_problems, served_card_problems
from grpo_mega.preflight.layout import context_problems, world_size_problems
from grpo_mega.preflight.model import Model, check_weights, position_problems, read_model
from grpo_mega.preflight.precision import card_problems, installed_problems
from grpo_mega.preflight.preflight import cut_problems
from grpo_mega.preflight.rewards import reward_problems
from grpo_mega.preflight.teachers import row_problems, teacher_problems
from grpo_mega.preflight.tokenizer import check_tokenizer_files
from grpo_mega.weights.spec import ModelShape


@dataclass
class Findings:
    violations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def take(self, problems: Iterable[str]) -> None:
        """Add the problems, each once, and the UserError that may end them. Two rules may find the same problem."""

        def add() -> None:
            for problem in problems:
                self._add(problem)

        self.run(add)

    def run(self, check: Callable[[], object]) -> None:
        """Add the UserError that `check` raises."""
        try:
            check()
        except UserError as error:
            self._add(" ".join(str(error).split()))

    def _add(self, problem: str) -> None:
        if all(problem.partition(";")[0] != known.partition(";")[0] for known in self.violations):
            self.violations.append(problem)


def find_all(
    config: Config, card: Card, world_size: int, gpus_per_node: int, *, model_config: Path | None, model: str | None
) -> tuple[Model | None, Findings]:
    """Return the model (None if it cannot be read) and everything wrong with the config on these GPUs or missing here.

    `model_config` and `model` are a file and a well-known name to read the model from instead of model.path.
    """
    findings = Findings()
    findings.take(reward_problems(config.rewards))
    _find_data(config, findings)
    findings.notes += _missing_here(config, card)
    found: Model | None = None
    try:
        found = read_model(config, model_config, model)
    except UserError as error:
        findings.take([" ".join(str(error).split())])
    findings.take(job_problems(config, found.shape if found else None, card, world_size, gpus_per_node))
    if found is not None:
        findings.take(position_problems(config, found.fields))
        if found.is_here and all(teacher.url or _has_weights(teacher.path) for teacher in config.teachers.values()):
            findings.take(teacher_problems(config, found.shape))
        if found.is_here:
            _find_files(config, found.shape, findings)
        if found.note is not None:
            findings.notes.insert(0, found.note)
    return found, findings


def job_problems(config: Config, shape: ModelShape | None, card: Card, world_size: int, gpus_per_node: int) -> Iterator[str]:
    """Yield the broken rules that need no file. Without a shape, skip the rules that need the model."""
    rollout = config.rollout
    yield from world_size_problems(config.layout, world_size)
    yield from context_problems(config)
    yield from card_problems(config.precision, card.capability, card.title)
    if shape is not None:
        yield from cut_problems(config, shape)
    if rollout.is_served:
        yield from served_card_problems(rollout, config.engine_dtype, card.capability, card.title)
        yield from engine_rank_problems(rollout.tp, world_size, min(world_size, gpus_per_node), config.layout.engine_ranks)


def _find_data(config: Config, findings: Findings) -> None:
    sources = [*config.data.train, *config.data.heldout_sources.values()]
    missing = [source.path for source in sources if source.path.startswith("hub:") or not _exists(source.path)]
    if missing:
        findings.notes.append(f"data not on this machine, not checked: {', '.join(missing)}")
    else:
        findings.run(lambda: check_data(config.data, config.batch.prompts_per_step, config.rollout))
        findings.take(row_problems(config))


def _find_files(config: Config, shape: ModelShape, findings: Findings) -> None:
    """Check weights and tokenizer in model.path. The folder has at least a config.json."""
    folder = config.model.path
    names = [path.name for path in folder.iterdir()]
    if config.model.init == "checkpoint":
        if _has_weights(folder):
            findings.run(lambda: check_weights(folder, shape))
        else:
            findings.notes.append(f"model.path={folder} has no weights here: not checked")
    if any(name.startswith(("tokenizer", "vocab")) for name in names):
        findings.run(lambda: check_tokenizer_files(folder, shape.vocab))
    else:
        findings.notes.append(f"model.path={folder} has no tokenizer here: not checked")


def _has_weights(folder: Path) -> bool:
    return folder.is_dir() and any(path.name.endswith(WEIGHT_SUFFIXES) for path in folder.iterdir())


def _missing_here(config: Config, card: Card) -> list[str]:
    """Return the problems that training would have on this machine."""
    missing = Findings()
    missing.take(missing_engine_problems(config.rollout, on_gpu=False))
    missing.take(installed_problems(config, card.capability, card.title))
    return [f"here: {problem}" for problem in missing.violations]


def _exists(path: str) -> bool:
    return Path(path).exists() or Path(path.rpartition("@")[0] or path).is_dir()
