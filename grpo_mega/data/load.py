"""All prompts of a run, from its data config: the training sets, one after another, and the held-out prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_mega.config_data import DataConfig, DataSource
from grpo_mega.data.dataset import DatasetReport, load_prompts
from grpo_mega.data.rows import check_rows
from grpo_mega.data.sampler import MixedSampler, PromptSampler, Sampler
from grpo_mega.data.sources import is_same
from grpo_mega.data.split import split_off
from grpo_mega.errors import ConfigError
from grpo_mega.types import Prompt

IDS_PER_SET = 10**9  # ids of set number n begin at n times this, so that they do not move when another set grows


@dataclass(frozen=True)
class RunData:
    train: list[Prompt]  # ids are unique
    sizes: tuple[int, ...]  # prompts of each training set, in the order of data.train
    heldout: list[Prompt]
    notes: tuple[str, ...]  # what the person should know, a line each

    def sampler(self, config: DataConfig, prompts_per_step: int, seed: int) -> Sampler:
        """The order in which the training prompts are drawn."""
        return make_sampler(config, self.sizes, prompts_per_step, seed)


def load_data(config: DataConfig, tokenizer: Any) -> RunData:
    """Reads, renders and tokenises all sets. Raises ConfigError for whatever cannot be used."""
    sets, notes = [], []
    for number, source in enumerate(config.train):
        prompts, report = _load(source, config, tokenizer, first_id=number * IDS_PER_SET)
        sets.append(prompts)
        notes.append(str(report))
    heldout: list[Prompt] = []
    size = config.heldout_size or round((config.heldout_fraction or 0.0) * sum(map(len, sets)))
    if config.heldout is not None:
        heldout, report = _load(config.heldout, config, tokenizer, first_id=0)
        notes.append(f"held out: {report}{_overlap(sets, heldout)}")
    elif size:
        num_before = sum(map(len, sets))
        sets, heldout = split_off(sets, size)
        num_dropped = num_before - size - sum(map(len, sets))
        twins = f"; {num_dropped} more of the same text dropped from training" if num_dropped else ""
        notes.append(f"held out: {size} prompts split off from data.train{twins}")
    elif config.heldout_fraction is not None:
        raise ConfigError(
            f"data.heldout_fraction={config.heldout_fraction} of {sum(map(len, sets))} prompts is less than one; raise it"
        )
    return RunData([p for prompts in sets for p in prompts], tuple(map(len, sets)), heldout, tuple(notes))


def check_data(config: DataConfig, prompts_per_step: int) -> None:
    """Whatever can be told without a tokenizer: raises ConfigError for a set or a row that cannot be used."""
    if config.heldout is not None:
        for source in config.train:
            if is_same(source.path, config.heldout.path):
                raise ConfigError(
                    f"data.heldout={config.heldout.path} is trained on as well (data.train); name another, "
                    "or split prompts off with data.heldout_size"
                )
    sizes = [_check(source, config) for source in config.train]
    if config.heldout is not None:
        _check(config.heldout, config)
    make_sampler(config, sizes, prompts_per_step, seed=0)


def make_sampler(config: DataConfig, sizes: tuple[int, ...] | list[int], prompts_per_step: int, seed: int) -> Sampler:
    """A sampler over sets of `sizes` prompts. Raises ConfigError if a step cannot be filled."""
    if len(sizes) == 1:
        return PromptSampler(sizes[0], prompts_per_step, seed, config.shuffle)
    return MixedSampler(sizes, [source.weight for source in config.train], prompts_per_step, seed, config.shuffle)


def _load(source: DataSource, config: DataConfig, tokenizer: Any, first_id: int) -> tuple[list[Prompt], DatasetReport]:
    return load_prompts(
        source.path,
        tokenizer=tokenizer,
        prompt_column=source.prompt_column or config.prompt_column,
        answer_column=source.answer_column or config.answer_column,
        system_prompt=config.system_prompt,
        max_prompt_length=config.max_prompt_length,
        first_id=first_id,
    )


def _check(source: DataSource, config: DataConfig) -> int:
    return check_rows(
        source.path,
        prompt_column=source.prompt_column or config.prompt_column,
        answer_column=source.answer_column or config.answer_column,
        system_prompt=config.system_prompt,
    )


def _overlap(sets: list[list[Prompt]], heldout: list[Prompt]) -> str:
    texts = {prompt.text for prompt in heldout}
    num_shared = sum(prompt.text in texts for prompts in sets for prompt in prompts)
    return f"; {num_shared} prompts of data.train have the text of one of these" if num_shared else ""
