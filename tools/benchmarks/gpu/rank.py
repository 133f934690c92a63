"""Common parts of the sections of benchmarks/gpu: figures, the config of a job with one rank, timing on a device."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from grpo_mega import config as configs
from grpo_mega.config import Config
from tools.benchmarks import harness


@dataclass(frozen=True)
class Figure:
    """One measured number with an optional target."""

    section: str
    case: str
    name: str
    value: float | None  # None if this device cannot measure it
    unit: str
    target: float | None = None
    better: Literal["less", "more"] = "less"
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        if self.target is None or self.value is None:
            return None
        return self.value <= self.target if self.better == "less" else self.value >= self.target

    def line(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"{self.section}: {self.case}: {self.name} {value_text(self.value, self.unit)}{note}"

    def row(self) -> dict[str, Any]:
        return asdict(self) | {"met": self.is_met}


def value_text(value: float | None, unit: str) -> str:
    return "none here" if value is None else f"{value:,.4g} {unit}"


@dataclass(frozen=True)
class Options:
    """Options of a run: `quick` for smaller sizes, `tiny` for sizes that a CPU can handle."""

    quick: bool
    tiny: bool
    say: Callable[[str], None]  # prints a line about a skipped case, with the reason
    profile: bool = False  # mfu: profile one step instead
    trial: str = ""  # mfu: compare with a change from trials.py instead

    @property
    def repeat(self) -> int:
        return 2 if self.tiny else 3 if self.quick else 7


def run_sections(
    sections: Sequence[str], quick: bool, tiny: bool, profile: bool = False, trial: str = ""
) -> tuple[list[dict[str, Any]], list[str]]:
    """Run the sections, and print each figure at once. If one fails, keep its figures and continue with the next.

    Return rows, and the sections that failed.
    """
    options = Options(quick, tiny, partial(print, flush=True), profile, trial)
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    for section in sections:
        try:
            for figure in importlib.import_module(f"tools.benchmarks.gpu.{section}").run(options):
                options.say(figure.line())
                rows.append(figure.row())
        except Exception:  # the other sections are independent
            traceback.print_exc()
            failed.append(section)
    return rows, failed


def config_of(run_dir: Path, model: dict[str, Any], **sections: Any) -> Config:
    """Return a run's config. Other keys have their default values."""
    raw = {"run_dir": str(run_dir), "steps": 1, "model": model, "data": {"train": "unused"}, **sections}
    return configs.validate(raw)


def finish(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(act: Callable[[], object], device: torch.device, repeat: int) -> float:
    """Return the median seconds of `repeat` runs, after one warm-up run."""
    variant = harness.timed(act, lambda: finish(device))
    return harness.medians(harness.take_turns({"act": variant}, repeat, warm_up=1))["act"]["seconds"]


def extra_gib(act: Callable[[], object], device: torch.device) -> float | None:
    """Return the peak GiB that `act` allocates in addition to earlier allocations; None without a GPU."""
    if device.type != "cuda":
        act()
        return None
    finish(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    act()
    finish(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**30
