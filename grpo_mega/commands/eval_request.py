"""Turn the options of `grpo-mega eval` into a config, from a run's folder or a config file, before anything heavy runs.

The resulting config trains nothing. Layout, engine, rewards and seed come from the run. The prompts to answer are its
data.train, or the held-out prompts split off from data.train. The caller sets its run_dir.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mega import config as configs
from grpo_mega.commands.options import EvalOptions
from grpo_mega.config import Config
from grpo_mega.errors import ConfigError
from grpo_mega.formats.detect import without_checkpoints
from grpo_mega.paths import CHECKPOINTS, CONFIG_FILE
from grpo_mega.run.checkpoints import find, find_finished
from grpo_mega.run.folder import last_step


@dataclass(frozen=True)
class EvalRequest:
    config: Config
    checkpoint: Path | None  # a run's checkpoint; None: the model in the config
    set_names: tuple[str, ...] | None  # names of the sets in data.train; None: the held-out prompts split off from data.train
    description: str  # description of the prompts, for the log
    out: Path | None
    step: int = 0  # step after which the config's model was written, if a finished run wrote it
    note: str | None = None  # message for the user


def make_request(options: EvalOptions) -> EvalRequest:
    """Return the request. Raise ConfigError or ResumeError in one line if it cannot be evaluated. Writes nothing."""
    if options.prompts is not None and options.prompts < 1:
        raise ConfigError(f"--prompts {options.prompts} leaves nothing to evaluate; give at least 1")
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
    set_names, description = _choose_data(raw, config, options)
    model = options.model or finished
    if model is not None:
        raw["model"] |= {"path": str(model), "init": "checkpoint"}
    elif checkpoint is not None:
        raw["model"]["init"] = "random"  # model.path need not have weights, because they are not read
    # The trainer's side only holds weights: it neither computes nor steps.
    raw["layout"] |= {"overlap_grad_reduce": False, "overlap_param_gather": False, "engine_ranks": 0}
    raw["precision"] = {}
    raw["optimizer"] |= {"moments_dtype": "float32"}
    raw["batch"] |= {"prompts_per_step": 1, "mini_batches": 1}
    raw["rollout"] |= {"oversample": 1.0, "partial": False, "placement": "colocated"}
    raw["checkpoint"] |= {"interval": 0}
    raw["log"] |= {"wandb": False}
    return EvalRequest(
        config=configs.validate(raw),
        checkpoint=checkpoint,
        set_names=set_names,
        description=description,
        out=options.out,
        step=last_step(options.target) if finished else 0,
        note=without_checkpoints(finished) if finished else None,
    )


def _checkpoint(options: EvalOptions, is_run: bool) -> Path | None:
    if options.model is not None:
        if options.step is not None:
            raise ConfigError(f"--model {options.model} and --step {options.step} name two policies; give one of them")
        return None
    if is_run:
        return find(options.target / CHECKPOINTS, options.step)
    if options.step is not None:
        raise ConfigError(
            f"--step {options.step} is an option for a run, but {options.target} is a file; name the run's folder"
        )
    return None


def _check_out(out: Path | None) -> None:
    if out is None:
        return
    if out.exists():
        raise ConfigError(f"--out {out} exists; name a file that does not")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}; make it first")


def _eval_settings(options: EvalOptions, given: dict[str, Any]) -> dict[str, Any]:
    names = ("samples", "temperature", "top_p", "greedy", "ks")
    settings = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.samples is not None:
        settings.setdefault("ks", None)  # the config's ks fit its number of samples, not this one
    is_configs_choice = options.data is None and not options.train_set
    return settings | {"num_prompts": options.prompts or (given["num_prompts"] if is_configs_choice else None)}


def _choose_data(raw: dict[str, Any], config: Config, options: EvalOptions) -> tuple[tuple[str, ...] | None, str]:
    """Set data.train to the prompts to evaluate, if they are separate sets. Return their names and a description."""
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
