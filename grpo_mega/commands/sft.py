"""`grpo-mega sft`: supervised fine-tuning on demonstrations. It takes the path of `grpo-mega train`."""

from __future__ import annotations

import math

from grpo_mega import config as configs
from grpo_mega.commands.options import SftOptions
from grpo_mega.commands.train import train
from grpo_mega.config import Config
from grpo_mega.config.sft import as_sft


def run(options: SftOptions) -> int:
    """Train with a config file and its overrides. Return the exit code."""
    config = configs.validate(as_sft(configs.read(options.config, list(options.overrides))))
    return train(with_steps(config), options.resume, options.argv)


def with_steps(config: Config) -> Config:
    """Return the config with the steps of data.epochs, if it is set. Its last step may start another epoch."""
    if config.data.epochs is None:
        return config
    from grpo_mega.data.rows import read_rows  # imports numpy

    num_rows = sum(1 for source in config.data.train for _ in read_rows(source.path))
    num_rows -= config.data.heldout_size or round((config.data.heldout_fraction or 0.0) * num_rows)
    steps = max(1, math.ceil(config.data.epochs * num_rows / config.batch.prompts_per_step))
    return config.model_copy(update={"steps": steps})
