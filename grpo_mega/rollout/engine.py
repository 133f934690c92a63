"""The interface of an engine, embedded or a server.

An engine holds a copy of the policy in its own layout. Only weight syncs fill it; `version` is the version of that policy.
Inputs and outputs are token ids, never text. An engine may span several ranks. All ranks call every method together, but
`generate` may return at once on a rank that drives no engine.
"""

# ruff: noqa: B027  # some methods are empty on purpose without being abstract

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from grpo_mega.rollout.stop_condition import StopCondition
from grpo_mega.types import Group, Prompt, Sample
from grpo_mega.weights.apply import Bucket
from grpo_mega.weights.layout import ShardLayout


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled. `temperature` 0 means greedy decoding, with log-probs at temperature 1."""

    group_size: int
    temperature: float
    max_response_length: int
    stop_token_ids: frozenset[int]
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    with_routes: bool = False  # record the experts of each token, see routes.py
    longest_first: bool = False  # the order in which samples start (schedule.py); does not change any sample


OnSample = Callable[[Sample, Group], None]  # called with a finished sample and its group so far, including that sample
NO_EARLIER_GROUPS: Mapping[int, Group] = MappingProxyType({})


class Engine(ABC):
    """One engine. Methods that are not abstract do nothing if the engine shares the trainer's process and device memory."""

    is_server = False  # the engine has a separate process with separate device memory
    is_absent = False  # this rank only trains, and other ranks have the engines
    version = -1  # policy version of the engine's weights; -1 before the first sync

    @property
    def failure(self) -> str | None:
        """Return why this rank's engine needs a restart before it can be used; None if it can be used."""
        return None

    def wait_until_ready(self) -> None:
        """Wait until the engine has started. The constructor launched it. Raise EngineError if the start fails."""

    @abstractmethod
    def generate(
        self,
        prompts: Mapping[int, Prompt],
        sampling: Sampling,
        *,
        step: int,
        on_sample: OnSample,
        stop: StopCondition | None = None,
        earlier: Mapping[int, Group] = NO_EARLIER_GROUPS,
    ) -> dict[int, Group]:
        """Return this rank's share of the groups, by the keys of their prompts.

        Call `on_sample(sample, group)` when a sample ends. `earlier` has the groups that earlier phases
        started. The engine continues their unfinished samples and does not modify the objects.

        When `stop` is met, the engine aborts all running samples, returns their groups with unfinished samples, and is ready
        for the next phase. Prompts start in their order, except with longest_first.

        Every rank passes the same prompts, and one rank generates each group. If the engine fails meanwhile, `failure` has
        the reason and unfinished groups are missing. If the engine accepts a seed per sample, a sample's random stream depends
        only on sampling.seed, the step in which the sample started, prompt id and sample index.
        """

    def restart(self, failed: Collection[int]) -> None:
        """Restart the engines of the ranks `failed`, without weights. Set `failure` again if the restart fails."""

    def sleep(self) -> None:
        """Release the device memory of weights and KV cache for the trainer."""

    def wake_weights(self) -> None:
        """Allocate the memory of the weights again. The values are lost."""

    def wake_cache(self) -> None:
        """Allocate the memory of the KV cache again. The cache is empty."""

    @abstractmethod
    def shard_layout(self) -> ShardLayout:
        """Return the tensors of each engine rank, for the plan of a sync."""

    @abstractmethod
    def start_update(self) -> list[str]:
        """Start a sync. Return how the engine's tensors differ from its layout. If they differ, load nothing."""

    @abstractmethod
    def allocate(self, index: int, num_bytes: int) -> Tensor:
        """Return the [num_bytes] uint8 tensor for round `index` of a sync. Wait until the engine has read its old contents."""

    @abstractmethod
    def load(self, bucket: Bucket) -> None:
        """Load a filled bucket. The engine may still be reading it after the return."""

    @abstractmethod
    def end_update(self, version: int) -> list[str]:
        """Wait until all buckets are loaded, then set the engine's version to `version`.

        Return the names of tensors with checksums that differ from the checksums in the buckets. If there are any, the version
        does not change. FP8 blocks were verified on arrival.
        """

    def close(self) -> None:
        """Stop the processes that the engine started. This may be called at any time, and twice."""
