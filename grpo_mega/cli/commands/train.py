"""`grpo-mega train`, and `grpo-mega sft`: what every command does before this process becomes a rank.

Rank 0 or the launcher checks the config and claims the run's folder. Then distributed/launch.py runs `train_as_rank` on
all ranks.

`sft` is supervised fine-tuning on demonstrations. It takes the path of `train`.
"""

import contextlib
import gc
import json
import math
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from grpo_mega import config as configs
from grpo_mega import processes
from grpo_mega.cli.commands.options import RewardOptions, SftOptions, TrainOptions
from grpo_mega.config import Config
from grpo_mega.config.data import ALIASES, as_sft
from grpo_mega.distributed.environment import bind_to_gpu_cores, library_environment, uses_gpu
from grpo_mega.distributed.launch import current_rank, ends_at_first, launch, launch_processes
from grpo_mega.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, ConfigError, RunFailed, raise_all
from grpo_mega.paths import LOGS
from grpo_mega.tracking.progress import phase


def run(options: TrainOptions) -> int:
    """Train with a config file and its overrides. Return the exit code."""
    profile = [] if options.profile is None else [f"log.profile={options.profile}"]
    config = configs.load(options.config, [*overrides_of(options), *profile])
    if config.algorithm.is_sft:
        raise ConfigError("algorithm.recipe=sft: must be left to grpo-mega sft; start that command, or use another one")
    return train(config, options.resume, ["grpo-mega", *options.argv])


def start(config: Config, resume: bool) -> None:
    """Train for a Python program, which grpo_mega.start describes. Its process becomes a rank only under a launcher."""
    command = [sys.executable, *sys.argv]
    code = train(with_steps(config) if config.algorithm.is_sft else config, resume, command, starts_processes=True)
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise RunFailed(code)


def train(config: Config, resume: bool, command: list[str], *, starts_processes: bool = False) -> int:
    """Train on all ranks. Return the exit code. `command` is for the run's record.

    With `starts_processes` also the only rank of a run is a new process.
    """
    from grpo_mega.trainer import folder as run_folder

    config = check_config(config, run_folder.recorded_dtype(config.run_dir) if resume else None)
    world_size, log_dir = config.layout.world_size, config.run_dir / LOGS
    if current_rank():  # rank 0 claims
        return launch(train_as_rank, config, world_size, log_dir)
    start_all = launch_processes if starts_processes and current_rank() is None else launch
    with run_folder.lock_run_dir(config, resume=resume, command=command) as claim:
        code = start_all(train_as_rank, config, world_size, log_dir)
        if code in (EXIT_USER_ERROR, EXIT_INTERRUPTED):
            claim.discard_unstarted()
        return code


def train_as_rank(config: Config) -> None:
    with ends_at_first("ending before the first step; nothing is lost", (signal.SIGINT,)):
        with rank_imports(config):
            program = import_module("grpo_mega.trainer.sft" if config.algorithm.is_sft else "grpo_mega.train")
            from grpo_mega.cli.planner.this_machine import free_on_gpu
            from grpo_mega.cli.report.writer import ReportWriter
            from grpo_mega.tracking.run_log import Hooks
        program.run(config, Hooks(ReportWriter, free_on_gpu))


def check_config(config: Config, recorded_dtype: str | None = None, *, trains: bool = True) -> Config:
    """Return the config with a model.dtype. Raise ConfigError with every rule that it breaks on this machine.

    If the config leaves model.dtype unset, it is the `recorded_dtype` of the run, or else one for this machine, and
    rank 0 or the launcher reports it. A rank other than rank 0 checks nothing.

    Training also needs enough memory. Evaluation has no optimizer, so its memory is not estimated.
    """
    rank = current_rank()
    with phase("checking the config, the model's files and the data", config.log.progress and not rank):
        from grpo_mega.cli import checks  # an error of the config itself is found without numpy

        config, note = checks.resolve_dtype(config, uses_gpu(config.device, os.environ), recorded_dtype)
        if rank:
            return config
        from grpo_mega.cli.planner import this_machine

        machine = checks.this_machine(config.layout, None if rank is None else os.environ)
        if trains:
            violations = this_machine.find_all(config, machine)
        else:
            whole = config.rollout.model_copy(update={"top_p": 1.0, "top_k": 0})  # only training needs all tokens
            violations = checks.find_all(config.model_copy(update={"rollout": whole}), machine)
    raise_all(violations.violations)
    print_notes([*violations.notes, *([] if note is None else [note])])
    return config


def print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"grpo-mega: note: {note}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def rank_imports(config: Config) -> Iterator[None]:
    """Prepare this process to be a rank, and import what the rank needs inside. TMPDIR is then a folder of this
    process.

    The variables of libraries are set before the imports. Garbage collection pauses, and what was imported is exempt
    from later collections. This saves 2.7 of 6.4 s of CPU at the start and the end of a rank, and shortens the
    collections between. Raise ConfigError if a kernel that the run needs does not load.
    """
    from grpo_mega.cli.checks.precision import environment

    gc.disable()
    try:
        processes.enter_private_folder()
        os.environ.update(environment(config) | library_environment(os.environ) | os.environ)
        bind_to_gpu_cores(os.environ)
        with phase("importing torch, transformers and Megatron-core", config.log.progress and not current_rank()):
            # It imports Megatron, which reads the environment.
            from grpo_mega.megatron.loaded_kernels import check_loads

            check_loads()
            yield
    finally:
        gc.freeze()
        gc.enable()


def overrides_of(options: RewardOptions) -> list[str]:
    """Return the overrides of --set, followed by the override of the reward flags. Raise ConfigError."""
    known: dict[str, Mapping[str, Any]] = {}
    if options.reward_funcs is not None:
        known = {f.name: f.options for f in configs.load(options.config, list(options.overrides)).rewards.functions}
        known |= {alias: known[name] for alias, name in ALIASES.items() if name in known}
    return [*options.overrides, *reward_override(options.reward_funcs, options.reward_weights, known)]


def reward_override(
    names: Sequence[str] | None,
    weights: Sequence[str | float] | None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[str]:
    """Return one "rewards.functions=[...]", or nothing if no function is named. `options` holds the functions' options
    by name.

    Raise ConfigError.
    """
    if names is None:
        if weights is not None:
            raise ConfigError(
                f"--reward_weights {_spaced(weights)} has no functions to weigh; name them by --reward_funcs"
            )
        return []
    if weights is None:
        weights = [1.0] * len(names)
    if len(weights) != len(names):
        raise ConfigError(
            f"--reward_weights {_spaced(weights)} are {len(weights)}, but --reward_funcs {_spaced(names)} are"
            f" {len(names)}; give one weight for each, in the same order"
        )
    functions = []
    for name, weight in zip(names, weights, strict=True):
        try:
            number = float(weight)
        except ValueError:
            raise ConfigError(f"--reward_weights: {weight!r} is not a number; give one for each function") from None
        functions.append({"name": name, "weight": number, "options": dict((options or {}).get(name, {}))})
    return [f"rewards.functions={json.dumps(functions)}"]


def _spaced(values: Sequence[object]) -> str:
    return " ".join(map(str, values))


def run_sft(options: SftOptions) -> int:
    """Train with a config file and its overrides. Return the exit code."""
    config = configs.validate(as_sft(configs.read(options.config, list(options.overrides))))
    return train(with_steps(config), options.resume, ["grpo-mega", *options.argv])


def with_steps(config: Config) -> Config:
    """Return the config with the steps of data.epochs, if it is set. Its last step may start another epoch."""
    if config.data.epochs is None:
        return config
    from grpo_mega.data.rows import read_rows  # imports numpy

    num_rows = sum(1 for source in config.data.train for _ in read_rows(source.path))
    num_rows -= config.data.heldout_size or round((config.data.heldout_fraction or 0.0) * num_rows)
    steps = max(1, math.ceil(config.data.epochs * num_rows / config.batch.prompts_per_step))
    return config.model_copy(update={"steps": steps})
