"""What the trainer asks of an engine, embedded or a server.

An engine holds a copy of the policy in its own layout, filled by `sync` and by nothing else; `version` says which policy that
is. Token ids go in and come out, never text. An engine may span several ranks; all of them call every method together, except
that `generate` may return at once on those that drive nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from grpo_mega.types import Group, Prompt, Sample
from grpo_mega.weights.apply import Bucket
from grpo_mega.weights.sides import Side


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. `temperature` 0 is greedy decoding; log-probs are then those at temperature 1."""

    group_size: int
    temperature: float
    max_response_length: int
    stop_token_ids: frozenset[int]
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


OnSample = Callable[[Sample], None]


class Engine(Protocol):
    version: int  # of the policy whose weights the engine holds; -1 before the first sync

    @property
    def failure(self) -> str | None:
        """Why the engine of this rank is of no use until it is revived; None if it is well."""
        ...

    def wait_until_ready(self) -> None:
        """Ends the start-up that began when the engine was made. Raises EngineError."""
        ...

    def generate(
        self, prompts: Mapping[int, Prompt], sampling: Sampling, *, step: int, on_sample: OnSample
    ) -> dict[int, Group]:
        """This rank's share of the groups, by the keys of their prompts. `on_sample` is called as each sample ends.

        Every rank passes the same prompts, and each prompt is sampled by one of them. If the engine fails on the way, `failure`
        says why and the groups that were not finished are missing. A sample's random stream depends on (sampling.seed, step,
        prompt id, sample index) only, where the engine takes a seed for each sample.
        """
        ...

    def revive(self, failed: Collection[int]) -> None:
        """Starts the engines of the ranks `failed` anew, which then have no weights; `failure` is set again if that fails."""
        ...

    def sleep(self) -> None:
        """Gives the device memory of weights and cache to the trainer."""
        ...

    def wake_weights(self) -> None:
        """Takes back the memory of the weights, whose values are lost."""
        ...

    def wake_cache(self) -> None:
        """Takes back the memory of the KV cache, which is empty then."""
        ...

    def side(self) -> Side:
        """What the engine side of each rank holds, for the plan of a sync."""
        ...

    def begin_update(self) -> list[str]:
        """Opens a sync. Returns what differs between the engine's tensors and those of `side`; then nothing may be loaded."""
        ...

    def allocate(self, index: int, num_bytes: int) -> Tensor:
        """The [num_bytes] uint8 tensor in which round `index` of a sync is to be put; waits until it is free again."""
        ...

    def load(self, bucket: Bucket) -> None:
        """Hands over a bucket that is filled; the engine may still be reading it when this returns."""
        ...

    def end_update(self, version: int) -> list[str]:
        """Waits until all buckets are loaded; then the engine holds `version`.

        Returns the names of tensors whose checksums are not those that came with the buckets; then the version stays as it was.
        What came as FP8 blocks was proven as it came.
        """
        ...

    def close(self) -> None:
        """Ends what the engine started; may be called at any time, and twice."""
        ...
