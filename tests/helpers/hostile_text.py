"""Text that breaks readers and writers of lines: line ends of `str.splitlines`, and surrogates, not valid in UTF-8."""

from typing import Any

from grpo_mega.rewards.api import Score

LINE_ENDS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e"
SURROGATES = "\ud800\udc80 \udfff"


def share_of_vowels(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> Score:
    """Return a hostile verdict. It becomes a metric name and is logged with the sample."""
    print(SURROGATES)
    return Score(sum(c in "aeiou" for c in response) / max(1, len(response)), f"vowels{LINE_ENDS}{SURROGATES}")
