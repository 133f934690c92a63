"""Distribution of response lengths: given percentiles, the samples of an earlier run, or an assumed tail."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from grpo_mega.errors import ConfigError
from grpo_mega.paths import SAMPLES_FILE, user_path
from grpo_mega.text import read_json_lines


@dataclass(frozen=True)
class Lengths:
    """Quantiles of the length in tokens, with linear interpolation between them."""

    shares: tuple[float, ...]
    tokens: tuple[float, ...]

    def of(self, count: int) -> list[int]:
        """Return `count` lengths in ascending order: the quantiles at the middles of `count` equal shares."""
        middles = (np.arange(count) + 0.5) / count
        lengths: list[int] = np.rint(np.interp(middles, self.shares, self.tokens)).astype(int).clip(1).tolist()
        return lengths

    def at(self, share: float) -> float:
        return float(np.interp(share, self.shares, self.tokens))


def assumed_lengths(mean: float, longest: int) -> Lengths:
    """Return a distribution with this mean: a share q is no longer than longest * q ** (longest / mean - 1)."""
    shares = np.linspace(0, 1, 1001)
    return Lengths(tuple(shares.tolist()), tuple((longest * shares ** (longest / mean - 1)).tolist()))


def read_lengths(text: str, longest: int) -> Lengths:
    """Return the distribution of "p50=700,p99=12000", from one token to `longest`, or of a run's samples.

    Longer responses count as `longest`. Raise ConfigError.
    """
    points = _samples(user_path(text)) if "=" not in text else {0.0: 1.0, 1.0: float(longest)} | _percentiles(text)
    shares = sorted(points)
    tokens = [min(points[share], float(longest)) for share in shares]
    if tokens != sorted(tokens) or tokens[0] < 1:
        raise ConfigError(f"--lengths {text}: must be at least 1 token and grow with the percentile; change an entry")
    return Lengths(tuple(shares), tuple(tokens))


def _percentiles(text: str) -> dict[float, float]:
    found = [re.fullmatch(r"p(\d+(?:\.\d+)?)=(\d+)", part) for part in text.split(",")]
    points = {float(match[1]) / 100: float(match[2]) for match in found if match}
    if len(points) < len(found) or max(points) > 1:
        raise ConfigError(f"--lengths {text}: must be percentiles like p50=700,p99=12000, or the folder of a run; change it")
    return points


def _samples(path: Path) -> dict[float, float]:
    """Return the lengths of the finished responses in a run's folder, or in a samples file."""
    path = path / SAMPLES_FILE if path.is_dir() else path
    try:
        rows = [row for _, row in read_json_lines(path) if row is not None]
    except OSError as error:
        raise ConfigError(
            f"--lengths: cannot read {path} ({error.strerror}); name the folder of a run, or percentiles"
        ) from None
    lengths = sorted(len(row["rollout_logprobs"]) for row in rows if row.get("rollout_logprobs"))
    if not lengths:
        raise ConfigError(f"--lengths: {path} has no samples; name the folder of a run with log.samples_per_step > 0")
    return {(i + 0.5) / len(lengths): float(length) for i, length in enumerate(lengths)}
