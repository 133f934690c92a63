"""What the trainer asks of an engine, embedded or a server.

An engine holds a copy of the policy in its own layout, filled by `sync` and by nothing else; `version` says which policy that
is. Token ids go in and come out, never text. An engine may span several ranks; all of them call every method together, except
that `generate` may return at once on those that drive nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from grpo_mega.types import Group, Prompt, Sample
from grpo_mega.weights.apply import Bucket
from grpo_mega.weights.layout import ShardLayout


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


class Until(Protocol):
    """When a generation phase ends before all of its groups are done; each rank has its own, and they agree.

    `clock` is the engine's own measure of how far it has come in this phase, which grows alike on all ranks: the embedded
    engine counts the tokens that it has decoded one after the other, so that which groups count as first does not depend on
    the speed of a rank. A server has no such clock; for its groups it is 0, and what is done is done.
    """

    def done(self, key: int, clock: int = 0) -> None:
        """All samples of a group have ended."""
        ...

    def is_reached(self, clock: int = 0) -> bool:
        """Whether the engine is to end what it has under way. Cheap enough to be asked between two tokens."""
        ...

    def aborted(self, key: int, lengths: Sequence[int]) -> None:
        """A group that was begun and not finished, with the response tokens so far of each sample; nothing else of it is kept.

        Here partial rollouts would take over: handed the samples themselves, the next phase could begin with them.
        """
        ...


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
        self,
        prompts: Mapping[int, Prompt],
        sampling: Sampling,
        *,
        step: int,
        on_sample: OnSample,
        until: Until | None = None,
    ) -> dict[int, Group]:
        """This rank's share of the groups, by the keys of their prompts. `on_sample` is called as each sample ends.

        With `until` only the groups that were done before it was reached; then nothing is under way any more, and the engine
        is as after a whole phase. Prompts are begun in their order.

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

    def shard_layout(self) -> ShardLayout:
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
