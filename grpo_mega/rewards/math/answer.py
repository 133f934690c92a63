"""Find the answer of a response, as text (`locate_answer`, then `read_located`).

Only the text after the thought (`</think>`) counts, or the whole text if there is no thought. A response that was cut
off inside its thought has no answer. Pass `whole_turn`: if the chat template opens the thought, the response itself has
no `<think>`.

The first of these that exists is the answer:
- the last complete `<answer>...</answer>`;
- the last `\\boxed{...}` with balanced braces, or several that a comma or "and" joins;
- the rest of the line after the last `####`, unless it is a heading with text below it;
- the answer that the text states (`prose`).

If the last box is never closed, there is no answer. In a response that was cut at the length limit, only these count: a
closed box or tag, a complete `####` line, and an announced answer with the text after it. The last expression does not
count.

Gold answers are read by the same rules, so a bare `1/2`, a worked solution ending in `#### 18` and one ending in
`\\boxed{18}` all work. Time is linear in the length of the text.
"""

import re
from collections.abc import Mapping
from typing import Any

from grpo_mega.rewards.math.notation import plain
from grpo_mega.rewards.math.prose import is_prose, other_answer, read_announced, read_passage, read_start

_THOUGHTS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
)
_TOKEN = re.compile(r"\\(?:boxed|fbox|framebox|bbox) *(?:\[[^\]]{0,60}\] *){0,2}\{|\\.|[{}]", re.DOTALL)
_COMMANDS = ("\\boxed", "\\fbox", "\\framebox", "\\bbox")
_UNBRACED = re.compile(r"\\(?:boxed|fbox) *(?=[^ {}])")
_JOIN = re.compile(
    r"\}[\s$]*(?:[,;]\s*(?:(?:and|or)\b)?|(?:and|or)\b|\\text ?\{ ?(?:and|or) ?\})[\s$]*(?:[A-Za-z] ?= ?)?"
    r"\\(?:boxed|fbox|framebox) *\{$"
)
_JOIN_OPEN = re.compile(
    r"(?:[,;]|[,;]?\s*(?:an?d?|or?\b|\\text ?\{ ?(?:and|or) ?\}))[\s$]*(?:[A-Za-z] ?= ?)?(?:\\[a-z]*)?"
)
_JOIN_CHARS, _MAX_JOINED = 40, 10
_NUMBERED, _NUMBER = re.compile(r"\d+[.)]\s"), re.compile(r"[-$€£\\(*_ ]*\d")
_MAX_HASHED = 400  # length limit of a line after ####; a longer line is not an answer


def whole_turn(response: str, extras: Mapping[str, Any]) -> str:
    """Return the assistant's turn: the text that the chat template wrote into it (extras["prefill"]), then the
    response.
    """
    return str(extras.get("prefill") or "") + response


def locate_answer(response: str, is_cut: bool = False) -> tuple[str | None, str]:
    """Return (the text marked as the answer, ""), or (None, the text that may state it).

    If the response `is_cut` at the length limit, only a complete mark counts. No regex that could backtrack over the
    whole text is used.
    """
    conclusion = conclusion_of(response)
    _, is_tagged, tagged = conclusion.rpartition("</answer>")[0].rpartition("<answer>")
    text = tagged.partition("</answer>")[0] if is_tagged else conclusion
    is_cut = is_cut and not is_tagged
    marked = _boxed(text, is_cut)
    if marked is None:
        marked = _hashed(text, is_cut)
    if marked is None and is_tagged:
        marked = text
    return (None, conclusion) if marked is None else (marked, "")


def read_located(marked: str | None, conclusion: str, is_cut: bool = False) -> str | None:
    """Return the answer from the result of `locate_answer`, stripped but otherwise unchanged; None if there is none."""
    if marked is not None:
        return marked.strip() or None
    return read_announced(conclusion) if is_cut else read_passage(conclusion)


def conclusion_of(response: str) -> str:
    """Return the text after the last thought; "" if that thought does not end."""
    if "<" not in response and "[" not in response:
        return response
    for opening, closing in _THOUGHTS:
        end = response.rfind(closing)
        if response.rfind(opening) > end:
            return ""
        if end >= 0:
            response = response[end + len(closing) :]
    return response


def _hashed(text: str, is_cut: bool) -> str | None:
    """Return the rest of the line after the last `####`; None if it is a title, too long, or may be cut off."""
    _, mark, rest = text.rpartition("####")
    line, end, below = rest.partition("\n") if mark else ("", "", "")
    line = line.strip()
    if not line or len(line) > _MAX_HASHED or (is_cut and not end):
        return None
    is_title = line.isalpha() or is_prose(plain(line))
    is_title = bool(_NUMBERED.match(line)) or (is_title and not _NUMBER.match(line))
    return None if is_title and below.strip() else line


def _boxed(text: str, is_cut: bool) -> str | None:
    r"""Return the content of the last box, or of several joined ones: "\boxed{3} and \boxed{5}" returns "3, 5".

    Return "" if the last box is never closed, because the answer was then cut off.
    """
    start = _last_command(text, len(text))
    if start < 0:
        return None
    last = _closed_box(text, start)
    if last is None:
        if unbraced := _UNBRACED.match(text, start):  # handles \boxed 5
            rest = text[unbraced.end() : unbraced.end() + _MAX_HASHED]
            found = read_start(rest)
            if found is not None:
                return "" if is_cut and len(rest) == len(found) else found
        if _content_of(text, start):
            return ""
        last = _last_boxed_of_all(text)
    if last is None:
        return None
    if is_cut and _JOIN_OPEN.fullmatch(text[last[1] + 1 :][:_MAX_HASHED].strip("$ \n")):
        return ""
    contents, end = [text[slice(*last)].strip()], last[1]
    for _ in range(_MAX_JOINED):
        first = max(0, last[0] - _JOIN_CHARS)
        join = _JOIN.search(text, first, last[0]) if "}" in text[first : last[0]] else None
        before = _last_command(text, join.start()) if join else -1
        joined = _closed_box(text, before) if before >= 0 else None
        if not join or not joined or joined[1] != join.start():
            break
        last = joined
        if (content := text[slice(*last)].strip()) not in contents:
            contents.insert(0, content)
    other = other_answer(contents[-1], text[end + 1 :])
    return ", ".join(contents) if other is None or other in contents else f"{contents[-1]} or {other}"


def _last_command(text: str, end: int) -> int:
    r"""Return the index of the last \boxed or \fbox before `end`, or -1."""
    while (place := text.rfind("box", 0, end)) >= 0:
        for command in _COMMANDS:
            start = place - command.index("box")
            if start >= 0 and text.startswith(command, start, end):
                return start
        end = place
    return -1


def _closed_box(text: str, start: int) -> tuple[int, int] | None:
    """Return the span of the content of the box at `start`; None if it is not closed."""
    first = _content_of(text, start)
    if not first:
        return None
    end = text.find("}", first)
    if text.find("{", first, end) < 0 and text.find("\\", first, end) < 0:  # the usual case
        return (first, end) if end >= 0 else None
    depth = 1
    for token in _TOKEN.finditer(text, first):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if not depth:
            return first, token.start()
    return None


def _content_of(text: str, start: int) -> int:
    """Return the index of the content of the box that opens at `start`; 0 if none does."""
    box = _TOKEN.match(text, start)
    num_backslashes = start - len(text[:start].rstrip("\\"))
    return box.end() if box is not None and box[0][-1] == "{" and num_backslashes % 2 == 0 else 0


def _last_boxed_of_all(text: str) -> tuple[int, int] | None:
    """Return the span of the content of the last closed box, in one pass. For texts whose last box is never closed."""
    last: tuple[int, int] | None = None
    open_braces: list[int] = []  # index after each open brace; -1 if the brace does not open a box
    for token in _TOKEN.finditer(text):
        if token[0] == "}":
            start = open_braces.pop() if open_braces else -1
            if start > 0 and (last is None or start > last[0]):
                last = (start, token.start())
        elif token[0] == "{":
            open_braces.append(-1)
        elif token[0].endswith("{") and len(token[0]) > 2:
            open_braces.append(token.end())
    return last
