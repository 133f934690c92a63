"""Send each token to the experts that the engine used for it (routing replay, R3, arXiv 2510.11370), and prove it.

Megatron's own replay keeps the routers of all models, policy and reference, in one list, and must be told before each pass
whether it is a recomputation, which no schedule knows. Here every router of the policy has an object of its own, in the place
where the router looks for Megatron's. The experts' weights are made from the router's scores of now.

Whether the experts used are those recorded is seen in what the router returns, so that a router that does not ask here, as a
fused one, is noticed: for all tokens and layers of the first update of a process, then for one layer of each, in turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from grpo_mega.errors import MismatchError
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.types import PackedBatch, StepMetrics
from grpo_mega.weights.spec import ModelShape

_CHECKED, _WRONG, _MOVED = range(3)  # tokens of a layer: compared; sent to other experts; that the router would send to others


class Replay:
    """Knows the routers of a model's chunks on this rank; `begin` must precede each of their forward passes."""

    def __init__(self, models: Sequence[Any], shape: ModelShape, runtime: Runtime) -> None:
        """`models`: this rank's unwrapped chunks, first to last."""
        self._runtime, config = runtime, models[0].config
        assert not config.moe_router_fusion, "the fused router does not ask for experts to replay"
        self._cuts = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self._counts = torch.zeros(shape.num_layers, 3, dtype=torch.int64, device=runtime.device.torch_device)  # by layer
        self._layers = range(shape.num_dense, shape.num_layers)  # those with experts
        self._compared, self._num_checks = self._layers, 0
        self._is_off = False
        self._routers = [
            [
                _Router(layer.mlp.router, layer.layer_number - 1, layer.layer_number - 1 - shape.num_dense)
                for layer in model.decoder.layers
                if hasattr(layer.mlp, "router")
            ]
            for model in models
        ]

    def begin(self, chunk: int, batch: PackedBatch, is_update: bool) -> None:
        """Set the experts of the micro-batch whose forward pass through this chunk comes next."""
        routes = batch.routes if not self._is_off else None
        part = None if routes is None else routes.chunk(self._cuts)[self._runtime.tp_rank % self._cuts]
        for router in self._routers[chunk]:
            router.routes = None if part is None else part[:, router.column]
            router.is_update = is_update
            router.counts = self._counts[router.layer] if router.layer in self._compared else None

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let the routers choose by themselves."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False

    def check(self) -> StepMetrics:
        """After a mini-batch raise MismatchError, on all ranks, if tokens were sent to other experts than the engine's.

        Return the share of tokens that the trainer's routers would have sent to other experts, in the layers compared.
        """
        for router in (router for routers in self._routers for router in routers):
            assert not router.to_recompute, "experts were left over: a recomputation did not happen"
        counts = self._runtime.sum(self._counts).tolist()
        self._counts.zero_()
        for layer, (checked, wrong, _) in enumerate(counts):
            if wrong:
                raise MismatchError(
                    f"layer {layer} sent {wrong} of {checked} tokens to other experts than the engine did; set "
                    "rollout.routing_replay=false to go on without it"
                )
        self._compared = self._layers[self._num_checks % len(self._layers) :][:1]
        self._num_checks += 1
        checked, _, moved = map(sum, zip(*counts, strict=True))
        return {"routing/moved": moved / max(1, checked)}


class _Router:
    """Gives one router the experts that it is to use; takes the place of Megatron's RouterReplay."""

    def __init__(self, router: Any, layer: int, column: int) -> None:
        """`column`: the layer's index among those with experts."""
        self.layer, self.column = layer, column
        self.routes: Tensor | None = None  # [tokens, top_k] of the forward pass that comes next, or is under way
        self.is_update = False
        self.counts: Tensor | None = None  # [3] of what is compared
        self.to_recompute: deque[Tensor | None] = deque()  # of an update's forward passes without gradients
        self._used: Tensor | None = None  # what was returned to the pass under way
        self._was_asked = False
        router.router_replay = self
        router.register_forward_hook(self._compare)

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, choose: Callable[..., tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and the experts [tokens, top_k] that the router is to use. Named by Megatron."""
        self._used, self._was_asked = self._take(), True
        if (routes := self._used) is None:
            return choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        with torch.no_grad():
            own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)[1]
            experts = torch.where(_is_known(routes)[:, None], routes.long(), own)
            if self.counts is not None:
                is_other = (experts.sort(dim=1)[0] != own.sort(dim=1)[0]).any(dim=1)
                self.counts[_MOVED] += is_other.sum()
        return scores.gather(1, experts), experts

    def _take(self) -> Tensor | None:
        """Return the experts of this pass. Megatron recomputes with gradients what it ran without, in the same order."""
        if self.is_update and torch.is_grad_enabled() and self.to_recompute:
            return self.to_recompute.popleft()
        if self.is_update and not torch.is_grad_enabled():
            self.to_recompute.append(self.routes)
        return self.routes

    def _compare(self, router: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        wanted, self._was_asked = (self._used if self._was_asked else self.routes), False
        if self.counts is None or wanted is None:
            return
        is_known, is_used = _is_known(wanted), output[1]  # [tokens], [tokens, experts]
        experts = torch.where(is_known[:, None], wanted.long(), 0)
        is_right = is_used.gather(1, experts).all(dim=1) & (is_used.sum(dim=1) == experts.shape[1])
        self.counts[: _WRONG + 1] += torch.stack((is_known.sum(), (is_known & ~is_right).sum()))


def _is_known(routes: Tensor) -> Tensor:
    """Return True [tokens] for tokens whose experts were recorded."""
    return routes[:, 0].int() != torch.iinfo(routes.dtype).max
