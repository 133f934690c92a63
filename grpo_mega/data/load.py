"""Load all prompts of a run from its data config, and decide the prompts of each step.

The prompts are the training sets, one after another, and the held-out prompts. Rows are rendered with the tokenizer's
chat template and tokenised. The id of a prompt is the first id of the set plus the row's index in the set, whatever
else is dropped. Prompts longer than the limit are dropped and counted.

`grpo-mega eval CONFIG --train-set --samples N --out FILE` counts how often the model solves each prompt, and writes
JSON lines: {"id": ..., "hash": ..., "samples": N, "solved": c} and more. The pass rate is c / N. Training prompts
outside data.min_pass_rate .. max_pass_rate teach nothing and are dropped. Prompts without a row are kept, and so are
prompts without a pass rate ("solved": null, because the gold answer cannot be read). The id and hash of a row must
belong to the same prompt, as rendered with the tokenizer's chat template. Otherwise the file belongs to another data
set.

The prompts of a step are a pure function of (seed, step), so a resumed run needs no sampler state. Each set has a
separate endless order: epoch after epoch, each a permutation seeded by (seed, set, epoch). A step draws its share of
prompts_per_step from every set. The share is rounded up or down, so that its mean over the steps is exact.

Invariant: no step has a prompt twice, even if the step spans two epochs. The random stream of a sample is fixed by
(seed, step, prompt id, sample index), so two copies of a prompt would get the same responses.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from grpo_mega.config import DataConfig, RolloutConfig
from grpo_mega.config.data import DataSource
from grpo_mega.data.chat import Renderer, find_prefill, writes_date
from grpo_mega.data.rows import is_same, read_conversations, read_demonstrations
from grpo_mega.errors import ConfigError
from grpo_mega.text import read_json_lines
from grpo_mega.types import Prompt

LoadSet = Callable[..., tuple[list[Any], int, str]]  # load_prompts, or another function with its arguments
BY_PROMPT, BY_TEXT = "prompt", "text"  # rules of split_off
IDS_PER_SET = 10**9  # ids of set n start at n times this, so they do not change when another set grows


class PassRate(NamedTuple):
    hash: str
    rate: float | None


@dataclass(frozen=True)
class RunData:
    train: list[Prompt]  # ids are unique
    sizes: tuple[int, ...]  # number of prompts per training set, in the order of data.train
    heldout_sets: dict[str, list[Prompt]]  # sets by name; "" for a single set without a name
    notes: tuple[str, ...]  # lines for the log
    digests: dict[str, str]  # digests of the loaded prompts by "key=path" of the config
    dropped: dict[str, int] = field(default_factory=dict)  # number of prompts dropped from the training sets by reason

    def sampler(self, config: DataConfig, prompts_per_step: int, seed: int, rollout: RolloutConfig) -> Sampler:
        """Return the sampler of training prompts. It draws as many per step as the step starts. Raises ConfigError."""
        try:
            return make_sampler(config, self.sizes, prompts_per_step, seed, rollout)
        except ConfigError as error:
            others = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items() if count)
            raise ConfigError(f"{error} ({others})" if others else str(error)) from None


def load_data(
    config: DataConfig,
    tokenizer: Any,
    load: LoadSet | None = None,
    tools: Sequence[dict[str, Any]] = (),
    split: str = BY_PROMPT,
) -> RunData:
    """Read, render and tokenise all sets. Raises ConfigError for unusable data.

    `load` loads one set of prompts. None: load_prompts, with these tools. `split`: see split_off.
    """
    limit = f"data.max_length={config.max_length}" if load else f"data.max_prompt_length={config.max_prompt_length}"
    load = load or partial(load_prompts, tools=tools)
    sets, notes, digests, num_too_long = [], [], {}, 0
    for number, source in enumerate(config.train):
        prompts, num_dropped, note = load(source, config, tokenizer, first_id=number * IDS_PER_SET)
        sets.append(prompts)
        notes.append(note)
        digests[f"data.train={source.path}"] = _digest(prompts)
        num_too_long += num_dropped
    dropped = {f"more are longer than {limit}": num_too_long}
    heldout_sets: dict[str, list[Prompt]] = {}
    size = config.heldout_size or round((config.heldout_fraction or 0.0) * sum(map(len, sets)))
    for number, (name, heldout_source) in enumerate(config.heldout_sources.items()):
        heldout, _, note = load(heldout_source, config, tokenizer, first_id=number * IDS_PER_SET)
        heldout_sets[name] = heldout
        digests[f"data.heldout{name and f'_sets.{name}'}={heldout_source.path}"] = _digest(heldout)
        texts = {prompt.text for prompt in heldout}
        num_shared = sum(prompt.text in texts for prompts in sets for prompt in prompts)
        shared = f"; {num_shared} prompts of data.train have the text of a held-out prompt" if num_shared else ""
        notes.append(f"held out{name and f' as {name}'}: {note}{shared}")
    if size:
        num_before = sum(map(len, sets))
        sets, heldout_sets[""] = split_off(sets, size, split)
        num_dropped = num_before - size - sum(map(len, sets))
        dropped["more are held out"] = size + num_dropped
        copies = f"; {num_dropped} more of the same text dropped from training" if num_dropped else ""
        notes.append(f"held out: {size} prompts split off from data.train{copies}")
    elif config.heldout_fraction is not None:
        raise ConfigError(
            f"data.heldout_fraction={config.heldout_fraction} of {sum(map(len, sets))} prompts is less than one;"
            " raise it"
        )
    if config.pass_rates is not None:
        num_before = sum(map(len, sets))
        sets, note = drop_by_pass_rate(sets, config)
        notes.append(note)
        digests[f"data.pass_rates={config.pass_rates}"] = hashlib.sha256(config.pass_rates.read_bytes()).hexdigest()
        dropped["more have other pass rates than wanted"] = num_before - sum(map(len, sets))
    train = [prompt for prompts in sets for prompt in prompts]
    return RunData(train, tuple(map(len, sets)), heldout_sets, tuple(notes), digests, dropped)


def load_prompts(
    source: DataSource,
    config: DataConfig,
    tokenizer: Any,
    *,
    first_id: int = 0,
    tools: Sequence[dict[str, Any]] = (),
) -> tuple[list[Prompt], int, str]:
    """Return the prompts of one set in order, the number of prompts dropped as too long, and a line for the log.

    `tools` has the schemas of rollout.tools, which the chat template writes into the prompts.

    Raises ConfigError if the set is unreadable or empty, a row is bad, the chat template is missing, or all prompts are
    too long.
    """
    renderer = Renderer(tokenizer, tools)
    conversations = read_conversations(source, config)
    prefill = find_prefill(tokenizer)
    if tools and (both := next((one.place for one in conversations if one.tools), None)):
        raise ConfigError(
            f"{both}: has tools, and rollout.tools is set too; leave one of them out, or rename the column"
        )
    texts = [renderer.render(one.messages, one.place, one.tools) for one in conversations]
    all_token_ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    dated = f"{tokenizer.chat_template}{config.system_prompt}{tools}" if writes_date(tokenizer) else ""
    prompts = [
        Prompt(
            id=first_id + one.index,
            text=text,
            token_ids=tuple(token_ids),
            answer=one.answer,
            prefill=prefill if text.endswith(prefill) else "",
            extras=one.extras,
            raw_columns=one.raw_columns,
            digest=one.digest,
            undated=dated and text_hash(f"{dated}{one.digest.hex()}"),
        )
        for one, text, token_ids in zip(conversations, texts, all_token_ids, strict=True)
        if len(token_ids) <= config.max_prompt_length
    ]
    if not prompts:
        shortest = min(len(token_ids) for token_ids in all_token_ids)
        raise ConfigError(
            f"data.max_prompt_length={config.max_prompt_length} drops all {len(texts)} prompts of {source.path}; "
            f"the shortest has {shortest} tokens, so raise it to at least that"
        )
    longest, num_too_long = max(len(prompt.token_ids) for prompt in prompts), len(texts) - len(prompts)
    dropped = f", {num_too_long} dropped as too long" if num_too_long else ""
    return prompts, num_too_long, f"{source.path}: {len(prompts)} prompts of at most {longest} tokens{dropped}"


def split_off(
    sets: Sequence[list[Prompt]], size: int, rule: str = BY_PROMPT
) -> tuple[list[list[Prompt]], list[Prompt]]:
    """Split off held-out prompts: return the remaining prompts of each set, and `size` prompts with distinct texts.

    The held-out prompts are the ones with the smallest hashes, whatever the seed and row order, so that runs can be
    compared on the same prompts. The hash is of the row's prompt. Runs that an earlier version started have BY_TEXT,
    the hash of the rendered text. The held-out prompts are ordered by hash, so the first N come from all sets for any
    N. No text is on both sides: a training prompt with the text of a held-out prompt is dropped. Raises ConfigError if
    too little remains.
    """
    by_text: dict[str, Prompt] = {}
    for prompt in sorted(
        chain.from_iterable(sets),
        key=lambda p: (rule == BY_PROMPT and p.digest) or hashlib.sha256(p.text.encode()).digest(),
    ):
        by_text.setdefault(prompt.text, prompt)
    if size >= len(by_text):
        raise ConfigError(
            f"{size} held-out prompts leave nothing of the {len(by_text)} different prompts of data.train; "
            "lower data.heldout_size or data.heldout_fraction"
        )
    heldout = list(by_text.values())[:size]
    heldout_texts = {prompt.text for prompt in heldout}
    train = [[prompt for prompt in prompts if prompt.text not in heldout_texts] for prompts in sets]
    for number, prompts in enumerate(train):
        if not prompts:
            raise ConfigError(
                f"{size} held-out prompts leave none of data.train.{number}; lower data.heldout_size or"
                " data.heldout_fraction"
            )
    return train, heldout


def check_data(config: DataConfig, prompts_per_step: int, rollout: RolloutConfig, *, is_sft: bool = False) -> None:
    """Raise ConfigError for an unusable set or row, as far as this can be checked without a tokenizer."""
    read = read_demonstrations if is_sft else read_conversations
    for name, heldout in config.heldout_sources.items():
        key = f"data.heldout_sets.{name}" if name else "data.heldout"
        for source in config.train:
            if is_same(source.path, heldout.path):
                raise ConfigError(
                    f"{key}={heldout.path} is also in data.train; name another set, or split prompts off with"
                    " data.heldout_size"
                )
    sizes = [len(read(source, config)) for source in config.train]
    for heldout in config.heldout_sources.values():
        read(heldout, config)
    if config.pass_rates is not None:
        read_pass_rates(config.pass_rates)
    make_sampler(config, sizes, prompts_per_step, 0, rollout)


def make_sampler(
    config: DataConfig, sizes: Sequence[int], prompts_per_step: int, seed: int, rollout: RolloutConfig
) -> Sampler:
    """Return a sampler over sets of `sizes` prompts. It draws as many per step as the step starts.

    Raises ConfigError if there are too few prompts.

    With oversampling, prompts that were started and aborted count as drawn: they come again in the next epoch. If
    partial rollouts continue them, each draw has prompts_per_step prompts, and a step makes as many draws as it needs.
    """
    weights = [source.weight for source in config.train]
    sampler = Sampler(sizes, weights, prompts_per_step, seed, shuffle=config.shuffle)
    num_started = rollout.num_started(prompts_per_step)
    if num_started == prompts_per_step or rollout.keeps_unfinished:
        return sampler
    try:
        return Sampler(sizes, weights, num_started, seed, shuffle=config.shuffle)
    except ConfigError:
        raise ConfigError(
            f"rollout.oversample={rollout.oversample} makes a step start {num_started} prompts (batch.prompts_per_step="
            f"{prompts_per_step}), more than the {sum(sizes)} prompts of data.train; lower it"
        ) from None


def text_hash(text: str) -> str:
    """Return the hash that identifies a prompt's text in a row."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_pass_rates(path: Path) -> dict[int, PassRate]:
    """Return pass rates by prompt id. Raises ConfigError if the file has no pass rates."""
    try:
        rows = [row for _, row in read_json_lines(path)]
    except OSError as error:
        raise ConfigError(
            f"data.pass_rates={path} cannot be read ({error}); write it with grpo-mega eval CONFIG --train-set"
            f" --samples 8 --out {path}"
        ) from None
    rates = {}
    for number, row in enumerate(rows, start=1):
        row = row or {}  # None means that the line is not a JSON object
        try:
            samples, solved = int(row["samples"]), row["solved"]
            rates[int(row["id"])] = PassRate(str(row["hash"]), None if solved is None else int(solved) / samples)
        except (ValueError, KeyError, TypeError, ZeroDivisionError):
            raise ConfigError(
                f"data.pass_rates={path}:{number} has no id, hash, samples and solved of a prompt; write the file with "
                "grpo-mega eval CONFIG --train-set --samples 8 --out FILE"
            ) from None
    return rates


def drop_by_pass_rate(sets: Sequence[list[Prompt]], config: DataConfig) -> tuple[list[list[Prompt]], str]:
    """Return the remaining prompts of each training set, and a line that counts the dropped prompts.

    Raises ConfigError if the file is about other prompts, or if a set would be empty.
    """
    assert config.pass_rates is not None
    rates, rate_of = read_pass_rates(config.pass_rates), dict[int, float | None]()
    for prompt in (p for prompts in sets for p in prompts if p.id in rates):
        if rates[prompt.id].hash != text_hash(prompt.undated or prompt.text):
            raise ConfigError(
                f"data.pass_rates={config.pass_rates} was computed for different prompts (prompt {prompt.id} differs);"
                " evaluate this data.train again, using this model's chat template and system prompt"
            )
        rate_of[prompt.id] = rates[prompt.id].rate
    if not rate_of:
        raise ConfigError(
            f"data.pass_rates={config.pass_rates} has no row for any prompt of data.train; evaluate this data.train"
        )
    low = 0.0 if config.min_pass_rate is None else config.min_pass_rate
    high = 1.0 if config.max_pass_rate is None else config.max_pass_rate
    known = [rate for rate in rate_of.values() if rate is not None]
    kept = [[p for p in prompts if (rate := rate_of.get(p.id)) is None or low <= rate <= high] for prompts in sets]
    for number, prompts in enumerate(kept):
        if not prompts:
            raise ConfigError(
                f"data.min_pass_rate={config.min_pass_rate} and data.max_pass_rate={config.max_pass_rate} keep none of"
                f" the {len(sets[number])} prompts of data.train.{number}; widen them"
            )
    num_before, num_kept = sum(map(len, sets)), sum(map(len, kept))
    below, above = sum(rate < low for rate in known), sum(rate > high for rate in known)
    never, always = sum(rate == 0 for rate in known), sum(rate == 1 for rate in known)
    parts = [f"{below} below data.min_pass_rate={low}"] * (config.min_pass_rate is not None)
    parts += [f"{above} above data.max_pass_rate={high}"] * (config.max_pass_rate is not None)
    unknown = f"; {num_before - len(known)} without a pass rate kept" if num_before > len(known) else ""
    note = (
        f"data.pass_rates={config.pass_rates}: {num_before - num_kept} of {num_before} training prompts dropped "
        f"({', '.join(parts)}; {never} were never solved, {always} always){unknown}"
    )
    return kept, note


def _digest(prompts: Sequence[Prompt]) -> str:
    """Return a digest of everything that training reads from the prompts, in order. Tokens follow from the text."""
    digest = hashlib.sha256()
    for p in prompts:
        digest.update(json.dumps([p.id, p.text, p.answer, p.extras], sort_keys=True, default=repr).encode() + b"\n")
    return digest.hexdigest()


Ints = NDArray[np.int64]
_GOLDEN = (math.sqrt(5) - 1) / 2  # any number of its multiples modulo 1 are spread evenly
_MIXING = 1 << 63  # key of the first step's offset; the other keys are epochs, which stay below it


class Draw(NamedTuple):
    source: int  # number of the set
    row: int  # index into all sets
    epoch: int  # number of the pass over the set, from 0


class Sampler:
    """Draws `prompts_per_step` prompts per step from sets of `sizes` prompts, in proportion to `weights`.

    The prompts of all sets are interleaved evenly within a step, so mini-batches are mixed too. Raises ConfigError if a
    set has fewer prompts than a step may draw from it.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], prompts_per_step: int, seed: int, *, shuffle: bool
    ) -> None:
        shares = [weight / sum(weights) for weight in weights]
        most = [math.ceil(round(share * prompts_per_step, 9)) for share in shares]
        if len(sizes) == 1 and most[0] > sizes[0]:
            if not sizes[0]:
                raise ConfigError("data.train holds no usable prompt; name a file with prompts")
            raise ConfigError(
                f"batch.prompts_per_step={prompts_per_step} is more than the {sizes[0]} prompts of data.train; "
                f"use at most {sizes[0]}"
            )
        for number, (size, share, needed) in enumerate(zip(sizes, shares, most, strict=True)):
            if needed > size:
                raise ConfigError(
                    f"data.train.{number} has {size} prompts, but its share {share:.3g} of batch.prompts_per_step="
                    f"{prompts_per_step} takes up to {needed} per step; lower its weight or batch.prompts_per_step"
                )
        self._bounds = np.round(np.cumsum([0.0, *shares]) * prompts_per_step, 9)  # bounds of the sets within a step
        self._first_offset = np.random.Generator(np.random.Philox(key=[seed, _MIXING])).random()
        self._firsts = [sum(sizes[:number]) for number in range(len(sizes))]
        self._orders = [
            _EndlessOrder(size, needed, key=seed + (number << 32), shuffle=shuffle)
            for number, (size, needed) in enumerate(zip(sizes, most, strict=True))
        ]

    def draws(self, step: int) -> list[Draw]:
        """Return the prompts of step `step` (from 0), with their sets and epochs. No row occurs twice.

        A step has an offset u in [0, 1). It draws as many prompts from a set as there are values of u, u + 1, u + 2,
        ... within the set's bounds.
        """
        offsets = (self._first_offset + _GOLDEN * np.arange(step + 1)) % 1.0
        counts = np.diff(np.ceil(self._bounds - offsets[:, None]), axis=1).astype(np.int64)
        # [step + 2, num_sets]: the number of prompts drawn from each set before steps 0, 1, ..., step + 1
        all_starts = np.concatenate([np.zeros((1, counts.shape[1]), dtype=np.int64), counts.cumsum(axis=0)])
        places: list[tuple[float, Draw]] = []  # (relative place in the step, draw)
        sets = zip(self._firsts, self._orders, all_starts.T, strict=True)
        for number, (first, order, starts) in enumerate(sets):
            drawn, start = order.last_step(starts), int(starts[-2])
            for i, index in enumerate(drawn):
                places.append(((i + 0.5) / len(drawn), Draw(number, first + index, (start + i) // order.num_prompts)))
        return [draw for _, draw in sorted(places)]


@dataclass(frozen=True)
class _EndlessOrder:
    """The order of one set's prompts over all epochs. A step draws at most `most_per_step` <= num_prompts prompts."""

    num_prompts: int
    most_per_step: int
    key: int
    shuffle: bool
    # Cached order of the last requested epoch. The orders of later epochs depend on it.
    _last: dict[int, Ints] = field(default_factory=dict)

    def last_step(self, starts: Ints) -> list[int]:
        """Return the prompts of the last step, given the number of prompts drawn before each step."""
        start, end = map(int, starts[-2:])
        epoch, place = divmod(start, self.num_prompts)
        # Only the first 2 * most_per_step places of an epoch depend on the previous epoch.
        is_tail_independent = self.num_prompts >= 3 * self.most_per_step
        first = max(0, epoch - 1) if is_tail_independent else 0
        known = [number for number in self._last if first <= number <= epoch]
        first, order = (known[0], self._last[known[0]]) if known else (first, self._permutation(first))
        for later in range(first + 1, epoch + 1):
            order = self._following(order, later, starts)
        self._last.clear()
        self._last[epoch] = order
        drawn = order[place : place + end - start]
        if missing := end - start - len(drawn):
            drawn = np.concatenate([drawn, self._following(order, epoch + 1, starts)[:missing]])
        return [int(index) for index in drawn]

    def _following(self, previous: Ints, epoch: int, starts: Ints) -> Ints:
        """Return the order of `epoch`. Its first step's prompts that were drawn from `previous` are moved back."""
        order = self._permutation(epoch)
        place = epoch * self.num_prompts
        num_shared = place - int(starts[np.searchsorted(starts, place, side="right") - 1])
        if not self.shuffle or num_shared == 0:
            return order
        head = order[: 2 * self.most_per_step]
        is_taken = np.isin(head, previous[-num_shared:])
        return np.concatenate([head[~is_taken], head[is_taken], order[len(head) :]])

    def _permutation(self, epoch: int) -> Ints:
        if not self.shuffle:
            return np.arange(self.num_prompts)
        return np.random.Generator(np.random.Philox(key=[self.key, epoch])).permutation(self.num_prompts)
