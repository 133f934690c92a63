"""The cases that the layout tests hand to their ranks, besides grpo_mega.commands.check's cases."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from grpo_mega.config import Config


@dataclass(frozen=True)
class LogitsCase:
    name: str
    config: Config
    sequences: list[list[int]]
    expected: list[torch.Tensor]  # of each sequence, [length, vocab] fp32
    probes: list[torch.Tensor] = field(default_factory=list)  # [length, hidden]: the loss is hidden times probe; none: no pass
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # of that loss, by the checkpoint's names, fp64

    @property
    def world_size(self) -> int:
        return self.config.layout.world_size


def probe(model: Any, sequences: list[list[int]], folder: Path) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Probes, and the gradients of hidden states times probes; transformers itself saves these under a checkpoint's names."""
    generator = torch.Generator().manual_seed(6)
    probes = [torch.randn(len(tokens), model.config.hidden_size, generator=generator) for tokens in sequences]
    model.config._experts_implementation = "eager"  # others know no fp64
    model = model.double().requires_grad_(True)
    hidden = [model.model(torch.tensor([tokens])).last_hidden_state[0] for tokens in sequences]
    sum((h * p).sum() for h, p in zip(hidden, probes, strict=True)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder)
    gradients = load_file(folder / "model.safetensors")
    assert all(gradient.any() for name, gradient in gradients.items() if "lm_head" not in name and ".experts." not in name)
    return probes, gradients
