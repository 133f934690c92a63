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
KINDS = "fixed:512, uniform:16,1024, lognormal:mean=256,sigma=0.8,max=1024 or file:lengths.json"
MISMATCH_WARN = 1e30  # nats per token; never warn, because synthetic log-probs have no meaning


@dataclass(frozen=True)
class Lengths:
    """A distribution of response lengths in tokens, from 1 to `longest`."""

    text: str  # the argument of --synthetic
    longest: int
    draw: Callable[[np.random.Generator], float]

    def sample(self, generator: np.random.Generator) -> int:
        return min(max(1, round(self.draw(generator))), self.longest)


def lengths_of(text: str, longest: int) -> Lengths:
    """Parse `text` (see KINDS). Raise ConfigError.

    `longest` is the maximum response length. An empty `text` is a log-normal distribution with a mean of a quarter of
    it.
    """
    text = text or f"lognormal:mean={max(1, longest // 4)},sigma=0.8,max={longest}"
    kind, _, rest = text.partition(":")
    if kind == "fixed":
        [value] = _whole(text, rest.split(","), 1)
        found = Lengths(text, value, lambda generator: value)
    elif kind == "uniform":
        low, high = _whole(text, rest.split(","), 2)
        if low > high:
            raise ConfigError(f"--synthetic {text}: {low} is above {high}; give the lower one first")
        found = Lengths(text, high, lambda generator: float(generator.integers(low, high + 1)))
    elif kind == "lognormal":
        found = _lognormal(text, rest)
    elif kind == "file":
        values = _read(text, Path(rest))
        found = Lengths(text, int(values.max()), lambda generator: generator.choice(values))
    else:
        raise ConfigError(f"--synthetic {text} is not known; give {KINDS}, and the CONFIG before --synthetic")
    if found.longest > longest:
        raise ConfigError(
            f"--synthetic {text} has responses of up to {found.longest} tokens, above {LIMIT}={longest}; lower them, or"
            f" raise it with --set {LIMIT}={found.longest}"
        )
    return found


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


def _lognormal(text: str, rest: str) -> Lengths:
    """Parse a log-normal: the mean before truncation, the deviation of the logarithm, and the maximum."""
    found: dict[str, float] = {}
    for part in rest.split(","):
        key, _, value = part.partition("=")
        if key not in ("mean", "sigma", "max"):
            raise ConfigError(f"--synthetic {text}: {part!r} is not understood; give mean=256,sigma=0.8,max=1024")
        try:
            found[key] = float(value)
        except ValueError:
            found[key] = math.nan
        if not 0 < found[key] < math.inf:
            raise ConfigError(f"--synthetic {text}: {key}={value} must be a number above 0")
    if missing := [key for key in ("mean", "sigma", "max") if key not in found]:
        raise ConfigError(f"--synthetic {text} has no {missing[0]}; give mean=256,sigma=0.8,max=1024")
    [longest] = _whole(text, [f"{found['max']:.12g}"], 1)
    mu = math.log(found["mean"]) - found["sigma"] ** 2 / 2
    return Lengths(text, longest, lambda generator: generator.lognormal(mu, found["sigma"]))


def _read(text: str, path: Path) -> np.ndarray:
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"--synthetic {text}: {error.strerror}; name a JSON file with a list of lengths") from None
    except ValueError as error:
        raise ConfigError(f"--synthetic {text} is not JSON ({error}); give a list of lengths in tokens") from None
    if not isinstance(values, list) or not values or not all(type(v) is int and v > 0 for v in values):
        raise ConfigError(f"--synthetic {text} does not hold a list of whole numbers above 0; give lengths in tokens")
    return np.array(values)


def _whole(text: str, values: list[str], count: int) -> list[int]:
    if len(values) != count or not all(v.isascii() and v.isdigit() and int(v) > 0 for v in values):
        raise ConfigError(f"--synthetic {text} needs {count} whole number{'s' * (count > 1)} above 0; give {KINDS}")
    return [int(v) for v in values]
