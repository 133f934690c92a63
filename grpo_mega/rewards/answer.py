"""The answer of a response, as text: where it stands (`extract_answer`).

The answer is the content of the last complete `<answer>...</answer>`; else of the last `\\boxed{...}` with balanced
braces; else what follows the last `####` on its line; else, of the text after `</think>` (of all, if nothing follows): the
whole if it is nothing but an expression or a short phrase, or the last expression or number in it. Gold answers are read by
the same rule, so that a bare `1/2`, a worked solution ending in `#### 18` and one ending in `\\boxed{18}` all serve. Time is
linear in the text's length.
"""

import re

TAIL = 2000  # characters from the end in which the last expression is looked for; a longer answer is none
MAX_PHRASE_WORDS = 5  # a text without any number or formula is an answer itself only up to this length

_FUNCTION = re.compile(
    "and|or|(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|exp|sqrt|inf|infinity|mod|gcd|lcm|max|min|pi", re.IGNORECASE
)
_DIGITS = r"(?<![A-Za-z_\d])(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+(?![A-Za-z]))?"
_ATOM = rf"(?:\d*\\[dtc]?frac\{{[^{{}}]*\}}\{{[^{{}}]*\}}|\d*\\sqrt\{{[^{{}}]*\}}|\\?[$€£¥₹]?-?{_DIGITS})"
# Without thousands, which would make it ambiguous, and the time exponential in the commas: (1,234) is matched by two of them.
_ELEMENT = r"(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+(?![A-Za-z]))?"
_EXPRESSION = re.compile(
    rf"[(\[] ?-?{_ELEMENT}(?: ?, ?-?{_ELEMENT})+ ?[)\]]"  # a tuple or an interval
    r"|(?<![A-Za-z_\d])\d{1,2}:\d\d(?!\d)(?: ?[aApP]\.?[mM]\b\.?)?"  # a time of day
    rf"|(?:(?<![\w)\]}}.])[-+])?{_ATOM}(?:(?:(?<=\d):(?=\d)| ?(?:[-+/^]|\*\*?|\\times|\\cdot|\\div) ?)\(?{_ATOM}\)?)*"
    r"(?: ?(?:\\?%|percent\b))?"
)
_FORMULA = re.compile(
    r"\$\$(?P<display>[^$]+)\$\$|\\\[(?P<bracket>.+?)\\\]|\\\((?P<inline>.+?)\\\)"
    r"|(?<!\\)\$(?!\s)(?P<dollar>[^$\n]+)(?<![\s\\])\$(?!\d)",  # "$5 and $6" are prices, not a formula
    re.DOTALL,
)
_ANNOUNCED = re.compile(r"(?i:\banswer(?: is)?(?=[:*\s])[:*\s]+)")
_WORD = re.compile(r"(?<![A-Za-z\\])(?:[A-Za-z]{3,}|(?i:it|is|so|we|he|be|of|by|at|on|as)(?![A-Za-z]))")
_BESIDE = frozenset("$%.,:;}")  # what ends the formula or the clause before a word
_COMMAND = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname|begin|end) ?\{[^{}]*\}|\\[A-Za-z]+")
_TOKEN = re.compile(r"\\(?:boxed|fbox) *\{|\\.|[{}]", re.DOTALL)
_TAG = re.compile(r"</?(?:think|answer)>")


def extract_answer(response: str) -> str | None:
    """The answer's text, stripped but otherwise as written; None where there is none."""
    return read_located(*locate_answer(response))


def locate_answer(response: str) -> tuple[str | None, str]:
    """(what is marked as the answer, ""), or (None, the text whose last expression it is); searched for without any regex
    that could go back over the text."""
    tagged = _last_tagged(response)
    marked = _marked(response if tagged is None else tagged)
    if marked is None and tagged is not None:
        marked = tagged
    if marked is not None:
        return marked, ""
    _, _, conclusion = response.rpartition("</think>")
    return None, conclusion if conclusion.strip() else response


def read_located(marked: str | None, conclusion: str) -> str | None:
    """`extract_answer` from what `locate_answer` found."""
    if marked is not None:
        return marked.strip() or None
    return last_expression(_TAG.sub(" ", conclusion))


def last_expression(text: str) -> str | None:
    """The whole text if it is a bare expression or a short phrase, else the last expression in its tail."""
    text = text.strip()
    if not text:
        return None
    one_line = "\n" not in text or "\\begin{" in text
    if one_line and not is_prose(text):
        return text
    tail = text[-TAIL:]
    found, end = None, -1
    for formula in _FORMULA.finditer(tail):
        content = (formula[formula.lastgroup] if formula.lastgroup else "").strip()
        if content:
            found, end = content, formula.end()
    for expression in _EXPRESSION.finditer(tail, max(end, 0)):
        found, end = expression[0].strip(), expression.end()
    *_, announced = ("", *_ANNOUNCED.split(tail)[1:])
    announced = announced.strip(" *\n")
    if announced and "\n" not in announced and not is_prose(announced):
        found = announced
    if found is None and one_line and len(text.split()) <= MAX_PHRASE_WORDS:
        found = text
    return found


def is_prose(text: str) -> bool:
    """Whether `text` has words beside its formulas: "18 dollars" and "It is x" have, "x + 1" and "cost = 18" not.

    A single word without any number is no prose but an answer ("Friday").
    """
    text = _COMMAND.sub(" ", re.sub(r"\\[\[\]()]", "$", text[-TAIL:]))
    for word in _WORD.finditer(text):
        if _FUNCTION.fullmatch(word[0]):
            continue
        before, after = text[: word.start()].rstrip(" (")[-1:], text[word.end() :].lstrip(" ).,:;!'")[:1]
        if before.isalnum() or before in _BESIDE or after.isalnum() or after == "$":
            return True
    return False


def _last_tagged(text: str) -> str | None:
    close = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, close) if close >= 0 else -1
    if start < 0:
        return None
    return text[start + len("<answer>") : text.index("</answer>", start)]


def _marked(text: str) -> str | None:
    """What the last box holds, else what follows the last `####`, if anything does."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    _, hashes, rest = text.rpartition("####")
    return rest.partition("\n")[0].strip() or None if hashes else None


def _last_boxed(text: str) -> str | None:
    """The content of the balanced `\\boxed{...}` or `\\fbox{...}` that starts last."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    box = _TOKEN.match(text, start)
    if box is not None and box[0][-1] == "{" and _is_token(text, start):
        depth = 1
        for token in _TOKEN.finditer(text, box.end()):
            depth += {"{": 1, "}": -1}.get(token[0], 0)  # there is no box in it: it is the last
            if not depth:
                return text[box.end() : token.start()]
    return _last_boxed_of_all(text)


def _is_token(text: str, start: int) -> bool:
    """Whether the backslash at `start` begins a command, and is not the second half of an escaped one."""
    first = start
    while first > 0 and text[first - 1] == "\\":
        first -= 1
    return (start - first) % 2 == 0


def _last_boxed_of_all(text: str) -> str | None:
    """The same in one pass over the text, for those whose last box is never closed."""
    last: tuple[int, int] | None = None
    open_braces: list[int] = []  # the index after each open brace, negated where it does not belong to a box
    for token in _TOKEN.finditer(text):
        if token[0] == "}":
            start = open_braces.pop() if open_braces else -1
            if start > 0 and (last is None or start > last[0]):
                last = (start, token.start())
        elif token[0] == "{":
            open_braces.append(-1)
        elif token[0].endswith("{") and len(token[0]) > 2:
            open_braces.append(token.end())
    return None if last is None else text[last[0] : last[1]]
