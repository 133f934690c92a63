"""Changes to a training step that are not in the config, because nobody has measured them on a card.

`tools/benchmarks/gpu --only mfu --try NAME` compares a step with and without one. Each change patches the product's
code for as long as its context lasts. The README has the gain that each may bring, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from grpo_mega.algorithm import logprobs
from grpo_mega.errors import ConfigError

CACHED_TILE = (2048, 4096)  # tokens and columns whose float32 logits, 32 MiB, fit into the cache of an H100, 50 MB


def no_more(policy: Any, num_tokens: int) -> None:
    """Change nothing after a step."""


@dataclass(frozen=True)
class Trial:
    what: str
    change: Callable[[], AbstractContextManager[None]]
    # Called with the policy and the tokens of its micro-batches, after a step.
    prepare: Callable[[Any, int], None] = no_more


@contextmanager
def bf16_gradients() -> Iterator[None]:
    from grpo_mega.megatron import optimizer

    plain = optimizer.DistributedDataParallelConfig
    changed = lambda **settings: plain(**settings | {"grad_reduce_in_fp32": False})  # noqa: E731
    with mock.patch.object(optimizer, "DistributedDataParallelConfig", changed):
        yield


@contextmanager
def graphs() -> Iterator[None]:
    from grpo_mega.megatron import model

    if not torch.cuda.is_available():
        raise ConfigError("CUDA graphs need a GPU; use one")
    settings = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["mlp"]}
    with mock.patch.object(model, "TransformerConfig", partial(model.TransformerConfig, **settings)):
        yield


def capture(policy: Any, num_tokens: int) -> None:
    """Capture the MLP of each layer, as Megatron's training loop does after its first steps."""
    from grpo_mega.megatron.compat import graph_helper

    helper = graph_helper()(policy.chunks, policy.models[0].config, num_tokens, 1, [policy._optimizer])
    helper.create_cudagraphs()
    helper.cuda_graph_set_manual_hooks()


@contextmanager
def tiles() -> Iterator[None]:
    with mock.patch.object(logprobs, "_GPU_TILE", CACHED_TILE):
        yield


@contextmanager
def fused_passes() -> Iterator[None]:
    backend = "inductor" if torch.cuda.is_available() else "aot_eager"  # without a GPU only to try the code
    sums, products = (torch.compile(f, dynamic=True, backend=backend) for f in (_exp_sum, _times_exp))
    with mock.patch.object(logprobs, "exp_sum", sums), mock.patch.object(logprobs, "times_exp", products):
        yield


def _exp_sum(x_nv: Tensor, max_n: Tensor) -> Tensor:
    return (x_nv - max_n[:, None]).exp().sum(dim=1)


def _times_exp(x_nv: Tensor, max_n: Tensor, factor_n1: Tensor) -> Tensor:
    return x_nv.copy_((x_nv - max_n[:, None]).exp() * factor_n1)


TRIALS = {
    "bf16-gradients": Trial("gradient buffers in bf16", bf16_gradients),
    "graphs": Trial("CUDA graphs of Transformer Engine, one per MLP", graphs, capture),
    "tiles": Trial("tiles of the output layer that fit into the cache", tiles),
    "fused-passes": Trial("compiled passes over the output layer's tiles", fused_passes),
}
