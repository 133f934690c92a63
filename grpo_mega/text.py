"""Text that every file, server and tokenizer takes: a str without surrogates.

UTF-8 has no form for a lone surrogate, half of a character in UTF-16. A str gets one by an escape in JSON or YAML ("\\ud800"),
by a decoder or by a file's name.
"""

from __future__ import annotations

import re
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")


def well_formed(text: str) -> str:
    """Return the text with U+FFFD in place of each surrogate; characters keep their places."""
    return _SURROGATE.sub("\ufffd", text)


def find_surrogate(value: Any) -> str | None:
    """Return the first surrogate in a str or in nested lists and dicts of them, like "U+D800 at character 7"; None if none."""
    if isinstance(value, str):
        match = _SURROGATE.search(value)
        return match and f"U+{ord(match[0]):04X} at character {match.start()}"
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((found for item in items if (found := find_surrogate(item))), None)
