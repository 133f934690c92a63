"""Messages between conversations and engines: a turn to sample, its result, and the end of a conversation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpo_mega.types import Prompt, Sample


@dataclass(frozen=True)
class TurnRequest:
    """One assistant turn to sample after `context_ids`.

    The random stream of the turn depends on the run's seed, `step`, the prompt's id, the sample index and the CRC-32 of
    `context_ids`. So it depends neither on the order of turns nor on time.
    """

    key: tuple[int, int]  # prompt index and sample index
    prompt: Prompt
    number: int  # 0, 1, ... within the sample
    context_ids: tuple[int, ...]
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    step: int  # the step in which the sample started; seeds its random stream


@dataclass(frozen=True)
class TurnResult:
    """The tokens of a sampled turn. With finish_reason "stop" the last token is a stop token of the request."""

    token_ids: list[int]
    logprobs: list[float]  # one per token, at the run's temperature
    finish_reason: Literal["stop", "length"]
    version: int  # version of the policy that sampled the tokens


@dataclass(frozen=True)
class Asked:
    """A conversation waits for this turn. Answer with Conversations.answer."""

    request: TurnRequest


@dataclass(frozen=True)
class Ended:
    """A conversation ended by itself or by a limit. The sample is complete."""

    prompt_index: int
    sample: Sample


@dataclass(frozen=True)
class Failed:
    """A conversation ended by an error of the infrastructure, also when it was repeated."""

    prompt_index: int
    error: str
