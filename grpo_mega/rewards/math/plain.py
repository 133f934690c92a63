"""Text without Markdown and chat-template marks (`plain`), with the digits and number formats of English.

Removed are emphasis (bold, italic, code), tokens such as <|im_end|>, and characters without width. Full-width characters and
digits of other scripts become ASCII. A Unicode line separator becomes a newline. Stars between operands stay: 2**10 is a power,
3*4 a product. In text of a language with a decimal comma, 1.234,5 becomes 1234.5.
"""
# ruff: noqa: RUF001 -- this module replaces characters that look like others

import re
from fractions import Fraction

_PLAIN = str.maketrans(
    {
        **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},  # maps full-width forms of ASCII
        **dict.fromkeys("\u2028\u2029\u0085", "\n"),
        **dict.fromkeys("\u200b\u2060\ufeff`", ""),
        **{chr(zero + digit): str(digit) for zero in (0x660, 0x6F0, 0x966, 0x9E6) for digit in range(10)},
        "\u066b": ".",
        "\u3000": " ",
        "。": ". ",
        "、": ", ",
        "−": "-",
    }
)
_MARKUP = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"<\|[^|<>\s]{1,40}\|>|</?answer>", " "),
        (r"(?<![0-9A-Za-z)}\]])\*\*\*?(?! )|(?<! )\*?\*\*(?![0-9A-Za-z(\\-])", ""),
        (r"(?<![0-9A-Za-z)}\]*^_{])\*([^\s*](?:[^*\n]{0,200}[^\s*])?)\*(?![0-9A-Za-z*({])", r"\1"),
        (r"(?<!\w)__(?=\S)|(?<=\S)__(?!\w)", ""),
        (r"(\d+(?:\.\d+)?) ?([\u4e07\u842c\ub9cc\u4ebf\u5104\uc5b5])(?:(\d{1,4})(?!\d))?", lambda match: _of_myriads(match)),
        # The next rule removes Indian thousands separators.
        (r"(?<![\d,])\d{1,2}(?:,\d\d)+,\d{3}(?![\d,])", lambda match: match[0].replace(",", "")),
        (r"(?<=\S) (?:veya|oder|ou|oppure|lub|или|または|或) (?=[A-Za-z] ?=)", " or "),
        (r"(\b[Rr]atio\b[^.\n]{0,80}?)\b(\d+) (?:to|is to) (\d+)", r"\1\2:\3"),
        (r"\b(\d+) (?:dollars?|euros?) and (\d\d) cents?\b", r"\1.\2"),
        (r"(?<![\d.,])(\d{1,3}(?:[ \u00a0\u202f\u2009]\d{3})+)(?![\d,.]\d|\d)", lambda match: re.sub(r"\s", "", match[1])),
        (
            r"(?<![\d.,])([1-9]\d{0,2}(?:\.\d{3})+)(?= ?(?:€|\\?[Ee]uros?\b|EUR\b|kr\b|reais\b))"
            r"|(?:(?<=€)|(?<=€ )|(?<=R\$)|(?<=R\$ ))([1-9]\d{0,2}(?:\.\d{3})+)(?![\d.,])",
            lambda match: match[0].replace(".", ""),
        ),
        (r"(?<![\d)] )\b(?:minus|negative|Minus|Negative) (?=[\d$\\(.])", "-"),
    )
)
_SUPERSCRIPT = re.compile(
    "\u207b?[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]{2,}|\u207b[\u00b9\u00b2\u00b3\u2074-\u2079]|[\u2074-\u2079]"
)
_NORMAL_SIZE = str.maketrans("\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079", "-0123456789")
# Matches words of languages with a decimal comma, and points or spaces between thousands.
_CONTINENTAL = re.compile(
    r"\b(?:der|die|das|ist|sind|und|also|est|sont|donc|les|une|el|los|las|respuesta|por|es|il|della|risposta|è|quindi|resposta|são|dos"
    r"|portanto|jest|odpowiedź|więc|het|een|antwoord|dus|cevap|ответ|рав[а-я]+|[а-я]{4,})\b",
    re.IGNORECASE,
)
_ENGLISH = re.compile(r"\b(?:the|is|are|of|so|and|we|that|this|with)\b")
_DECIMAL_COMMA = re.compile(r"(?<=\d)(?:,|\{,\})(?=\d+(?!\d|,\d|\)|\])|\\overline)(?<![(\[]\d,)")
_DOT_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:\.\d{3})+(?![\d.]\d|\d)")
_MYRIADS = {"\u4e07": 4, "\u842c": 4, "\ub9cc": 4, "\u4ebf": 8, "\u5104": 8, "\uc5b5": 8}


def plain(text: str) -> str:
    """Return `text` without Markdown and chat-template marks, stripped."""
    text = _SUPERSCRIPT.sub(lambda match: "^{" + match[0].translate(_NORMAL_SIZE) + "}", text.translate(_PLAIN))
    if _CONTINENTAL.search(text) and not _ENGLISH.search(text):
        text = _DOT_THOUSANDS.sub(lambda match: match[0].replace(".", ""), _DECIMAL_COMMA.sub(".", text))
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    return text.strip()


def _of_myriads(match: re.Match[str]) -> str:
    zeros = _MYRIADS[match[2]]
    value = Fraction(match[1]) * 10**zeros + int(match[3] or 0)
    return str(value) if value.denominator == 1 else match[0]
