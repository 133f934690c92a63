"""Conversations without agents: scripts decide the contexts of turns, and events decide when a turn is asked for."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from grpo_mega.rollout.engine import Sampling
from grpo_mega.rollout.sessions.session import Asked, Ended, Failed, TurnRequest, TurnResult
from grpo_mega.types import Context, FinishReason, Prompt, Sample, Span

Key = tuple[int, int]  # prompt index and sample index
Script = Generator[TurnRequest, TurnResult, Sample]


@dataclass
class ScriptedConversations:
    """Runs a script per sample. It answers at once, except for turns that are held back."""

    script: Callable[[Key, Prompt, int], Script]  # called with key, prompt and step
    # Turns (key, number) that are asked for only once this many turns were answered or conversations ended.
    held: dict[tuple[Key, int], int] = field(default_factory=dict)
    failing: set[Key] = field(default_factory=set)  # conversations that fail once instead of their second turn
    events: queue.SimpleQueue[Asked | Ended | Failed] = field(default_factory=queue.SimpleQueue)
    started: list[Key] = field(default_factory=list)
    ended: list[Key] = field(default_factory=list)
    turns: list[tuple[TurnRequest, TurnResult]] = field(default_factory=list)
    sampling: Sampling | None = None  # the engine sets it
    num_aborts: int = 0
    aborted: set[Key] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._running: dict[Key, Script] = {}
        self._waiting: dict[tuple[Key, int], Asked | Ended] = {}
        self._lock = threading.RLock()

    def start(self, prompt_index: int, sample_index: int, prompt: Prompt, step: int) -> None:
        with self._lock:
            key = prompt_index, sample_index
            assert key not in self._running and self.sampling is not None
            self.started.append(key)
            self._running[key] = self.script(key, prompt, step)
            self._continue(key, None)

    def answer(self, request: TurnRequest, result: TurnResult) -> None:
        with self._lock:
            if request.key in self._running:  # otherwise it was aborted
                self.turns.append((request, result))
                self._continue(request.key, result)

    def abort(self) -> None:
        with self._lock:
            self.num_aborts += 1
            self.aborted |= self._running.keys() | {key for key, _ in self._waiting}
            self._running.clear()
            self._waiting.clear()
            while not self.events.empty():
                self.events.get()

    def release(self) -> None:
        """Ask for all turns that are held back."""
        with self._lock:
            self.held.clear()
            self._put_waiting()

    def close(self) -> None:
        self.abort()

    def _continue(self, key: Key, result: TurnResult | None) -> None:
        """Run the script to its next turn or its end, and put the event of it, unless it is held back."""
        if result is not None and key in self.failing:
            self.failing.discard(key)
            del self._running[key]
            self.events.put(Failed(key[0], f"the worker of sample {key} died"))
            return
        event: Asked | Ended
        number = sum(request.key == key for request, _ in self.turns)
        try:
            script = self._running[key]
            event = Asked(next(script) if result is None else script.send(result))
        except StopIteration as stop:
            del self._running[key]
            self.ended.append(key)
            event = Ended(key[0], stop.value)
        self._waiting[key, number] = event
        self._put_waiting()

    def _put_waiting(self) -> None:
        for name in sorted(self._waiting):
            if self.held.get(name, 0) <= len(self.turns) + len(self.ended):
                self.events.put(self._waiting.pop(name))


@dataclass(frozen=True)
class Talk:
    """A script: turns with tokens of tools between them. Every third conversation rewrites its history once."""

    vocab_size: int
    stop_token_ids: frozenset[int]
    max_response_length: int
    max_new_tokens: int = 9  # limit of each turn

    def num_turns(self, key: Key) -> int:
        return 1 + (key[0] + key[1]) % 4

    def __call__(self, key: Key, prompt: Prompt, step: int) -> Script:
        numbers = random.Random(f"{prompt.id} {key}")
        ids, logprobs = list[int](), list[float]()
        sampled, contexts, spans = list[tuple[int, int]](), list[Context](), list[Span]()
        base, since = prompt.token_ids, 0
        reason: FinishReason = "stop"
        for number in range(self.num_turns(key)):
            room = self.max_response_length - len(ids)
            if room < 1:
                reason = "length"
                break
            # Turns stop at different tokens, because a client may name others.
            stops = self.stop_token_ids if number % 2 == 0 else frozenset(sorted(self.stop_token_ids)[::2])
            result = yield TurnRequest(
                key, prompt, number, (*base, *ids[since:]), min(room, self.max_new_tokens), stops, step
            )
            start, end = len(ids), len(ids) + len(result.token_ids)
            sampled.append((start, end))
            spans.append(Span(result.version, start, end))
            ids += result.token_ids
            logprobs += result.logprobs
            if number + 1 == self.num_turns(key):
                break
            tool = [numbers.randrange(self.vocab_size) for _ in range(numbers.choice((0, 1, 4, 11)))]
            tool = tool[: self.max_response_length - len(ids)]
            ids += tool
            logprobs += [0.0] * len(tool)
            if number == 0 and sum(key) % 3 == 2:  # the agent forgets its first turn
                base, since = (*prompt.token_ids[::-1], 3), len(ids)
                contexts.append(Context(since, base))
        return Sample(prompt, key[1], ids, logprobs, reason, spans, sampled=sampled, contexts=contexts, messages=[])
