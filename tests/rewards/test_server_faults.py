"""Faults of a reward server: the score is missing instead of 0, and time and memory are bounded, whatever the server
sends.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

import grpo_mega.rewards.reward_model
from grpo_mega.errors import ConfigError
from grpo_mega.rewards import NoScore, Score
from grpo_mega.rewards.reward_model import check_reachable, reward_model
from tests.helpers.http_servers import sending, serving


def score(url: str, **options: Any) -> Score:
    return reward_model("pp", "abc", "7", {}, url=url, **options)


NO_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "1" * 400]


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_a_reward_that_is_not_finite_is_a_missing_score(value: str) -> None:
    replies = {
        "classify": f'[{{"embedding": [{value}]}}]',
        "score": f'{{"scores": [[{value}]]}}',
        "chat": json.dumps({"choices": [{"message": {"content": f"Score: {'9' * 400}"}}]}),
    }
    for api, reply in replies.items():
        problem = "without a score from 0 to 10" if api == "chat" else "gave the reward"
        with serving(lambda path, body: (200, reply)) as url, pytest.raises(NoScore, match=problem):  # noqa: B023
            score(url, api=api, model="m")


def test_a_scale_that_makes_a_reward_infinite_is_a_missing_score() -> None:
    with (
        serving(lambda path, body: (200, {"choices": [{"message": {"content": "9"}}]})) as url,
        pytest.raises(NoScore, match="gave the reward inf"),
    ):
        score(url, api="chat", model="m", scale=1e308)


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"", "does not answer (RemoteDisconnected"),
        (b"\x16\x03\x01 garbage\r\n\r\n", "does not answer (BadStatusLine"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "does not answer (IncompleteRead"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n[{", "sent a reply that is not JSON"),
        (b'HTTP/1.1 200 OK\r\n\r\n[{"embedding": [\xff]}]', "sent a reply that is not JSON"),
        (
            b"HTTP/1.1 200 OK\r\n" + b"X: 1\r\n" * 300 + b"\r\n",
            "does not answer (HTTPException: got more than 100 headers",
        ),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 900\r\n\r\nwait", "answers 503 (wait)"),
    ],
)
def test_a_reply_that_is_not_http_is_a_missing_score(sent: bytes, error: str) -> None:
    with sending([sent]) as server, pytest.raises(NoScore) as raised:
        score(server.url, retries=0)
    assert error in str(raised.value)


def test_a_reply_that_is_too_long_is_given_up_at_the_limit() -> None:
    piece = b" " * (1 << 20)
    with sending([b"HTTP/1.1 200 OK\r\n\r\n", *[piece] * 400]) as server:
        with pytest.raises(NoScore, match="sent more than 16 MiB"):
            score(server.url, timeout_s=100.0)
        assert server.num_sent < 100, "400 MiB were available"


@pytest.mark.parametrize("start", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "])
def test_a_reply_that_arrives_byte_by_byte_is_given_up_in_time(start: bytes) -> None:
    with sending([start, *[b"1"] * 600], pause_s=0.1) as server:
        started = time.monotonic()
        with pytest.raises(NoScore, match="does not answer"):
            score(server.url, timeout_s=1.0)
        assert time.monotonic() - started < 30  # the whole reply takes 60 s


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed_so_that_the_key_stays_here(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    seen: list[Any] = []

    def elsewhere(path: str, body: Any) -> tuple[int, Any]:
        seen.append(body)
        return 200, [{"embedding": [1.0]}]

    with serving(elsewhere) as other:
        redirect = f"HTTP/1.1 {status} Moved\r\nLocation: {other}/classify?key=x\r\nContent-Length: 0\r\n\r\n".encode()
        with sending([redirect]) as server:
            text = f"answers {status}, a redirect to {other}, which is not followed; set "
            with pytest.raises(NoScore, match=re.escape(text)):
                score(server.url, api_key_env="JUDGE_KEY")
            with pytest.raises(ConfigError, match=re.escape(text)):
                check_reachable({"url": server.url, "api_key_env": "JUDGE_KEY"})
    assert seen == []


def test_the_check_of_a_server_reads_only_a_little_of_its_reply() -> None:
    piece = b" " * (1 << 20)
    with sending([b"HTTP/1.1 200 OK\r\n\r\n", *[piece] * 3000]) as server:
        check_reachable({"url": server.url})
        assert server.num_sent < 100, "3 GB were available"


def test_the_check_of_a_server_has_one_deadline_for_the_whole_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo_mega.rewards.reward_model, "START_TIMEOUT_S", 1.0)
    for start in (b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "):
        with sending([start, *[b"1"] * 600], pause_s=0.1) as server:
            started = time.monotonic()
            with pytest.raises(ConfigError, match="no server answers at url="):
                check_reachable({"url": server.url})
            assert time.monotonic() - started < 30  # the whole reply takes 60 s
