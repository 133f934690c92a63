"""Curves as the page draws them, and findings: signs of trouble that a person should look at.

A run of more than MAX_POINTS steps is thinned: each point is the mean of several steps, or the maximum for metrics whose name
ends in "max". Values that are not finite stay visible.
"""

from __future__ import annotations

import math
from typing import Any

from grpo_mega.observe.curves import Curves
from grpo_mega.observe.metrics import MISMATCH, engine_mismatch

MAX_POINTS = 2000
_PAID_BUT_WRONG = 0.01
_MANY_CUT, _MANY_EQUAL = 0.2, 0.9  # larger shares are findings
_NAMED = 6  # maximum number of steps named in a finding


def steps_done(found: Curves) -> int:
    """Return the number of the last training step."""
    return max(found.get("seconds/step") or found.get("reward/mean") or found.get("loss/total") or {0: 0.0})


def series(found: Curves) -> dict[str, Any]:
    """Return {"steps": lists of steps, "series": {name: {"s": index of a list, "v": values}}, "points_averaged": width}."""
    longest = max((len(curve) for curve in found.values()), default=0)
    width = max(1, math.ceil(longest / MAX_POINTS))
    lists: dict[tuple[int, ...], int] = {}
    thinned = {}
    for name, curve in found.items():
        steps = sorted(curve)
        bins = [steps[i : i + width] for i in range(0, len(steps), width)] if len(steps) > MAX_POINTS else [[s] for s in steps]
        key = tuple(one[-1] for one in bins)
        summarise = max if name.endswith("max") else _mean
        values = [summarise([curve[s] for s in one]) for one in bins]
        thinned[name] = {"s": lists.setdefault(key, len(lists)), "v": [_rounded(v) for v in values]}
    return {"steps": [list(key) for key in lists], "series": thinned, "points_averaged": width}


def findings(found: Curves, mismatch_warn: float | None) -> list[str]:
    """Return the findings, one sentence each."""

    def above(name: str, limit: float = 0.0) -> list[int]:
        return [step for step, value in found.get(name, {}).items() if value > limit]

    broken = {name: [s for s, v in curve.items() if not math.isfinite(v)] for name, curve in sorted(found.items())}
    sentences = [f"{name} is not finite {_at(steps)}" for name, steps in broken.items() if steps]
    if steps := above("nonfinite_mini_batches"):
        sentences.append(f"mini-batches were dropped because loss or gradient was not finite {_at(steps)}")
    elif steps := above("dropped_mini_batches"):
        sentences.append(f"mini-batches were dropped {_at(steps)}")
    for name in sorted(found):
        if name.startswith("verdict/") and name.rsplit("/", 1)[1] in ("timeout", "crashed", "error") and (steps := above(name)):
            sentences.append(f"checks ended as {name.removeprefix('verdict/')} {_at(steps)}")
    if steps := above("reward/excluded"):
        sentences.append(f"samples had no reward and were excluded {_at(steps)}")
    if steps := above("reward/paid_but_wrong", _PAID_BUT_WRONG):
        sentences.append(f"more than {_PAID_BUT_WRONG:.0%} of the paid responses were wrong {_at(steps)}")
    of_mismatch = {name: curve for name, curve in found.items() if name.startswith(MISMATCH)}
    by_step = {s: {name: c[s] for name, c in of_mismatch.items() if s in c} for s in found.get(MISMATCH, {})}
    if mismatch_warn is not None and (steps := [s for s, one in by_step.items() if engine_mismatch(one) > mismatch_warn]):
        sentences.append(f"the mismatch of engine and trainer was above rollout.mismatch_warn={mismatch_warn:g} {_at(steps)}")
    if stale := found.get("ledger/dropped_groups/stale"):
        sentences.append(f"{stale[max(stale)]:.0f} groups were too old for rollout.max_staleness and were restarted")
    for name, bound, what in (
        ("response_length/cut", _MANY_CUT, "of the responses are cut off at rollout.max_response_length"),
        ("groups/zero_variance", _MANY_EQUAL, "of the groups have zero reward variance and teach nothing"),
    ):
        last = found.get(name)
        if last and last[max(last)] > bound:
            sentences.append(f"{last[max(last)]:.0%} {what}, in the last step")
    return sentences


def _at(steps: list[int]) -> str:
    named = ", ".join(map(str, sorted(steps)[:_NAMED]))
    more = f" and {len(steps) - _NAMED} more" if len(steps) > _NAMED else ""
    return f"at step{'s' if len(steps) > 1 else ''} {named}{more}"


def _mean(values: list[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan


def _rounded(value: float) -> float | None:
    """Round to six digits, more than a picture shows."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
