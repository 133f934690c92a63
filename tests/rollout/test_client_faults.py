"""Faults of a server: a full cache, redirects, endless answers, and answers that are too large."""

from __future__ import annotations

import json
from typing import Any

import pytest

from grpo_mega.errors import ConfigError, EngineError
from grpo_mega.rollout.engine import Sampling
from grpo_mega.rollout.sglang.client import ServerClient, check_server, served_logprobs
from grpo_mega.types import Prompt, Sample
from tests.helpers.http_servers import sending, serving

HEADERS = {"Authorization": "Bearer secret"}
PIECE = b" " * (1 << 20)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_of_a_server_is_refused_and_the_key_stays_here(status: int) -> None:
    seen: list[Any] = []

    def elsewhere(path: str, body: Any) -> tuple[int, Any]:
        seen.append(path)
        return 200, {}

    sample = Sample(Prompt(7, "p", (1,), "a"), 0, [], [], None)
    with serving(elsewhere) as other:
        redirect = f"HTTP/1.1 {status} Moved\r\nLocation: {other}/x\r\nContent-Length: 0\r\n\r\n".encode()
        with sending([redirect]) as server:
            session = ServerClient(server.url, HEADERS)
            try:
                with pytest.raises(EngineError, match=f"was refused \\({status}"):
                    session.run(session.post("/flush_cache"))
                assert not session.run(session.is_healthy(20))
                session.generate(0, [sample], Sampling(1, 1.0, 8, frozenset()), 0)
                event = session.events.get(timeout=60)
                assert event.error and f"refused a request ({status}" in event.error
            finally:
                session.close()
    assert seen == []


def test_an_answer_that_is_too_long_is_given_up() -> None:
    for status, error in (("200 OK", "answered more than 256 MiB"), ("400 Bad", "was refused")):
        with sending([f"HTTP/1.1 {status}\r\n\r\n".encode(), *[PIECE] * 3000]) as server:
            session = ServerClient(server.url, HEADERS, deadline_s=100)
            try:
                with pytest.raises(EngineError, match=error):
                    session.run(session.post("/flush_cache"))
            finally:
                session.close()
            assert server.num_sent < 1500, "the client read too much of 3 GB"


def test_a_teacher_that_sends_without_end_is_no_server() -> None:
    with sending([b"HTTP/1.1 200 OK\r\n\r\n", *[PIECE] * 3000]) as server:
        with pytest.raises(ConfigError, match=r"teachers\.t\.url="):
            check_server("t", server.url)
        assert server.num_sent < 100, "the client read too much of 3 GB"


BAD_LOGPROBS = [None, "-1.0", True, [-1.0], float("nan"), float("inf"), 0.0011, -1e39, 10**400]
BAD_TEACHERS = [
    "<html>",
    "null",
    "[]",
    "[" * 100_000,
    '"log-probs"',
    {},
    {"meta_info": None},
    {"meta_info": {}},
    *({"meta_info": {"input_token_logprobs": entries}} for entries in (None, "text", [], [-1.0] * 3, [[]] * 3, {})),
    {"meta_info": {"input_token_logprobs": [[-1.0, 8, None], [-1.0, 9, None]]}},
    {"meta_info": {"input_token_logprobs": [[-1.0, token, None] for token in (7, 8, 8)]}},
    *({"meta_info": {"input_token_logprobs": [[-1.0, 7], [bad, 8], [-1.0, 9]]}} for bad in BAD_LOGPROBS),
]


def test_an_answer_of_a_teacher_that_cannot_be_used_names_the_teacher() -> None:
    answers: list[Any] = [*BAD_TEACHERS, {"meta_info": {"input_token_logprobs": [[-0.5, 7], [9e-4, 0], [-3e38, 9]]}}]
    sample = Sample(Prompt(7, "p", (1, 2), "a"), 0, [7, 8, 9], [], "stop")
    remaining = iter(answers)
    with serving(lambda path, body: (200, next(remaining))) as url:
        for _ in BAD_TEACHERS:
            with pytest.raises(EngineError, match=rf"teachers\.t\.url={url}: .* answered .*; see its log.*--resume$"):
                served_logprobs("t", url, [sample], lambda: None)
        assert served_logprobs("t", url, [sample], lambda: None) == [[-0.5, 0.0, -3e38]]


GOOD = {
    "index": 0,
    "output_ids": [9, 4],
    "meta_info": {
        "finish_reason": {"type": "stop"},
        "weight_version": "3",
        "output_token_logprobs": [[-0.5, 9, None], [5e-4, 4, None]],
    },
}
BAD_PARTS: list[dict[str, Any]] = [
    *({"output_token_logprobs": [[-0.5, 9, None], [bad, 4, None]]} for bad in BAD_LOGPROBS),
    *({"index": index} for index in (-1, 1, None, "0")),
    *({"output_ids": [9, bad], "output_token_logprobs": [[-0.5, 9], [-0.5, bad]]} for bad in (11, -1, "4", 4.0, None)),
    {"output_ids": [9, 4, 4, 4], "output_token_logprobs": [[-0.5, token] for token in (9, 4, 4, 4)]},
    {"output_ids": [], "output_token_logprobs": []},
    {"output_ids": [9]},
    {"finish_reason": "stop"},
    {"meta_info": None},
    {"meta_info": {}},
]


def test_an_answer_of_an_engine_that_cannot_be_used_is_an_error() -> None:
    bad = [
        GOOD | part | ({} if part.keys() & {"meta_info"} else {"meta_info": GOOD["meta_info"] | part})
        for part in BAD_PARTS
    ]  # type: ignore[operator]
    answers = [json.dumps(answer) for answer in (*bad, None, "text", [1])] + ["{", json.dumps(GOOD)]
    sample, remaining = Sample(Prompt(7, "p", (1,), "a"), 0, [], [], None), iter(answers)
    with serving(lambda path, body: (200, f"data: {next(remaining)}\n\n")) as url:
        session = ServerClient(url, HEADERS)
        try:
            for answer in answers:
                session.generate(0, [sample], Sampling(1, 1.0, 3, frozenset(), vocab_size=11), 0)
                event = session.events.get(timeout=60)
                if answer != answers[-1]:
                    assert event.sample is None and event.error, answer
                    assert f"the answer of {url} for prompt 7 cannot be used" in event.error, event.error
        finally:
            session.close()
    assert event.sample is not None
    assert (event.sample.response_ids, event.sample.rollout_logprobs) == ([9, 4], [-0.5, 0.0])


def test_a_sample_that_was_interrupted_by_a_full_cache_is_reported() -> None:
    samples = [Sample(Prompt(7, "p", (1,), "a"), index, [], [], None) for index in range(2)]

    def answer(path: str, body: Any) -> tuple[int, str]:
        meta = {"finish_reason": {"type": "stop"}, "weight_version": "3", "output_token_logprobs": [[-0.5, 9, None]]}
        lines = [
            {"index": i, "output_ids": [9], "meta_info": meta | {"num_retractions": 2 * i}} for i in range(len(samples))
        ]
        return 200, "".join(f"data: {json.dumps(line)}\n\n" for line in lines)

    with serving(answer) as url:
        session = ServerClient(url, HEADERS)
        try:
            session.generate(0, samples, Sampling(2, 1.0, 8, frozenset()), 0)
            events = [session.events.get(timeout=60) for _ in samples]
        finally:
            session.close()
    assert [(event.sample and event.sample.index, event.was_retracted) for event in events] == [(0, False), (1, True)]
