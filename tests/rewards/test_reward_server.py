"""The reward of a server that is slow, broken, absent or misconfigured. tests/sglang covers answers of a real
server.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from typing import Any

import pytest

from grpo_mega.cli.checks.violations import reward_problems
from grpo_mega.config import Config, validate
from grpo_mega.errors import ConfigError, RewardError, raise_all
from grpo_mega.rewards import NoScore, RewardPool, Score, Step
from grpo_mega.rewards.reward_model import JUDGE_TEMPLATE, reward_model
from tests.helpers.http_servers import Answer, serving
from tests.helpers.reward_pools import reward_pool

pytestmark = [pytest.mark.pool, pytest.mark.waiting]

CHAT = {"api": "chat", "model": "m"}


def lengths(path: str, body: Any) -> tuple[int, Any]:
    """Return the length of each text as its reward, like a reward model."""
    if path == "/health":
        return 200, ""
    assert path == "/classify"
    return 200, [{"embedding": [float(len(text))]} for text in body["text"]]


def says(reply: str) -> Answer:
    return lambda path, body: (200, {"choices": [{"message": {"content": reply}}]})


def score(url: str, response: str = "abc", **options: Any) -> Score:
    return reward_model("pp", response, "7", {"source": "gsm", "row": 3}, url=url, **options)


def test_the_template_is_filled_and_the_value_scaled() -> None:
    with serving(lengths) as url:
        assert score(url) == Score(5.0, "scored")
        assert score(url + "/", scale=-0.5) == Score(-2.5, "scored")
        template = "{source}{row}|{answer}|{response}{other}{}"
        expected = len("gsm3|7|{answer}{other}{}")  # placeholders in a response are not filled
        assert score(url, "{answer}", template=template) == Score(expected, "scored")


def test_steps_are_scored_by_the_response_up_to_their_end_in_one_request() -> None:
    asked: list[Any] = []

    def answer(path: str, body: Any) -> tuple[int, Any]:
        asked.append(body["text"])
        return lengths(path, body)

    with serving(answer) as url:
        assert score(url, "a\n\n\nbcd", steps=True) == Score(None, "scored", (Step(4, 3.0), Step(7, 9.0)))
        found = score(url, "a\nb\n", steps=True, step_splitter="lines", scale=2)
        assert found == Score(None, "scored", (Step(2, 6.0), Step(4, 10.0)))
        assert score(url, "ab\n\ncd", steps=True, template="{response}") == Score(
            None, "scored", (Step(4, 2.0), Step(6, 6.0))
        )
        assert score(url, " \n", steps=True) == Score(None, "no_steps")
    assert asked[0] == ["ppa", "ppa\n\n\nbcd"]


SCORES = [
    ("Good: 8", 0.8),
    ("8/10, so\n**7.5**", 0.75),
    ("<think>10</think>\nScore: 0.", 0.0),
    ("gpt4 says 2", 0.2),
    ("8/10", 0.8),
    ("I give it **9** / 10.", 0.9),
    ("It is right.\n7 out of 10\n", 0.7),
    ("8/10 because 3 of 5 steps hold", 0.8),
    ("Style: 4/10\n\nOverall score: **6/10**, as rules of 2024 say.", 0.6),
    ("Score (0-10): 5", 0.5),
    ('{"score": 7}', 0.7),
    ("It earns a score of 10.", 1.0),
    ("\\boxed{8.5}", 0.85),
    ("7,5", 0.75),
    ("10/10!", 1.0),
    ("8 points", 0.8),
    ("I would give this 7 points.", 0.7),
    ("I'd give this response a 7 because one step is missing", 0.7),
    ("My rating would be 6.", 0.6),
    ("My rating of the answer is 6, for it is terse.", 0.6),
    ("8 (out of 10)", 0.8),
    ("8 points out of 10", 0.8),
    ("<answer>8</answer>", 0.8),
    ("<score>8</score>", 0.8),
    ("I assign 8", 0.8),
    ("We award the solution 9 marks.", 0.9),
    ("I'd rate it an 8.", 0.8),
    ("On a scale of 0 to 10, I would say 8.", 0.8),
    ("Score (out of 10): 8, because of 2 errors", 0.8),
    ('{"reason": "the answer is 4", "score": 8}', 0.8),
    ("The right answer is 4.\nScore: 8", 0.8),
    ("The response is right, but terse. 8", 0.8),
    ("It deserves 3.", 0.3),
    ("So the score should be 7.", 0.7),
    ("My evaluation is 7, but it earns 7 for its style.", 0.7),
    ("This is a 9", 0.9),
    ("Final answer: 8", 0.8),
    ("9 out of 10 overall", 0.9),
]
NO_SCORES = [
    "no idea",
    "11",
    "-2",
    "gpt4 says -2",
    "85",
    "Score: 80/100",
    "Score: -1",
    "Both answers appeared in 2024",
    "2024",
    "between 7 and 8",
    "Score: 7-8",
    "Score: 7 or 8",
    "7/5",
    "Rating: 4/5",
    "3 of 5 steps are right",
    "Graded 3 of 5.",
    "1e1",
    "12/10",
    "<think>It is 7/10",
    "Correct: the answer is 4",
    "The answer is 4.",
    "Right answer: 4",
    "The result is 7",
    "so x = 4",
    "I would give the answer 4.",
    "The rating is low because the answer is 4",
    "The response gives 4",
    "I assign 4 to x.",
    "It fails at step 3.",
    "Errors: 2",
    "I give 2 reasons",
    "It is a grade 5 problem.",
    "The team scored 8 goals",
    "The interest rate is 5",
    "8/10 steps are right",
    "3 out of 10 steps hold",
    "Score: 8%",
    "I'd give it 4 (out of 5)",
    "a 7 or an 8",
    "7 or 8 out of 10",
    "7-8/10",
    "I would give between 6 and 7 points",
    "Style 7/10, substance 4/10",
    "Score: 8\nConfidence: 9",
    "In 2024: 20",
    "Why this score:\n1. It is right.",
    "5 + 3 = 8 points?",
]


def test_a_judges_score_counts_in_its_usual_forms() -> None:
    asked: list[Any] = []

    def answer(path: str, body: Any) -> tuple[int, Any]:
        reply = SCORES[len(asked)][0]
        asked.append((path, body))
        return says(reply)(path, body)

    with serving(answer) as url:
        for reply, value in SCORES:
            assert score(url, api="chat", model="judge") == Score(pytest.approx(value), "scored"), reply
    filled = JUDGE_TEMPLATE.replace("{prompt}", "pp").replace("{answer}", "7").replace("{response}", "abc")
    for path, body in asked:
        assert (path, body["model"]) == ("/v1/chat/completions", "judge")
        assert body["messages"] == [{"role": "user", "content": filled}]


def test_numbers_that_are_no_score_of_0_to_10_are_no_score() -> None:
    replies = iter(NO_SCORES)
    with serving(lambda path, body: says(next(replies))(path, body)) as url:
        for reply in NO_SCORES:
            with pytest.raises(NoScore, match="replied without a score from 0 to 10"):
                pytest.fail(f"{reply!r} scores {score(url, **CHAT).value}")


def test_any_last_number_counts_with_a_template_of_your_own() -> None:
    with serving(says("Of 5 steps 3 hold: -80")) as url:
        assert score(url, template="{response}", **CHAT) == Score(-80.0, "scored")


@pytest.mark.parametrize(
    ("answer", "options", "error"),
    [
        (says("no idea"), CHAT, "replied without a score from 0 to 10 (no idea); ask for one in template"),
        (says("no"), {**CHAT, "template": "{response}"}, "replied without a number (no); ask for one in template"),
        (lambda path, body: (200, {"x": 1}), CHAT, "not a message; correct url or api"),
        (
            lambda path, body: (200, [{"embedding": []}]),
            {},
            "gave [] for a text; serve a reward model, with --is-embedding",
        ),
        (
            lambda path, body: (200, [{"embedding": [1, 2]}]),
            {},
            "has a model of 2 outputs; set output to one of 0 to 1",
        ),
        (lambda path, body: (200, [{"embedding": [1]}]), {"output": 1}, "output=1 is not one; lower it"),
        (lambda path, body: (200, []), {}, "not 1 embeddings"),
        (lambda path, body: (200, {"scores": 3}), {"api": "score"}, "not 1 scores"),
        (
            lambda path, body: (400, "input is\ntoo long"),
            {},
            "/classify answers 400 (input is too long); correct the options",
        ),
        (lambda path, body: (503, "busy"), {"retries": 1}, "answers 503 (busy); see its log"),
        (lambda path, body: (200, "<html>"), {"retries": 0}, "sent a reply that is not JSON (Expecting value"),
        (
            lambda path, body: (200, "[" * 100_000),
            {"retries": 0},
            "sent a reply that is not JSON (it is nested too deeply)",
        ),
        (lambda path, body: (200, '[{"embedding": [%s]}]' % ("1" * 5_000)), {"retries": 0}, "not JSON (Exceeds"),
        (lambda path, body: (200, [{"embedding": ["7"]}]), {}, "gave ['7'] for a text"),
        (lambda path, body: (200, [{"embedding": [True]}]), {}, "gave [True] for a text"),
        (lambda path, body: (200, {"choices": [{"message": {"content": [{"text": "8"}]}}]}), CHAT, "not a message"),
        (lambda path, body: (200, {"scores": [[0.5], [0.5]]}), {"api": "score"}, "not 1 scores"),
    ],
)
def test_a_reply_without_a_reward_is_a_missing_score(answer: Answer, options: dict[str, Any], error: str) -> None:
    with serving(answer) as url, pytest.raises(NoScore) as raised:
        score(url, **options)
    assert str(raised.value).startswith(f"the server at {url}")
    assert error in str(raised.value)


def test_requests_to_a_server_that_fails_sometimes_are_retried() -> None:
    statuses = iter([503, 429, 200])
    with serving(lambda path, body: (next(statuses), [{"embedding": [3.0]}])) as url:
        assert score(url) == Score(3.0, "scored")
    statuses = iter([400, 200])
    with serving(lambda path, body: (next(statuses), "no")) as url, pytest.raises(NoScore):
        score(url)
    assert list(statuses) == [200]  # a refused request is not retried


def test_a_server_that_hangs_is_given_up_in_time() -> None:
    with serving(lambda path, body: (time.sleep(3), (200, []))[1]) as url:  # type: ignore[func-returns-value]
        started = time.monotonic()
        with pytest.raises(NoScore, match="does not answer"):
            score(url, timeout_s=0.5, retries=5)
        assert time.monotonic() - started < 2.5  # the server takes 3 s, like six tries of 0.5 s


def _pool(url: str, **options: Any) -> RewardPool:
    given = {"url": url, "timeout_s": 10.0, **options}
    return reward_pool([("reward_model", 1.0)], options={"reward_model": given})


def test_one_failure_costs_only_its_score_and_reports_the_reason() -> None:
    def answer(path: str, body: Any) -> tuple[int, Any]:
        return (400, "bad") if "bad" in str(body) else lengths(path, body)

    with serving(answer) as url, _pool(url) as pool:
        for key, response in enumerate(["good", "bad"]):
            pool.submit(key, "", response, "", {})
        results = pool.collect()
        assert [(r.total, r.verdicts["reward_model"]) for r in results.values()] == [(4.0, "scored"), (None, "error")]
        assert (
            f"the server at {url}/classify answers 400 (bad); correct the options" in results[1].errors["reward_model"]
        )


def test_a_missing_server_is_a_one_line_error_before_any_scoring() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with _pool(url) as pool, pytest.raises(RewardError) as raised:
        pool.wait_until_ready()
    assert f"no server answers at url={url} ([Errno 111] Connection refused); start it, or correct" in str(raised.value)
    with (
        serving(lambda path, body: (503, "")) as url,
        _pool(url) as pool,
        pytest.raises(RewardError, match="answers 503 to /health"),
    ):
        pool.wait_until_ready()
    with serving(lambda path, body: (404, "")) as url, _pool(url) as pool:  # not every server has /health
        pool.wait_until_ready()


def test_a_worker_replaced_during_a_run_does_not_need_the_server() -> None:
    statuses = iter([200])  # /health answers once

    def answer(path: str, body: Any) -> tuple[int, Any]:
        return (next(statuses, 503), "") if path == "/health" else lengths(path, body)

    with serving(answer) as url, _pool(url) as pool:
        pool.wait_until_ready()
        os.kill(pool.worker_pids[0], signal.SIGKILL)
        time.sleep(0.2)
        pool.submit(0, "", "fine", "", {})
        assert pool.collect()[0].total == 4.0


def test_the_key_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    seen: list[Any] = []

    def answer(path: str, body: Any) -> tuple[int, Any]:
        seen.append(body)
        return 200, ""

    with serving(answer) as url, _pool(url, api_key_env="JUDGE_KEY") as pool:
        pool.wait_until_ready()
    assert seen[0]["Authorization"] == "Bearer secret"


def _config(**reward: Any) -> Config:
    function = {"name": "reward_model", "options": {"url": "http://n:1"} | reward.pop("options", {})}
    return validate(
        {
            "run_dir": "r",
            "steps": 1,
            "model": {"path": "m"},
            "data": {"train": "t"},
            "rewards": {"functions": [function], **reward},
        }
    )


@pytest.mark.parametrize(
    ("reward", "error"),
    [
        ({"options": {"url": "n:1"}}, "url='n:1' is not of the form http://HOST:PORT"),
        ({"options": {"url": 5}}, "reward_model: url=5: must be text"),
        ({"options": {"api": "rank"}}, "reward_model: api='rank': must be 'classify', 'score' or 'chat'"),
        ({"options": {"api": "chat"}}, "api=chat needs the option model"),
        ({"options": {"template": "{prompt}"}}, "template has no {response}"),
        ({"options": {"labels": "yes"}}, "labels='yes' are not token ids; write them like '9689,2753'"),
        ({"options": {"output": -1}}, "output=-1: must be at least 0; raise it"),
        ({"options": {"retries": 1.5}}, "retries=1.5: must be a whole number"),
        ({"options": {"scale": "1"}}, "scale='1': must be a number"),
        ({"options": {"timeout_s": 0}}, "timeout_s=0: must be above 0; raise it"),
        ({"options": {"steps": "yes"}}, "steps='yes': must be true or false"),
        ({"options": {"api_key_env": "NO_SUCH_KEY"}}, "'NO_SUCH_KEY' is not in the environment; export it"),
        ({"options": {"modle": "x"}}, "has no option 'modle'; did you mean model?"),
        ({"options": {"timeout_s": 9}}, "timeout_s=9 is not below rewards.deadline_s=5; lower it, or raise"),
        ({"deadline_s": 3}, "timeout_s=4 is not below rewards.deadline_s=3"),
    ],
)
def test_invalid_options_are_refused_before_anything_starts(reward: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(error)) as raised:
        raise_all(reward_problems(_config(**reward).rewards, None))
    assert "\n" not in str(raised.value)


def test_a_config_without_a_url_is_refused() -> None:
    raw = _config().model_dump(mode="json")
    raw["rewards"]["functions"][0]["options"] = {}
    with pytest.raises(ConfigError, match="reward function 'reward_model' needs the option 'url'"):
        raise_all(reward_problems(validate(raw).rewards, None))


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("blank", "rewards.step_splitter='blank' is unknown; use blank-lines, lines, step-k or regex:PATTERN"),
        ("regex:", "rewards.step_splitter='regex:' is unknown"),
        ("regex:[", "rewards.step_splitter='regex:[' is not a regular expression"),
    ],
)
def test_a_step_splitter_that_does_not_exist_is_refused_with_the_config(name: str, error: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(error)):
        _config(step_splitter=name)
