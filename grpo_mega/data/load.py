"""All prompts of a run, from its data config: the training sets, one after another, and the held-out prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_mega.config import RolloutConfig
from grpo_mega.config.data import DataConfig, DataSource
from grpo_mega.data.dataset import DatasetReport, load_prompts
from grpo_mega.data.pass_rates import drop_by_pass_rate, read_pass_rates
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
    heldout_sets: dict[str, list[Prompt]]  # by name; "" where there is only one without a name
    notes: tuple[str, ...]  # what the person should know, a line each
    digests: dict[str, str]  # of what was read, by "key=path" of the config
    dropped: dict[str, int] = field(default_factory=dict)  # from the training sets: how many prompts, by the reason

    @property
    def heldout(self) -> list[Prompt]:
        """Of all sets; ids are unique."""
        return [prompt for prompts in self.heldout_sets.values() for prompt in prompts]

    def sampler(self, config: DataConfig, prompts_per_step: int, seed: int, rollout: RolloutConfig) -> Sampler:
        """Return the order in which the training prompts are drawn, as many per step as it begins. Raises ConfigError."""
        try:
            return make_sampler(config, self.sizes, prompts_per_step, seed, rollout)
        except ConfigError as error:
            others = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items() if count)
            raise ConfigError(f"{error} ({others})" if others else str(error)) from None


def load_data(config: DataConfig, tokenizer: Any) -> RunData:
    """Reads, renders and tokenises all sets. Raises ConfigError for whatever cannot be used."""
    sets, notes, digests, num_too_long = [], [], {}, 0
    for number, source in enumerate(config.train):
        prompts, report = _load(source, config, tokenizer, first_id=number * IDS_PER_SET)
        sets.append(prompts)
        notes.append(str(report))
        digests[f"data.train={source.path}"] = _digest(prompts)
        num_too_long += report.num_too_long
    dropped = {f"more are longer than data.max_prompt_length={config.max_prompt_length}": num_too_long}
    heldout_sets: dict[str, list[Prompt]] = {}
    size = config.heldout_size or round((config.heldout_fraction or 0.0) * sum(map(len, sets)))
    for number, (name, heldout_source) in enumerate(config.heldout_sources.items()):
        heldout, report = _load(heldout_source, config, tokenizer, first_id=number * IDS_PER_SET)
        heldout_sets[name] = heldout
        digests[f"data.heldout{name and f'_sets.{name}'}={heldout_source.path}"] = _digest(heldout)
        notes.append(f"held out{name and f' as {name}'}: {report}{_overlap(sets, heldout)}")
    if size:
        num_before = sum(map(len, sets))
        sets, heldout_sets[""] = split_off(sets, size)
        num_dropped = num_before - size - sum(map(len, sets))
        dropped["more are held out"] = size + num_dropped
        twins = f"; {num_dropped} more of the same text dropped from training" if num_dropped else ""
        notes.append(f"held out: {size} prompts split off from data.train{twins}")
    elif config.heldout_fraction is not None:
        raise ConfigError(
            f"data.heldout_fraction={config.heldout_fraction} of {sum(map(len, sets))} prompts is less than one; raise it"
        )
    if config.pass_rates is not None:
        num_before = sum(map(len, sets))
        sets, note = drop_by_pass_rate(sets, config)
        notes.append(note)
        digests[f"data.pass_rates={config.pass_rates}"] = hashlib.sha256(config.pass_rates.read_bytes()).hexdigest()
        dropped["more have other pass rates than wanted"] = num_before - sum(map(len, sets))
    train = [prompt for prompts in sets for prompt in prompts]
    return RunData(train, tuple(map(len, sets)), heldout_sets, tuple(notes), digests, dropped)


def check_data(config: DataConfig, prompts_per_step: int, rollout: RolloutConfig) -> None:
    """Whatever can be told without a tokenizer: raises ConfigError for a set or a row that cannot be used."""
    for name, heldout in config.heldout_sources.items():
        key = f"data.heldout_sets.{name}" if name else "data.heldout"
        for source in config.train:
            if is_same(source.path, heldout.path):
                raise ConfigError(
                    f"{key}={heldout.path} is trained on as well (data.train); name another, "
                    "or split prompts off with data.heldout_size"
                )
    sizes = [_check(source, config) for source in config.train]
    for heldout in config.heldout_sources.values():
        _check(heldout, config)
    if config.pass_rates is not None:
        read_pass_rates(config.pass_rates)
    make_sampler(config, sizes, prompts_per_step, 0, rollout)


def make_sampler(config: DataConfig, sizes: Sequence[int], prompts_per_step: int, seed: int, rollout: RolloutConfig) -> Sampler:
    """A sampler over sets of `sizes` prompts, of which a step draws what it begins. Raises ConfigError if it cannot be filled.

    With oversampling, prompts that were begun and aborted count as drawn: they come again in the next epoch.
    """

    def make(per_step: int) -> Sampler:
        if len(sizes) == 1:
            return PromptSampler(sizes[0], per_step, seed, config.shuffle)
        return MixedSampler(sizes, [source.weight for source in config.train], per_step, seed, config.shuffle)

    sampler, num_begun = make(prompts_per_step), rollout.num_begun(prompts_per_step)
    if num_begun == prompts_per_step:
        return sampler
    try:
        return make(num_begun)
    except ConfigError:
        raise ConfigError(
            f"rollout.oversample={rollout.oversample} has a step begin {num_begun} prompts (batch.prompts_per_step="
            f"{prompts_per_step}), more than data.train, {sum(sizes)} prompts, can give; lower it"
        ) from None


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


def _digest(prompts: Sequence[Prompt]) -> str:
    """A digest of all that training takes from the prompts, in their order; the tokens are the text's."""
    digest = hashlib.sha256()
    for p in prompts:
        digest.update(json.dumps([p.id, p.text, p.answer, p.extras], sort_keys=True, default=repr).encode() + b"\n")
    return digest.hexdigest()


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
