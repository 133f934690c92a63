"""The steps of a response: where each ends, by the name of a splitter (the key rewards.step_splitter).

    blank-lines    a step ends with the blank lines after it
    lines          a step is a line
    step-k         a step begins at a line such as "Step 2: ...", "**Step 2**", "### step 2." or "- Step 2)"
    regex:PATTERN  a step ends where a match of PATTERN ends

A splitter maps a text to the ascending character ends of its steps. Together the steps are the whole text, what separates two
of them belongs to the one before, and none is white space alone: such a piece belongs to its neighbour, and a text of white
space has no steps. Time is linear in the text's length (for regex:PATTERN, as far as PATTERN is).
"""

import re
from collections.abc import Callable
from functools import lru_cache

from grpo_mega.config.rewards import step_separator
from grpo_mega.errors import ConfigError

_INK = re.compile(r"\S")

Splitter = Callable[[str], list[int]]


@lru_cache(maxsize=32)
def splitter(name: str) -> Splitter:
    """Return the splitter called `name`. Raises ConfigError for an unknown name or a pattern that is no regular expression."""
    try:
        separator = step_separator(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return lambda text: _ends(text, separator)


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
