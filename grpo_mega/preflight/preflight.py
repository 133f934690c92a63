"""Check a config against the files that it names, before any rank starts or device is taken. Never imports torch.

A child process renders the chat template. Another one asks torch if it sees a GPU when `device: auto` finds one.

A problem with the layout for this model, with a path or name, with the model's files (from their headers), with the tokenizer
or with a row of the data is one line with the remedy. Checks that need the tokenizer itself, the weights' values or the user's
code run on the ranks before the first step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from grpo_mega.config import Config
from grpo_mega.data.load import check_data
from grpo_mega.hardware.driver import unusable_gpu_problems
from grpo_mega.hardware.kernels import FUSED_PACKED
from grpo_mega.preflight import raise_first
from grpo_mega.preflight.engine import engine_problems, missing_engine_problems
from grpo_mega.preflight.layout import layout_problems
from grpo_mega.preflight.model import check_model, expert_problems, latent_problems, position_problems
from grpo_mega.preflight.precision import bf16_layer_problems, block_problems, installed_problems
from grpo_mega.preflight.rewards import reward_problems
from grpo_mega.preflight.teachers import row_problems, teacher_problems
from grpo_mega.preflight.tokenizer import check_tokenizer_files
from grpo_mega.weights.hf_config import resolve
from grpo_mega.weights.spec import ModelShape, read_config


def check(config: Config) -> None:
    """Raise ConfigError or WeightMappingError in one line for the first problem."""
    raise_first(unusable_gpu_problems(config.device, os.environ))
    raise_first(reward_problems(config.rewards))
    shape = check_model(config.model)
    raise_first(position_problems(config, resolve(read_config(config.model.path))))
    raise_first(cut_problems(config, shape))
    # The ranks check the card.
    raise_first(installed_problems(config, FUSED_PACKED if config.device == "cuda" else None, "cuda"))
    raise_first(missing_engine_problems(config.rollout, on_gpu=config.device == "cuda"))
    check_tokenizer_files(config.model.path, shape.vocab)
    raise_first(teacher_problems(config, shape))
    check_data(config.data, config.batch.prompts_per_step, config.rollout)
    raise_first(row_problems(config))


def cut_problems(config: Config, shape: ModelShape) -> Iterator[str]:
    """Yield the reasons why the model cannot be split over the trainer's ranks, into FP8 blocks, or over an engine's ranks."""
    yield from layout_problems(config.layout, shape)
    yield from latent_problems(config, shape)
    yield from expert_problems(config, shape)
    yield from engine_problems(config.rollout, config.layout, shape)
    yield from bf16_layer_problems(config.precision, config.layout, shape.num_layers)
    yield from block_problems(config.precision, config.layout, shape)
