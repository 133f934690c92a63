"""Build and run one rank of a layout without the other ranks: real Megatron on fake tensors, in a fake process group.

`python -m grpo_mega.megatron.rehearsal` reads requests from stdin, one line of JSON each: config, model (the fields of its
config.json), rank, world_size, num_batches, num_tokens (per micro-batch) and segment (tokens per sample). For each request it
prints a line of JSON with its counts: parameters, the bytes that this rank sends by group and kind, and the peak bytes that
autograd keeps for the backward pass. No memory is allocated for tensors and nothing is computed, so a rank of a 70B model takes
seconds. Tokens of an MoE model have no values to route by, so they are spread evenly over the experts. Run it in a separate
process, because it replaces functions of torch.distributed permanently.
"""

from __future__ import annotations

import contextlib
import json
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from grpo_mega import console

CONTEXT = "CONTEXT_PARALLEL_GROUP"  # Megatron's description of the group that shares a sequence


class _Done:
    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Counted:
    """Count the bytes that this rank sends to other ranks with ring algorithms, by participating ranks."""

    def __init__(self) -> None:
        self.sent: Counter[tuple[tuple[int, ...], str, bool]] = Counter()  # keys: ranks, function, is context-parallel

    def add(self, group: dist.ProcessGroup | None, name: str, num_bytes: float) -> None:
        ranks = dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
        if len(ranks) > 1:
            self.sent[tuple(ranks), name, group is not None and group.group_desc == CONTEXT] += int(num_bytes)

    def install(self) -> None:
        """Replace the functions of torch.distributed. Call it before Megatron imports them by name."""
        for name, share in (
            ("all_reduce", lambda n, tensor: 2 * _bytes(tensor) * (n - 1) / n),
            ("broadcast", lambda n, tensor: _bytes(tensor)),
            ("all_gather_into_tensor", lambda n, output, given: _bytes(given) * (n - 1)),
            ("_all_gather_base", lambda n, output, given: _bytes(given) * (n - 1)),
            ("reduce_scatter_tensor", lambda n, output, given: _bytes(given) * (n - 1) / n),
            ("_reduce_scatter_base", lambda n, output, given: _bytes(given) * (n - 1) / n),
            ("reduce_scatter", lambda n, output: _bytes(output) * (n - 1)),  # its input is a list, not a tensor
            ("all_to_all_single", lambda n, output, given, *sizes: _bytes(given) * (n - 1) / n),
        ):
            setattr(dist, name, self._collective(name, share))
        setattr(dist, "batch_isend_irecv", self._batch)  # noqa: B010  # setattr allows a replacement of another type
        for name in ("isend", "irecv", "send", "recv"):
            setattr(dist, name, self._point_to_point(name))
            setattr(dist.distributed_c10d, name, getattr(dist, name))  # P2POp accepts only functions of this module
        dist.barrier = lambda *args, **kwargs: None

    def _collective(self, name: str, share: Callable[..., float]) -> Callable[..., _Done]:
        def counted(*args: Any, **kwargs: Any) -> _Done:
            tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
            group = next((v for v in (*args, *kwargs.values()) if isinstance(v, dist.ProcessGroup)), None)
            size = group.size() if group is not None else dist.get_world_size()
            self.add(group, name, share(size, *tensors))
            return _Done()

        counted.__name__ = name
        return counted

    def _point_to_point(self, name: str) -> Callable[..., _Done]:
        def counted(tensor: Tensor, *args: Any, group: Any = None, **kwargs: Any) -> _Done:
            if "send" in name:
                self.add(group, name, _bytes(tensor))
            return _Done()

        counted.__name__ = name
        return counted

    def _batch(self, operations: Sequence[Any]) -> list[Any]:
        for operation in operations:
            operation.op(operation.tensor, group=operation.group)
        return [_Done()]


class Kept:
    """Count the bytes of storages that autograd keeps for the backward pass, without `parameters`: current and peak."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._fixed = {p.untyped_storage()._cdata for p in parameters}
        self._seen: set[int] = set()
        self.now = self.most = 0

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._seen and key not in self._fixed:
            self._seen.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._drop, key, size)
        return tensor

    def _drop(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def main() -> None:
    counted = Counted()
    counted.install()
    make_group = dist.new_group
    dist.new_group = lambda *args, **kwargs: make_group(*args, **(kwargs | {"backend": None}))  # Megatron asks for gloo
    from grpo_mega.megatron import runtime as runtimes

    for line in sys.stdin:  # each request creates new groups
        request = json.loads(line)
        dist.init_process_group("fake", store=dist.HashStore(), rank=request["rank"], world_size=request["world_size"])
        print(json.dumps(rehearse(request, counted)), flush=True)
        runtimes.stop()


def rehearse(request: dict[str, Any], counted: Counted) -> dict[str, Any]:
    from transformers import AutoConfig

    from grpo_mega import config as configs
    from grpo_mega.distributed.device import Device
    from grpo_mega.megatron import optimizer as optimizers
    from grpo_mega.megatron import runtime as runtimes
    from grpo_mega.megatron.attention import pack_params
    from grpo_mega.megatron.policy import Policy
    from grpo_mega.megatron.precision import DTYPES
    from grpo_mega.types import PackedBatch
    from grpo_mega.weights.families import family_of
    from grpo_mega.weights.spec import ModelShape

    config = configs.validate(request["config"])
    hf_config = AutoConfig.for_model(**request["model"])
    shape = ModelShape.from_hf_config(hf_config.to_dict())
    runtime = runtimes.arrange(config, Device("cpu", torch.device("cpu")))
    length = request["num_tokens"]
    cuts = torch.tensor([*range(0, length, request["segment"]), length], dtype=torch.int32)
    cp_size, cp_rank = runtime.layout.cp, runtime.cp_rank
    params = pack_params(cuts, torch.arange(length), DTYPES[config.model.dtype], cp_size, cp_rank)
    counted.sent.clear()
    with FakeTensorMode(allow_non_fake_inputs=True), _patched_for_fake_tensors():
        policy = Policy(config, shape, family_of(shape.model_type), hf_config, runtime)
        policy.pipeline.packed_seq_params_of = lambda batch: params  # type: ignore[method-assign]
        kept = Kept(list(policy.parameters.values()))
        zeros, ids = torch.zeros(length), torch.zeros(length, dtype=torch.int64)
        batch = PackedBatch(ids, ids, ids, cuts, zeros, zeros, zeros, zeros, [], [], cp_size=cp_size, cp_rank=cp_rank)
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda x: x):
            if request["num_batches"]:  # with 0 the request only builds the model
                policy.pipeline.forward_backward([batch] * request["num_batches"], _sum_of_hidden)
        if not config.layout.overlap_param_gather:  # with overlap the first pass has gathered them
            optimizers.gather_parameters(policy.chunks)  # an optimizer step gathers them
    buffers = [b for chunk in policy.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    return {
        "num_parameters": sum(p.numel() for p in policy.parameters.values() if p.requires_grad),
        "weights": sum(b.param_data.nbytes for b in buffers),
        "gradients": sum(b.grad_data.nbytes for b in buffers),
        "kept": kept.most,
        "sent": [[list(key[0]), key[1], sent, key[2]] for key, sent in sorted(counted.sent.items())],
    }


@contextlib.contextmanager
def _patched_for_fake_tensors() -> Iterator[None]:
    """Patch moves and random states, because fake tensors have none, and expert routing, because it depends on values.

    Fake tensors are created on the right device in the right dtype.
    """
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as Dispatcher

    module: Any = torch.nn.Module
    tensor: Any = Tensor
    before = module.to, module.bfloat16, torch.set_rng_state, tensor.masked_select, Dispatcher.preprocess
    CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    module.to = module.bfloat16 = lambda self, *args, **kwargs: self
    torch.set_rng_state = lambda new_state: None
    Dispatcher.preprocess = _spread_evenly
    try:
        yield
    finally:
        module.to, module.bfloat16, torch.set_rng_state, tensor.masked_select, Dispatcher.preprocess = before


def _spread_evenly(dispatcher: Any, routing_map_TE: Tensor) -> np.ndarray:
    """Replace the dispatcher's counts: every expert gets the same number of tokens from every rank. Counts are on the host."""
    (num_tokens, num_experts), num_local = routing_map_TE.shape, dispatcher.num_local_experts
    num_chosen = num_tokens * dispatcher.config.moe_router_topk
    counts = np.full(num_experts, num_chosen // num_experts)
    counts[: num_chosen % num_experts] += 1
    mine = counts[dispatcher.local_expert_indices]
    ep, tp = dispatcher.ep_size, dispatcher.tp_size
    dispatcher.num_out_tokens = num_chosen
    dispatcher.input_splits = counts.reshape(ep, num_local).sum(axis=1).tolist()
    dispatcher.output_splits = [int(mine.sum())] * ep
    dispatcher.output_splits_tp = np.full(tp, ep * mine.sum())
    dispatcher.num_global_tokens_per_local_expert = np.tile(mine, (tp * ep, 1))
    places = np.arange(num_experts * tp)
    dispatcher.sort_input_by_local_experts = places.reshape(-1, num_local).T.ravel()
    dispatcher.restore_output_by_local_experts = places.reshape(num_local, -1).T.ravel()
    # The dispatcher selects the chosen tokens and their weights by the map. A fake map does not tell how many there are.
    select: Any = _Select.apply
    tensor: Any = Tensor
    tensor.masked_select = lambda values, mask: select(values, mask, num_chosen)
    return tp * ep * mine


class _Select(torch.autograd.Function):
    """Select a given number of elements. Like Tensor.masked_select, keep values and mask for the backward pass."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(values, mask)
        return values.new_empty(size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return torch.empty_like(ctx.saved_tensors[0]), None, None


def _sum_of_hidden(hidden_TH: Tensor, batch: Any) -> Any:
    """Return a loss that keeps no tensors for its backward pass. The planner counts the log-probs' tensors by formulas."""
    from grpo_mega.algorithm.losses import LossOutputs

    return LossOutputs(hidden_TH.sum(), {}, {})


if __name__ == "__main__":
    console.install()
    main()
