"""Drop training prompts that teach nothing, because a model solves them always or never.

`grpo-mega eval CONFIG --train-set --samples N --out FILE` counts how often the model solves each prompt, and writes JSON lines:
{"id": ..., "hash": ..., "samples": N, "solved": c} and more. The pass rate is c / N. Prompts without a row are kept, and so are
prompts without a pass rate ("solved": null, because the gold answer cannot be read). The id and hash of a row must belong to
the same prompt, as rendered with the tokenizer's chat template. Otherwise the file belongs to another data set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from grpo_mega.config.data import DataConfig
from grpo_mega.errors import ConfigError
from grpo_mega.json_lines import read_json_lines
from grpo_mega.types import Prompt


class PassRate(NamedTuple):
    hash: str
    rate: float | None


def text_hash(text: str) -> str:
    """Return the hash that identifies a prompt's text in a row."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_pass_rates(path: Path) -> dict[int, PassRate]:
    """Return pass rates by prompt id. Raises ConfigError if the file has no pass rates."""
    try:
        rows = [row for _, row in read_json_lines(path)]
    except OSError as error:
        raise ConfigError(
            f"data.pass_rates={path} cannot be read ({error}); write it with grpo-mega eval CONFIG --train-set --samples 8 "
            f"--out {path}"
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
    rates = read_pass_rates(config.pass_rates)
    _check_same(sets, rates, config.pass_rates)
    low = 0.0 if config.min_pass_rate is None else config.min_pass_rate
    high = 1.0 if config.max_pass_rate is None else config.max_pass_rate
    rate_of = {p.id: rates[p.id].rate for prompts in sets for p in prompts if p.id in rates}
    known = [rate for rate in rate_of.values() if rate is not None]
    kept = [[p for p in prompts if (rate := rate_of.get(p.id)) is None or low <= rate <= high] for prompts in sets]
    for number, prompts in enumerate(kept):
        if not prompts:
            raise ConfigError(
                f"data.min_pass_rate={config.min_pass_rate} and data.max_pass_rate={config.max_pass_rate} keep none of the "
                f"{len(sets[number])} prompts of data.train.{number}; widen them"
            )
    num_before, num_kept = sum(map(len, sets)), sum(map(len, kept))
    below, above = sum(rate < low for rate in known), sum(rate > high for rate in known)
    never, always = sum(rate == 0 for rate in known), sum(rate == 1 for rate in known)
    parts = [
        *([f"{below} below data.min_pass_rate={low}"] if config.min_pass_rate is not None else []),
        *([f"{above} above data.max_pass_rate={high}"] if config.max_pass_rate is not None else []),
    ]
    unknown = f"; {num_before - len(known)} without a pass rate kept" if num_before > len(known) else ""
    return kept, (
        f"data.pass_rates={config.pass_rates}: {num_before - num_kept} of {num_before} training prompts dropped "
        f"({', '.join(parts)}; {never} were never solved, {always} always){unknown}"
    )


def _check_same(sets: Sequence[list[Prompt]], rates: dict[int, PassRate], path: Path) -> None:
    num_found = 0
    for prompt in (p for prompts in sets for p in prompts if p.id in rates):
        num_found += 1
        if rates[prompt.id].hash != text_hash(prompt.text):
            raise ConfigError(
                f"data.pass_rates={path} is of other prompts: the text of prompt {prompt.id} is not the one that was "
                "evaluated; evaluate this data.train, with this model's chat template and system prompt"
            )
    if not num_found:
        raise ConfigError(f"data.pass_rates={path} has no row for any prompt of data.train; evaluate this data.train")
