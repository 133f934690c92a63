"""Find where the steps of a response end, by the name of a splitter (the key rewards.step_splitter).

    blank-lines    a step ends with the blank lines after it
    lines          a step is a line
    step-k         a step begins at a line such as "Step 2: ...", "**Step 2**", "### step 2." or "- Step 2)"
    regex:PATTERN  a step ends where a match of PATTERN ends

A splitter maps a text to the ascending character ends of its steps. Together the steps are the whole text, what separates two
of them belongs to the one before, and none is white space alone: such a piece belongs to its neighbour, and a text of white
space has no steps. Time is linear in the text's length (for regex:PATTERN, as far as PATTERN is).
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache

from grpo_mega.config.rewards import step_separator
from grpo_mega.errors import ConfigError

PIECE_SIZE = 16  # tokens that are decoded together; up to MAX_CUT more where a piece would end within a character
MAX_CUT = 4

_REPLACEMENT = "\ufffd"  # a part of a character, decoded
_INK = re.compile(r"\S")

Splitter = Callable[[str], list[int]]
Decode = Callable[[Sequence[int]], str]


@lru_cache(maxsize=32)
def splitter(name: str) -> Splitter:
    """Return the splitter called `name`. Raises ConfigError for an unknown name or a pattern that is no regular expression."""
    try:
        separator = step_separator(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return lambda text: _ends(text, separator)


def tokens_at(token_ids: Sequence[int], decode: Decode, ends: Sequence[int]) -> list[int]:
    """Return for each of the character `ends` the smallest t such that token_ids[: t + 1] decode to a text that begins with so
    many characters of the whole text."""
    ids = list(token_ids)
    by_token = _token_ends(ids, decode)
    if by_token is not None:
        return [bisect_left(by_token, end) for end in ends]
    whole = decode(ids)
    return [bisect_left(range(len(ids) - 1), True, key=lambda t: decode(ids[: t + 1]).startswith(whole[:end])) for end in ends]


def _ends(text: str, separator: re.Pattern[str]) -> list[int]:
    ends: list[int] = []
    ink = _INK.search(text)  # the first character of the step that is to end, white space aside
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
    """Return for each token how many characters of the whole decoded text are complete once it is decoded.

    A character that several tokens make up is complete with the last of them, and a token without text, such as a special one
    that `decode` leaves out, adds none. The text is decoded in pieces, since decoding every prefix of a long text takes
    seconds; None if the pieces do not make up the whole, as with some tokenizers.
    """
    ids = list(token_ids)
    ends = _ends_by_pieces(ids, decode, context=[])
    # Some tokenizers drop the space before a text's first word, so decode the later pieces after a token.
    return ends if ends is not None else _ends_by_pieces(ids, decode, context=ids[:1])


def _ends_by_pieces(ids: list[int], decode: Decode, context: list[int]) -> list[int] | None:
    whole = decode(ids)
    ends: list[int] = []
    start = 0  # characters of the pieces so far
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
        reached = 0  # never less than before: a character can come and go while bytes of the next one are decoded with its own
        for size in range(1, len(piece) + 1):
            reached = max(reached, _num_common(decode([*before, *piece[:size]])[skipped:], text))
            ends.append(start + reached)
        start += len(text)
    return ends if start == len(whole) else None


def _num_common(a: str, b: str) -> int:
    """Return how many first characters two texts have in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
