"""Writers of a run's log: the console, files of JSON lines, Weights & Biases and TensorBoard.

Every writer accepts any subset of the known metrics. Files are appended to and flushed line by line, so they are
complete when a run is killed. A resumed run appends to the same files, and the last line of a step counts.

The package of a tracker is imported when its writer starts.
"""

import netrc
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from rich.console import Console
from rich.text import Text

from grpo_mega.paths import (
    EXPERTS_FILE,
    MESSAGES_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    TENSORBOARD,
    WANDB_ID_FILE,
    write_atomically,
)
from grpo_mega.text import json_line, well_formed
from grpo_mega.types import StepMetrics

LINE_WIDTH = 120  # maximum number of columns of a step line
SHORTEST_PHASE_SHOWN = 0.05  # phases below this many seconds are not shown

Level = Literal["info", "warning"]


class Writer:
    """Ignores everything. A subclass overrides only the methods for what it writes. An evaluation is written like a
    step.
    """

    def write_step(self, step: int, metrics: StepMetrics) -> None:
        pass

    def write_eval(self, step: int, metrics: StepMetrics) -> None:
        self.write_step(step, metrics)

    def write_samples(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write `rows` from run_log.sample_row, at least one."""

    def write_loads(self, step: int, tokens: Sequence[Sequence[int]]) -> None:
        """Write the tokens per expert, by layer. The list of a dense layer is empty."""

    def write_message(self, text: str, *, level: Level = "info") -> None:
        pass

    def close(self) -> None:
        pass


class ConsoleWriter(Writer):
    """Prints one line per step of at most 120 columns, styled on a terminal, plain elsewhere."""

    def __init__(self, console: Console, num_steps: int, seconds_between: float = 0.0) -> None:
        """Print a step only if it is the last one, or if `seconds_between` have passed since another one."""
        self._console, self._num_steps, self._seconds_between = console, num_steps, seconds_between
        self._shown_at = -seconds_between

    def write_step(self, step: int, metrics: StepMetrics) -> None:
        if step < self._num_steps and time.monotonic() < self._shown_at + self._seconds_between:
            return
        self._shown_at = time.monotonic()
        head = f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}"
        self._print(head, step_line(metrics, LINE_WIDTH - len(head) - 2), "bold")

    def write_eval(self, step: int, metrics: StepMetrics) -> None:
        values = "  ".join(f"{name.removeprefix('eval/')} {value:.3f}" for name, value in metrics.items())
        self._print(f"held-out, step {step}", values, "bold green")

    def write_message(self, text: str, *, level: Level = "info") -> None:
        self._console.print(Text(text, style="yellow" if level == "warning" else ""), soft_wrap=True)

    def _print(self, head: str, line: str, style: str) -> None:
        # soft_wrap: never fold a line, because a pipe or a log file has no width.
        self._console.print(Text.assemble((head, style), "  ", line), soft_wrap=True)


class JsonLinesWriter(Writer):
    """Appends to three files in the run's folder, and overwrites experts.json with the last step of an MoE model.

    metrics.jsonl    {"step": 3, "reward/mean": 0.5, ...}. NaN and infinities are strings, because JSON has no numbers
                     for them and null would hide the difference
    samples.jsonl    some responses of every step
    messages.jsonl   the console's messages, each with the last finished step
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._step = folder, 0
        for name in (METRICS_FILE, SAMPLES_FILE, MESSAGES_FILE):
            self._append(name, ())

    def write_step(self, step: int, metrics: StepMetrics) -> None:
        self._step = step
        self._append(METRICS_FILE, [{"step": step, **metrics}])

    def write_samples(self, rows: Sequence[dict[str, Any]]) -> None:
        self._append(SAMPLES_FILE, rows)

    def write_loads(self, step: int, tokens: Sequence[Sequence[int]]) -> None:
        write_atomically(self._folder / EXPERTS_FILE, json_line({"step": step, "tokens": tokens}).encode())

    def write_message(self, text: str, *, level: Level = "info") -> None:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        self._append(MESSAGES_FILE, [{"step": self._step, "time": now, "level": level, "text": text}])

    def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append to a file, which is opened each time: if the folder was removed, this raises."""
        with (self._folder / name).open("a", encoding="utf-8") as file:
            file.writelines(json_line(row) for row in rows)


def step_line(metrics: Mapping[str, float], width: int) -> str:
    """Return the main figures of a step in a line: `reward 0.812  kl 0.0123 ...  3.4 s: sample 1.2, update 0.8`.

    The longest phases come first, as many as fit into `width` columns.
    """
    watched = [
        ("reward", "reward/mean", "{:.3f}".format),
        ("loss", "loss/nll", "{:.4f}".format),
        ("kl", "kl/mean", "{:.4f}".format),
        ("length", "response_length/mean", _three_digits),
        ("cut", "response_length/cut", "{:.0%}".format),
        ("turns", "agent/turns", "{:.1f}".format),
        ("clip", "clip/fraction", "{:.3f}".format),
        ("mismatch", "mismatch/abs_mean", "{:.0e}".format),
    ]
    parts = [f"{label} {show(metrics[name])}" for label, name, show in watched if name in metrics]
    phases = {name.removeprefix("seconds/"): value for name, value in metrics.items() if name.startswith("seconds/")}
    phases.pop("idle", None)  # a part of `sample`
    total = phases.pop("step", None)
    if total is None:
        return "  ".join(parts)
    line = "  ".join([*parts, f"{_three_digits(total)} s"])
    separator = ": "
    for phase in sorted(phases, key=lambda phase: -phases[phase]):
        shown = f"{separator}{phase} {_three_digits(phases[phase])}"
        if phases[phase] < SHORTEST_PHASE_SHOWN or len(line) + len(shown) > width:
            break
        line += shown
        separator = ", "
    return line


def _three_digits(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


_DEFAULT_SERVER = "https://api.wandb.ai"
_SECONDS_TO_CONNECT = 30.0

MOST_WARNINGS = 20  # number of warnings in the summary of a W&B run
MAX_TITLE = 63  # characters of an alert on W&B
TABLE = "completions"

Mode = Literal["online", "offline", "disabled"]

# The names of equal metrics in TRL and verl. Omitted because they differ: TRL's num_tokens (of the whole run), verl's
# perf/throughput (it counts prompts too) and actor/pg_clipfrac_lower (of dual clipping). timing_s has our phases, under
# verl's names if verl has one.
SAME: dict[str, tuple[str, ...]] = {  # our name -> names in TRL (1.16) and verl
    "reward/mean": ("reward", "critic/score/mean", "critic/rewards/mean"),
    "reward/std": ("reward_std",),
    "reward/min": ("critic/score/min", "critic/rewards/min"),
    "reward/max": ("critic/score/max", "critic/rewards/max"),
    "groups/zero_variance": ("frac_reward_zero_std",),
    "kl/mean": ("kl", "actor/kl_loss"),
    "entropy/mean": ("entropy", "actor/entropy"),
    "loss/total": ("loss",),
    "loss/policy": ("policy_loss", "actor/pg_loss"),
    "grad_norm": ("grad_norm", "actor/grad_norm"),
    "lr": ("learning_rate", "actor/lr"),
    "response_length/mean": ("completions/mean_length", "response_length/mean"),
    "response_length/min": ("completions/min_length", "response_length/min"),
    "response_length/max": ("completions/max_length", "response_length/max"),
    "response_length/cut": ("completions/clipped_ratio", "response_length/clip_ratio"),
    "clip/fraction": ("clip_ratio/region_mean", "actor/pg_clipfrac"),
    "clip/fraction_low": ("clip_ratio/low_mean",),
    "clip/fraction_high": ("clip_ratio/high_mean",),
    "mismatch/abs_mean": ("sampling/sampling_logp_difference/mean",),
    "mismatch/abs_max": ("sampling/sampling_logp_difference/max",),
    "seconds/step": ("step_time", "timing_s/step", "perf/time_per_step"),
}
PHASES = {
    "sample": "gen",
    "update": "update_actor",
    "sync": "update_weights",
    "checkpoint": "save_checkpoint",
    "evaluation": "testing",
}
_OF_ALL = {"mean", "std", "min", "max"}


class WandbWriter(Writer):
    def __init__(self, run_dir: Path, project: str, settings: dict[str, Any], log: Callable[[str], None]) -> None:
        if sys.modules.get("wandb", self) is None:  # megatron/compat.py hides wandb from Megatron
            del sys.modules["wandb"]
        import wandb

        mode = wandb_mode(os.environ)
        # The id is stored in the run's folder, so that a resumed run continues the same W&B run.
        id_file = run_dir / WANDB_ID_FILE
        if not id_file.exists():
            write_atomically(id_file, uuid.uuid4().hex[:8].encode())

        def start(mode: Mode) -> Any:
            return wandb.init(
                project=project,
                name=run_dir.name,
                id=id_file.read_text().strip(),
                resume="allow",
                dir=str(run_dir),
                config=settings,
                mode=mode,
                settings=wandb.Settings(console="off", silent=True, init_timeout=_SECONDS_TO_CONNECT),
            )

        try:
            self._run = start(mode)
        except wandb.errors.Error as error:
            if mode != "online":
                raise
            mode = "offline"
            log(f"wandb: cannot reach its server ({' '.join(str(error).split())}); logging offline")
            self._run = start(mode)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # charts run over steps; a step that is repeated stays one
        self._warnings: list[str] = []
        log(f"wandb: {mode}, {self._run.url if mode == 'online' else self._run.dir}")

    def write_step(self, step: int, metrics: StepMetrics) -> None:
        # Log the step as a value, because wandb's own step refuses to decrease after a resume.
        self._run.log({"step": step, **metrics, **other_names(metrics)})

    def write_samples(self, rows: Sequence[dict[str, Any]]) -> None:
        """Log a table under "completions", like TRL."""
        import wandb

        names = list(rows[0]["rewards"])
        columns = ["step", "prompt", "completion", "answer", *names, "reward", "advantage", "finish_reason"]
        table = wandb.Table(columns=columns, allow_mixed_types=True)
        for row in rows:
            scores = [row["rewards"][name] for name in names]
            rest = [row["reward"], row["advantage"], row["finish_reason"]]
            texts = [well_formed(row[name]) for name in ("prompt", "response", "answer")]
            table.add_data(row["step"], *texts, *scores, *rest)
        self._run.log({"step": rows[0]["step"], TABLE: table})

    def write_message(self, text: str, *, level: Level = "info") -> None:
        """Send a warning as an alert, and keep the last ones in the run's summary, which the run's page shows."""
        if level == "warning":
            self._warnings = [*self._warnings, text][-MOST_WARNINGS:]
            self._run.summary["warnings"] = self._warnings
            self._run.alert(title=text[:MAX_TITLE], text=text, level="WARN")

    def close(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()  # its service writes the end of an offline run's file only when it shuts down


class TensorBoardWriter(Writer):
    """Writes metrics and warnings with torch's writer into RUN_DIR/tensorboard. A resumed run continues the same
    curves.
    """

    def __init__(self, run_dir: Path, first_step: int) -> None:
        """`first_step`: the first step of this start. TensorBoard hides what earlier starts wrote from this step on."""
        from torch.utils.tensorboard import SummaryWriter

        self._step = first_step - 1
        self._writer = SummaryWriter(str(run_dir / TENSORBOARD), purge_step=first_step)

    def write_step(self, step: int, metrics: StepMetrics) -> None:
        self._step = step
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def write_message(self, text: str, *, level: Level = "info") -> None:
        if level == "warning":
            self._writer.add_text("warnings", text, self._step)
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def wandb_mode(environ: Mapping[str, str]) -> Mode:
    """Return a mode in which wandb never asks for a key."""
    wanted = environ.get("WANDB_MODE", "online")
    if wanted in ("offline", "dryrun"):
        return "offline"
    if wanted == "disabled":
        return "disabled"
    if environ.get("WANDB_API_KEY"):
        return "online"
    host = urlparse(environ.get("WANDB_BASE_URL", _DEFAULT_SERVER)).hostname or ""
    path = Path(environ.get("NETRC") or Path(environ.get("HOME", "/")) / ".netrc")
    try:
        return "offline" if netrc.netrc(str(path)).authenticators(host) is None else "online"
    except (OSError, netrc.NetrcParseError):
        return "offline"


def other_names(metrics: Mapping[str, float]) -> StepMetrics:
    """Return the metrics that TRL or verl also have, under their names."""
    aliases: StepMetrics = {}
    for name, value in metrics.items():
        family, _, rest = name.partition("/")
        if name in SAME:
            aliases |= dict.fromkeys(SAME[name], value)
        elif family == "reward" and rest not in _OF_ALL:
            aliases[f"rewards/{rest}/mean"] = value
        elif family == "seconds":
            aliases[f"timing_s/{PHASES.get(rest, rest)}"] = value
        elif family == "eval" and (rest == "score" or rest.endswith("/score")):
            aliases[f"val-core/{rest.removesuffix('/score') if '/' in rest else 'heldout'}/score/mean@1"] = value
    return {name: value for name, value in aliases.items() if name not in metrics}
