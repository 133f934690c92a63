"""Rewards that shape a response, apart from whether its answer is right: format, signs of steps, length, repetition,
language.

format, and the lenient soft_format and tag_count for a model that first has to learn the format, score prefill +
response: the text that the chat template wrote into the assistant's turn (for example "<think>\\n") counts.

reasoning_steps, len, cosine and repetition_penalty return the values of open-r1's functions with these names, with two
differences. If the gold answer cannot be read there is no value, while open-r1 counts every answer as right. Past
max_len cosine keeps its last value, while open-r1's turns back. Lengths are in characters. Impossible options raise
ValueError on any response.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

from grpo_mega.rewards.api import Extras, Score
from grpo_mega.rewards.math.answer import whole_turn

# Shaping functions do not decide whether an answer is right.
SHAPING = frozenset({"reasoning_steps", "len", "cosine", "repetition_penalty", "language_consistency"})

# Possessive quantifiers keep the time linear, however often a response repeats a tag.
_CONTENT = r"[^<]*+(?:<(?!/?(?:think|answer)>)[^<]*+)*+"  # matches a text without any of the four tags
_WELL_FORMED = re.compile(rf"<think>{_CONTENT}</think>\s*+<answer>{_CONTENT}</answer>\s*+")
_ON_OWN_LINES = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
_ANSWER_AFTER_THOUGHT = re.compile(r"</think>\s*<answer>")

_SIGN_OF_STEP = re.compile(r"Step \d+:|\A\d+\.|\n[-*]|(?:First|Second|Next|Finally),")
_SIGNS_WANTED = 3

_HAN, _KANA = "\u3400-\u4dbf\u4e00-\u9fff", "\u3040-\u30ff"
_LETTERS = dict.fromkeys(("en", "de", "es", "fr", "it", "pt"), "A-Za-z\u00c0-\u024f")
_LETTERS |= {"zh": _HAN, "ja": _HAN + _KANA, "ko": "\uac00-\ud7af", "ru": "\u0400-\u04ff", "el": "\u0370-\u03ff"}
_LETTERS |= {"ar": "\u0600-\u06ff", "he": "\u0590-\u05ff"}
_WORD = re.compile(rf"[{_HAN}{_KANA}]|(?:(?![{_HAN}{_KANA}])[^\W\d_])+")
_NO_PROSE = re.compile(r"\\[A-Za-z]+|\b[A-Za-z]\b|<[^<>\s]*>")  # matches LaTeX commands, variables and tags


def format_reward(prompt: str, response: str, answer: str, extras: Extras) -> Score:
    """Return 1 if the whole turn is `<think>...</think>` and then `<answer>...</answer>`.

    Each tag must occur exactly once, in this order. Thought and answer may span lines and may be empty. Only white
    space may stand between and after them.
    """
    prefill = str(extras.get("prefill") or "").lstrip()  # leading white space belongs to the template, not to the model
    return _formed(_WELL_FORMED.fullmatch(prefill + response) is not None)


def soft_format(prompt: str, response: str, answer: str, extras: Extras) -> Score:
    """Return 1 if a thought ends and, after white space only, a complete answer follows. Other text may surround
    them.
    """
    turn = whole_turn(response, extras)
    found = _ANSWER_AFTER_THOUGHT.search(turn)
    return _formed(found is not None and "</answer>" in turn[found.end() :])


def tag_count(prompt: str, response: str, answer: str, extras: Extras) -> float:
    """Return a quarter for each of the four tags that occurs exactly once and on a separate line, like open-r1's
    function.
    """
    turn = whole_turn(response, extras)
    return sum(turn.count(tag) == 1 for tag in _ON_OWN_LINES) / len(_ON_OWN_LINES)


def reasoning_steps(prompt: str, response: str, answer: str, extras: Extras) -> float:
    """Return a third per sign of a step, at most 1: "Step 2:", a bullet, "First,", or "1." at the start of the text."""
    return min(1.0, sum(1 for _ in _SIGN_OF_STEP.finditer(response)) / _SIGNS_WANTED)


def len_reward(judged: Sequence[Score], lengths: Sequence[int]) -> list[Score]:
    """Return Kimi k1.5's length reward (arXiv 2501.12599, section 2.3.3) for a group's accuracy Scores and lengths.

    The reward is 0.5 - (length - shortest) / (longest - shortest), at most 0 for a wrong answer, and 0 if all lengths
    are equal.
    """
    spread = max(lengths) - min(lengths)
    values = [0.5 - (length - min(lengths)) / spread if spread else 0.0 for length in lengths]
    return [
        Score(None if score.value is None else value if score.value else min(value, 0.0), score.verdict)
        for score, value in zip(judged, values, strict=True)
    ]


def cosine(
    judged: Score,
    length: int,
    *,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
    max_len: float = 1000,
) -> Score:
    """Return the cosine reward (arXiv 2502.03373, section 4) for an accuracy Score and a length.

    It is half a cosine period over the length, up to max_len. The reward of a right answer falls from max_value_correct
    to min_value_correct. The reward of a wrong one rises from min_value_wrong to max_value_wrong.
    """
    _require("max_len", max_len, max_len > 0, "be above 0")
    if judged.value is None:
        return judged
    short, long = (max_value_correct, min_value_correct) if judged.value else (min_value_wrong, max_value_wrong)
    share = min(length / max_len, 1.0)
    return Score(long + (short - long) * (1.0 + math.cos(math.pi * share)) / 2, judged.verdict)


def repetition_penalty(
    prompt: str,
    response: str,
    answer: str,
    extras: Extras,
    *,
    ngram_size: int = 3,
    max_penalty: float = -1.0,
    unit: str = "words",
) -> float:
    """Return max_penalty times the share of repeated n-grams in the response (arXiv 2502.03373, appendix C.2).

    Words are separated by white space, and case does not matter. `unit: characters` is for scripts without spaces.
    """
    _require("ngram_size", ngram_size, ngram_size >= 1, "be at least 1")
    _require("max_penalty", max_penalty, max_penalty <= 0, "be at most 0")
    _require("unit", unit, unit in ("words", "characters"), "be words or characters")
    units = response.lower().split()
    if unit == "characters":
        units = list("".join(units))
    ngrams = [tuple(units[i : i + ngram_size]) for i in range(len(units) - ngram_size + 1)]
    return max_penalty * (1 - len(set(ngrams)) / len(ngrams)) if ngrams else 0.0


def language_consistency(prompt: str, response: str, answer: str, extras: Extras, *, language: str = "en") -> float:
    """Return the share of the thought's words in the script of the language (DeepSeek-R1, arXiv 2501.12948, 2.3.2).

    The thought is the text between <think> and </think>, or the whole response without such tags. Each Chinese or
    Japanese character is a word. LaTeX commands and single Latin letters are not words. Languages that share a script
    cannot be told apart.
    """
    _require("language", language, language in _LETTERS, f"be one of {', '.join(_LETTERS)}")
    turn = whole_turn(response, extras)
    thought = turn.partition("<think>")[2].partition("</think>")[0] if "<think>" in turn else turn
    words = _WORD.findall(_NO_PROSE.sub(" ", thought))
    own = re.compile(f"[{_LETTERS[language]}]+")
    return sum(own.fullmatch(word) is not None for word in words) / len(words) if words else 0.0


def _formed(is_right: bool) -> Score:
    return Score(float(is_right), "well_formed" if is_right else "malformed")


def _require(name: str, value: Any, is_right: bool, what: str) -> None:
    if not is_right:
        raise ValueError(f"{name}={value!r}: must {what}")
