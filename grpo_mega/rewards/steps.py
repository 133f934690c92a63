"""Find where the steps of a response end, by the name of a splitter (the key rewards.step_splitter).

    blank-lines    a step ends with the blank lines after it
    lines          a step is a line
    step-k         a step starts at a line such as "Step 2: ...", "**Step 2**", "### step 2." or "- Step 2)"
    regex:PATTERN  a step ends where a match of PATTERN ends

A splitter maps a text to the ascending character ends of its steps. Together the steps are the whole text. A separator belongs
to the step before it. No step is only white space: such a piece is merged into its neighbour, and a text of only white space
has no steps. Time is linear in the length of the text (for regex:PATTERN, if PATTERN is linear).
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache

from grpo_mega.config.rewards import step_separator
from grpo_mega.errors import ConfigError

PIECE_SIZE = 16  # tokens that are decoded together, plus up to MAX_CUT if the piece would end within a character
MAX_CUT = 4

_REPLACEMENT = "\ufffd"  # decoded form of an incomplete character
_INK = re.compile(r"\S")

Splitter = Callable[[str], list[int]]
Decode = Callable[[Sequence[int]], str]


@lru_cache(maxsize=32)
def splitter(name: str) -> Splitter:
    """Return the splitter called `name`. Raises ConfigError for an unknown name or an invalid pattern."""
    try:
        separator = step_separator(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return lambda text: _ends(text, separator)


def tokens_at(token_ids: Sequence[int], decode: Decode, ends: Sequence[int]) -> list[int]:
    """Return for each character end the index of the token that completes it.

    This is the smallest t such that the decoded token_ids[: t + 1] start with that many characters of the whole text.
    """
    ids = list(token_ids)
    by_token = _token_ends(ids, decode)
    if by_token is not None:
        return [bisect_left(by_token, end) for end in ends]
    whole = decode(ids)
    return [bisect_left(range(len(ids) - 1), True, key=lambda t: decode(ids[: t + 1]).startswith(whole[:end])) for end in ends]


def _ends(text: str, separator: re.Pattern[str]) -> list[int]:
    ends: list[int] = []
    ink = _INK.search(text)  # first non-space character of the current step
    for match in separator.finditer(text):
        if ink is not None and ink.start() < match.end():
            ends.append(match.end())
            ink = _INK.search(text, match.end())
    if ink is not None:
        ends.append(len(text))
    elif ends:
        ends[-1] = len(text)
    return ends


def _token_ends(token_ids: Sequence[int], decode: Decode) -> list[int] | None:
    """Return for each token how many characters of the whole decoded text are complete after it; None if unknown.

    A character that spans several tokens is complete with the last one. A token without text, such as a special token that
    `decode` omits, adds no characters. The text is decoded in pieces, because decoding every prefix of a long text takes
    seconds. With some tokenizers the pieces do not add up to the whole text; then the result is None.
    """
    ids = list(token_ids)
    ends = _ends_by_pieces(ids, decode, context=[])
    # Some tokenizers drop the space before the first word of a text, so decode later pieces after a token.
    return ends if ends is not None else _ends_by_pieces(ids, decode, context=ids[:1])


def _ends_by_pieces(ids: list[int], decode: Decode, context: list[int]) -> list[int] | None:
    whole = decode(ids)
    ends: list[int] = []
    start = 0  # characters of all pieces so far
    while len(ends) < len(ids):
        before = context if ends else []
        skipped = len(decode(before))
        for size in range(PIECE_SIZE, PIECE_SIZE + MAX_CUT + 1):
            piece = ids[len(ends) : len(ends) + size]
            text = decode([*before, *piece])[skipped:]
            if not text.endswith(_REPLACEMENT):
                break
        if not whole.startswith(text, start):
            return None
        reached = 0  # must not shrink: a character can vanish while bytes of the next one are decoded with it
        for size in range(1, len(piece) + 1):
            reached = max(reached, _num_common(decode([*before, *piece[:size]])[skipped:], text))
            ends.append(start + reached)
        start += len(text)
    return ends if start == len(whole) else None


def _num_common(a: str, b: str) -> int:
    """Return the length of the longest common prefix of two texts."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
