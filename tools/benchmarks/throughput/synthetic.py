"""Synthetic responses for benchmarks/throughput: lengths from a distribution, random tokens, random rewards.

The synthetic engine and scorer have the interfaces of the real ones (rollout/engine.py, rewards/scorer.py), so the step
is the trainer's own. Lengths, tokens and rewards depend only on (seed, step, prompt id, sample index). Rewards differ
within a group of two or more samples, so every group trains. The real engine handles everything except sampling,
including new weights. This module does not import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_mega.config import Config
from grpo_mega.errors import ConfigError
from grpo_mega.types import Group, Prompt, Sample, Span

if TYPE_CHECKING:
    from grpo_mega.rollout.engine import Engine, RolloutRequest, Sampling

LIMIT = "rollout.max_response_length"
FORMS = "fixed:512, uniform:16,1024, lognormal:mean=256,sigma=0.8,max=1024 or file:lengths.json"
MISMATCH_WARN = 1e30  # nats per token; never warn, because synthetic log-probs have no meaning


@dataclass(frozen=True)
class Lengths:
    """A distribution of response lengths in tokens, from 1 to `longest`."""

    text: str  # the argument of --synthetic
    longest: int
    draw: Callable[[np.random.Generator], float]

    def sample(self, generator: np.random.Generator) -> int:
        return min(max(1, round(self.draw(generator))), self.longest)


def lengths_of(text: str | None, longest: int) -> Lengths | None:
    """Parse `text`, one of FORMS. Raise ConfigError.

    `longest` is the maximum response length. An empty `text` is a log-normal distribution with a mean of a quarter of
    it. Return None for None.
    """
    if text is None:
        return None
    text = text or f"lognormal:mean={max(1, longest // 4)},sigma=0.8,max={longest}"
    try:
        found = _parsed(text)
    except OSError as error:
        raise ConfigError(f"--synthetic {text}: {error.strerror}; name a JSON file with a list of lengths") from None
    except ValueError:
        raise ConfigError(
            f"--synthetic {text}: must be {FORMS}, with numbers above 0; correct it, or give CONFIG before --synthetic"
        ) from None
    if found.longest > longest:
        raise ConfigError(
            f"--synthetic {text} has responses of up to {found.longest} tokens, above {LIMIT}={longest}; lower them, or"
            f" raise it with --set {LIMIT}={found.longest}"
        )
    return found


def _parsed(text: str) -> Lengths:
    """Raise OSError, or ValueError for a text without a meaning. A log-normal's mean is that before truncation."""
    kind, _, rest = text.partition(":")
    if kind in ("fixed", "uniform"):
        low, *others = map(int, rest.split(","))
        (high,) = others if kind == "uniform" else (low, *others)
        shortest, draw = low, lambda generator: generator.integers(low, high + 1)
    elif kind == "lognormal":
        keys = dict(part.split("=") for part in rest.split(","))
        mean, sigma, high = float(keys.pop("mean", 0)), float(keys.pop("sigma", 0)), int(keys.pop("max", 0))
        mu = math.log(mean) - sigma**2 / 2
        if keys or sigma <= 0 or not math.isfinite(mu):
            raise ValueError
        shortest, draw = 1, lambda generator: generator.lognormal(mu, sigma)
    elif kind == "file":
        values = np.array(json.loads(Path(rest).read_text()))
        if values.ndim != 1 or values.dtype.kind != "i":
            raise ValueError
        shortest, high, draw = values.min(), int(values.max()), lambda generator: generator.choice(values)
    else:
        raise ValueError
    if not 1 <= shortest <= high:
        raise ValueError
    return Lengths(text, high, draw)


def settings(config: Config) -> dict[str, Any]:
    """Return settings of `rollout` in which synthetic log-probs neither stop the run nor warn."""
    return config.rollout.model_dump(mode="json") | {"mismatch_stop": None, "mismatch_warn": MISMATCH_WARN}


class SyntheticEngine:
    """A wrapper of the real engine that replaces only `generate`."""

    def __init__(self, engine: Engine, lengths: Lengths, *, vocab: int, rank: int, world_size: int) -> None:
        self._engine, self._lengths, self._vocab = engine, lengths, vocab
        self._rank, self._world_size = rank, world_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, request: RolloutRequest) -> dict[int, Group]:
        """Make the responses of every world_size-th group. A group's clock is its longest response."""
        sampling, found = request.sampling, dict[int, Group]()
        for index in list(request.groups)[self._rank :: self._world_size]:
            prompt = request.groups[index].prompt
            assert not request.groups[index].samples
            group = found[index] = Group(prompt, [])
            for number in range(sampling.group_size):
                group.samples.append(self._sample(prompt, number, sampling, request.step))
                request.on_sample(group.samples[-1], group)
            if request.stop is not None:
                request.stop.done(index, max(s.response_len for s in group.samples))
        return found

    def _sample(self, prompt: Prompt, index: int, sampling: Sampling, step: int) -> Sample:
        generator = np.random.default_rng((sampling.seed, step, prompt.id, index))
        length = self._lengths.sample(generator)
        tokens = generator.integers(0, self._vocab, length).tolist()
        is_cut = length == sampling.max_response_length
        if not is_cut and sampling.stop_token_ids:
            tokens[-1] = min(sampling.stop_token_ids)
        spans = [Span(self._engine.version, 0, length)]
        return Sample(prompt, index, tokens, [-math.log(self._vocab)] * length, "length" if is_cut else "stop", spans)


class RandomRewards:
    """A scorer that returns 1 for the first sample of a group, 0 for the second, and 0 or 1 for other samples."""

    def __init__(self, names: Iterable[str], *, has_steps: bool) -> None:
        """If `has_steps`, also set the reward of one step that ends with the response."""
        self._names, self._has_steps = tuple(names), has_steps
        self._samples: list[Sample] = []
        self.warned_of = {"zero", "missing"}  # there are no failures to report

    def submit(self, sample: Sample) -> None:
        pass

    def submit_group(self, samples: Iterable[Sample]) -> None:
        pass

    def keep(self, groups: Iterable[Group]) -> None:
        self._samples = [sample for group in groups for sample in group.samples]

    def finish(self, on_progress: Callable[[], None] = lambda: None) -> None:
        for sample in self._samples:
            mixed = sum(sample.response_ids) + sample.index
            value = float(1 - sample.index if sample.index < 2 else mixed % 2)
            sample.scores, sample.reward = dict.fromkeys(self._names, value), value
            sample.verdicts = dict.fromkeys(self._names, "scored")
            if self._has_steps:
                sample.step_ends, sample.step_rewards = [sample.response_len - 1], [value]
        self._samples = []
        on_progress()

    def check(self) -> None:
        pass
