"""The reward of a reward-model server, for a response or for each of its steps. The options are the fields of `Server`.

A response that the server did not score gets no score (NoScore, verdict "error") instead of 0. This covers a server
that is away, slow, refuses or redirects, and a reply that is too long, unreadable or not a finite number.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import reprlib
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator

from grpo_mega.config import problems_of
from grpo_mega.config.base import PositiveInt, Section
from grpo_mega.errors import ConfigError
from grpo_mega.http_client import NoReply, Reply, send
from grpo_mega.paths import parse_json
from grpo_mega.rewards.api import Extras, NoScore, Score, Step, splitter
from grpo_mega.rewards.math.answer import conclusion_of
from grpo_mega.text import well_formed

FIRST_PAUSE_S = 0.2  # doubles before every further try
START_TIMEOUT_S = 30.0
# Limit of a reply; allows thousands of steps, or embeddings of a model that is not a reward model.
MOST_BYTES = 16 << 20
HEALTH_BYTES = 4096  # bytes to read of the reply to /health; only its status matters
SHOWN = 200  # characters to show of a server's complaint

TEXT_TEMPLATE = "{prompt}{response}"
JUDGE_TEMPLATE = """Judge a response to a question.

Question:
{prompt}

Right answer:
{answer}

Response:
{response}

How good is the response, from 0 (wrong) to 10 (right, and rightly reasoned)? It may be unfinished; then judge what \
there is. \
Say why in a sentence, and end with the number alone on a line."""

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?![\w])")
# A score of 0 to 10 for the default template is a number alone on the last line. Else it is N/10, N out of 10, or N
# after a word for a score or "I give". Else it ends the reply, after a colon, a sentence, "a" or "says". A number that
# belongs to the next word, as in "8 steps" or "8 of 9", is no score. A range is none either.
_TAG = re.compile(r"</?\w+>")
_RANGE = re.compile(
    r"(?<![\d.,])\d[\d.,]*+[^\S\n]*(?:[-–]|\b(?:to|or|and)\b)[^\S\n]*(?:an? )?\d[\d.,]*",  # noqa: RUF001  # two dashes
    re.IGNORECASE,
)
_SCORE = r"((?<![\w.,/-])[-+]?\d+(?:[.,]\d+)?)(?![\w%]|[.,]\d)"
_OF_TEN = r"(?: points?)?[\s*_`(]*(?:/|\bout of\b)[\s*_`]*10(?![\w/%]|[.,]\d)"
_NAME = r"scor\w*|rating|rated|grad(?:e|ed|ing)|mark(?:s|ed)?|award\w*|deserves|earns|merits|evaluation"
_I_GIVE = r"(?:I|we)\b[\w' ]{0,24}?\b(?:give|gave|assign|award|rate|grade|score|mark|say)"
_JUDGED = r"(?:for |to |of )?(?:the|this) (?:response|solution|reply)|(?:for the|to the|of the|this) answer"
_BETWEEN = rf"(?:\([^()]*\)|\W|\b(?:{_JUDGED}|is|was|of|as|at|be|should|would|an?|it|I|give|assign|this)\b){{0,40}}+"
_CLAUSE_END = (
    r"(?![\s*_`(]*(?:/|(?:out )?of\b|[-+=]\s*\d))\s*(?:$|[^\w\s]|(?-i:[A-Z])"
    r"|(?:points?|marks?|because|for|as|since|and|but|if|with|on|due|overall|given|which)\b)"
)
_ALONE = re.compile(
    rf"[\W_]*?(?:(?:boxed|final answer)\W*)?{_SCORE}(?:{_OF_TEN})?(?: (?:point|mark)s?)?[\W_]*", re.IGNORECASE
)
_LABELLED = re.compile(
    rf"{_SCORE}{_OF_TEN}(?={_CLAUSE_END})|\b(?:{_NAME}|{_I_GIVE}){_BETWEEN}{_SCORE}(?={_CLAUSE_END})", re.IGNORECASE
)
_AT_END = re.compile(rf"(?:(?<!\bno)[:.!?]|\b(?:an?|says))[\s*_`]*{_SCORE}[\W_]*\Z", re.IGNORECASE)
# A sentence that ends with such a word or number, and the number after it, says something else.
_OTHER = re.compile(
    r"(?:\b(?:answer|result|solution|value|total|sum|step|question|problem|line|errors?)\b|\b\d)[^.!?]*\Z",
    re.IGNORECASE,
)
_FIELD = re.compile(r"\{(\w+)\}")


class RewardServer(Section):
    """A reward-model server, with the options of `reward_model` as fields, and the requests to it."""

    model_config = ConfigDict(strict=True)

    url: str  # address of the server, such as http://node7:30000
    # classify: a model with a value head, through SGLang's POST /classify. score: the probability of a label token
    # after the text, through SGLang's POST /v1/score. chat: a judge, through POST /v1/chat/completions of any server
    # that has it; the last number of its reply is the reward. With the default template it must be a score of 0 to 10.
    api: Literal["classify", "score", "chat"] = "classify"
    model: str = ""  # name of the model at the server, if the server needs one
    template: str = ""  # text to send, with {prompt}, {response}, {answer} and {column} of the dataset
    # True: reward each step by scoring the response up to the end of the step (chat: one request per step).
    steps: bool = False
    step_splitter: str = "blank-lines"  # splitter that finds the step ends; default: rewards.step_splitter
    # score: token ids such as "9689,2753". With several ids, the reward is the share of the first one; with one id, its
    # probability.
    labels: str | int = ""
    # Classify and score: index of the model's output to use, if it has several.
    output: int | None = Field(default=None, ge=0)
    # Factor of the value. The default is 1, but 0.1 for the default chat template, because it asks for 0 to 10.
    scale: float | None = None
    max_tokens: PositiveInt = 512  # chat: maximum length of a reply
    # Limit for one response with retries and pauses. Must be below rewards.deadline_s.
    timeout_s: float = Field(default=4.0, gt=0)
    retries: int = Field(default=2, ge=0)  # further tries if the server does not answer, or answers 429 or 5xx
    api_key_env: str = ""  # environment variable with the API key, if the server needs one

    @model_validator(mode="after")
    def _fits(self) -> RewardServer:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url={self.url!r} is not of the form http://HOST:PORT; correct it")
        if self.api == "chat" and not self.model:
            raise ValueError("api=chat needs the option model; name the judge as the server knows it")
        if self.template and "{response}" not in self.template:
            raise ValueError("template has no {response}; say where the response stands")
        if not re.fullmatch(r"(\d+( *, *\d+)*)?", str(self.labels)):
            raise ValueError(f"labels={self.labels!r} are not token ids; write them like '9689,2753'")
        if self.api_key_env and self.api_key_env not in os.environ:
            raise ValueError(
                f"api_key_env={self.api_key_env!r} is not in the environment; export it, or leave the option out"
            )
        return self

    def fill(self, values: Mapping[str, str]) -> str:
        """Fill the template with these values. Other words in braces stay."""
        template = self.template or (JUDGE_TEMPLATE if self.api == "chat" else TEXT_TEMPLATE)
        return well_formed(_FIELD.sub(lambda match: values.get(match[1], match[0]), template))

    def score(self, texts: list[str]) -> list[float]:
        """Return the rewards of these texts, scaled. Raises NoScore."""
        deadline = time.monotonic() + self.timeout_s
        body: dict[str, Any]
        if self.api == "chat":
            values = []
            for text in texts:
                messages = [{"role": "user", "content": text}]
                body = {"model": self.model, "messages": messages, "temperature": 0.0, "max_tokens": self.max_tokens}
                reply = self._ask("/v1/chat/completions", body, deadline)
                try:
                    content = reply["choices"][0]["message"]["content"] or ""
                except (TypeError, KeyError, IndexError):
                    content = None
                if not isinstance(content, str):
                    raise self._failure("", f"gave {_shown(reply)}, not a message", "correct url or api")
                numbers = _NUMBER.findall(content.rpartition("</think>")[2]) if self.template else _scores_of(content)
                if not numbers:
                    problem = f"replied without a {'number' if self.template else 'score from 0 to 10'}"
                    problem += f" ({_one_line(content[-SHOWN:])})"
                    raise self._failure("", problem, "ask for one in template")
                values.append(self._finite(float(numbers[-1])))
        elif self.api == "classify":
            reply = self._ask("/classify", {"text": texts}, deadline)
            items = reply if isinstance(reply, list) else [reply]
            if len(items) != len(texts) or not all(isinstance(item, dict) for item in items):
                problem = f"gave {_shown(reply)}, not {len(texts)} embeddings"
                raise self._failure("/classify", problem, "is it SGLang?")
            values = [self._output_of(item.get("embedding")) for item in items]
        else:
            labels = [int(label) for label in str(self.labels).split(",") if label]
            body = {"model": self.model or "default", "query": "", "items": texts}
            if labels:
                body |= {"label_token_ids": labels, "apply_softmax": len(labels) > 1}
            reply = self._ask("/v1/score", body, deadline)
            rows = reply.get("scores") if isinstance(reply, dict) else None
            if not isinstance(rows, list) or len(rows) != len(texts):
                raise self._failure("/v1/score", f"gave {_shown(reply)}, not {len(texts)} scores", "is it SGLang?")
            values = [self._output_of(row[:1] if labels and isinstance(row, list) else row) for row in rows]
        scale = self.scale if self.scale is not None else 0.1 if self.api == "chat" and not self.template else 1.0
        return [self._finite(scale * value) for value in values]

    def open(self, path: str, body: Mapping[str, Any] | None, timeout_s: float, most_bytes: int = MOST_BYTES) -> Reply:
        """Return the reply to POST, or to GET without a body. Raises NoReply."""
        headers = {"Content-Type": "application/json"}
        if self.api_key_env:
            headers["Authorization"] = f"Bearer {os.environ[self.api_key_env]}"
        data = None if body is None else json.dumps(body).encode()
        return send(self.url.rstrip("/") + path, data, headers, deadline_s=timeout_s, most_bytes=most_bytes)

    def _ask(self, path: str, body: Mapping[str, Any], deadline: float) -> Any:
        """Return the server's reply. Retry while a retry may help and time is left."""
        pause = FIRST_PAUSE_S
        for num_left in range(self.retries, -1, -1):
            try:
                reply = self.open(path, body, max(deadline - time.monotonic(), 0.01))
                if 200 <= reply.status < 300:
                    if not reply.is_whole:
                        remedy = "is url the address of a reward model?"
                        raise self._failure(path, f"sent more than {MOST_BYTES >> 20} MiB", remedy)
                    return parse_json(reply.body)
                problem = _status(reply)
                if reply.status != 429 and reply.status < 500:
                    remedy = "correct the options, or the server's settings"
                    raise self._failure(path, problem, "set url to that address" if _redirects(reply) else remedy)
            except NoReply as error:
                problem = f"does not answer ({_one_line(str(error))})"
            except ValueError as error:
                problem = f"sent a reply that is not JSON ({_one_line(str(error))})"
            if num_left == 0 or time.monotonic() + pause >= deadline:
                break
            time.sleep(pause)
            pause *= 2
        raise self._failure(path, problem, "see its log, or raise timeout_s and rewards.deadline_s") from None

    def _failure(self, path: str, problem: str, remedy: str) -> NoScore:
        return NoScore(f"the server at {self.url}{path} {problem}; {remedy}")

    def _output_of(self, values: Any) -> float:
        # The type check also rejects bool.
        if not isinstance(values, list) or not values or not all(type(value) in (int, float) for value in values):
            raise self._failure("", f"gave {_shown(values)} for a text", "serve a reward model, with --is-embedding")
        output = self.output or 0
        if output >= len(values) or (len(values) > 1 and self.output is None):
            choice = f"set output to one of 0 to {len(values) - 1}"
            remedy = choice if self.output is None else f"output={output} is not one; lower it"
            raise self._failure("", f"has a model of {len(values)} outputs", remedy)
        return self._finite(values[output])

    def _finite(self, value: float) -> float:
        """Return the value as a float. Raises NoScore for NaN, infinity and numbers that overflow to it."""
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self._failure(
                "", f"gave the reward {number}", "see its log; its model may overflow in half precision"
            )
        return number


def reward_model(prompt: str, response: str, answer: str, extras: Extras, **options: Any) -> Score:
    """Return the server's reward. `options` are the fields of `Server`. Raises NoScore if the server returns none."""
    server = server_of(options)
    values = {**{name: str(value) for name, value in extras.items()}, "prompt": prompt, "answer": answer}
    if not server.steps:
        return Score(server.score([server.fill({**values, "response": response})])[0], "scored")
    ends = splitter(server.step_splitter)(response)
    if not ends:
        return Score(None, "no_steps")
    rewards = server.score([server.fill({**values, "response": response[:end].rstrip()}) for end in ends])
    return Score(None, "scored", tuple(Step(end, reward) for end, reward in zip(ends, rewards, strict=True)))


# The registry reads the options of a function from its signature.
reward_model.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        *list(inspect.signature(reward_model).parameters.values())[:4],
        *inspect.signature(RewardServer).parameters.values(),
    ]
)


def server_of(options: Mapping[str, Any]) -> RewardServer:
    """Return the server that the options describe. Raises ConfigError for an invalid option value."""
    try:
        return RewardServer.model_validate(options)
    except ValidationError as error:
        raise ConfigError(*(f"reward_model: {problem}" for problem in problems_of(RewardServer, error))) from None


def check_deadline(options: Mapping[str, Any], deadline_s: float) -> None:
    """Raise ConfigError if the pool would end a check before the function itself times out."""
    timeout_s = server_of(options).timeout_s
    if timeout_s >= deadline_s:
        raise ConfigError(
            f"reward_model: timeout_s={timeout_s:g} is not below rewards.deadline_s={deadline_s:g}; "
            f"lower it, or raise rewards.deadline_s above {timeout_s:g}"
        )


def check_reachable(options: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the server answers and is ready. A server without /health only needs to answer."""
    server = server_of(options)
    try:
        reply = server.open("/health", None, START_TIMEOUT_S, HEALTH_BYTES)
    except NoReply as error:
        problem = f"no server answers at url={server.url} ({_one_line(str(error))})"
        raise ConfigError(f"reward_model: {problem}; start it, or correct the option url") from None
    if _redirects(reply):
        raise ConfigError(
            f"reward_model: the server at url={server.url} {_status(reply)}; set the option url to that address"
        )
    if reply.status >= 500:
        raise ConfigError(
            f"reward_model: the server at url={server.url} answers {reply.status} to /health; start training when it is"
            " ready"
        )


def _scores_of(reply: str) -> list[str]:
    """Return the score in a judge's reply to the default template, if it has one from 0 to 10, else []."""
    reply = _RANGE.sub("_", _TAG.sub(" ", conclusion_of(reply))).strip()
    last = reply.rpartition("\n")[2]
    if found := _ALONE.fullmatch(last):
        scores = {found[1]}
    else:
        lines = [{one[1] or one[2] for one in _LABELLED.finditer(line)} for line in reply.split("\n")]
        scores = next((line for line in reversed(lines) if line), set())
        found = _AT_END.search(last)
        if found and not _OTHER.search(last[: found.start(1)]):
            scores |= {found[1]}
    numbers = {float(score.replace(",", ".")) for score in scores}
    return [str(one) for one in numbers if len(numbers) == 1 and 0 <= one <= 10]


def _redirects(reply: Reply) -> bool:
    return 300 <= reply.status < 400


def _status(reply: Reply) -> str:
    if _redirects(reply):
        return (
            f"answers {reply.status}, a redirect to {_one_line(reply.redirects_to) or 'somewhere'}, which is not"
            " followed"
        )
    return f"answers {reply.status} ({_one_line(reply.body[: 4 * SHOWN].decode(errors='replace'))})"


def _shown(reply: Any) -> str:
    """Return the outermost part of a parsed reply, because a reply may be large and deep."""
    return _one_line(reprlib.repr(reply))


def _one_line(text: str) -> str:
    return " ".join(text.split())[:SHOWN]
