"""Compute the figures of benchmarks/throughput from the ranks' measurements: rows by phase, totals, and coverage of the step.

The time of a row in a step is its mean over the ranks. `seconds` is the mean of these times over the steps, so rows sum to the
step, and a checkpoint every other step counts half. `median`, `low` and `high` are their median and quartiles. `slowest_rank`
is the largest mean of a rank. The row idle has all waits; they are subtracted from their phases. Tokens are the tokens of
prompts and responses that a phase passes through the model; sampling counts only responses. FLOPs are the model's
(observe/flops.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from grpo_mega.config import Config
from grpo_mega.preflight.model import read_model
from tools.benchmarks.throughput.plan import Peak, peak_of, predict

TOLERANCE = 0.02  # largest relative difference between the sum of phases and the wall time
SKIPPED = ("sample", "reward")  # rows without figures if responses are synthetic
# The timers' phases in each row. Phases without a row count in OTHER.
ROWS: Mapping[str, tuple[str, ...]] = {
    "sample": ("sample",),
    "reward": ("reward",),
    "logprobs": ("logprobs",),
    "reference": ("reference",),
    "update": ("update",),
    "sync": ("sync",),
    "sleep/wake": ("sleep", "wake", "offload", "onload"),
    "checkpoint": ("checkpoint",),
    "pack/exchange/other": ("pack", "exchange", "other"),
    "idle": (),
}
OTHER = "pack/exchange/other"
# Config keys that may differ between compared runs: paths, and settings that do not affect a step.
FREE = ("run_dir", "steps", "layout", "log", "eval", "hang_deadline_s", "max_nonfinite_steps", "device")
ROW_OF = {phase: row for row, phases in ROWS.items() for phase in phases}


def result(raw: Mapping[str, Any], config: Config, synthetic: str | None, gpu: str | None) -> dict[str, Any]:
    """Return the JSON result. `synthetic` is the distribution of lengths, or None if responses were sampled."""
    peak = peak_of(raw, config)
    skipped = SKIPPED if synthetic is not None else ()
    seconds = _seconds_by_rank(raw, skipped)
    walls = _walls(raw, skipped)
    samples = sum(work["samples"] for work in raw["work"])
    per_step = {name: fmean(work[name] for work in raw["work"]) for name in raw["work"][0]}
    plan = predict(
        raw,
        config,
        gpu,
        prompt=sum(work["prompt_tokens"] for work in raw["work"]) / max(1, samples),
        response=sum(work["response_tokens"] for work in raw["work"]) / max(1, samples),
    )
    work = _work(config, per_step, skipped)
    total = fmean(map(fmean, walls))
    peaks = _peaks_of_memory(raw)
    world_size = raw["world_size"]
    phases = {
        row: _row(seconds[row], total, work.get(row), peak, world_size)
        | {"peak_memory_gib": peaks.get(row), "predicted_seconds": plan["seconds"].get(row)}
        for row in ROWS
    }
    step = _row(walls, total, work["step"], peak, world_size)
    compared = settings(config, synthetic)
    return {
        "fingerprint": hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).hexdigest()[:16],
        **{name: raw[name] for name in ("device", "card", "world_size", "layout", "threads")},
        "steps": len(raw["work"]),
        "synthetic": synthetic,
        "phases": phases,
        "step": step | {"peak_memory_gib": max(peaks.values()), "predicted_seconds": plan["seconds"].get("step")},
        "phases_cover": sum(one["seconds"] or 0.0 for one in phases.values()) / total,
        "worst_cover": _worst_cover(raw),
        **_figures(raw, config, per_step, phases, seconds),
        "peak": {"tflops": peak.total / 1e12, "source": peak.source},
        "plan": plan,
        "settings": compared,
    }


def settings(config: Config, synthetic: str | None) -> dict[str, Any]:
    """Return the settings that compared runs must share. They include the model's shape but no paths."""
    found = {name: value for name, value in config.model_dump(mode="json").items() if name not in FREE}
    found["model"] = found["model"] | {"path": None}
    found["data"] = found["data"] | {"train": None, "heldout": None, "heldout_sets": None, "pass_rates": None}
    found["rollout"].pop("tp")  # the engines' layout may differ, too
    return {"synthetic": synthetic, "shape": str(read_model(config).shape)} | found


def problem(found: Mapping[str, Any]) -> str | None:
    """Return the reason not to trust the table; None if the phases cover the step."""
    for name, what in (("phases_cover", "the rows"), ("worst_cover", "in one step of one rank the phases")):
        if abs(found[name] - 1) > TOLERANCE:
            return (
                f"{what} sum to {found[name]:.1%} of the step's wall time, not within {TOLERANCE:.0%} of it; "
                "measure again on a quieter machine, and correct observe/timers.py if it stays so"
            )
    return None


def _seconds_by_rank(raw: Mapping[str, Any], skipped: Sequence[str]) -> dict[str, list[list[float]] | None]:
    """Return seconds[rank][step] by row; None for a row that occurred in no step."""
    found: dict[str, list[list[float]] | None] = {}
    for row in ROWS:
        is_seen = row not in skipped and (
            row in ("idle", OTHER)
            or any(ROW_OF.get(p, OTHER) == row for r in raw["ranks"] for s in r["steps"] for p in s["phases"])
        )
        found[row] = [[_of_row(step, row, skipped) for step in rank["steps"]] for rank in raw["ranks"]] if is_seen else None
    return found


def _of_row(step: Mapping[str, Any], row: str, skipped: Sequence[str]) -> float:
    """Return the seconds of a row in a step. A wait is capped at its phase, because the clocks differ slightly."""
    waits = {phase: min(value, step["phases"].get(phase, 0.0)) for phase, value in step["waits"].items()}
    if row == "idle":
        return sum(value for phase, value in waits.items() if phase not in skipped)
    mine = [phase for phase in step["phases"] if ROW_OF.get(phase, OTHER) == row]
    return sum(step["phases"][phase] - waits.get(phase, 0.0) for phase in mine)


def _walls(raw: Mapping[str, Any], skipped: Sequence[str]) -> list[list[float]]:
    """Return the wall seconds[rank][step] without the time to make synthetic responses."""
    return [
        [step["wall"] - sum(step["phases"].get(phase, 0.0) for phase in skipped) for step in rank["steps"]]
        for rank in raw["ranks"]
    ]


def _worst_cover(raw: Mapping[str, Any]) -> float:
    """Return the sum of phases divided by wall time, for the step and rank with the ratio farthest from 1."""
    ratios = [sum(step["phases"].values()) / step["wall"] for rank in raw["ranks"] for step in rank["steps"]]
    return max(ratios, key=lambda ratio: abs(ratio - 1))


def _work(config: Config, per_step: Mapping[str, float], skipped: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return tokens and FLOPs by row, over all ranks."""
    tokens = per_step["prompt_tokens"] + per_step["response_tokens"]
    forward, passes = per_step["forward_flops"], config.batch.epochs
    found = {
        "sample": (per_step["response_tokens"], per_step["sample_flops"]),
        "logprobs": (tokens, forward) if config.needs_old_logprobs else None,
        "reference": (tokens, forward) if config.algorithm.kl_beta > 0 else None,
        "update": (passes * tokens, 3 * passes * forward),
    }
    done = {row: value for row, value in found.items() if value is not None and row not in skipped}
    return done | {"step": (tokens, sum(flops for _, flops in done.values()))}


def _row(
    seconds: list[list[float]] | None, total: float, work: tuple[float, float] | None, peak: Peak, world_size: int
) -> dict[str, Any]:
    """Return the figures of a row from seconds[rank][step]. If `seconds` is None, the row was not measured."""
    if seconds is None:
        names = ("seconds", "median", "low", "high", "slowest_rank", "share", "tokens", "tokens_per_second")
        return dict.fromkeys((*names, "tokens_per_second_per_gpu", "tflops", "mfu"))
    steps = [fmean(values) for values in zip(*seconds, strict=True)]
    mean = fmean(steps)
    tokens, flops = work if work is not None and mean > 0 else (None, None)
    rate = None if tokens is None else tokens / mean
    return {
        "seconds": mean,
        "median": median(steps),
        "low": quantile(steps, 0.25),
        "high": quantile(steps, 0.75),
        "slowest_rank": max(map(fmean, seconds)),
        "share": mean / total,
        "tokens": tokens,
        "tokens_per_second": rate,
        "tokens_per_second_per_gpu": None if rate is None else rate / world_size,
        "tflops": None if flops is None else flops / mean / 1e12,
        "mfu": None if flops is None else flops / mean / peak.total,
    }


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile by linear interpolation."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _figures(
    raw: Mapping[str, Any],
    config: Config,
    per_step: Mapping[str, float],
    phases: Mapping[str, Mapping[str, Any]],
    seconds: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the figures of the batch, the pipeline and the sync."""
    layout = raw["layout"]
    firsts = [rank for rank in raw["ranks"] if rank["place"][0] == rank["place"][1] == 0]  # one rank per data-parallel rank
    mini_batches = [mini for rank in firsts for step in rank["steps"] for mini in step["micro_batches"]]
    number = fmean(count for count, _, _ in mini_batches) if mini_batches else 0.0
    held = sum(count * tokens for count, tokens, _ in mini_batches)
    filled = sum(tokens for _, _, tokens in mini_batches)
    by_rank = [sum(mini[2] for step in rank["steps"] for mini in step["micro_batches"]) for rank in firsts]
    received = fmean(sum(values) for values in zip(*([s["received"] for s in r["steps"]] for r in raw["ranks"]), strict=True))
    sync = phases["sync"]["seconds"]
    return {
        "samples": per_step["samples"],
        "prompt_tokens": per_step["prompt_tokens"],
        "response_tokens": per_step["response_tokens"],
        "micro_batches": number,  # micro-batches per rank and optimizer step
        "padding_waste": 1 - filled / held if held else None,
        "dp_imbalance": max(by_rank) / fmean(by_rank) - 1 if sum(by_rank) else None,
        "bubble": (layout["pp"] - 1) / (layout["vpp"] * number + layout["pp"] - 1) if number else None,
        "bubble_measured": _measured_bubble(raw),
        "sync_bytes": raw["sync_bytes"],
        "sync_received_bytes": received,
        "sync_bytes_per_second": raw["sync_bytes"] / sync if sync else None,
        "sync_received_bytes_per_second": received / sync if sync else None,
    }


def _measured_bubble(raw: Mapping[str, Any]) -> float | None:
    """Return the share of an update in which a stage waits for its neighbours, with transfers; None if not measurable."""
    if raw["layout"]["pp"] == 1 or raw["layout"]["vpp"] > 1:
        return None
    steps = [step for rank in raw["ranks"] for step in rank["steps"]]
    whole = sum(step["phases"].get("update", 0.0) for step in steps)
    return sum(step["waits"].get("update", 0.0) for step in steps) / whole if whole else None


def _peaks_of_memory(raw: Mapping[str, Any]) -> dict[str, float]:
    """Return the peak GiB of any rank by row."""
    found: dict[str, float] = {}
    for rank in raw["ranks"]:
        for step in rank["steps"]:
            for phase, gib in step["memory"].items():
                row = ROW_OF.get(phase, OTHER)
                found[row] = max(found.get(row, 0.0), gib)
    return found
