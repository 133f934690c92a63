"""The cases that the layout tests hand to their ranks, besides grpo_mega.commands.check's cases."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from grpo_mega.config import Config

# Methods, on a short qwen2, by their changes to the config: between them every loss, advantage and kind of correction.
METHODS = {
    "dual_clip": (
        "algorithm.loss_type=dual_clip",
        "algorithm.use_valid_token_scale=true",
        "algorithm.loss_agg_func=token-mean",
    ),
    "gspo": ("algorithm.recipe=gspo", "algorithm.correction={importance: sequence, veto_below: 0.1}"),
    "gspo_token": ("algorithm.recipe=gspo_token", "algorithm.adv_type=grpo_process"),
    "cispo": ("algorithm.recipe=cispo", "algorithm.correction={importance: token, mask: token, mask_low: 0.3, mask_high: 3.0}"),
    "sapo": ("algorithm.recipe=sapo", "algorithm.correction={mask: geometric, mask_low: 0.7, mask_high: 1.4}"),
    "gmpo": ("algorithm.recipe=gmpo", "algorithm.correction={mask: sequence, mask_low: 0.05, mask_high: 20.0}"),
    "rloo": (
        "algorithm.recipe=rloo",
        "algorithm.loss_type=reinforce",
        "algorithm.correction={importance: icepop, mask_low: 0.8, mask_high: 1.25}",
    ),
    "reinforce_plus_plus": ("algorithm.recipe=reinforce_plus_plus", "algorithm.kl_beta=0.1"),
    "reinforce_plus_plus_baseline": ("algorithm.recipe=reinforce_plus_plus_baseline", "algorithm.overlong_buffer=0.3"),
    "process_supervision": ("algorithm.recipe=process_supervision", "algorithm.overlong_filter=true"),
    "clip_cov": (
        "algorithm={recipe: clip_cov, adv_type: grpo_turn, group_size: 4, cov_share: 1.0, cov_low: 0.02, cov_high: 0.5}",
        "algorithm.correction={importance: token, batch_normalize: true, reject: seq_max_k3, reject_above: 2.0}",
    ),
    "kl_cov": (
        "algorithm={recipe: kl_cov, adv_type: opo, group_size: 4, cov_share: 0.2, positive_nll: 0.1, positive_above: 0.5}",
        "algorithm.correction={importance: sequence, batch_normalize: true, off_policy_threshold: 0.01}",
    ),
    "opd": ("algorithm.recipe=opd", "teachers={main: {path: FOLDER/uneven}}"),
    "opd_kl": (
        "algorithm={recipe: opd, group_size: 4, adv_type: grpo, distill_kl: reverse}",
        "teachers={main: {path: FOLDER/large}}",
    ),
}


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
