"""What the trainer asks of an engine, embedded or a server.

An engine holds a copy of the policy in its own layout, filled by `sync` and by nothing else; `version` says which policy that
is. Token ids go in and come out, never text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from grpo_mega.types import Group, Prompt, Sample
from grpo_mega.weights.boxes import Holding


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

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int, on_sample: OnSample) -> list[Group]:
        """A group for each of this rank's prompts, in their order. `on_sample` is called as each sample ends.

        A sample's random stream depends on (sampling.seed, step, prompt id, sample index) only.
        """
        ...

    def asleep(self) -> AbstractContextManager[None]:
        """While it lasts the engine's device memory belongs to the trainer."""
        ...

    def holdings(self, world_size: int) -> list[Holding]:
        """What the engine side of each rank holds, for the plan of a sync."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """This rank's tensors by the local names of its holding; a sync writes into them."""
        ...
