"""The cases that the layout tests hand to their ranks, besides grpo_mega.commands.check's cases."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import VOCAB_SIZE
from safetensors.torch import load_file

from grpo_mega.config import Config
from grpo_mega.rollout.routes import Routers, extended
from grpo_mega.types import Group, Prompt, Routes, Sample
from grpo_mega.weights.spec import ModelShape


@dataclass(frozen=True)
class LogitsCase:
    name: str
    config: Config
    sequences: list[list[int]]
    expected: list[torch.Tensor]  # of each sequence, [length, vocab] fp32
    probes: list[torch.Tensor] = field(default_factory=list)  # [length, hidden]: the loss is hidden times probe; none: no pass
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # of that loss, by the checkpoint's names, fp64
    routes: list[Routes] = field(default_factory=list)  # of each sequence; none: routed as the model itself does

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


def random_routes(routers: Routers, num_tokens: int, seed: int) -> Routes:
    """Experts that no router chose, for all but the last token; those of a fifth of the tokens are not known."""
    random = np.random.default_rng(seed)
    experts = routers.not_known(num_tokens - 1)
    for token in np.flatnonzero(random.random(len(experts)) < 0.8):
        experts[token] = [random.permutation(routers.num_experts)[: routers.top_k] for _ in experts[token]]
    return extended(None, experts)


def force_routes(model: Any, routes: list[Routes]) -> None:
    """Have transformers' routers send the tokens to these experts, where they are known, one sequence after the other, again
    and again. The weights are made of the routers' scores, in the precision of the model."""
    state = {"sequence": -1}

    def next_sequence(*_: Any) -> None:
        state["sequence"] = (state["sequence"] + 1) % len(routes)

    def experts_of(column: int, own: torch.Tensor) -> torch.Tensor:
        known = routes[state["sequence"]].experts[:, column].astype(np.int64)  # all tokens but the last
        forced = torch.cat((torch.from_numpy(known), own[-1:]))
        return torch.where(forced < 250, forced, own)

    def of_softmax(column: int, router: Any, inputs: Any, output: Any) -> Any:
        logits, _, own = output
        experts = experts_of(column, own)
        weights = logits.softmax(-1).gather(1, experts)
        normalised = weights / weights.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else weights
        return logits, normalised, experts

    def of_sigmoid(column: int, block: Any, choose: Any, logits: torch.Tensor) -> Any:
        experts = experts_of(column, choose(logits)[0])
        weights = logits.sigmoid().gather(1, experts)
        return experts, weights / weights.sum(-1, keepdim=True) * block.routed_scaling_factor

    model.model.register_forward_pre_hook(next_sequence)
    blocks = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    for column, block in enumerate(blocks):
        if hasattr(block, "route_tokens_to_experts"):
            block.route_tokens_to_experts = partial(of_sigmoid, column, block, block.route_tokens_to_experts)
        else:
            block.gate.register_forward_hook(partial(of_softmax, column))


def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (5, 17, 2, 30, 11, 24, 9)]


def random_groups(seed: int) -> list[Group]:
    """Six groups of four ragged samples; one without spread, one sample without a reward."""
    generator = torch.Generator().manual_seed(seed)

    def ints(n: int) -> list[int]:
        return torch.randint(2, VOCAB_SIZE, (n,), generator=generator).tolist()

    groups = []
    for g in range(6):
        prompt = Prompt(g, "", tuple(ints(3 + g)), "")
        samples = []
        for i in range(4):
            length = int(torch.randint(1, 24, (1,), generator=generator))
            logprobs = (-5.3 + 0.3 * torch.randn(length, generator=generator)).tolist()  # near those of a random model
            reward = 1.0 if g == 2 else float(torch.rand(1, generator=generator))
            sample = Sample(prompt, i, ints(length), logprobs, "stop" if length < 20 else "length", 0)
            if not g == i == 1:
                sample.reward = reward
                sample.step_ends = sorted({length // 3, length - 1})
                sample.step_rewards = torch.rand(len(sample.step_ends), generator=generator).tolist()
            samples.append(sample)
        groups.append(Group(prompt, samples))
    return groups


def routes_of(model: Any, lengths: Iterable[int]) -> list[Routes]:
    shape = ModelShape.from_hf_config(model.config.to_dict())
    routers = Routers.of(shape, model.config)
    return [random_routes(routers, length, seed) for seed, length in enumerate(lengths)]
