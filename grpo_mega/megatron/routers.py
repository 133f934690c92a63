"""The routers of an MoE model during updates: loads of their experts, balancing losses, the bias per expert, routing
replay.

Only an update's forward passes count. Passes for log-probs, recomputation and padding do not. Megatron's own losses are
off, because they expect a later division by tokens, depend on the number of micro-batches, and lose the padding mask
under sequence and pipeline parallelism. Here a loss is its coefficient times an average, added for every MoE layer:

seq_aux_loss  experts * sum over experts of f P for each sample, averaged over the samples of the mini-batch, however
              they are packed; f is the share of the sample's choices that fell on the expert, P the mean of its scores
aux_loss      the same sum over all samples of a micro-batch, averaged over micro-batches in proportion to their tokens
z_loss        squared logsumexp of the logits (arXiv 2202.08906), averaged over the tokens of the mini-batch

Prompt and response tokens count. f counts the best scores, without bias, groups or replay. The bias moves as in
DeepSeek-V3 (arXiv 2412.19437, 2.1.2), but only with optimizer steps that are taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from torch import Tensor

from grpo_mega.batching.layout import segments
from grpo_mega.config import RouterConfig
from grpo_mega.errors import MismatchError
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.types import PackedBatch, StepMetrics, unknown_expert
from grpo_mega.weights.spec import ModelShape

_AUX, _Z, _TOKENS = -3, -2, -1  # columns of sums, after one column per expert
# Counts of tokens: compared, sent to wrong experts, routed otherwise by the trainer.
_CHECKED, _WRONG, _MOVED = range(3)
_UNLIMITED = 1e9  # a capacity factor at which Megatron drops nothing


def settings(config: RouterConfig) -> dict[str, Any]:
    """Return Megatron's settings. Fused routing would bypass these losses and the replayed routes."""
    return {
        "moe_router_dtype": "fp32",
        "moe_router_fusion": False,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": 0.0,  # Megatron would move the bias in every pass, even if the update is dropped
        # Megatron lets padding use up capacity, so tokens are dropped here. Its dispatcher must know that some are
        # dropped.
        "moe_expert_capacity_factor": None if config.capacity_factor is None else _UNLIMITED,
    }


@dataclass
class _Tokens:
    """A micro-batch as this rank's routers see it: t of its T tokens, in groups. A loss is averaged over a group."""

    is_real_t: Tensor  # bool, False for padding
    groups_t: Tensor  # int64, group of each token
    lengths_G: Tensor  # tokens per group, over all ranks that share the row
    weights_G: Tensor  # weight of each group in the mini-batch's loss


@dataclass
class _Pass:
    """A micro-batch's pass through a router."""

    tokens: _Tokens | None = None  # set in updates, and in all passes with a capacity factor
    is_counted: bool = False  # True in updates only
    routes: Tensor | None = None  # experts to replay, see Replay.part_of


@dataclass
class _Watched:
    router: Any
    layer: int  # index, from 0
    route: Any  # Megatron's routing function
    replayed: Replayed | None = None
    announced: _Pass | None = None  # the announced pass, until its forward pass runs
    to_recompute: deque[_Pass] = field(default_factory=deque)  # backward passes come in the order of forward passes


class Routers:
    def __init__(
        self,
        models: Sequence[Any],
        config: RouterConfig,
        runtime: Runtime,
        num_layers: int,
        replay: Replay | None = None,
    ) -> None:
        """Watch the routers of this rank's unwrapped chunks. A dense model has none."""
        self._config, self._runtime, self._replay = config, runtime, replay
        self._chunks = [[_Watched(r, r.layer_number - 1, r.routing) for r in routers_of(model)] for model in models]
        self._watched = [watched for chunk in self._chunks for watched in chunk]
        self._dispatchers = [layer.mlp.token_dispatcher for model in models for layer in moe_layers_of(model)]
        self.is_moe = models[0].config.num_moe_experts is not None
        self._topk: int = models[0].config.moe_router_topk
        width = (models[0].config.num_moe_experts or 0) + 3
        self._sums_LC = torch.zeros(num_layers, width, dtype=torch.float64, device=runtime.device.torch_device)
        self._totals = torch.ones(2, device=runtime.device.torch_device)  # samples and tokens of the mini-batch
        self._is_updating = False
        self.loads: list[
            list[int]
        ] = []  # tokens per layer and expert in the last mini-batch, over all ranks; dense layers: []
        for watched in self._watched:
            watched.replayed = replay.attach(watched.router) if replay else None
            watched.router.routing = partial(self._routing, watched)

    @contextmanager
    def updating(self, batches: Sequence[PackedBatch]) -> Iterator[None]:
        """Count loads and add the losses' gradients inside. `batches` are this rank's micro-batches of a mini-batch."""
        self._sums_LC.zero_()
        if self._config.aux_loss_coeff or self._config.z_loss_coeff:
            lengths, layout = [n for batch in batches for n in batch.lengths], self._runtime.layout
            mine = torch.stack([self._totals.new_full((), count) for count in (len(lengths), sum(lengths))])
            self._totals = self._runtime.sum(mine) / (layout.tp * layout.cp * layout.pp)  # so many ranks share samples
        self._is_updating = True
        try:
            yield
        finally:
            self._is_updating = False
            # Megatron's dispatchers keep tensors from their last pass. The autograd graphs of these tensors lead back
            # to the model, and the garbage collector cannot follow them. In a process that builds another model,
            # memory and process groups would never be freed.
            flex = [d._comm_manager for d in self._dispatchers if hasattr(d, "_comm_manager")]
            for dispatcher in (*self._dispatchers, *flex):
                kept = vars(dispatcher)
                has_graph = {name for name, v in kept.items() if isinstance(v, Tensor) and v.grad_fn is not None}
                kept.update(dict.fromkeys(has_graph))
        assert not any(watched.announced or watched.to_recompute for watched in self._watched)

    def start(self, chunk: int, batch: PackedBatch) -> None:
        """Announce the micro-batch of the chunk's next forward pass."""
        if self._chunks[chunk]:
            is_needed = self._is_updating or self._config.capacity_factor is not None
            tokens = self._tokens_of(batch) if is_needed else None
            routes = self._replay.part_of(batch) if self._replay else None
            for watched in self._chunks[chunk]:
                watched.announced = _Pass(tokens, self._is_updating, routes)

    def choosing(self) -> AbstractContextManager[None]:
        """Let the routers choose the experts inside the context, even if replay is on."""
        return self._replay.off() if self._replay else nullcontext()

    def metrics(self) -> StepMetrics:
        """Return the metrics of the mini-batch, identical on all ranks. Loads are relative to a layer's mean.

        Raise MismatchError if replayed tokens went to other experts than the engine's.
        """
        if not self.is_moe:
            return {}
        rows = self._runtime.sum(self._sums_LC.clone()).cpu()
        self.loads = [row[:_AUX].int().tolist() if row[_TOKENS] else [] for row in rows]
        rows = rows[rows[:, _TOKENS] > 0]  # layers with experts
        relative = rows[:, :_AUX] / rows[:, :_AUX].mean(dim=1, keepdim=True)
        metrics = {
            "moe/load_max": float(relative.amax()),
            "moe/load_mean": float(relative.amax(dim=1).mean()),
            "moe/idle_experts": float((relative == 0).sum()),
        }
        if self._config.capacity_factor is not None:
            metrics["moe/dropped_tokens"] = 1.0 - float(rows[:, :_AUX].sum() / (self._topk * rows[:, _TOKENS].sum()))
        if self._config.aux_loss_coeff:
            metrics["moe/aux_loss"] = float(rows[:, _AUX].mean())
        if self._config.z_loss_coeff:
            metrics["moe/z_loss"] = float(rows[:, _Z].mean())
        return metrics | (self._replay.check() if self._replay else {})

    @torch.no_grad()
    def move_biases(self) -> None:
        """Raise the biases of experts below their layer's mean load in the last mini-batch. Lower the biases above
        it.
        """
        for watched in self._watched if self._config.bias_update_rate else ():
            load_E = torch.tensor(self.loads[watched.layer], dtype=torch.float64)
            bias_E = watched.router.expert_bias
            bias_E += (self._config.bias_update_rate * torch.sign(load_E.mean() - load_E)).to(bias_E)

    def _tokens_of(self, batch: PackedBatch) -> _Tokens:
        (all_samples, all_tokens), num_samples = self._totals.unbind(), len(batch.lengths)
        groups_T = segments(batch).clamp(max=num_samples)
        lengths_G = batch.padded_lengths  # the last group is padding
        if lengths_G is None:  # not from layout.to_device
            lengths_G = torch.tensor([*batch.lengths, 0], device=groups_T.device)
        is_real_T = batch.position_ids < lengths_G[groups_T]
        groups_T, weights_G = groups_T.where(is_real_T, num_samples), (lengths_G > 0) / all_samples
        if self._config.balancing == "aux_loss":
            groups_T, lengths_G = (~is_real_T).long(), torch.stack([lengths_G.sum(), torch.ones_like(lengths_G[0])])
            weights_G = torch.stack([lengths_G[0] / all_tokens, torch.zeros_like(all_tokens)])
        t = batch.num_tokens // self._runtime.layout.tp
        mine = slice(t * self._runtime.tp_rank, t * (self._runtime.tp_rank + 1))
        return _Tokens(is_real_T[mine], groups_T[mine], lengths_G, weights_G)

    def _routing(self, watched: _Watched, logits: Tensor, padding_mask: None = None) -> tuple[Tensor, Tensor]:
        """Replace the router's `routing`. `logits` are [t, 1, experts]."""
        current, has_grad = watched.announced, torch.is_grad_enabled()
        watched.announced, is_first = None, current is not None  # otherwise this is a recomputation
        if current is None:
            current = watched.to_recompute.popleft() if watched.to_recompute and has_grad else _Pass()
        elif current.is_counted and not has_grad:
            watched.to_recompute.append(current)
        if self._replay and watched.replayed:
            watched.replayed.start(current.routes, self._replay.is_compared(watched.layer))
        if (tokens := current.tokens) is None or not current.is_counted:
            probs, routing_map = watched.route(logits, padding_mask)
            return self._within_capacity(probs, routing_map, tokens)
        sums_C = self._sums_LC[watched.layer]
        if has_grad and self._config.z_loss_coeff:
            z_loss = (torch.logsumexp(logits[:, 0].float(), dim=-1).square() * tokens.is_real_t).sum() / self._totals[1]
            sums_C[_Z] += z_loss.detach()
            logits = MoEAuxLossAutoScaler.apply(logits, self._config.z_loss_coeff * z_loss)
        probs, routing_map = watched.route(logits, padding_mask)
        probs, routing_map = self._within_capacity(probs, routing_map, tokens)
        if is_first:
            sums_C[:_AUX] += (routing_map & tokens.is_real_t[:, None]).sum(dim=0)
            sums_C[_TOKENS] += tokens.is_real_t.sum()
        if has_grad and self._config.aux_loss_coeff:
            aux_loss = self._aux_loss(watched.router, logits[:, 0], tokens)
            sums_C[_AUX] += aux_loss.detach()
            probs = MoEAuxLossAutoScaler.apply(probs, self._config.aux_loss_coeff * aux_loss)
        return probs, routing_map

    def _within_capacity(self, probs_tE: Tensor, map_tE: Tensor, tokens: _Tokens | None) -> tuple[Tensor, Tensor]:
        """Drop each expert's choices beyond its capacity, smallest weights first. Padding chooses nothing.

        The capacity is computed for the whole row, gathered from the ranks that share it. Samples of one prompt can
        have equal weights. Then the first in the row stay, so the row's length does not matter.
        """
        if self._config.capacity_factor is None or tokens is None:
            return probs_tE, map_tE
        with torch.no_grad():
            chosen_tE = map_tE & tokens.is_real_t[:, None]
            weights_tE = probs_tE.float().masked_fill(~chosen_tE, -1.0)
            group = parallel_state.get_tensor_and_context_parallel_group()
            parts = [torch.empty_like(weights_tE) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, weights_tE.contiguous(), group=group)
            weights_TE, first = torch.cat(parts), dist.get_rank(group) * len(weights_tE)
            num_real = (weights_TE >= 0).any(dim=1).sum(dtype=torch.float64)
            capacity = (num_real * self._topk / weights_TE.shape[1] * self._config.capacity_factor).ceil()
            order_TE = weights_TE.argsort(dim=0, descending=True, stable=True)
            places = torch.arange(len(order_TE), device=order_TE.device)[:, None].expand_as(order_TE)
            rank_TE = torch.empty_like(order_TE).scatter_(0, order_TE, places)
            kept_tE = chosen_tE & (rank_TE < capacity)[first : first + len(chosen_tE)]
        return probs_tE * kept_tE, kept_tE

    def _aux_loss(self, router: Any, logits_tE: Tensor, tokens: _Tokens) -> Tensor:
        """Return this rank's part of the loss of its row. Only the scores have a gradient."""
        chosen_tE, scores_tE = compute_routing_scores_for_aux_loss(logits_tE, router.topk, router.score_function)
        none_GE = scores_tE.new_zeros(len(tokens.weights_G), scores_tE.shape[1])
        counts_GE = none_GE.index_add(0, tokens.groups_t, chosen_tE.to(none_GE))
        dist.all_reduce(counts_GE, group=parallel_state.get_tensor_and_context_parallel_group())
        products_G = (counts_GE * none_GE.index_add(0, tokens.groups_t, scores_tE)).sum(dim=1)
        num_experts = scores_tE.shape[1]
        return (
            tokens.weights_G * products_G * num_experts / (router.topk * tokens.lengths_G.clamp(min=1).square())
        ).sum()


class Replay:
    """Send each token to the experts that the engine used for it (routing replay, R3, arXiv 2510.11370), and verify it.

    Megatron's own replay keeps the routers of all models, policy and reference, in one list. Before each pass it needs
    to know if the pass is a recomputation, and no schedule knows that. Here each router of the policy has a separate
    object in the attribute that the router reads, and `Routers` passes it the routes of each micro-batch. Expert
    weights still come from the router's current scores.

    The check reads the experts from the router's output. So it also catches a router that bypasses the replay, such as
    a fused one. It compares all tokens and layers in the first update of a process, then one layer per update, in turn.
    """

    def __init__(self, config: Any, shape: ModelShape, runtime: Runtime, policy: Any) -> None:
        """`config` is Megatron's config of the model. `policy` is a weak reference, as Megatron keeps routers."""
        self._runtime, self._policy = runtime, policy
        assert not config.moe_router_fusion, "the fused router does not ask for experts to replay"
        self._cuts = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self._counts = torch.zeros(shape.num_layers, 3, dtype=torch.int64, device=runtime.device.torch_device)
        self._layers = range(shape.num_dense, shape.num_layers)  # layers with experts
        self._has_checked = self._is_off = False

    def attach(self, router: Any) -> Replayed:
        """Make a router ask for the experts that it must use."""
        layer = router.layer_number - 1
        return Replayed(router, layer, layer - self._layers.start, self._counts[layer])

    def part_of(self, batch: PackedBatch) -> Tensor | None:
        """Return the experts [t, MoE layers, top_k] of the tokens that this rank's routers see; None if the routers
        choose.
        """
        if batch.routes is None or self._is_off:
            return None
        return batch.routes.chunk(self._cuts)[self._runtime.tp_rank % self._cuts]

    @property
    def _measured(self) -> Sequence[int]:
        """Return the layers of this update's metric. They depend only on the run, so that a resume changes no
        metric.
        """
        number = self._policy().optimizer_step
        return self._layers[(number - 1) % len(self._layers) :][:1] if number else self._layers

    def is_compared(self, layer: int) -> bool:
        return not self._has_checked or layer in self._measured

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

        Return the share of tokens that the trainer's routers would have sent to other experts, over the measured
        layers.
        """
        counts = self._runtime.sum(self._counts).tolist()
        self._counts.zero_()
        for layer, (checked, wrong, _) in enumerate(counts):
            if wrong:
                raise MismatchError(
                    f"layer {layer} sent {wrong} of {checked} tokens to other experts than the engine did; set "
                    "rollout.routing_replay=false to continue without it"
                )
        self._has_checked = True
        checked, _, moved = map(sum, zip(*(counts[layer] for layer in self._measured), strict=True))
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
        """Return the scores and the experts [tokens, top_k] that the router must use. Megatron calls it by this
        name.
        """
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


def moe_layers_of(model: Any) -> list[Any]:
    """Return the MoE layers of an unwrapped chunk, first to last."""
    return [layer for layer in model.decoder.layers if hasattr(layer.mlp, "router")]


def routers_of(model: Any) -> list[Any]:
    return [layer.mlp.router for layer in moe_layers_of(model)]
