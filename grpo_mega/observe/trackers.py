"""Writers of experiment trackers: Weights & Biases and TensorBoard. Each package is imported when its writer starts."""

from __future__ import annotations

import netrc
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from grpo_mega.config import Config
from grpo_mega.observe.writers import Level, Writer
from grpo_mega.paths import TENSORBOARD, WANDB_ID_FILE, write_atomically
from grpo_mega.text import well_formed
from grpo_mega.types import StepMetrics

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
    def __init__(self, config: Config, log: Callable[[str], None]) -> None:
        if sys.modules.get("wandb", self) is None:  # megatron/compat.py hides wandb from Megatron
            del sys.modules["wandb"]
        import wandb

        mode = wandb_mode(os.environ)
        # The id is stored in the run's folder, so that a resumed run continues the same W&B run.
        id_file = config.run_dir / WANDB_ID_FILE
        if not id_file.exists():
            write_atomically(id_file, uuid.uuid4().hex[:8].encode())

        def start(mode: Mode) -> Any:
            return wandb.init(
                project=config.log.wandb_project,
                name=config.run_dir.name,
                id=id_file.read_text().strip(),
                resume="allow",
                dir=str(config.run_dir),
                config=config.model_dump(mode="json"),
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
