"""Describe the machines of a job: how many ranks they start, their GPU, and the installed packages."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from grpo_mega.config import LayoutConfig
from grpo_mega.distributed.environment import cuda_compiler
from grpo_mega.preflight import kernels
from grpo_mega.preflight.cards import Card


@dataclass(frozen=True)
class Machine:
    """The machines of a job. Packages are the ones installed here, because no others are known."""

    world_size: int
    ranks_per_node: int
    card: Card | None = None  # GPU of a job that is planned for other machines; None: it runs here, and ranks ask their GPU
    transformer_engine: str | None = field(default_factory=kernels.transformer_engine_version)
    flash_attention: str | None = field(default_factory=kernels.flash_attention_version)
    cuda: str | None = field(default_factory=kernels.cuda_version)
    has_sglang: bool = field(default_factory=lambda: find_spec("sglang") is not None)
    compiler: Path | None = field(default_factory=lambda: cuda_compiler(os.environ))

    @property
    def is_here(self) -> bool:
        return self.card is None

    def gpu(self, device: str) -> tuple[kernels.Version | None, str]:
        """Return the GPU's compute capability, None if it is not known, and its name. The ranks check theirs."""
        if self.card is not None:
            return self.card.capability, self.card.title
        return (kernels.FUSED_PACKED if device == "cuda" else None), "cuda"


def this_machine(layout: LayoutConfig, ranks: Mapping[str, str] | None = None) -> Machine:
    """Return this machine with the ranks that torchrun started, by its environment `ranks`, or else with the layout's ranks."""
    if ranks is None:
        return Machine(layout.world_size, layout.world_size)
    return Machine(int(ranks["WORLD_SIZE"]), int(ranks.get("LOCAL_WORLD_SIZE", ranks["WORLD_SIZE"])))
