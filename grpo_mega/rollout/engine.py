"""The interface of an engine, embedded or a server.

An engine holds a copy of the policy in its own layout, filled by weight syncs only; `version` names that policy. Token ids go
in and come out, never text. An engine may span several ranks. All ranks call every method together, but `generate` may return
at once on a rank that drives no engine.
"""

# ruff: noqa: B027  # methods that are empty without being abstract are meant to be

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
    """How responses are sampled. `temperature` 0 is greedy decoding; log-probs are then those at temperature 1."""

    group_size: int
    temperature: float
    max_response_length: int
    stop_token_ids: frozenset[int]
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    with_routes: bool = False  # record the experts of each token, see routes.py
    longest_first: bool = False  # the order in which samples begin, see schedule.py; they are the same


OnSample = Callable[[Sample, Group], None]  # the sample that has ended, and its group so far, it included
NONE_BEGUN: Mapping[int, Group] = MappingProxyType({})


class Engine(ABC):
    """The methods that are not abstract do nothing where an engine has neither a process nor device memory of its own."""

    is_server = False  # it has a process, and device memory, of its own
    is_absent = False  # this rank trains only, and others have the engines
    version = -1  # of the policy whose weights the engine holds; -1 before the first sync

    @property
    def failure(self) -> str | None:
        """Why the engine of this rank cannot be used until it is restarted; None if it can."""
        return None

    def wait_until_ready(self) -> None:
        """Finish the start that began when the engine was made. Raise EngineError if it fails."""

    @abstractmethod
    def generate(
        self,
        prompts: Mapping[int, Prompt],
        sampling: Sampling,
        *,
        step: int,
        on_sample: OnSample,
        stop: StopCondition | None = None,
        begun: Mapping[int, Group] = NONE_BEGUN,
    ) -> dict[int, Group]:
        """Return this rank's share of the groups, by the keys of their prompts; call `on_sample(sample, group)` as each
        sample ends. Groups of `begun` have samples of earlier phases: unfinished ones are continued, none is changed.

        With `stop` what is under way when it is met is aborted: its groups are returned as they are then, with unfinished
        samples, and the engine is as after a whole phase. Prompts are begun in their order, except with longest_first.

        Every rank passes the same prompts, and one rank generates each group. If the engine fails meanwhile, `failure` says
        why, and the groups that were not finished are missing. A sample's random stream depends on (sampling.seed, the step in
        which it began, prompt id, sample index) only, where the engine takes a seed per sample.
        """

    def restart(self, failed: Collection[int]) -> None:
        """Restart the engines of the ranks `failed`, which then have no weights; set `failure` again if that fails."""

    def sleep(self) -> None:
        """Give the device memory of weights and KV cache to the trainer."""

    def wake_weights(self) -> None:
        """Take back the memory of the weights, whose values are lost."""

    def wake_cache(self) -> None:
        """Take back the memory of the KV cache, which is empty then."""

    @abstractmethod
    def shard_layout(self) -> ShardLayout:
        """Return the tensors of each engine rank, for the plan of a sync."""

    @abstractmethod
    def begin_update(self) -> list[str]:
        """Begin a sync. Return how the engine's tensors differ from those of its layout; if they do, nothing may be loaded."""

    @abstractmethod
    def allocate(self, index: int, num_bytes: int) -> Tensor:
        """Return the [num_bytes] uint8 tensor for round `index` of a sync, once the engine has read its last contents."""

    @abstractmethod
    def load(self, bucket: Bucket) -> None:
        """Hand over a filled bucket; the engine may still be reading it when this returns."""

    @abstractmethod
    def end_update(self, version: int) -> list[str]:
        """Wait until all buckets are loaded; then the engine holds `version`.

        Return the names of tensors whose checksums differ from those that came with the buckets; then the version stays as it
        was. FP8 blocks were verified as they came.
        """

    def close(self) -> None:
        """End what the engine started; may be called at any time, and twice."""
