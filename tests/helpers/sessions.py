"""Conversations for tests: an engine that answers from a script, and workers that are threads of this process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from grpo_mega.rollout.engine import Sampling
from grpo_mega.rollout.sessions.calls import CallParser
from grpo_mega.rollout.sessions.conversations import Conversations
from grpo_mega.rollout.sessions.session import (
    Asked,
    ChatRequest,
    Ended,
    Failed,
    Limits,
    Session,
    Turn,
    TurnRequest,
    TurnResult,
)
from grpo_mega.rollout.sessions.template import Template
from grpo_mega.text import well_formed
from grpo_mega.types import Prompt
from tools.chat_families import stop_ids, tokenizer_of

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "description": "a number"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "Add one.", "parameters": PARAMETERS}}]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def tool(content: str, call_id: str = "abcdefghi") -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def encode(name: str, text: str) -> list[int]:
    """Return the tokens of a text in a family's vocabulary."""
    ids: list[int] = tokenizer_of(name)(text, add_special_tokens=False)["input_ids"]
    return ids


def decode(name: str, ids: Any) -> str:
    """Return the text of tokens, with special tokens."""
    return well_formed(tokenizer_of(name).decode(list(ids), skip_special_tokens=False))


def prompt_of(name: str, content: str = "hello", number: int = 7, **columns: Any) -> Prompt:
    """Return a prompt with one user message, as a dataset has it."""
    text = tokenizer_of(name).apply_chat_template([user(content)], tokenize=False, add_generation_prompt=True)
    return Prompt(number, text, tuple(encode(name, text)), "4", extras=columns, raw_columns={"prompts": content})


def result_of(name: str, text: str, *, stop: int | None = 0, version: int = 3) -> TurnResult:
    """Return a turn with a text and a stop token, by its place in the family. `stop` None: the turn was cut."""
    ids = encode(name, text) + ([] if stop is None else [stop_ids(name)[stop]])
    return TurnResult(ids, [-0.5] * len(ids), "length" if stop is None else "stop", version)


def parser_of(name: str, tool_format: str = "auto") -> CallParser:
    """Return the parser of a family's calls."""
    template = Template(tokenizer_of(name), stop_ids(name))
    return CallParser(template, lambda ids: decode(name, ids), tool_format)


class Dialogue:
    """A session without an endpoint."""

    def __init__(self, name: str, content: str = "hello", **limits: int) -> None:
        self.name, self.template = name, Template(tokenizer_of(name), stop_ids(name))
        parser = CallParser(self.template, lambda ids: decode(name, ids))
        most = {"max_turns": 8, "max_response_length": 5000, "max_context": 9000} | limits
        self.prompt = prompt_of(name, content)
        bounds = Limits(**most, stop_token_ids=frozenset(stop_ids(name)))
        self.session = Session(self.template, parser, (5, 2), self.prompt, 1, bounds)

    def turn(self, messages: list[dict[str, Any]], **options: Any) -> Turn:
        """Return the turn of a request, with or without a result."""
        return self.session.turn_of(ChatRequest.read(messages, **options))

    def ask(self, messages: list[dict[str, Any]], text: str, *, stop: int | None = 0, **options: Any) -> Turn:
        """Ask for a turn, which the engine answers with a text, and return it."""
        chat = ChatRequest.read(messages, **options)
        turn = self.session.turn_of(chat)
        if turn.result is None:
            self.session.record(turn, chat, result_of(self.name, text, stop=stop))
        return turn


@dataclass
class ThreadWorkers:
    """Runs agent functions as threads.

    `agent` gets base url, key and prompt. It returns a value, or fields of a result.
    """

    agent: Callable[[str, str, SimpleNamespace], Any]
    results: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    started: list[str] = field(default_factory=list)
    most: list[int] = field(default_factory=list)  # number of samples that may share the worker, of each start
    killed: set[str] = field(default_factory=set)
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self, session_id: str, base_url: str, api_key: str, prompt: SimpleNamespace, most: int) -> None:
        self.started.append(session_id)
        self.most.append(most)

        def run() -> None:
            value = self.agent(base_url, api_key, prompt)
            given = value if isinstance(value, SimpleNamespace) else SimpleNamespace(value=value)
            fields: dict[str, Any] = {
                "session_id": session_id,
                "value": None,
                "error": None,
                "kind": "returned",
                "turn_rewards": {},
                "num_sharing": 1,
            }
            if session_id not in self.killed:
                self.results.put(SimpleNamespace(**(fields | vars(given))))

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def kill(self, session_ids: Collection[str]) -> None:
        self.killed |= set(session_ids)

    def close(self) -> None:
        for thread in self.threads:
            thread.join(timeout=60)


class Run:
    """Conversations of one family, with an engine in a thread that answers each turn with `reply(request)`."""

    def __init__(self, conversations: Conversations, reply: Callable[[TurnRequest], TurnResult | None]) -> None:
        self.conversations, self.asked = conversations, list[TurnRequest]()
        self.ends: queue.SimpleQueue[Ended | Failed] = queue.SimpleQueue()
        self._reply = reply
        threading.Thread(target=self._answer, daemon=True).start()

    def start(self, prompt: Prompt, index: int = 0) -> None:
        self.conversations.start(5, index, prompt, 1)

    def end(self) -> Ended | Failed:
        """Wait until a conversation ends."""
        return self.ends.get(timeout=60)

    def _answer(self) -> None:
        while True:
            event = self.conversations.events.get()
            if isinstance(event, Asked):
                self.asked.append(event.request)
                if (result := self._reply(event.request)) is not None:
                    self.conversations.answer(event.request, result)
            else:
                self.ends.put(event)


def sampling_of(name: str, max_response_length: int = 2000) -> Sampling:
    """Return the sampling of a run at temperature 0.7."""
    return Sampling(4, 0.7, max_response_length, frozenset(stop_ids(name)))


@contextmanager
def conversations(
    name: str,
    agent: Any,
    reply: Callable[[TurnRequest], TurnResult | None],
    *,
    max_turns: int = 8,
    max_response_length: int = 2000,
    warn: Callable[[str], None] = lambda text: None,
) -> Iterator[Run]:
    """Run conversations in which `agent` is the agent function of each sample, or the workers that run it."""
    workers: Any = ThreadWorkers(agent) if callable(agent) else agent
    runner = Conversations(
        tokenizer_of(name),
        lambda ids: decode(name, ids),
        sampling_of(name, max_response_length),
        workers,
        max_turns=max_turns,
        max_context=9000,
        max_tokens=20_000,
        warn=warn,
    )
    try:
        yield Run(runner, reply)
    finally:
        runner.close()
