"""Check that sessions train exactly the tokens that were sampled, on generated conversations.

`python tools/check_sessions.py --conversations 10000` lets clients talk to sessions, with the templates of
chat_families.py and a random engine. A conversation has 1 to 6 turns. Its messages have tools, thoughts, unicode
(U+2028 and lone surrogates), empty and huge tool results, and literal marks of calls. Its answers are text, valid and
broken calls, and random tokens. Some are cut, and some end with another stop token than usual. Clients change the form
of what they send back, repeat requests, branch, and rewrite the history. For each conversation the tool checks:

- tokens: each sampled token follows in its row the tokens that the engine saw, and nothing else is marked as sampled;
- template: the tokens between two turns are a part of the template's rendering of all messages;
- calls: the calls are exactly the calls that the engine wrote;
- cost: what a turn renders and encodes depends on the new messages, and not on the number of turns before.

The last line is JSON with the counts. Exit code 1 if a check fails; the tool prints the seed of the conversation.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to run this file as a script

from grpo_mega.rollout.sessions.calls import CallParser
from grpo_mega.rollout.sessions.session import ChatRequest, Limits, Session, Turn, TurnResult
from grpo_mega.rollout.sessions.template import RequestError, Template
from grpo_mega.text import filter_output, well_formed
from grpo_mega.types import Prompt, Sample
from tools.chat_families import FAMILIES, stop_ids, tokenizer_of

TEXTS = ["hello", "2+2", "é ü\u2028x", "\ud800 half", "  spaces \n", "<tool_call>\n{}\n</tool_call>", '{"name": "f"}']
TEXTS += ["[TOOL_CALLS] []", "日本語 🙂", "<think>no</think>", "a<|im_end|>b", "\u0000\u0085", "x" * 300]
RESULTS = ["", " ", "4", '{"a": [1, null]}', "y" * 4000, "\udfff", "<|im_start|>assistant\n", "line\u2028two"]
TOOL = {"type": "object", "properties": {"a": {"type": "integer", "description": "a number"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "Add one.", "parameters": TOOL}}]
LIMITS = {"max_turns": 8, "max_response_length": 40000, "max_context": 90000}


class CheckFailed(Exception):
    """The sessions did something wrong."""


@dataclass
class Machine:
    """A family's template and parser, which all conversations share."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.tokenizer = tokenizer_of(self.name)
        self.stops = stop_ids(self.name)
        self.template = Template(self.tokenizer, self.stops)
        self.parser = CallParser(self.template, self.decode)

    def decode(self, ids: Any) -> str:
        return well_formed(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def render(self, messages: list[dict[str, Any]], tools: Any) -> str:
        options = {"tools": tools} if tools else {}
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        return str(text)


class Conversation:
    """One client with one session. `rng` decides everything."""

    def __init__(self, machine: Machine, seed: int) -> None:
        self.machine, self.rng = machine, random.Random(seed)
        self.tools = TOOLS if self.rng.random() < 0.6 else None
        system = [{"role": "system", "content": "be brief"}] if self.rng.random() < 0.3 else []
        self.messages: list[dict[str, Any]] = [*system, {"role": "user", "content": self.rng.choice(TEXTS)}]
        text = machine.render(_rendered(self.messages), self.tools if self.rng.random() < 0.8 else None)
        self.prompt = Prompt(seed, text, tuple(machine.encode(text)), "")
        limits = Limits(**LIMITS, stop_token_ids=frozenset(machine.stops))
        self.session = Session(machine.template, machine.parser, (0, 0), self.prompt, 0, limits)
        self.seen: list[tuple[tuple[int, ...], list[int], list[float]]] = []  # what the engine saw and sampled
        self.num_calls = 0  # calls in the last text
        self.num_written: int | None = None  # calls in the last turn; None if it was cut or has unusual tokens

    def run(self) -> Sample:
        """Have a conversation, and return its sample."""
        for _ in range(self.rng.randint(1, 6)):
            try:
                answer = self.ask()
            except RequestError as error:
                self.machine.counts[f"refused: {error.code}"] += 1
                if error.code not in ("template", "max_response_length", "max_turns"):
                    raise CheckFailed(f"a request was refused: {error}") from None
                break
            self.follow(answer)
        return self.session.to_sample("stop")

    def ask(self) -> dict[str, Any]:
        """Send the messages, as a client would, and return the answer."""
        machine, most = self.machine, self.rng.choice([None, None, None, 3])
        chat = ChatRequest.read(json.loads(json.dumps(_disturbed(self.messages, self.rng))), self.tools, most)
        turn = self.session.turn_of(chat)
        if turn.result is None:
            self.check_template(turn)
            result = self.sample(turn)
            self.session.record(turn, chat, result)
            self.seen.append((turn.request.context_ids, result.token_ids, result.logprobs))
            machine.counts["turns"] += 1
            machine.counts["extended turns"] += turn.parent is not None
            self.check_calls(turn)
        if self.rng.random() < 0.1:
            again = self.session.turn_of(ChatRequest.read(_disturbed(self.messages, self.rng), self.tools, most))
            if again is not turn:
                raise CheckFailed("a repeated request started another turn")
            machine.counts["repeated requests"] += 1
        return copy.deepcopy(turn.answer)

    def sample(self, turn: Turn) -> TurnResult:
        """Return a random turn."""
        rng, machine = self.rng, self.machine
        ids: list[int] = []
        text = self.text()
        for piece in re.findall("(?s).{1,7}", text):  # so the tokens are not the tokenizer's
            ids += machine.encode(piece) if rng.random() < 0.5 else [i for c in piece for i in machine.encode(c)]
        for mark in FAMILIES[machine.name].plain:  # a mark is one token, apart from a few
            if rng.random() < 0.9 and mark in machine.decode(ids):
                ids = machine.encode(machine.decode(ids))
        if rng.random() < 0.1:
            ids = [rng.randrange(len(machine.tokenizer)) for _ in range(9)]
        ids = [token for token in ids if token not in machine.stops]
        if rng.random() < 0.06 or len(ids) >= turn.request.max_new_tokens:
            ids, reason = (ids or machine.encode("x"))[: turn.request.max_new_tokens], "length"
        else:
            ids, reason = [*ids, self.stop(ids)], "stop"
        logprobs = [-rng.random() for _ in ids]
        is_whole = ids[:-1] == machine.encode(text) and "open " not in text
        self.num_written = self.num_calls if is_whole else None
        return TurnResult(ids, logprobs, "length" if reason == "length" else "stop", len(self.seen))

    def stop(self, ids: list[int]) -> int:
        """Return the stop token for a turn: usually the family's, which depends on calls for GLM."""
        stops = self.machine.stops
        if self.machine.name.startswith("glm") and "<tool_call>" in self.machine.decode(ids):
            return stops[1]
        return stops[0] if self.rng.random() < 0.95 else self.rng.choice(stops)

    def text(self) -> str:
        """Return the text of a turn."""
        rng, kind = self.rng, self.machine.parser.format
        texts = {"a": str(rng.randrange(9)), "b": "\u2028"}  # b is a text
        arguments = {"a": int(texts["a"]), "b": texts["b"]}
        call = {"name": "f", "parameters" if kind == "llama3" else "arguments": arguments}
        body = json.dumps(call, ensure_ascii=rng.random() < 0.5)
        if kind == "glm45":
            body = "f\n" + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in texts.items())
        elif kind == "qwen3_coder":
            pairs = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in texts.items())
            body = f"<function=f>\n{pairs}</function>"
        whole, self.num_calls = body, 0
        if rng.random() < 0.2:
            # GLM's call is complete after each argument, so it is cut in its last one.
            body = body[: rng.randrange(len(body) - 45, len(body) - 1) if kind == "glm45" else rng.randrange(len(body))]
        written = {"llama3": body, "mistral": f"[TOOL_CALLS] [{body}]"}
        thought = rng.choice(["", "", "<think>\nit is\n</think>\n\n", "<think>\n\n</think>\n\n", "<think>open "])
        if self.machine.template.prefill.endswith("<think>\n"):  # the template has opened the thought
            thought = thought.removeprefix("<think>") or "</think>\n\n"
        if self.tools and rng.random() < 0.5:
            self.num_calls = int(body == whole)
            return written.get(kind) or f"{thought}<tool_call>\n{body}\n</tool_call>"
        return thought + rng.choice(["4", "hello there", "é🙂", "  4 \n", "", "say <tool_call>", "{}"])

    def follow(self, answer: dict[str, Any]) -> None:
        """Append the answer and new messages, or rewrite the history."""
        rng = self.rng
        self.messages = [*self.messages, answer]
        calls = answer.get("tool_calls") or []
        for call in calls:
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": rng.choice(RESULTS)})
        if not calls or rng.random() < 0.05:
            self.messages.append({"role": "user", "content": rng.choice(TEXTS)})
        chance = rng.random()
        if chance < 0.04:  # another question in the same place
            places = [number for number, message in enumerate(self.messages) if message["role"] == "user"]
            self.messages = [*self.messages[: places[-1]], {"role": "user", "content": f"instead {rng.choice(TEXTS)}"}]
        elif chance < 0.08:
            self.messages = [m | {"content": "changed"} if m["role"] == "system" else m for m in self.messages]
        elif chance < 0.12:  # thoughts are removed by the client
            self.messages = [
                m | {"content": re.sub("(?s)<think>.*</think>", "", m["content"])} if m.get("content") else m
                for m in self.messages
            ]

    def check_template(self, turn: Turn) -> None:
        """Check that the context is the template's rendering of all messages.

        Only spaces in sampled turns and the form of their calls may differ.
        """
        machine, row = self.machine, turn
        pieces: list[str] = []  # texts and patterns, from the last to the first
        exact: list[str] = []
        messages: list[dict[str, Any]] = []
        while (parent := row.parent) is not None:
            inserted = machine.decode(row.request.context_ids[len(row.request.context_ids) - row.num_inserted :])
            stop = machine.decode(parent.token_ids[-1:])
            text = _squeezed(machine.decode(parent.text_ids))
            if "tool_calls" in parent.answer and machine.template.shows_calls:
                text = _squeezed(parent.answer["content"] or "")
                exact += [re.escape(_squeezed(stop + inserted)), ".*", re.escape(text)]
            else:
                exact += [re.escape(_squeezed(stop + inserted)), re.escape(text)]
            pieces += [re.escape(stop + inserted), ".*"]
            messages[:0] = row.messages[len(parent.messages) :]
            row = parent
        start = machine.decode(row.request.context_ids)
        shown = self.session.as_sampled(ChatRequest.read([*row.messages, *messages], self.tools))
        whole = machine.render(shown, self.tools)
        exact.append(re.escape(_squeezed(start)))
        for found, text in (([*pieces, re.escape(start)], whole), (exact, _squeezed(whole))):
            if not re.fullmatch("".join(reversed(found)), text, re.DOTALL):
                raise CheckFailed(f"the context is not the template's: {machine.decode(turn.request.context_ids)!r}")

    def check_calls(self, turn: Turn) -> None:
        """Check that a turn has a call if the engine wrote one, and only then."""
        counts, answer = self.machine.counts, turn.answer
        if self.num_written not in (None, len(answer.get("tool_calls", ()))):
            raise CheckFailed(f"the engine wrote {self.num_written} calls, and the answer is {answer}")
        counts["turns with known calls"] += self.num_written is not None
        counts["calls"] += len(answer.get("tool_calls", ()))
        counts["invalid calls"] += len(answer.get("invalid_tool_calls", ()))
        for call in answer.get("tool_calls", ()):
            if call["function"]["name"] != "f" or set(json.loads(call["function"]["arguments"])) - {"a", "b"}:
                raise CheckFailed(f"a call that the engine did not write: {call}")


def check_sample(sample: Sample, seen: list[tuple[tuple[int, ...], list[int], list[float]]]) -> None:
    """Check that rows and ranges of a sample are exactly what the engine saw and sampled."""
    found = []
    is_sampled = [False] * sample.response_len
    for start, end in sample.sampled:
        segment = next(s for s in sample.segments() if s.start <= start < s.end)
        context = (*segment.context_ids, *sample.response_ids[segment.start : start])
        found.append((context, list(sample.response_ids[start:end]), list(sample.rollout_logprobs[start:end])))
        is_sampled[start:end] = [True] * (end - start)
    if sorted(found) != sorted(seen):
        raise CheckFailed("the sample's rows are not what the engine saw and sampled")
    others = [lp for lp, sampled in zip(sample.rollout_logprobs, is_sampled, strict=True) if not sampled]
    if any(others):
        raise CheckFailed("a token that was not sampled has a log-prob")
    if sum(is_sampled) != sample.num_sampled or sum(len(ids) for _, ids, _ in seen) != sample.num_sampled:
        raise CheckFailed("the mask has other tokens than the engine sampled")
    ends = [0, *(span.end for span in sample.spans)]
    if [span.start for span in sample.spans] != ends[:-1] or ends[-1] != sample.response_len:
        raise CheckFailed("the spans of versions do not cover the response")


def check_cost(machine: Machine, num_turns: int = 12) -> tuple[int, int]:
    """Check that turns 4 to `num_turns` cost the same. Return their characters rendered and tokens encoded."""
    limits = Limits(num_turns, 10**6, 10**6, frozenset(machine.stops))
    session = Session(machine.template, machine.parser, (0, 0), Prompt(0, "", (), ""), 0, limits)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    costs = []
    for number in range(num_turns):
        before = machine.template.counts.copy()
        chat = ChatRequest.read(messages)
        turn = session.turn_of(chat)
        after = machine.template.counts
        costs.append((after["rendered"] - before["rendered"], after["encoded"] - before["encoded"]))
        if number and turn.parent is None:
            return (0, 0)  # the template rewrites the history
        session.record(turn, chat, TurnResult([*machine.encode("fine"), machine.stops[0]], [0.0] * 5, "stop", 0))
        messages = [*messages, turn.answer, {"role": "user", "content": "and this?"}]
    if len(set(costs[3:])) != 1:
        raise CheckFailed(f"{machine.name}: the cost of a turn depends on the turns before: {costs}")
    return costs[-1]


def _squeezed(text: str) -> str:
    """Return the text without spaces."""
    return "".join(text.split())


def _rendered(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with well-formed texts and with arguments as objects, for the template."""
    return ChatRequest.read([*messages, {"role": "user", "content": ""}]).messages[:-1]


def _disturbed(messages: list[dict[str, Any]], rng: random.Random) -> list[dict[str, Any]]:
    """Return the messages as another client writes them: the same content, in other forms."""
    copied = copy.deepcopy(messages)
    for message in copied:
        message.pop("invalid_tool_calls", None)
        if message["role"] == "assistant" and rng.random() < 0.5:
            message["content"] = rng.choice([f"{message['content'] or ''} \n", (message["content"] or "").strip()])
            for call in message.get("tool_calls", ()):
                arguments = json.loads(call["function"]["arguments"])
                call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=1)
            message |= {"refusal": None, "annotations": []}
            if not message["content"].strip() and rng.random() < 0.5:
                message["content"] = None
    return copied


def run(names: list[str], num_conversations: int, seed: int) -> Counter[str]:
    """Check conversations of all families in turn, and return the counts. Raise CheckFailed."""
    machines, totals = [Machine(name) for name in names], Counter[str]()
    for number in range(num_conversations):
        machine = machines[number % len(machines)]
        conversation = Conversation(machine, seed + number)
        try:
            sample = conversation.run()
            check_sample(sample, conversation.seen)
        except Exception as error:
            raise CheckFailed(f"{machine.name}, --seed {seed + number}: {type(error).__name__}: {error}") from error
        machine.counts.update(conversations=1, segments=len(sample.segments()), sampled=sample.num_sampled)
        machine.counts["inserted"] += sample.response_len - sample.num_sampled
    for machine in machines:
        rendered, encoded = check_cost(machine)
        words = ", ".join(f"{count} {name}" for name, count in sorted(machine.counts.items()))
        cost = f"a turn costs {rendered} characters and {encoded} tokens" if rendered else "rewrites each history"
        print(f"{machine.name}: {words}; {cost}")
        totals += machine.counts
    return totals


def main() -> int:
    parser = argparse.ArgumentParser(description="Check that sessions train exactly the tokens that were sampled.")
    parser.add_argument("--conversations", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first conversation")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    options = parser.parse_args()
    try:
        totals = run(options.families, options.conversations, options.seed)
    except CheckFailed as error:
        print(f"FAILED: {error}")
        return 1
    print(json.dumps(dict(sorted(totals.items()))))
    return 0


if __name__ == "__main__":
    filter_output()
    sys.exit(main())
