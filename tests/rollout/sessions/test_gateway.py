"""The unmodified openai package talks to a session, and everything that would change the log-probs is refused."""

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from grpo_mega.rollout.sessions.session import Ended, TurnRequest, TurnResult
from tests.helpers.sessions import CALL, TOOLS, Run, conversations, decode, prompt_of, result_of, tool, user
from tools.chat_families import stop_ids

NAME = "qwen2.5"
# Python 3.12 limits json.loads and Python's calls separately, and a comprehension is no call any more.
DEPTH = 600 if sys.version_info < (3, 12) else 1200


def reply(request: TurnRequest) -> TurnResult:
    """Call the tool if the last message is a question, else answer."""
    asks = not decode(NAME, request.context_ids).rstrip().endswith("</tool_response><|im_end|>\n<|im_start|>assistant")
    return result_of(NAME, f"Let me see. {CALL}" if asks else "It is 2, \u2028 é 🙂.")


def agent(use: Callable[[openai.OpenAI], Any]) -> Callable[[str, str, SimpleNamespace], Any]:
    """Return an agent function that uses OpenAI's client. An error of the test fails the conversation."""

    def run(base_url: str, api_key: str, prompt: SimpleNamespace) -> Any:
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            return use(client)

    return run


def outcome_of(use: Callable[[openai.OpenAI], Any], **options: Any) -> tuple[Any, Run, Ended]:
    """Run one conversation, and return what `use` returned or raised, the run, and the end of the conversation."""
    found: list[Any] = []

    def noting(client: openai.OpenAI) -> None:
        try:
            found.append(use(client))
        except Exception as error:
            found.append(error)

    with conversations(NAME, agent(noting), options.pop("reply", reply), **options) as run:
        run.start(prompt_of(NAME))
        end = run.end()
    assert isinstance(end, Ended)
    return found[0], run, end


def refusal(**parameters: Any) -> openai.APIStatusError:
    """Return the error of a request with these parameters."""
    body = {"model": "policy", "messages": [user("hello")]} | parameters
    error, run, _ = outcome_of(lambda client: client.chat.completions.create(**body))
    assert isinstance(error, openai.APIStatusError), error
    assert not run.asked
    return error


def ask(client: openai.OpenAI, messages: list[Any], **parameters: Any) -> Any:
    return client.chat.completions.create(model="policy", messages=messages, **parameters)


def test_a_client_calls_a_tool_and_gets_the_answer() -> None:
    def use(client: openai.OpenAI) -> str:
        messages: list[Any] = [user("hello")]
        first = ask(client, messages, tools=TOOLS, temperature=0.7, top_p=1, n=1, tool_choice="auto").choices[0]
        assert first.finish_reason == "tool_calls" and first.message.content == "Let me see."
        [call] = first.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"a": 1})
        messages += [first.message, tool("2", call.id)]
        second = ask(client, messages, tools=TOOLS)
        assert second.usage.completion_tokens > 5 and second.choices[0].finish_reason == "stop"
        return second.choices[0].message.content

    text, run, end = outcome_of(use)
    assert text == "It is 2, \u2028 é 🙂."
    assert [request.number for request in run.asked] == [0, 1] and len(end.sample.contexts) == 1
    assert end.sample.contexts[0].start == 0, "the tools are in the prompt"


def test_a_streamed_answer_has_the_same_content() -> None:
    def use(client: openai.OpenAI) -> None:
        plain = ask(client, [user("hello")], tools=TOOLS).choices[0]
        chunks = list(ask(client, [user("hello")], tools=TOOLS, stream=True, stream_options={"include_usage": True}))
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == plain.message.content
        [call] = [call for delta in deltas for call in delta.tool_calls or ()]
        assert (call.id, call.function.arguments) == (
            plain.message.tool_calls[0].id,
            plain.message.tool_calls[0].function.arguments,
        )
        assert chunks[-2].choices[0].finish_reason == "tool_calls" and chunks[-1].usage.total_tokens > 20
        with client.chat.completions.stream(model="policy", messages=[user("hello")], tools=TOOLS) as stream:
            final = stream.get_final_completion().choices[0].message
        assert final.tool_calls[0].function.name == "f"

    error, run, end = outcome_of(use)
    assert error is None and len(run.asked) == 1, "the same request is sampled once"
    assert end.sample.num_sampled == end.sample.response_len


def test_many_asynchronous_clients_talk_at_the_same_time() -> None:
    barrier = threading.Barrier(8)

    def run_agent(base_url: str, api_key: str, prompt: SimpleNamespace) -> float:
        barrier.wait(timeout=60)

        async def talk() -> float:
            async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
                messages: list[Any] = [user(f"question {prompt.level}")]
                for _ in range(2):
                    message = (await client.chat.completions.create(model="x", messages=messages, tools=TOOLS)).choices[
                        0
                    ]
                    messages += [message.message, *[tool("2", c.id) for c in message.message.tool_calls or ()]]
                stream = await client.chat.completions.create(
                    model="x", messages=messages[:1], tools=TOOLS, stream=True
                )
                return float("".join([c.choices[0].delta.content or "" async for c in stream]) == "Let me see.")

        return asyncio.run(talk())

    with conversations(NAME, run_agent, reply) as run:
        for index in range(8):
            run.start(prompt_of(NAME, level=index), index)
        ends = [run.end() for _ in range(8)]
    assert all(isinstance(end, Ended) and end.sample.scores == {"agent": 1.0} for end in ends), ends
    assert sorted(end.sample.index for end in ends if isinstance(end, Ended)) == list(range(8))
    assert len(run.asked) == 16


def test_a_client_that_asks_again_gets_the_turn_that_was_sampled() -> None:
    waiting, may_answer = threading.Event(), threading.Event()

    def slow(request: TurnRequest) -> TurnResult:
        waiting.set()
        assert may_answer.wait(60)
        return result_of(NAME, "late")

    def use(client: openai.OpenAI) -> str:
        impatient = client.with_options(timeout=0.2)
        with pytest.raises(openai.APITimeoutError):
            ask(impatient, [user("hello")])
        assert waiting.wait(60)
        may_answer.set()
        return ask(client, [user("hello")]).choices[0].message.content

    text, run, end = outcome_of(use, reply=slow)
    assert (text, len(run.asked), len(end.sample.sampled)) == ("late", 1, 1)


def test_a_call_that_cannot_be_parsed_is_told_to_the_client() -> None:
    broken = '<tool_call>\n{"name": }\n</tool_call>'
    answer, _, _ = outcome_of(
        lambda client: ask(client, [user("hello")], tools=TOOLS).choices[0], reply=lambda _: result_of(NAME, broken)
    )
    assert answer.message.content == broken and answer.message.tool_calls is None
    assert "not JSON" in answer.message.invalid_tool_calls[0]["error"] and answer.finish_reason == "stop"


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"temperature": 0.2}, r"temperature=0.2: must be rollout.temperature=0.7, because the trainer"),
        ({"top_p": 0.9}, r"top_p=0.9: must be rollout.top_p=1.0"),
        ({"n": 2}, r"n=2: is not supported; leave it out"),
        ({"seed": 1}, "seed=1: is not supported"),
        ({"logprobs": True}, "logprobs=True: is not supported"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice='required': is not supported"),
        ({"tools": TOOLS, "tool_choice": "none"}, "tool_choice='none': is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format="),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, "chat_template_kwargs="),
        ({"stop": "hello there"}, "stop='hello there': must be one token"),
        ({"messages": [user("a") | {"x": json.loads("[" * DEPTH + "]" * DEPTH)}]}, "the body is nested too deeply"),
        ({"max_tokens": 0}, "max_tokens=0: must be a number of at least 1"),
        ({"tools": [{"type": "function"}]}, "tools: must be a list of"),
        ({"messages": []}, "messages: must be a list of at least one message"),
        ({"messages": [{"role": "tool", "content": "a"}], "tools": "f"}, "tools: must be a list of"),
    ],
)
def test_parameters_that_cannot_be_honoured_are_refused(parameters: dict[str, Any], problem: str) -> None:
    error = refusal(**parameters)
    assert error.status_code == 400 and problem in str(error)


def test_the_temperature_of_training_may_be_named_in_evaluation() -> None:
    found: list[Any] = []

    def use(client: openai.OpenAI) -> None:
        for temperature in (0.7, 0.0, 0.5):
            try:
                found.append(ask(client, [user("hello")], temperature=temperature, extra_body={"top_k": -1}))
            except openai.BadRequestError as error:
                found.append(str(error))

    with conversations(NAME, agent(use), reply) as run:
        run.conversations.sampling = replace(run.conversations.sampling, temperature=0.0)
        run.start(prompt_of(NAME))
        run.end()
    assert found[0].id == found[1].id and "temperature=0.5: must be rollout.temperature=0.7" in found[2]


def test_messages_that_the_template_refuses_are_an_error_of_the_client() -> None:
    def use(client: openai.OpenAI) -> None:
        ask(client, [user("a"), user("b")])

    found: list[Any] = []

    def noting(client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            use(client)
        found.append(caught.value)

    with conversations("mistral", agent(noting), lambda _: None) as run:
        run.start(prompt_of("mistral"))
        run.end()
    assert "the chat template refuses the messages (After the optional system message" in str(found[0])


def test_keys_and_sessions_are_checked() -> None:
    def use(client: openai.OpenAI) -> str:
        ask(client, [user("hello")])
        assert [model.id for model in client.models.list()] == ["policy"]
        with pytest.raises(openai.AuthenticationError, match="API key is not the session's"):
            ask(client.with_options(api_key="wrong"), [user("hello")])
        with pytest.raises(openai.NotFoundError, match="there is no session 'nobody'"):
            unknown = str(client.base_url).replace(str(client.base_url).split("/")[4], "nobody")
            ask(client.with_options(base_url=unknown), [user("hello")])
        return f"{client.base_url} {client.api_key}"

    found: list[str] = []
    with conversations(NAME, agent(lambda client: found.append(use(client))), reply) as run:
        run.start(prompt_of(NAME))
        run.end()
        base_url, key = found[0].split()
        with openai.OpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
            with pytest.raises(openai.APIStatusError, match="the session has ended") as caught:
                ask(client, [user("hello")])
            assert caught.value.status_code == 410
            assert caught.value.code == "session_ended"


def test_max_tokens_and_stop_reach_the_engine() -> None:
    answer, run, _ = outcome_of(lambda client: ask(client, [user("hello")], max_completion_tokens=5, stop=["x", "y"]))
    assert answer.choices[0].finish_reason == "tool_calls"
    assert run.asked[0].max_new_tokens == 5
    extra = run.asked[0].stop_token_ids - {*stop_ids(NAME)}
    assert {decode(NAME, [token]) for token in extra} == {"x", "y"}


def test_a_limit_is_an_error_with_a_code_and_the_samples_finish_reason() -> None:
    def use(client: openai.OpenAI) -> str:
        first = ask(client, [user("hello")]).choices[0].message
        try:
            ask(client, [user("hello"), first, user("more")])
        except openai.BadRequestError as error:
            return str(error.code)
        return "no error"

    code, _, end = outcome_of(use, max_turns=1)
    assert (code, end.sample.finish_reason) == ("max_turns", "turns")
    code, _, end = outcome_of(use, max_response_length=45)
    assert (code, end.sample.finish_reason) == ("max_response_length", "length")
