"""The agent functions of the examples, with a model that follows a script."""

import asyncio
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rollout.sessions.endpoint import Endpoint, say

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture(autouse=True)
def _examples_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def prompt(text: str, answer: str) -> SimpleNamespace:
    return SimpleNamespace(messages=[{"role": "user", "content": text}], answer=answer)


def test_a_game_ends_with_the_number_or_after_five_turns() -> None:
    replies = []

    async def bisect(messages: list[Any]) -> dict[str, Any]:
        replies[:] = [one["content"] for one in messages[1:] if one["role"] == "user"]
        return say(["no idea", "50", "25", "I say 37"][min(len(replies), 3)])

    run = importlib.import_module("guess_number").run
    assert asyncio.run(run(bisect, prompt("Guess.", "37"))) == 1.0
    assert replies == ["Answer with a number.", "lower", "higher"]
    assert asyncio.run(run(bisect, prompt("Guess.", "36"))) == 0.0 and replies[3:] == ["lower"]
    assert asyncio.run(run(bisect, prompt("Guess.", "38"))) == 0.0


@pytest.mark.parametrize(("answer", "reward"), [("918", 1.0), ("919", 0.0)])
def test_the_openai_package_calls_a_tool_over_two_turns(answer: str, reward: float) -> None:
    pytest.importorskip("openai")
    call = ("calculate", '{"expression": "34*27"}')
    served = Endpoint(
        lambda messages: say(f"<answer>{messages[-1]['content']}</answer>") if messages[1:] else say("", call)
    )
    chat = SimpleNamespace(base_url=served.url, api_key="key")
    assert asyncio.run(importlib.import_module("openai_agent").run(chat, prompt("34*27=?", answer))) == reward
    served.close()
    assert served.requests[1]["messages"][-1] == {"role": "tool", "tool_call_id": "c0", "content": "918"}
    assert served.requests[0]["tools"][0]["function"]["name"] == "calculate"
    assert served.requests[0]["key"] == "Bearer key"
