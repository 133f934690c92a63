"""Text that breaks readers and writers of lines: ends of lines to `str.splitlines`, and surrogates, which UTF-8 cannot hold."""

from typing import Any

from grpo_mega.rewards.api import Score

LINE_ENDS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e"
SURROGATES = "\ud800\udc80 \udfff"


def share_of_vowels(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> Score:
    """A verdict becomes a metric's name, and is logged with the sample."""
    print(SURROGATES)
    return Score(sum(c in "aeiou" for c in response) / max(1, len(response)), f"vowels{LINE_ENDS}{SURROGATES}")
