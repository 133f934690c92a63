"""The accuracy reward: compare the response's answer with the gold answer.

`answer` and `normalize` read both answers. Verdicts: "correct" (1.0), "wrong" (0.0), "unparsable" (0.0, the response
has no readable answer) and "gold_unparsable" (None). "gold_unparsable" depends only on the gold answer, so all samples
of a prompt get it and the caller can drop the prompt.

Two plain numbers are compared exactly, and so are pairs, intervals and sets of plain numbers (`numbers`). Two times of
day and two phrases are compared by their text. math-verify compares everything else: equations by their right-hand
side, sets in any order, tuples and intervals in order, expressions up to algebra. If the gold answer has plain numbers,
arithmetic on numerals does not count as an answer (`arithmetic`). If the response ended at the length limit
(extras["finish_reason"] is "length"), only an explicit and complete answer counts (`answer`). There is no timeout here,
because no timeout inside the process can stop every input: run the function in the pool.

The training process calls `quick`. It returns the same verdict if exact arithmetic and text decide. It only looks at
short answers, so that no regex or number takes long, and does not import math-verify.
"""

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from grpo_mega.rewards.api import Extras, Score
from grpo_mega.rewards.math.answer import canonical_number, locate_answer, normalize_answer, read_located, whole_turn
from grpo_mega.rewards.math.arithmetic import has_plain_numbers, is_bounded, is_open, is_unevaluated
from grpo_mega.rewards.math.kinds import TIME, compare_kinds, is_code, seconds_of, unit_after, values_agree
from grpo_mega.rewards.math.numbers import (
    in_words,
    lists_equal,
    numbers_contradict,
    numbers_equal,
    parse_list,
    parse_number,
)
from grpo_mega.rewards.math.prose import TAIL

GOLD_SECONDS = 2.0  # limit of processor time for parsing a gold answer
CUT = "length"  # finish reason of a response that ended at the length limit
MAX_CHARS = 100  # length limit of answers that `quick` looks at
UNPARSABLE, GOLD_UNPARSABLE = Score(0.0, "unparsable"), Score(None, "gold_unparsable")
CORRECT, WRONG = Score(1.0, "correct"), Score(0.0, "wrong")

_EQUALS = re.compile(r"(?<![<>!\\:=])=(?!=)")
_WITH_UNIT = "\x1f"  # separates a normalized answer from its unit
_SECONDS = f"{_WITH_UNIT}time1:1"  # unit of a time span such as 2 h 30 min
_DEGREES = f"{_WITH_UNIT}angle1:1"
_NUMERAL_AND_UNIT = re.compile(
    r"(?P<numeral>(?P<mantissa>-?\d{1,15}(?:\.\d{1,15})?)(?:[eE](?P<e>[-+]?\d{1,3}))?)"
    r"(?: ?\\(?:times|cdot) ?10 ?(?P<power>\^ ?\{?(?P<t>-?\d{1,3})\}?))? ?(?:[A-Za-z\u00b5\u03bc]{0,5}|¢)"
)
_E_NOTATION = re.compile(r"(?<![\w.^}\\])(\d+\.?\d*|\.\d+)[eE](\+?)(-?\d{1,3})(?![\w.^])", re.ASCII)
_LETTER_E = re.compile(r"(?<![A-Za-z\\])e(?![A-Za-z])")
_EVALUATED = re.compile(r"-?\d{1,30}(?:\.\d{1,30})?%?", re.ASCII)  # an evaluated number, to which no other rule applies
_UNIT_I, _UNIT_J = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])"), re.compile(r"(?<![A-Za-z\\])j(?![A-Za-z])")
_VARIABLE = re.compile(r" ?[A-Za-z] ?")
_LIST = re.compile(r",|;|\band\b|\bor\b")
_CHOICE = re.compile(r"\(([A-J])\) (.+)")
_BASE = re.compile(r"[\dA-F]+_\{?(\d+)\}?")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*")
# math-verify reads words as products of their letters, so "stop" would equal "pots".
_PHRASE = re.compile(r".*[A-Za-z]{4}|.*[A-Za-z] +[A-Za-z]")


def accuracy(prompt: str, response: str, answer: str, extras: Extras, *, unevaluated: bool = False) -> Score:
    """Score the response against the gold `answer`; the module docstring lists the verdicts.

    With `unevaluated`, arithmetic on numerals is accepted as an answer.
    """
    turn = whole_turn(response, extras)
    gold, text = _without_choices(read_answer(answer), read_answer(turn, is_cut=extras.get("finish_reason") == CUT))
    if score := _judge(gold, text, unevaluated):
        return score
    from grpo_mega.rewards.math import mathverify  # imported late, because it takes one to two seconds

    if not _is_plain(gold) and not _parse_gold(gold):
        return GOLD_UNPARSABLE
    if _UNIT_J.search(text) and not _UNIT_J.search(gold) and _UNIT_I.search(gold):
        text = _UNIT_J.sub("i", text)  # j is the imaginary unit of engineers
    if score := _judge_by_comparison(gold, text):
        return score
    parsed = mathverify.parse_answer(_right_side(gold, text))
    if not parsed:
        return UNPARSABLE
    return CORRECT if mathverify.is_equal_answer(_parse_gold(gold), parsed) else WRONG


def quick(
    response: str, answer: str, finish_reason: str | None = None, *, unevaluated: bool = False
) -> tuple[Score | None, tuple[str, str] | None]:
    """Return (the Score, None) if it is clear without math-verify, else (None, the texts that determine it).

    The texts are the normalized gold answer and answer; None if one is too long. Time is linear in the length of the
    texts, plus some dozen microseconds for the answers, whatever they contain.
    """
    try:
        gold, text = _read_gold(answer), _read_if_short(response, finish_reason == CUT)
        if gold is None or text is None:
            return None, None
        score = _judge(*_without_choices(gold, text), unevaluated)
    except Exception:  # the check in the worker meets the same error and fails
        return None, None
    return score, None if score is not None else (gold, text)


def read_answer(text: str, is_cut: bool = False) -> str:
    """Return the normalized answer of a response or of a gold answer; "" if it has none."""
    marked, conclusion = locate_answer(text, is_cut)
    return (_normalize_short if len(marked or conclusion) <= MAX_CHARS else _normalize)(marked, conclusion, is_cut)


def _without_choices(gold: str, text: str) -> tuple[str, str]:
    """Return the parts of two normalized answers to compare, with units only if both have one.

    For "(C) 12" the part is the letter if the other answer is a letter, or if both have different letters; else it is
    the value.
    """
    if _WITH_UNIT in gold or _WITH_UNIT in text:
        hours = parse_number(gold) if text.endswith(_SECONDS) else None
        if hours and hours.value * 3600 == Fraction(text.removesuffix(_SECONDS)):
            return gold, gold  # 2.5 equals 2 h 30 min if the question asks for hours
        if text.endswith(_DEGREES) and "\\pi" in gold:
            return gold, rf"\frac{{{text.removesuffix(_DEGREES)}\pi}}{{180}}"
        if not (_WITH_UNIT in gold and _WITH_UNIT in text):
            gold, text = gold.partition(_WITH_UNIT)[0], text.partition(_WITH_UNIT)[0]
    both = f"{gold} {text}"
    if "e" in both.lower() and _WITH_UNIT not in gold and _E_NOTATION.search(both):
        # 2e-3 is 0.002, but 2e - 3 if the other answer has the letter e.
        has_letter = any(_LETTER_E.search(_E_NOTATION.sub("", side)) for side in (gold, text))
        gold, text = (
            _E_NOTATION.sub(r"\1e \2\3" if has_letter else r"\1\\times10^{\3}", side) for side in (gold, text)
        )
    if gold[:1] != "(" and text[:1] != "(":
        return gold, text
    if not (_CHOICE.fullmatch(gold) or _CHOICE.fullmatch(text)):
        return gold, text
    (gold_letter, gold_value), (letter, value) = _choice(gold), _choice(text)
    if gold_letter and letter and (gold_letter != letter or not (gold_value and value)):
        return gold_letter, letter
    return gold_value or gold, value or text


def _is_plain(gold: str) -> bool:
    """Return whether a normalized answer can be read without math-verify."""
    return bool(parse_number(gold) or parse_list(gold) or TIME.fullmatch(gold) or is_code(gold) or _is_phrase(gold))


@lru_cache(maxsize=1024)
def _judge(gold: str, text: str, unevaluated: bool) -> Score | None:
    """Return the Score of a normalized answer against a normalized gold answer; None if only math-verify can decide."""
    if _WITH_UNIT in gold:
        (value, _, unit), (other, _, other_unit) = (
            side.replace("¢", "").partition(_WITH_UNIT) for side in (gold, text)
        )
        return CORRECT if values_agree(Fraction(value), unit, Fraction(other), other_unit) else WRONG
    if _EVALUATED.fullmatch(text) and (gold_number := parse_number(gold)) and (number := parse_number(text)):
        return CORRECT if numbers_equal(gold_number, number) else WRONG
    is_plain = _is_plain(gold)
    if not gold or not (is_plain or is_bounded(gold)):
        return GOLD_UNPARSABLE
    if text and text != gold and has_plain_numbers(gold):
        if is_open(text):
            return UNPARSABLE
        if not unevaluated and is_unevaluated(_right_side(gold, text), gold):
            return WRONG
    return _judge_by_comparison(gold, text) if is_plain else None


def _judge_by_comparison(gold: str, text: str) -> Score | None:
    """Return the Score of an answer if its text or exact arithmetic decides; None if only math-verify can decide."""
    if not text or (text != gold and (is_open(text) or (parse_number(text) is None and not is_bounded(text)))):
        return UNPARSABLE
    is_correct = _compare(gold, text)
    return None if is_correct is None else CORRECT if is_correct else WRONG


@lru_cache(maxsize=256)
def _parse_gold(gold: str) -> tuple[Any, ...]:
    """Parse a gold answer; () if it takes more than GOLD_SECONDS of processor time. Cached, because a group shares
    it.
    """
    from grpo_mega.rewards.math import mathverify

    with mathverify.cpu_limit(GOLD_SECONDS):
        return mathverify.parse_answer(gold)
    return ()


def _compare(gold: str, text: str) -> bool | None:
    """Return whether two non-empty normalized answers are the same; None if only math-verify can decide."""
    if text == gold:
        return True
    by_kind = compare_kinds(gold, text)
    if by_kind is not None:
        return by_kind
    if _WORDS.fullmatch(gold) and _WORDS.fullmatch(text):
        if gold.lower().split() == text.lower().split():
            return True
        if _is_phrase(gold) or _is_phrase(text):
            return False
    if _is_phrase(gold) and not in_words(gold):
        return False
    if "_" in gold and (gold_base := _BASE.fullmatch(gold)) and (base := _BASE.fullmatch(text)):
        if gold_base[1] != base[1]:
            return False
    elif "=" in text and not (_EQUALS.search(gold) or _LIST.search(text)):
        numbers = [number for side in _EQUALS.split(text) if (number := parse_number(normalize_answer(side)))]
        if any(numbers_contradict(number, numbers[-1]) for number in numbers[:-1]):  # 17 = 18
            return False
    text = _right_side(gold, text)
    gold_number, number = parse_number(gold), parse_number(text)
    if gold_number or number:
        if "\\pm" in text or "\\mp" in text:
            return False
        gold_number, number = gold_number or in_words(gold), number or in_words(text)
    if gold_number and number:
        return numbers_equal(gold_number, number)
    gold_list, found_list = parse_list(gold), parse_list(text)
    return lists_equal(gold_list, found_list) if gold_list and found_list else None


def _right_side(gold: str, text: str) -> str:
    """Return the part of `text` to compare: 18 for "x = 9*2 = 18", but the whole text if the gold answer is an
    equation.
    """
    if _EQUALS.search(gold) or _LIST.search(text):
        return text
    first, *others = _EQUALS.split(text)
    if len(others) == 1 and _VARIABLE.fullmatch(others[0]) and parse_number(first.strip()):  # 16 = x
        return first.strip()
    return normalize_answer(others[-1] if others else first)


def _choice(text: str) -> tuple[str, str]:
    """Return (letter, value) of "(C) 12"; (letter, "") for a letter alone; else two empty texts."""
    if match := _CHOICE.fullmatch(text):
        return match[1], match[2]
    return (text.upper() if len(text) == 1 and text.upper() in "ABCDEFGHIJ" else ""), ""


def _read_if_short(text: str, is_cut: bool = False) -> str | None:
    marked, conclusion = locate_answer(text, is_cut)
    return _normalize_short(marked, conclusion, is_cut) if len(marked or conclusion) <= MAX_CHARS else None


_read_gold = lru_cache(maxsize=1024)(_read_if_short)  # cached, because a group shares the gold answer


def _normalize(marked: str | None, conclusion: str, is_cut: bool) -> str:
    if marked is not None and (number := canonical_number(marked)):
        return number
    extracted = read_located(marked, conclusion, is_cut)
    text = normalize_answer(extracted) if extracted is not None else ""
    if seconds := seconds_of(text):
        return f"{seconds}{_SECONDS}"
    number = text.rpartition("=")[2].strip()  # E = 450 becomes 450
    with_unit = _NUMERAL_AND_UNIT.fullmatch(number)
    if with_unit is None:
        return text
    number, exponent = with_unit["numeral"], with_unit["t"]
    source = marked if marked is not None else conclusion[-TAIL:]
    unit = unit_after(source, with_unit["power"] or number.lstrip("-"))
    number += f"e{exponent}" if exponent else ""
    return f"{number}{'¢' if text.endswith('¢') else ''}{_WITH_UNIT}{unit}" if unit else text


_normalize_short = lru_cache(maxsize=4096)(_normalize)  # cached, because a group has few different answers


def _is_phrase(text: str) -> bool:
    return _WORDS.fullmatch(text) is not None and _PHRASE.match(text) is not None
