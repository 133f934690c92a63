"""Send each token to the experts that the engine used for it (routing replay, R3, arXiv 2510.11370), and verify it.

Megatron's own replay keeps the routers of all models, policy and reference, in one list. Before each pass it needs to know if
the pass is a recomputation, and no schedule knows that. Here each router of the policy has a separate object in the attribute
that the router reads, and routers.py passes it the routes of each micro-batch. Expert weights still come from the router's
current scores.

The check reads the experts from the router's output. So it also catches a router that bypasses the replay, such as a fused one.
It compares all tokens and layers in the first update of a process, then one layer per update, in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from grpo_mega.errors import MismatchError
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.types import PackedBatch, StepMetrics, unknown_expert
from grpo_mega.weights.spec import ModelShape

_CHECKED, _WRONG, _MOVED = range(3)  # counts of tokens: compared, sent to wrong experts, routed otherwise by the trainer


class Replay:
    def __init__(self, config: Any, shape: ModelShape, runtime: Runtime) -> None:
        """`config` is Megatron's config of the model."""
        self._runtime = runtime
        assert not config.moe_router_fusion, "the fused router does not ask for experts to replay"
        self._cuts = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self._counts = torch.zeros(shape.num_layers, 3, dtype=torch.int64, device=runtime.device.torch_device)
        self._layers = range(shape.num_dense, shape.num_layers)  # layers with experts
        self._compared, self._num_checks = self._layers, 0
        self._is_off = False

    def attach(self, router: Any) -> Replayed:
        """Make a router ask for the experts that it must use."""
        layer = router.layer_number - 1
        return Replayed(router, layer, layer - self._layers.start, self._counts[layer])

    def part_of(self, batch: PackedBatch) -> Tensor | None:
        """Return the experts [t, MoE layers, top_k] of the tokens that this rank's routers see; None if the routers choose."""
        if batch.routes is None or self._is_off:
            return None
        return batch.routes.chunk(self._cuts)[self._runtime.tp_rank % self._cuts]

    def is_compared(self, layer: int) -> bool:
        return layer in self._compared

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let the routers choose the experts inside the context."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False

    def check(self) -> StepMetrics:
        """Raise MismatchError on all ranks if a token of the mini-batch was not sent to the engine's experts.

        Return the share of tokens that the trainer's routers would have sent to other experts, over the compared layers.
        """
        counts = self._runtime.sum(self._counts).tolist()
        self._counts.zero_()
        for layer, (checked, wrong, _) in enumerate(counts):
            if wrong:
                raise MismatchError(
                    f"layer {layer} sent {wrong} of {checked} tokens to other experts than the engine did; set "
                    "rollout.routing_replay=false to continue without it"
                )
        self._compared = self._layers[self._num_checks % len(self._layers) :][:1]
        self._num_checks += 1
        checked, _, moved = map(sum, zip(*counts, strict=True))
        return {"routing/moved": moved / max(1, checked)}


class Replayed:
    """The experts that one router must use. Replaces Megatron's RouterReplay."""

    def __init__(self, router: Any, layer: int, column: int, counts: Tensor) -> None:
        """`column` is the layer's index among the MoE layers. `counts` [3] is the layer's row of counts."""
        self.layer, self._column, self._counts = layer, column, counts
        self._routes: Tensor | None = None  # [t, top_k], experts of the current pass
        self._is_compared = False
        router.router_replay = self
        router.register_forward_hook(self._compare)

    def start(self, routes: Tensor | None, is_compared: bool) -> None:
        """Set the experts [t, MoE layers, top_k] of the pass that starts; None if the router chooses."""
        self._routes = None if routes is None else routes[:, self._column]
        self._is_compared = is_compared

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, choose: Callable[..., tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and the experts [tokens, top_k] that the router must use. Megatron calls it by this name."""
        if (routes := self._routes) is None:
            return choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        with torch.no_grad():
            own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)[1]
            experts = torch.where(_is_known(routes)[:, None], routes.long(), own)
            if self._is_compared:
                is_other = (experts.sort(dim=1)[0] != own.sort(dim=1)[0]).any(dim=1)
                self._counts[_MOVED] += is_other.sum()
        return scores.gather(1, experts), experts

    def _compare(self, router: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        if (routes := self._routes) is None or not self._is_compared:
            return
        is_known, is_used = _is_known(routes), output[1]  # [tokens], [tokens, experts]
        experts = torch.where(is_known[:, None], routes.long(), 0)
        is_right = is_used.gather(1, experts).all(dim=1) & (is_used.sum(dim=1) == experts.shape[1])
        self._counts[: _WRONG + 1] += torch.stack((is_known.sum(), (is_known & ~is_right).sum()))


def _is_known(routes: Tensor) -> Tensor:
    """Return a bool [tokens]: True if the token's experts were recorded."""
    return routes[:, 0].int() != unknown_expert(routes.dtype)
