"""Compare the plan's arithmetic with real Megatron on chosen ranks of the layout, without the other ranks and without a
GPU.

`rehearse` starts this module as a process, which builds and runs each rank on fake tensors in a fake process group. The
comparison covers parameters, buffers and the activations that autograd keeps, for a few micro-batches of full length.
It verifies the formulas of Megatron's local layers, but not the formulas of Transformer Engine's layers. Every expert
of an MoE model gets the same number of tokens, so the compared plan assumes no imbalance.

The process reads requests (`request_of`) from stdin, one line of JSON each. For each request it prints a line of JSON
with its counts (`run_rank`). No memory is allocated for tensors and nothing is computed, so a rank of a 70B model takes
seconds. The process replaces functions of torch.distributed permanently.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from grpo_mega.cli.planner.activations import activations
from grpo_mega.cli.planner.job import PlannedJob
from grpo_mega.cli.planner.memory import state_of
from grpo_mega.config import OptimizerConfig, PrecisionConfig

ACTIVATIONS = 0.10  # tolerance relative to the rehearsed number; state is exact
SEGMENTS = 8  # samples of equal length per micro-batch
COLLECTIVES = """
    all_reduce broadcast all_gather_into_tensor _all_gather_base reduce_scatter_tensor _reduce_scatter_base
    reduce_scatter all_to_all_single isend send irecv recv
    """.split()  # noqa: SIM905  # a list of texts is three times as long


@dataclass(frozen=True)
class Comparison:
    rank: int
    label: str
    planned: float
    rehearsed: float
    tolerance: float = 0.0

    @property
    def difference(self) -> float:
        """Return the difference relative to the rehearsed number."""
        return abs(self.planned - self.rehearsed) / max(abs(self.rehearsed), 1.0)

    @property
    def agrees(self) -> bool:
        return self.difference <= self.tolerance


def default_ranks(setup: PlannedJob) -> list[int]:
    """Return one rank each of the first, the middle and the last pipeline stage."""
    stages = sorted({0, setup.layout.pp // 2, setup.layout.pp - 1})
    places = {setup.layout.place(rank): rank for rank in range(setup.layout.world_size)}
    return [places[0, stage, 0] for stage in stages]


def rehearse(cases: Sequence[tuple[PlannedJob, Sequence[int], Mapping[str, Any]]]) -> list[list[Comparison]]:
    """Return the comparisons of each setup's ranks. A case is (setup, ranks, fields of config.json)."""
    local = []
    for setup, ranks, fields in cases:
        # Megatron's local layers have no features of Transformer Engine, and the rehearsed experts are balanced.
        config = setup.config.model_copy(update={"precision": PrecisionConfig(), "optimizer": OptimizerConfig()})
        assumed = replace(setup.assumed, expert_imbalance=1.0)
        local.append((replace(setup, config=config, uses_te=False, assumed=assumed), ranks, fields))
    requests = [request_of(setup, rank, fields) for setup, ranks, fields in local for rank in ranks]
    process = subprocess.run(
        [sys.executable, "-m", "tests.helpers.rehearsal"],
        input="".join(json.dumps(request) + "\n" for request in requests),
        capture_output=True,
        text=True,
    )
    answers = iter([json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")])
    assert process.returncode == 0, process.stderr
    return [[c for rank in ranks for c in _compare(setup, rank, next(answers))] for setup, ranks, _ in local]


def request_of(setup: PlannedJob, rank: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request for a rank that trains, with tokens per micro-batch and per segment."""
    config = setup.config.model_dump(mode="json")
    config["layout"] |= {"dp": setup.layout.dp, "engine_ranks": 0}
    config["rollout"]["placement"] = "colocated"
    return {
        "config": config,
        "model": dict(fields),
        "rank": rank,
        "world_size": setup.layout.world_size,
        "num_batches": _num_batches(setup),
        "num_tokens": setup.micro_batch_tokens,
        "segment": -(-setup.micro_batch_tokens // SEGMENTS),
    }


def _num_batches(setup: PlannedJob) -> int:
    """Return enough micro-batches to fill the pipeline. Interleaved stages start more than one round before the first
    ends.
    """
    return setup.layout.pp * (2 if setup.layout.vpp > 1 else 1)


def _compare(setup: PlannedJob, rank: int, found: Mapping[str, Any]) -> Iterator[Comparison]:
    _, pp_rank, _ = setup.layout.place(rank)
    state = state_of(setup, pp_rank)
    yield Comparison(rank, "parameters", state.num_parameters, found["num_parameters"])
    yield Comparison(rank, "weights", state.weights, found["weights"])
    yield Comparison(rank, "gradients", state.gradients, found["gradients"])
    kept = sum(activations(setup, pp_rank, padding=1.0).kept)  # segments of equal length need no padding
    yield Comparison(rank, "activations kept", kept, found["kept"], ACTIVATIONS)


def main() -> None:
    send_nothing()
    from grpo_mega.megatron import runtime as runtimes

    for line in sys.stdin:  # each request creates new groups
        request = json.loads(line)
        dist.init_process_group("fake", store=dist.HashStore(), rank=request["rank"], world_size=request["world_size"])
        print(json.dumps(run_rank(request)), flush=True)
        runtimes.stop()


def run_rank(request: dict[str, Any]) -> dict[str, Any]:
    """Return parameters, buffers and the peak bytes that autograd keeps."""
    from transformers import AutoConfig

    from grpo_mega import config as configs
    from grpo_mega.algorithm.losses import LossOutputs
    from grpo_mega.distributed.device import Device
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
    hf_config = hf_config.get_text_config()
    runtime = runtimes.arrange(config, Device("cpu", torch.device("cpu")))
    length = request["num_tokens"]
    cuts = torch.tensor([*range(0, length, request["segment"]), length], dtype=torch.int32)
    cp_size, cp_rank = runtime.layout.cp, runtime.cp_rank
    dtype, window = DTYPES[config.model.resolved_dtype], max(shape.windows, default=0)
    params = pack_params(cuts, torch.arange(length), dtype, cp_size, cp_rank, window=window)
    with FakeTensorMode(allow_non_fake_inputs=True), _patched_for_fake_tensors():
        policy = Policy(config, shape, family_of(shape.model_type), hf_config, runtime)
        policy.pipeline.packed_seq_params_of = lambda batch: params  # type: ignore[method-assign]
        kept = Kept(list(policy.parameters.values()))
        zeros, ids = torch.zeros(length), torch.zeros(length, dtype=torch.int64)
        batch = PackedBatch(
            *(ids, ids, ids, cuts, [], [], []),
            loss_mask=zeros,
            loss_weights=zeros,
            advantages=zeros,
            rollout_logprobs=zeros,
            cp_size=cp_size,
            cp_rank=cp_rank,
        )
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda x: x):
            if request["num_batches"]:  # with 0 the request only builds the model
                # This loss keeps no tensors for its backward pass. The planner counts the log-probs' tensors.
                policy.pipeline.forward_backward(
                    [batch] * request["num_batches"], lambda hidden_TH, batch: LossOutputs(hidden_TH.sum(), {}, {})
                )
    buffers = [b for chunk in policy.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    return {
        "num_parameters": sum(p.numel() for p in policy.parameters.values() if p.requires_grad),
        "weights": sum(b.param_data.nbytes for b in buffers) + sum(map(_bytes, policy.lora.frozen)),
        "gradients": sum(b.grad_data.nbytes for b in buffers),
        "kept": kept.most,
    }


class _Done:
    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def send_nothing() -> None:
    """Replace functions of torch.distributed by functions that do nothing. Call it before Megatron imports them by
    name.
    """
    for name in COLLECTIVES:
        setattr(dist, name, _named(name))
    dist.batch_isend_irecv = lambda p2p_op_list: [p2p.op(p2p.tensor, group=p2p.group) for p2p in p2p_op_list]
    for name in ("isend", "irecv", "send", "recv"):
        setattr(dist.distributed_c10d, name, getattr(dist, name))  # P2POp accepts only functions of this module
    dist.barrier = lambda *args, **kwargs: None
    make_group = dist.new_group
    # Megatron asks for gloo.
    dist.new_group = lambda *args, **kwargs: make_group(*args, **(kwargs | {"backend": None}))


def _named(name: str) -> Callable[..., _Done]:
    def done(*args: Any, **kwargs: Any) -> _Done:
        return _Done()

    done.__name__ = name
    return done


class Kept:
    """Count the bytes of storages that autograd keeps for the backward pass, without `parameters`: the peak."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._fixed = {p.untyped_storage()._cdata for p in parameters}
        self._sizes: dict[int, int] = {}  # bytes of each storage that is kept now
        self.most = 0

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes and key not in self._fixed:
            self._sizes[key] = storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._sizes.pop, key)
        return tensor

    @property
    def now(self) -> int:
        """Return the bytes that are kept now."""
        return sum(self._sizes.values())


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


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
    """Replace the dispatcher's counts: every expert gets the same number of tokens from every rank. Counts are on the
    host.
    """
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
    # The dispatcher selects the chosen tokens and their weights by the map. A fake map does not tell how many there
    # are.
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


if __name__ == "__main__":
    main()
