"""Request log-probs of responses from an SGLang server of a teacher. The server generates nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing

from grpo_mega.errors import ConfigError
from grpo_mega.rollout.sglang.session import Session
from grpo_mega.types import Sample

CONCURRENT = 64  # maximum number of concurrent requests per rank
DEADLINE_S = 300.0  # deadline of one request


def served_logprobs(url: str, samples: Sequence[Sample], on_answer: Callable[[], None]) -> list[list[float]]:
    """Return the log-probs of each sample's response tokens, at temperature 1. Raise EngineError if a request fails."""
    with closing(Session(url, {}, num_connections=CONCURRENT, deadline_s=DEADLINE_S)) as session:
        gate = asyncio.Semaphore(CONCURRENT)

        async def ask(sample: Sample) -> list[float]:
            async with gate:
                return await session.logprobs([*sample.prompt.token_ids, *sample.response_ids], sample.response_len)

        found = []
        for answer in [session.start(ask(sample)) for sample in samples]:
            found.append(answer.result())
            on_answer()
        return found


def check_server(name: str, url: str) -> None:
    """Raise ConfigError if no SGLang server answers at a teacher's url."""
    with closing(Session(url, {})) as session:
        if not session.run(session.is_healthy(30.0)):
            raise ConfigError(f"teachers.{name}.url={url}: no SGLang server answers there; start it, or correct the url")
