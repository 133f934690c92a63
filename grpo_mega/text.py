"""Text that every file, server and tokenizer accepts (a str without surrogates), and text that a terminal may show.

UTF-8 cannot encode a lone surrogate, half of a character in UTF-16. A str gets one from an escape in JSON or YAML ("\\ud800"),
from a decoder or from a file name.
"""

from __future__ import annotations

import re
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")
_COLOUR = re.compile("(?:\x1b\\[|\x9b)[0-9;:]*m")
_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def well_formed(text: str) -> str:
    """Return the text with U+FFFD instead of each surrogate. All other characters keep their positions."""
    return _SURROGATE.sub("\ufffd", text)


def find_surrogate(value: Any) -> str | None:
    """Return the first surrogate in a str or in nested lists and dicts, like "U+D800 at character 7"; None if there is none."""
    if isinstance(value, str):
        match = _SURROGATE.search(value)
        return match and f"U+{ord(match[0]):04X} at character {match.start()}"
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((found for item in items if (found := find_surrogate(item))), None)


def printable(text: str) -> str:
    """Return text that cannot control a terminal: controls are escaped as "\\x1b" or "\\u202e", and colours removed.

    Line feeds and tabs stay. All other controls (C0, C1, DEL) and line and paragraph separators are escaped. Controls of
    bidirectional text are escaped too, because they show a line in a different order.
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), _COLOUR.sub("", text.replace("\r\n", "\n")))
