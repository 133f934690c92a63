"""From characters of a response to its tokens: where does the token stand that completes a step?"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

PIECE_SIZE = 64  # tokens; a piece grows by up to MAX_CUT of them where it would end within a character
MAX_CUT = 4

Decode = Callable[[list[int]], str]


def token_ends(token_ids: Sequence[int], decode: Decode, ends: Sequence[int]) -> list[int]:
    """For each of the ascending character `ends` the smallest t such that the text of token_ids[: t + 1] begins with so many
    characters of the whole text.

    So a character that several tokens make up is reached by the last of them, and a token without text, such as a special
    one that `decode` leaves out, by none. The text is taken piece by piece where the tokenizer allows that, for decoding every
    prefix of a long response takes seconds; where it does not, by bisection.
    """
    ids = list(token_ids)
    whole = decode(ids)
    pieces = _pieces(ids, decode, whole) or _pieces(ids, _after(ids[:1], decode), whole)
    found: list[int] = []
    for end in ends:
        assert 0 < end <= len(whole), "a step that ends outside of the response"
        if not pieces:
            found.append(bisect_left(range(len(ids) - 1), True, key=lambda t: decode(ids[: t + 1]).startswith(whole[:end])))
            continue
        piece = pieces[bisect_left(pieces, end, key=lambda piece: piece.first_character) - 1]
        found.append(piece.first_to_reach(end))
    return found


@dataclass
class _Piece:
    """Some of the tokens, whose text is the same without the others."""

    first_token: int
    first_character: int
    ids: list[int]
    decode: Decode

    @cached_property
    def _prefixes(self) -> list[str]:
        return [self.decode(self.ids[: t + 1]) for t in range(len(self.ids))]

    def first_to_reach(self, end: int) -> int:
        text = self._prefixes[-1][: end - self.first_character]
        # One by one: a character can come and go while bytes of the next one are decoded with its own.
        return self.first_token + next(t for t, prefix in enumerate(self._prefixes) if prefix.startswith(text))


def _pieces(ids: list[int], decode: Decode, whole: str) -> list[_Piece]:
    """The tokens in pieces; none if the texts of the pieces do not make up the whole."""
    pieces: list[_Piece] = []
    token = character = 0
    while token < len(ids):
        size = PIECE_SIZE
        text = decode(ids[token : token + size])
        while text.endswith("\ufffd") and size < PIECE_SIZE + MAX_CUT:
            size += 1
            text = decode(ids[token : token + size])
        if not whole.startswith(text, character):
            return []
        if text:
            pieces.append(_Piece(token, character, ids[token : token + size], decode))
        token += size
        character += len(text)
    return pieces if character == len(whole) else []


def _after(first: list[int], decode: Decode) -> Decode:
    """What is decoded after these tokens: some tokenizers drop the space before a text's first word."""
    length = len(decode(first))
    return lambda ids: decode([*first, *ids])[length:]
