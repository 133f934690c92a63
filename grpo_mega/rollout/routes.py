"""Recorded experts: an engine's router choices per token, for the trainer to replay (arXiv 2510.11370;
megatron/routers.py).

Row t contains the experts that predicted token t + 1, in the router's order, so n context tokens have n - 1 rows.
Continued samples keep the rows from the policies that generated their tokens. Expert ids use the smallest integer type
that fits, and the type's largest value marks an unrecorded expert. A running checksum verifies that the rows arrive as
recorded.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_mega.errors import EngineError
from grpo_mega.types import Routes, Sample, unknown_expert
from grpo_mega.weights.spec import ModelShape


@dataclass(frozen=True)
class RouterSizes:
    """Router sizes in an MoE model."""

    num_layers: int  # all model layers, dense and MoE
    num_dense: int  # leading dense layers, without a router
    num_experts: int  # experts per MoE layer
    top_k: int  # experts per token

    @classmethod
    def of(cls, shape: ModelShape, hf_config: Any) -> RouterSizes:
        return cls(shape.num_layers, shape.num_dense, shape.num_experts, hf_config.num_experts_per_tok)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint8 if self.num_experts <= np.iinfo(np.uint8).max else np.uint16)

    @property
    def token_bytes(self) -> int:
        """Return the bytes per row."""
        return self.not_known(1).nbytes

    def not_known(self, num_tokens: int) -> NDArray[Any]:
        shape = num_tokens, self.num_layers - self.num_dense, self.top_k
        return np.full(shape, unknown_expert(self.dtype), self.dtype)


def with_routes_of(before: Routes | None, experts: NDArray[Any]) -> Routes:
    """Append the later rows from `experts`, which covers the whole context, to the routes `before`."""
    known, checksum = (before.experts, before.checksum) if before else (experts[:0], 0)
    later = np.ascontiguousarray(experts[len(known) :])
    return Routes(np.concatenate((known, later)), zlib.crc32(later.data, checksum))


def cut(routes: Routes, num_tokens: int) -> Routes:
    """Return the first `num_tokens` rows."""
    return with_routes_of(None, routes.experts[:num_tokens])


def is_intact(routes: Routes) -> bool:
    return zlib.crc32(np.ascontiguousarray(routes.experts).data) == routes.checksum


def is_known(experts: NDArray[Any]) -> NDArray[Any]:
    """Return True [tokens] for recorded rows."""
    return np.asarray(experts[:, 0, 0] != unknown_expert(experts.dtype))


def num_recorded(samples: Iterable[Sample], rank: int) -> int:
    """Count tokens with recorded experts, in samples that this rank counts.

    The rank that recorded a sample counts it. Rank 0 counts samples whose routes are on all ranks.
    """
    mine = [sample.routes for sample in samples if sample.routes and (sample.routes.rank or 0) == rank]
    return sum(int(is_known(routes.experts).sum()) for routes in mine)


def parsed(answer: str, routers: RouterSizes, num_tokens: int) -> NDArray[Any]:
    """Return the experts [num_tokens, MoE layers, top_k] from a server's answer: base64, int32, all layers.

    Raise EngineError if no router can have chosen these experts.
    """
    numbers = np.frombuffer(base64.b64decode(answer), np.int32)
    wanted = num_tokens, routers.num_layers, routers.top_k
    if numbers.size != np.prod(wanted):
        raise EngineError(f"the server returned {numbers.size} experts of a sample instead of {wanted}")
    experts = numbers.reshape(wanted)[:, routers.num_dense :]
    if num_tokens and not 0 <= experts.min() <= experts.max() < routers.num_experts:
        raise EngineError(f"the server returned experts {experts.min()} to {experts.max()} of {routers.num_experts}")
    in_order = np.sort(experts, axis=-1)
    if (in_order[..., 1:] == in_order[..., :-1]).any():
        raise EngineError("the server returned an expert twice for one token")
    return experts.astype(routers.dtype)
