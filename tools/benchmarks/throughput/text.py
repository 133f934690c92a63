"""The table of benchmarks/throughput, for a terminal of 132 columns; "-" is an unknown figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TITLES = ("phase", "seconds", "plan", "share", "median", "quartiles", "slowest", "tokens/s", "/s/GPU", "TFLOP/s", "MFU", "GiB")
MORE = ("before", "ratio", "verdict")
GB = 1e9


def table(found: Mapping[str, Any]) -> list[str]:
    """Return a title, a line per phase, the step's line, and the figures of batch, pipeline and sync."""
    against = found.get("against")
    compared: Mapping[str, Any] = {} if against is None else against["phases"]
    rows = [[*TITLES, *(MORE if against else ())]]
    for name, row in [*found["phases"].items(), ("step", found["step"])]:
        more = _compared(compared[name]) if against else []
        rows.append([name, *_cells(row), *more])
    lines = [_title(found), "", *_aligned(rows), "", *_figures(found)]
    if against is not None:
        lines += ["", f"against {against['file']}: " + ("; ".join(against["differs"]) or "the same layout and machine")]
    return lines


def _title(found: Mapping[str, Any]) -> str:
    layout = ", ".join(
        f"{name}={size}" for name, size in found["layout"].items() if name == "tp" or size not in (1, "tp-dp-pp")
    )
    what = found["card"] or f"CPU, {found['threads']} threads per rank"
    responses = f"synthetic responses ({found['synthetic']})" if found["synthetic"] is not None else "sampled responses"
    return f"{found['world_size']} ranks ({layout}) on {what}; {found['steps']} steps of {found['samples']:.0f} {responses}"


def _cells(row: Mapping[str, Any]) -> list[str]:
    quartiles = "-" if row["low"] is None else f"{_seconds(row['low'])}..{_seconds(row['high'])}"
    return [
        _seconds(row["seconds"]),
        _seconds(row["predicted_seconds"]),
        _percent(row["share"]),
        _seconds(row["median"]),
        quartiles,
        _seconds(row["slowest_rank"]),
        _number(row["tokens_per_second"], ",.0f"),
        _number(row["tokens_per_second_per_gpu"], ",.0f"),
        _number(row["tflops"], ".3g"),
        _percent(row["mfu"]),
        _number(row["peak_memory_gib"], ".2f"),
    ]


def _compared(one: Mapping[str, Any]) -> list[str]:
    return [_seconds(one["before"]), _number(one["ratio"], ".2f"), one["verdict"] or "-"]


def _figures(found: Mapping[str, Any]) -> list[str]:
    plan = found["plan"]

    def beside(name: str, show: Any, key: str | None = None) -> str:
        return f"{show(found[name])} (plan {show(plan.get(key or name))})"

    def rate(name: str) -> str:
        return "-" if found[name] is None else f"{found[name] / GB:.3g} GB/s"

    step = found["step"]
    planned_rate = _number(plan.get("tokens_per_second_per_gpu"), ",.0f")
    planned_share = _percent(plan.get("update_mfu"))
    moved = _number(found["sync_received_bytes"] / 1e6, ",.1f")
    planned_moved = "-" if plan.get("sync_moved_bytes") is None else f"{plan['sync_moved_bytes'] / 1e6:,.1f}"
    mfu, busiest = _percent(found["phases"]["update"]["mfu"]), _percent(found["dp_imbalance"])
    filled, sync = f"{found['sync_bytes'] / 1e6:,.1f} MB", rate("sync_bytes_per_second")
    return [
        f"tokens/s/GPU of the step {_number(step['tokens_per_second_per_gpu'], ',.0f')} (plan {planned_rate}); "
        f"MFU of the update {mfu} (plan {planned_share})",
        f"micro-batches per rank {beside('micro_batches', lambda v: _number(v, '.1f'))}; "
        f"padding waste {beside('padding_waste', _percent)}; busiest data-parallel rank {busiest} above the mean",
        f"calculated bubble {beside('bubble', _percent)}; measured, with transfers, {_percent(found['bubble_measured'])}",
        f"sync fills the engines with {filled} at {sync}; "
        f"between ranks {moved} MB (plan {planned_moved}) at {rate('sync_received_bytes_per_second')}",
        f"peak: {found['peak']['source']}",
        f"plan: {plan['source']}",
        f"phases cover {found['phases_cover']:.1%} of the step's wall time",
    ]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 100 else f"{value:,.1f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
