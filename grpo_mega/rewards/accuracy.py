"""The accuracy reward: is the response's answer the gold answer?

Both are read by `answer.extract_answer` and `normalize.normalize_answer`. Verdicts: "correct" (1.0), "wrong" (0.0),
"unparsable" (0.0, the response has no answer that can be read) and "gold_unparsable" (None; it depends on the gold
answer alone, so that all samples of a prompt get it and the caller can drop the prompt).

Two plain numbers are compared exactly (`numbers`), two times of day and two phrases by their text, everything else by
math-verify: equations against their right-hand side, sets in any order, tuples and intervals in order, expressions up
to algebra. There is no timeout here, since none that lives inside the process can stop every input: run it in the pool.
"""

import logging
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from grpo_mega.rewards.answer import extract_answer
from grpo_mega.rewards.normalize import normalize_answer
from grpo_mega.rewards.numbers import PlainNumber, numbers_equal, parse_number
from grpo_mega.rewards.score import Score

_EQUALS = re.compile(r"(?<![<>!\\:=])=(?!=)")
_TIME = re.compile(r"(\d{1,2}):([0-5]\d)(?: ?([aApP])\.? ?[mM]\.?)?")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*")
# To math-verify words are products of their letters: it takes "stop" for "pots".
_PHRASE = re.compile(r".*[A-Za-z]{4}|.*[A-Za-z] +[A-Za-z]")


@dataclass(frozen=True)
class _Answer:
    text: str  # normalized
    number: PlainNumber | None
    parsed: tuple[Any, ...]  # math-verify's expressions; empty if it has none


def accuracy(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> Score:
    """Score of the response against the gold `answer`; the verdicts are in the module's docstring."""
    gold = _read_gold(answer)
    if gold is None:
        return Score(None, "gold_unparsable")
    extracted = extract_answer(response)
    text = normalize_answer(extracted) if extracted is not None else ""
    if not text:
        return Score(0.0, "unparsable")
    is_correct = _compare(gold, text)
    if is_correct is None:
        return Score(0.0, "unparsable")
    return Score(1.0, "correct") if is_correct else Score(0.0, "wrong")


def warm_up() -> None:
    """Imports math-verify and builds its parser's tables, about a second, so that no check pays for it."""
    accuracy("", "x + 1", "1 + x", {})


@lru_cache(maxsize=256)
def _read_gold(answer: str) -> _Answer | None:
    """The gold answer, or None if neither we nor math-verify can read it; cached because a group shares it."""
    extracted = extract_answer(answer)
    text = normalize_answer(extracted) if extracted is not None else ""
    number = parse_number(text)
    parsed = () if number or _TIME.fullmatch(text) or _is_phrase(text) else _parse(text)
    if not (number or parsed or _TIME.fullmatch(text) or _is_phrase(text)):
        return None
    return _Answer(text, number, parsed)


def _compare(gold: _Answer, text: str) -> bool | None:
    """Whether `text` is the gold answer; None if `text` cannot be read."""
    if text == gold.text:
        return True
    if _TIME.fullmatch(gold.text) and _TIME.fullmatch(text):
        return _same_time(gold.text, text)
    if _WORDS.fullmatch(gold.text) and _WORDS.fullmatch(text):
        if gold.text.lower().split() == text.lower().split():
            return True
        if _is_phrase(gold.text) or _is_phrase(text):
            return False
    if _is_phrase(gold.text):
        return False
    if not _EQUALS.search(gold.text) and not re.search(r",|;|\band\b|\bor\b", text):
        text = normalize_answer(_EQUALS.split(text)[-1])
    number = parse_number(text)
    if gold.number and number:
        return numbers_equal(gold.number, number)
    parsed = _parse(text)
    if not parsed:
        return None
    return _verify(gold.parsed or _parse(gold.text), parsed)


def _is_phrase(text: str) -> bool:
    return _WORDS.fullmatch(text) is not None and _PHRASE.match(text) is not None


def _same_time(gold: str, response: str) -> bool:
    """Hours and minutes agree; am or pm must agree if the gold answer says which."""
    gold_match, match = _TIME.fullmatch(gold), _TIME.fullmatch(response)
    assert gold_match and match
    if (int(gold_match[1]), gold_match[2]) != (int(match[1]), match[2]):
        return False
    return gold_match[3] is None or gold_match[3].lower() == (match[3] or "").lower()


def _parse(text: str) -> tuple[Any, ...]:
    """math-verify's reading of a normalized answer, as one LaTeX formula; empty if it has none."""
    if not text:
        return ()
    math_verify = _math_verify()
    # Its own removal of units would take "3t" for "3"; its search for boxes and its fallback to a string would extract
    # a second time.
    config = math_verify.LatexExtractionConfig(
        boxed_match_priority=-1,
        normalization_config=math_verify.LatexNormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
        ),
    )
    latex = text.replace("%", r"\%")
    return tuple(math_verify.parse(f"${latex}$", [config], fallback_mode="no_fallback", parsing_timeout=None))


def _verify(gold: tuple[Any, ...], response: tuple[Any, ...]) -> bool:
    return bool(_math_verify().verify(list(gold), list(response), allow_set_relation_comp=True, timeout_seconds=None))


@lru_cache(maxsize=1)
def _math_verify() -> Any:
    """The math_verify package: imported at the first use, for it takes a second, and with its log lines silenced."""
    import math_verify

    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return math_verify
