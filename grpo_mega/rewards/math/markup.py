"""Text without the marks of Markdown and chat templates (`plain`): what `prose` and `normalize` read.

Gone are emphasis (bold, italic, code), tokens such as <|im_end|>, and characters without width. Full-width characters become
ASCII, and a line separator of Unicode becomes a newline. Stars between operands stay: 2**10 is a power, 3*4 a product.
"""

import re

CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3"  # the inside of a regex's character class

_PLAIN = str.maketrans(
    {
        **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},  # full-width forms of ASCII
        **dict.fromkeys("\u2028\u2029\u0085", "\n"),
        **dict.fromkeys("\u200b\u2060\ufeff`"),
        "\u3000": " ",
        "。": ". ",
        "、": ", ",
        "−": "-",  # noqa: RUF001
    }
)
_MARKUP = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"<\|[^|<>\s]{1,40}\|>|</?answer>", " "),
        (r"(?<![0-9A-Za-z)}\]])\*\*\*?(?! )|(?<! )\*?\*\*(?![0-9A-Za-z(\\-])", ""),
        (r"(?<![0-9A-Za-z)}\]*^_{])\*([^\s*](?:[^*\n]{0,200}[^\s*])?)\*(?![0-9A-Za-z*({])", r"\1"),
        (r"(?<!\w)__(?=\S)|(?<=\S)__(?!\w)", ""),
        (r"(?<![\d)] )\b(?:minus|negative|Minus|Negative) (?=[\d$\\(.])", "-"),
    )
)


def plain(text: str) -> str:
    """Return `text` without marks, stripped."""
    text = text.translate(_PLAIN)
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    return text.strip()
