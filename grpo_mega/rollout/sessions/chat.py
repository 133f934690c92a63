"""The arguments of an agent function: `chat`, a client of the sample's endpoint, and `prompt`, the row of the data set.

    async def run(chat, prompt):
        message = await chat([*prompt.messages, {"role": "user", "content": "Guess."}], max_tokens=20)
        chat.reward(0.1)
        return 1.0 if prompt.answer in message["content"] else 0.0

`chat` runs inside an agent worker and never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import aiohttp

from grpo_mega.rewards.api import as_score
from grpo_mega.types import Prompt

# Codes of the endpoint's errors: the sample has reached a limit, so no further turn can be sampled.
LIMIT_CODES = frozenset({"max_turns", "max_response_length", "context_length_exceeded"})


class LimitReached(Exception):
    """The sample has reached max_turns or max_response_length. An agent function may leave it uncaught."""


class RefusedRequest(ValueError):
    """The endpoint refuses a request of the agent function."""


class EndpointFailed(ConnectionError):
    """The endpoint does not answer. The sample is not to blame, and starts again."""


class Chat:
    """A client of one sample's conversation."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self.base_url, self.api_key = base_url, api_key  # for any other OpenAI client
        self.finish_reason: str | None = None  # why the last turn ended: stop, length or tool_calls
        self.turn_rewards: dict[str, float] = {}  # by the id of the turn's answer
        self._last_id: str | None = None

    async def __call__(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, **sampling: Any
    ) -> dict[str, Any]:
        """Sample one assistant turn, and return its message.

        `sampling` may have max_tokens and stop; other keys must have the run's values. Raises LimitReached if the
        sample may have no further turn.
        """
        body = {"model": "policy", "messages": list(messages), **({"tools": list(tools)} if tools else {}), **sampling}
        answer = await post(f"{self.base_url}/chat/completions", self.api_key, body)
        self._last_id, choice = answer["id"], answer["choices"][0]
        self.finish_reason = choice["finish_reason"]
        return dict(choice["message"])

    def reward(self, value: float, answer_id: str | None = None) -> None:
        """Set the reward of the last turn of `chat`, or of the turn whose answer has this id (of another client)."""
        turn = answer_id or self._last_id
        if turn is None:
            raise ValueError("chat.reward needs a turn; call chat first")
        number = as_score(value, "").value
        if number is not None:
            self.turn_rewards[turn] = number


async def post(url: str, api_key: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Send JSON to the endpoint, and return the JSON answer. Raise LimitReached, RefusedRequest or EndpointFailed."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as client,  # the sample has a deadline
            client.post(url, json=body, headers={"Authorization": f"Bearer {api_key}"}) as response,
        ):
            code, answer = response.status, await response.json(content_type=None)
    except (OSError, aiohttp.ClientError, ValueError) as error:
        raise EndpointFailed(f"the sample's endpoint does not answer ({type(error).__name__}: {error})") from None
    if code == 200 and isinstance(answer, dict):
        return answer
    problem = answer.get("error", {}) if isinstance(answer, dict) else {}
    if problem.get("code") in LIMIT_CODES:
        raise LimitReached(problem.get("message"))
    if code >= 500:
        raise EndpointFailed(f"the sample's endpoint failed with status {code}: {problem.get('message')}")
    raise RefusedRequest(problem.get("message") or f"status {code}")


def prompt_values(prompt: Prompt) -> dict[str, Any]:
    """Return what an agent function sees of a prompt, for `as_prompt` in a worker."""
    columns = prompt.extras | {name: value for name, value in prompt.raw_columns.items() if name != "prompts"}
    return {"messages": prompt.messages, "answer": prompt.answer, "columns": columns}


def as_prompt(values: Mapping[str, Any]) -> SimpleNamespace:
    """Return the object with messages, answer, and each column of the row that is not called like one of them."""
    return SimpleNamespace(**{str(name): value for name, value in values["columns"].items()} | dict(values))
