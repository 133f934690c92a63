"""Compute the figures of benchmarks/throughput from the ranks' measurements, the plan's estimates, and a comparison.

The time of a row in a step is its mean over the ranks. `seconds` is the mean of these times over the steps, so rows sum
to the step, and a checkpoint every other step counts half. `median`, `low` and `high` are their median and quartiles.
`slowest_rank` is the largest mean of a rank. The row idle has all waits; they are subtracted from their phases.

For a known card, MFU and the plan use the card's figures (cli/checks/machine.py). Otherwise they use the rates that
the same run measured. The planner's shares and constants are still a GPU's, so its times for a CPU mean little. This
module does not import torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from grpo_mega.cli.checks.machine import CARDS, Card, card_of
from grpo_mega.cli.checks.model import read_model
from grpo_mega.cli.planner.job import PlannedJob
from grpo_mega.cli.planner.plan import Plan
from grpo_mega.config import Config, LayoutConfig
from grpo_mega.errors import ConfigError, UserError
from tools.benchmarks.gpu.models import peak_tflops

Json = dict[str, Any]
NOISE = 0.05
UNBOUNDED = 1e15  # bytes/s, so high that a transfer takes no time
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
    peak, source = peak_of(raw, config)
    skipped = SKIPPED if synthetic is not None else ()
    seconds, walls = _seconds_by_rank(raw, skipped), _walls(raw, skipped)
    per_step = {name: fmean(work[name] for work in raw["work"]) for name in raw["work"][0]}
    plan = predict(raw, config, gpu, per_step)
    work, total, peaks = _work(config, per_step, skipped), fmean(map(fmean, walls)), _peaks_of_memory(raw)
    rows = {
        row: _row(times, total, work.get(row), peak, raw["world_size"])
        | {"peak_memory_gib": peaks.get(row), "predicted_seconds": plan["seconds"].get(row)}
        for row, times in [*seconds.items(), ("step", walls)]
    }
    step = rows.pop("step") | {"peak_memory_gib": max(peaks.values())}
    compared = settings(config, synthetic)
    return {
        "fingerprint": hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).hexdigest()[:16],
        **{name: raw[name] for name in ("device", "card", "world_size", "layout", "threads")},
        "steps": len(raw["work"]),
        "synthetic": synthetic,
        "phases": rows,
        "step": step,
        "phases_cover": sum(one["seconds"] or 0.0 for one in rows.values()) / total,
        "worst_cover": _worst_cover(raw),
        **_figures(raw, per_step, rows["sync"]["seconds"]),
        "peak": {"tflops": peak / 1e12, "source": source},
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
                "measure again on a quieter machine, and correct tracking/progress.py if it stays so"
            )
    return None


def _seconds_by_rank(raw: Mapping[str, Any], skipped: Sequence[str]) -> dict[str, list[list[float]] | None]:
    """Return seconds[rank][step] by row; None for a row that occurred in no step."""
    phases = {phase for rank in raw["ranks"] for step in rank["steps"] for phase in step["phases"]}
    seen = ({"idle", OTHER} | {ROW_OF.get(phase, OTHER) for phase in phases}) - set(skipped)
    return {
        row: [[_of_row(step, row, skipped) for step in rank["steps"]] for rank in raw["ranks"]] if row in seen else None
        for row in ROWS
    }


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
    seconds: list[list[float]] | None, total: float, work: tuple[float, float] | None, peak: float, world_size: int
) -> dict[str, Any]:
    """Return the figures of a row from seconds[rank][step]. If `seconds` is None, the row was not measured."""
    if seconds is None:
        names = ("seconds", "median", "low", "high", "slowest_rank", "share", "tokens", "tokens_per_second")
        return dict.fromkeys((*names, "tokens_per_second_per_gpu", "tflops", "mfu"))
    steps = [fmean(values) for values in zip(*seconds, strict=True)]
    mean = fmean(steps)
    tokens, flops = work if work is not None and mean > 0 else (None, None)
    rate = None if tokens is None else tokens / mean
    rate_of_flops = None if flops is None else flops / mean
    return {
        "seconds": mean,
        **quartiles(steps),
        "slowest_rank": max(map(fmean, seconds)),
        "share": mean / total,
        "tokens": tokens,
        "tokens_per_second": rate,
        "tokens_per_second_per_gpu": None if rate is None else rate / world_size,
        "tflops": None if rate_of_flops is None else rate_of_flops / 1e12,
        "mfu": None if rate_of_flops is None else rate_of_flops / peak,
    }


def quartiles(values: Sequence[float]) -> dict[str, float]:
    return dict(zip(("low", "median", "high"), np.quantile(values, (0.25, 0.5, 0.75)).tolist(), strict=True))


def _figures(raw: Mapping[str, Any], per_step: Mapping[str, float], sync: float | None) -> dict[str, Any]:
    """Return the figures of the batch, the pipeline and the sync. `sync` is the sync's seconds."""
    pp, vpp = raw["layout"]["pp"], raw["layout"]["vpp"]
    # The mini-batches of one rank per data-parallel rank.
    mini_batches = [
        [mini for step in rank["steps"] for mini in step["micro_batches"]]
        for rank in raw["ranks"]
        if rank["place"][0] == rank["place"][1] == 0
    ]
    every = [mini for of_rank in mini_batches for mini in of_rank]
    number = fmean(count for count, _, _ in every) if every else 0.0
    by_rank = [sum(filled for _, _, filled in of_rank) for of_rank in mini_batches]
    received = fmean(map(sum, zip(*([s["received"] for s in r["steps"]] for r in raw["ranks"]), strict=True)))
    return {
        **{name: per_step[name] for name in ("samples", "prompt_tokens", "response_tokens")},
        "micro_batches": number,  # micro-batches per rank and optimizer step
        "padding_waste": 1 - sum(by_rank) / sum(count * tokens for count, tokens, _ in every) if every else None,
        "dp_imbalance": max(by_rank) / fmean(by_rank) - 1 if sum(by_rank) else None,
        "bubble": (pp - 1) / (vpp * number + pp - 1) if number else None,
        "bubble_measured": _measured_bubble(raw),
        "sync_bytes": raw["sync_bytes"],
        "sync_received_bytes": received,
        "sync_bytes_per_second": raw["sync_bytes"] / sync if sync else None,
        "sync_received_bytes_per_second": received / sync if sync else None,
    }


def _measured_bubble(raw: Mapping[str, Any]) -> float | None:
    """Return the share of an update in which a stage waits for its neighbours, with transfers, if measured."""
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


def peak_of(raw: Mapping[str, Any], config: Config) -> tuple[float, str]:
    """Return the FLOP/s of all ranks together, and the source of the figure."""
    precision = "fp8" if config.precision.fp8 else "bf16"
    world_size = raw["world_size"]
    if raw["card"] is not None and config.model.dtype == "bfloat16":
        tflops = peak_tflops(raw["card"], precision)
        if tflops is not None:
            return tflops * 1e12 * world_size, f"{raw['card']}, {tflops:g} TFLOP/s dense in {precision}"
    total = sum(rank["rates"]["matmul"] for rank in raw["ranks"])
    why = "no card" if raw["card"] is None else f"{raw['card']} has no known peak in {config.model.dtype}"
    each = f"{total / world_size / 1e12:.3g} TFLOP/s per rank in {config.model.dtype}"
    return total, f"{why}: against a matrix product measured here, all ranks at once, {each}"


def predict(raw: Mapping[str, Any], config: Config, gpu: str | None, per_step: Mapping[str, float]) -> Json:
    """Return the plan's seconds by row and figures of the step, for the measured mean lengths; None for missing
    figures.

    `gpu` is a card to plan for instead of this machine's.
    """
    name = raw["card"]
    gpu = gpu or next((card for card in CARDS if name is not None and card.upper() in name.upper()), None)
    try:
        model = read_model(config)
        layout = LayoutConfig.model_validate(config.layout.model_dump() | {"dp": raw["layout"]["dp"]})
        setup = PlannedJob(
            config=config.model_copy(update={"layout": layout}),
            shape=model.shape,
            experts_per_token=model.experts_per_token,
            card=card_of(gpu) if gpu else _measured_card(raw, config),
            world_size=raw["world_size"],
            gpus_per_node=raw["ranks_per_node"],
            mean_prompt=per_step["prompt_tokens"] / max(1, per_step["samples"]),
            mean_response=per_step["response_tokens"] / max(1, per_step["samples"]),
            uses_te=bool(gpu),
        )
        plan = Plan(setup)
    except UserError as error:
        return {"source": f"none: {error}", "seconds": {}}
    timing = plan.timing
    by_label = {figure.label: figure for figure in timing.phases}
    forwards = {"logprobs": int(setup.config.needs_old_logprobs), "reference": int(setup.has_reference)}
    each = by_label["log-probs"] / max(1, sum(forwards.values()))
    moves, sync = by_label["offload and onload"], by_label["sync"]
    seconds: dict[str, float | None] = {
        "sample": by_label["sampling"],
        **{name: each if count else None for name, count in forwards.items()},
        "update": by_label["update"],
        "sync": sync or None,
        "sleep/wake": moves or None,
        "pack/exchange/other": by_label["everything else"],
        "step": timing.step,
    }
    return {
        "source": setup.card.title if gpu else f"{setup.card.title}; its shares and constants are a GPU's",
        "seconds": seconds,
        "tokens_per_second_per_gpu": timing.tokens_per_second_per_gpu,
        "bubble": plan.setup.batch.bubble,
        "micro_batches": plan.setup.batch.micro_batches,
        "padding_waste": 1 - setup.assumed.packing_fill,
        "sync_moved_bytes": plan.sync_traffic.moved,
        "peak_memory_gib": plan.peak_gib if gpu else None,
    }


def _measured_card(raw: Mapping[str, Any], config: Config) -> Card:
    def mean(name: str) -> float:
        values = [rank["rates"][name] for rank in raw["ranks"] if rank["rates"][name] is not None]
        return sum(values) / len(values) if values else UNBOUNDED

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Card(
        name="measured",
        title=f"{raw['card'] or 'this CPU'} by the rates measured in this run, in {config.model.dtype}",
        capability=(0, 0),
        memory_gib=memory / raw["ranks_per_node"],
        bf16_flops=mean("matmul"),
        fp8_flops=mean("matmul") if config.precision.fp8 else 0.0,
        hbm_bytes=mean("copy"),
        nvlink_bytes=mean("link"),
        network_bytes=mean("link"),
        host_bytes=mean("copy"),
        node_memory_gib=memory,
    )


def read_result(path: Path) -> Json:
    """Read a file written by --out, or a log of the tool's output. Raise ConfigError."""
    try:
        found = json.loads(path.read_text().strip().rpartition("\n")[2])  # a log ends with it
    except (OSError, ValueError) as error:
        raise ConfigError(f"--against {path} cannot be read ({error}); name a file written by --out") from None
    if isinstance(found, dict) and {"fingerprint", "phases", "settings", "layout", "step"} <= found.keys():
        return found
    raise ConfigError(f"--against {path} holds no result of this tool; name a file written by --out")


def check_comparable(settings: Mapping[str, Any], before: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError if the earlier result has other settings."""
    for name, here, there in _differences("", settings, before["settings"]):
        raise ConfigError(
            f"--against {path}: {name} is {there!r} there and {here!r} here; compare runs that differ in layout only"
        )


def differing(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Describe differences in layout and machine."""
    names = ("layout", "world_size", "device", "card", "threads")
    here, there = ({name: found.get(name) for name in names} for found in (now, before))
    return [f"{name} is {value} here and was {old} there" for name, value, old in _differences("", here, there)]


def compare(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Json]:
    """Return {"before", "ratio" of the medians, "verdict"} by row, and for the step. Unknown figures are None."""
    rows = {name: _compared(row, before["phases"].get(name, {"median": None})) for name, row in now["phases"].items()}
    return rows | {"step": _compared(now["step"], before["step"])}


def _compared(now: Mapping[str, Any], before: Mapping[str, Any]) -> Json:
    was = before["median"]
    if now["median"] is None or was is None:
        return {"before": was, "ratio": None, "verdict": None}
    ratio = now["median"] / was if was else None
    is_close = now["median"] == was if ratio is None else abs(ratio - 1) < NOISE
    overlaps = now["low"] <= before["high"] and before["low"] <= now["high"]
    verdict = "same" if is_close or overlaps else "faster" if now["median"] < was else "slower"
    return {"before": was, "ratio": ratio, "verdict": verdict}


def _differences(prefix: str, now: Any, before: Any) -> list[tuple[str, Any, Any]]:
    """Return leaves with different values: dotted name, value now, value before."""
    if not (isinstance(now, dict) and isinstance(before, dict)):
        return [] if now == before else [(prefix, now, before)]
    names = [*now, *(name for name in before if name not in now)]
    return [
        found
        for name in names
        for found in _differences(f"{prefix}.{name}" if prefix else name, now.get(name), before.get(name))
    ]
