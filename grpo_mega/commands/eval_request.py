"""What `grpo-mega eval` is asked for, as a config of its own: made from a run's folder or a config, before anything heavy.

The config that comes out trains nothing: its layout, engine, rewards and seed are the run's, the prompts to answer are its
data.train (or, where held-out prompts are split off from data.train, what is split off), and its run_dir is set by the caller.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_mega import config as configs
from grpo_mega.config import Config
from grpo_mega.errors import ConfigError
from grpo_mega.formats.checkpoint_files import find, find_finished, without_checkpoints
from grpo_mega.paths import CHECKPOINTS, CONFIG_FILE
from grpo_mega.run.folder import last_step

REQUEST_FILE = "request.json"


@dataclass(frozen=True)
class Options:
    """As given on the command line; None: as the config has it."""

    target: Path  # a run's folder or a config
    overrides: Sequence[str] = ()
    step: int | None = None
    model: Path | None = None
    data: str | None = None  # a path as data.heldout takes it
    train_set: bool = False
    prompts: int | None = None
    samples: int | None = None
    ks: Sequence[int] | None = None
    temperature: float | None = None
    top_p: float | None = None
    greedy: bool | None = None
    out: Path | None = None


@dataclass(frozen=True)
class Request:
    config: Config
    checkpoint: Path | None  # of a run; None: the model that the config names
    names: tuple[str, ...] | None  # of the sets that data.train consists of; None: what is split off from it
    what: str  # is evaluated
    out: Path | None
    step: int = 0  # after which the config's model was written, where it is a finished run's
    note: str | None = None  # for the person who asked

    def write(self, folder: Path) -> None:
        """For `read`, by another process."""
        content = {
            "config": self.config.model_dump(mode="json"),
            "checkpoint": self.checkpoint and str(self.checkpoint),
            "names": self.names,
            "what": self.what,
            "out": self.out and str(self.out),
            "step": self.step,
            "note": self.note,
        }
        (folder / REQUEST_FILE).write_text(json.dumps(content))

    @classmethod
    def read(cls, folder: Path) -> Request:
        found = json.loads((folder / REQUEST_FILE).read_text())
        return cls(
            config=configs.validate(found["config"]),
            checkpoint=found["checkpoint"] and Path(found["checkpoint"]),
            names=found["names"] if found["names"] is None else tuple(found["names"]),
            what=found["what"],
            out=found["out"] and Path(found["out"]),
            step=found["step"],
            note=found["note"],
        )


def make_request(options: Options) -> Request:
    """Raises ConfigError or ResumeError in one line for what cannot be evaluated; writes nothing."""
    is_run = options.target.is_dir()
    if is_run and not (options.target / CONFIG_FILE).is_file():
        raise ConfigError(f"{options.target} holds no {CONFIG_FILE}; name the run_dir of a run, or a config file")
    path = options.target / CONFIG_FILE if is_run else options.target
    config = configs.load(path, ["run_dir=unused", *options.overrides])
    finished = find_finished(options.target, options.step) if is_run and options.model is None else None
    checkpoint = _checkpoint(options, is_run) if finished is None else None
    _check_out(options.out)
    raw = config.model_dump(mode="json")
    raw["eval"] |= _eval_settings(options, raw["eval"])
    names, what = _choose_data(raw, config, options)
    if options.model is not None:
        raw["model"] |= {"path": str(options.model), "init": "checkpoint"}
    elif finished is not None:
        raw["model"] |= {"path": str(finished), "init": "checkpoint"}
    elif checkpoint is not None:
        raw["model"]["init"] = "random"  # so that the weights in model.path, which are not read, need not be there
    # The trainer's side holds weights, and neither computes nor steps.
    raw["layout"] |= {"overlap_grad_reduce": False, "overlap_param_gather": False}
    raw["precision"] = {}
    raw["optimizer"] |= {"moments_dtype": "float32"}
    raw["batch"] |= {"prompts_per_step": 1, "mini_batches": 1}
    raw["rollout"] |= {"oversample": 1.0}
    raw["checkpoint"] |= {"interval": 0}
    raw["log"] |= {"wandb": False}
    request = Request(configs.validate(raw), checkpoint, names, what, options.out)
    if finished is not None:
        request = replace(request, step=last_step(options.target), note=without_checkpoints(finished))
    return request


def _checkpoint(options: Options, is_run: bool) -> Path | None:
    if options.model is not None:
        if options.step is not None:
            raise ConfigError(f"--model {options.model} and --step {options.step} name two policies; give one of them")
        return None
    if is_run:
        return find(options.target / CHECKPOINTS, options.step)
    if options.step is not None:
        raise ConfigError(f"--step {options.step} is of a run, and {options.target} is a file; name the run's folder")
    return None


def _check_out(out: Path | None) -> None:
    if out is None:
        return
    if out.exists():
        raise ConfigError(f"--out {out} exists; name a file that does not")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}; make it first")


def _eval_settings(options: Options, given: dict[str, Any]) -> dict[str, Any]:
    given_here: dict[str, Any] = {
        "samples": options.samples,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "greedy": options.greedy,
    }
    found = {name: value for name, value in given_here.items() if value is not None}
    if options.ks is not None:
        found["ks"] = list(options.ks)
    elif options.samples is not None:
        found["ks"] = None  # the config's were chosen for its own number of samples
    is_configs_choice = options.data is None and not options.train_set
    return found | {"num_prompts": options.prompts or (given["num_prompts"] if is_configs_choice else None)}


def _choose_data(raw: dict[str, Any], config: Config, options: Options) -> tuple[tuple[str, ...] | None, str]:
    """Makes the prompts to evaluate data.train, where they are sets of their own; returns their names, and what they are."""
    data = raw["data"]
    data |= {"pass_rates": None, "min_pass_rate": None, "max_pass_rate": None}
    if options.train_set:
        if options.data is not None:
            raise ConfigError(f"--data {options.data} and --train-set name two sets; give one of them")
        data |= {"heldout": None, "heldout_sets": {}}
        return ("",) * len(config.data.train), "training prompts"
    sources = {name: source.model_dump() for name, source in config.data.heldout_sources.items()}
    if options.data is not None:
        sources = {"": {"path": options.data}}
    if sources:
        data |= {"train": list(sources.values()), "heldout": None, "heldout_sets": {}}
        data |= {"heldout_size": None, "heldout_fraction": None}
        return tuple(sources), "held-out prompts" if options.data is None else f"prompts of {options.data}"
    if data["heldout_size"] is None and data["heldout_fraction"] is None:
        raise ConfigError(f"{options.target} has no held-out prompts; name a data set by --data, or give --train-set")
    return None, "held-out prompts"
