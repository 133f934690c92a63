"""Random experts that no router selected, and transformers models forced to use them: the oracle of routing replay."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch

from grpo_mega.rollout.routes import RouterSizes, with_routes_of
from grpo_mega.types import Routes
from grpo_mega.weights.spec import ModelShape


def routes_of(model: Any, lengths: Iterable[int]) -> list[Routes]:
    shape = ModelShape.from_hf_config(model.config.to_dict())
    routers = RouterSizes.of(shape, model.config)
    return [random_routes(routers, length, seed) for seed, length in enumerate(lengths)]


def random_routes(routers: RouterSizes, num_tokens: int, seed: int) -> Routes:
    """Return random experts for all but the last token; the experts of a fifth of the tokens are unknown."""
    random = np.random.default_rng(seed)
    experts = routers.not_known(num_tokens - 1)
    for token in np.flatnonzero(random.random(len(experts)) < 0.8):
        experts[token] = [random.permutation(routers.num_experts)[: routers.top_k] for _ in experts[token]]
    return with_routes_of(None, experts)


def force_routes(model: Any, routes: list[Routes]) -> None:
    """Make transformers' routers use these experts for tokens whose experts are known. Each forward pass takes the next
    sequence, cyclically. The expert weights come from the routers' scores, in the precision of the model."""
    state = {"sequence": -1}

    def next_sequence(*_: Any) -> None:
        state["sequence"] = (state["sequence"] + 1) % len(routes)

    def experts_of(column: int, own: torch.Tensor) -> torch.Tensor:
        known = routes[state["sequence"]].experts[:, column].astype(np.int64)  # all tokens but the last
        forced = torch.cat((torch.from_numpy(known).to(own.device), own[-1:]))
        return torch.where(forced < 250, forced, own)

    def of_gate(column: int, router: Any, inputs: Any, output: Any) -> Any:
        logits, _, own = output
        experts = experts_of(column, own)
        if hasattr(router, "e_score_correction_bias"):  # transformers 5.19; before, only its block chooses experts
            return logits, _normalised(logits.sigmoid().gather(1, experts)) * router.routed_scaling_factor, experts
        weights = logits.softmax(-1).gather(1, experts)
        normalised = _normalised(weights) if getattr(router, "norm_topk_prob", True) else weights
        return logits, normalised, experts

    def of_block(column: int, block: Any, choose: Any, logits: torch.Tensor) -> Any:
        experts = experts_of(column, choose(logits)[0])
        weights = logits.sigmoid().gather(1, experts)
        return experts, _normalised(weights) * block.routed_scaling_factor

    model.model.register_forward_pre_hook(next_sequence)
    blocks = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    for column, block in enumerate(blocks):
        if hasattr(block, "route_tokens_to_experts"):
            block.route_tokens_to_experts = partial(of_block, column, block, block.route_tokens_to_experts)
        else:
            block.gate.register_forward_hook(partial(of_gate, column))


def _normalised(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum(-1, keepdim=True)
