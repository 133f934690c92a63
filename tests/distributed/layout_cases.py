"""The cases that the layout tests hand to their ranks, besides grpo_mega.commands.check's cases."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from grpo_mega.config import Config, RouterConfig
from grpo_mega.types import Prompt, Sample


@dataclass(frozen=True)
class LogitsCase:
    name: str
    config: Config
    sequences: list[list[int]]
    expected: list[torch.Tensor]  # of each sequence, [length, vocab] fp32
    probes: list[torch.Tensor] = field(default_factory=list)  # [length, hidden]: the loss is hidden times probe; none: no pass
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # of that loss, by the checkpoint's names, fp64
    loads: list[list[int]] = field(default_factory=list)  # tokens of each expert, by layer
    balance: dict[str, float] = field(default_factory=dict)  # the metrics of the routers' losses

    @property
    def world_size(self) -> int:
        return self.config.layout.world_size


def as_samples(sequences: list[list[int]]) -> list[Sample]:
    """All but the first token of each as a response."""
    samples = [
        Sample(Prompt(i, "", (tokens[0],), ""), 0, tokens[1:], [0.0] * (len(tokens) - 1), "stop", reward=1.0)
        for i, tokens in enumerate(sequences)
    ]
    for sample in samples:
        sample.advantages = torch.zeros(sample.response_len)
    return samples


class Routed:
    """What the routers of a transformers model did, by layer: a list of each sequence's logits, and of its chosen experts."""

    def __init__(self, num_layers: int) -> None:
        self.logits: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]  # [tokens, experts]
        self.chosen: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]  # [tokens, chosen]
        self.num_experts = 0

    def loads(self) -> list[list[int]]:
        return [torch.cat(c).flatten().bincount(minlength=self.num_experts).tolist() if c else [] for c in self.chosen]


@contextmanager
def routed(model: Any) -> Iterator[Routed]:
    """See all that the model computes inside, one sequence after the other."""
    found, handles = Routed(len(model.model.layers)), []
    for i, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts"):
            gate = layer.mlp.gate
            found.num_experts = gate.weight.shape[0]
            into = lambda _, args, i=i, gate=gate: found.logits[i].append(args[0].flatten(0, -2) @ gate.weight.t())  # noqa: E731
            handles.append(layer.mlp.register_forward_pre_hook(into))
            handles.append(layer.mlp.experts.register_forward_pre_hook(lambda _, args, i=i: found.chosen[i].append(args[1])))
    yield found
    for handle in handles:
        handle.remove()


def router_losses(
    found: Routed, config: RouterConfig, micro_batches: Sequence[Sequence[int]], topk: int, is_sigmoid: bool
) -> Any:
    """The balancing loss and the z loss of each layer with experts: tensors [layers]."""
    balancing, z_losses = [], []
    for logits in filter(None, found.logits):
        num_tokens = sum(map(len, logits))
        z_losses.append(torch.cat(logits).logsumexp(-1).square().mean())
        is_by_sample = config.balancing == "seq_aux_loss"
        parts = [[i] for i in range(len(logits))] if is_by_sample else micro_batches
        loss = torch.zeros((), dtype=torch.float64)
        for part in parts:
            own = torch.cat([logits[i] for i in part])
            scores = own.sigmoid() / own.sigmoid().sum(-1, keepdim=True) if is_sigmoid else own.softmax(-1)
            f = scores.topk(topk).indices.flatten().bincount(minlength=found.num_experts) / (topk * len(own))
            weight = 1 / len(logits) if is_by_sample else len(own) / num_tokens
            loss = loss + weight * found.num_experts * (f * scores.mean(0)).sum()
        balancing.append(loss)
    return torch.stack(balancing), torch.stack(z_losses)


def probe(
    model: Any, sequences: list[list[int]], folder: Path, config: RouterConfig, micro_batches: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Probes, and the gradients of hidden states times probes; transformers itself saves these under a checkpoint's names.

    The routers' losses are part of it; aux_loss is right for a layout with these micro-batches only.
    """
    generator = torch.Generator().manual_seed(6)
    probes = [0.05 * torch.randn(len(tokens), model.config.hidden_size, generator=generator) for tokens in sequences]
    model.config._experts_implementation = "eager"  # others know no fp64
    model = model.double().requires_grad_(True)
    with routed(model) as found:
        hidden = [model.model(torch.tensor([tokens])).last_hidden_state[0] for tokens in sequences]
    is_sigmoid, topk = model.config.model_type == "deepseek_v3", model.config.num_experts_per_tok
    balancing, z_losses = router_losses(found, config, micro_batches, topk, is_sigmoid)
    loss = sum((h * p).sum() for h, p in zip(hidden, probes, strict=True))
    (loss + config.aux_loss_coeff * balancing.sum() + config.z_loss_coeff * z_losses.sum()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder)
    gradients = load_file(folder / "model.safetensors")
    assert all(gradient.any() for name, gradient in gradients.items() if "lm_head" not in name and ".experts." not in name)
    metrics = {"moe/aux_loss": float(balancing.detach().mean()) if config.aux_loss_coeff else 0.0}
    metrics |= {"moe/z_loss": float(z_losses.detach().mean()) if config.z_loss_coeff else 0.0}
    balance = {name: value for name, value in metrics.items() if value}
    return {"probes": probes, "gradients": gradients, "loads": found.loads(), "balance": balance}
