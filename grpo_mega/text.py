"""Text that every file, server and tokenizer takes: a str without surrogates; and where its tokens end in a text.

UTF-8 has no form for a lone surrogate, half of a character in UTF-16. A str gets one by an escape in JSON or YAML ("\\ud800"),
by a decoder or by a file's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

Decode = Callable[[list[int]], str]

PIECE_SIZE = 16  # tokens that are decoded together; up to MAX_CUT more where a piece would end within a character
MAX_CUT = 4

_REPLACEMENT = "\ufffd"  # a part of a character, decoded
_SURROGATE = re.compile("[\ud800-\udfff]")


def well_formed(text: str) -> str:
    """Return the text with U+FFFD in place of each surrogate; characters keep their places."""
    return _SURROGATE.sub(_REPLACEMENT, text)


def find_surrogate(value: Any) -> str | None:
    """Return the first surrogate in a str or in nested lists and dicts of them, like "U+D800 at character 7"; None if none."""
    if isinstance(value, str):
        match = _SURROGATE.search(value)
        return match and f"U+{ord(match[0]):04X} at character {match.start()}"
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((found for item in items if (found := find_surrogate(item))), None)


def token_ends(token_ids: Sequence[int], decode: Decode) -> list[int] | None:
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
