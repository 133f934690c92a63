"""The cases that the layout tests hand to their ranks, besides grpo_mega.commands.check's cases."""

from dataclasses import dataclass

import torch

from grpo_mega.config import Config


@dataclass(frozen=True)
class LogitsCase:
    name: str
    config: Config
    sequences: list[list[int]]
    expected: list[torch.Tensor]  # of each sequence, [length, vocab] fp32

    @property
    def world_size(self) -> int:
        return self.config.layout.world_size
