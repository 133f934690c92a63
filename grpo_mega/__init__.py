"""grpo_mega: a Megatron-style 3D-parallel trainer for GRPO.

    from grpo_mega import Config, start

    start(Config(run_dir="runs/a", steps=100, model={"path": "models/a"}, ...))

This is the command line for Python programs: it refuses what `grpo-mega train` and `sft` refuse, and starts the same
ranks. `grpo_mega.config.load` reads a YAML file. Importing this package imports nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_mega.config import Config

__all__ = ["Config", "start"]
__version__ = "0.2.0"


def start(config: Config, *, resume: bool = False) -> None:
    """Train on all ranks, like `grpo-mega train`, or `grpo-mega sft` for the recipe sft. Return at the end of the run.

    The ranks are new processes, which write to this process's terminal. Under torchrun or Slurm this process is a rank.
    With `resume` the run continues from its last checkpoint.

    Raises a UserError with one line per broken rule before anything starts, and RunFailed if a rank fails.
    """
    from grpo_mega.cli import bypass_proxies
    from grpo_mega.cli.commands import train

    bypass_proxies()
    train.start(config, resume)


def __getattr__(name: str) -> Any:
    if name != "Config":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from grpo_mega.config import Config

    return Config
