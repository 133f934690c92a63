r"""Other notations for answers, converted into the form that the other rules and math-verify read.

`plain` removes emphasis (bold, italic, code), tokens such as <|im_end|>, and characters without width. Full-width
characters and digits of other scripts become ASCII. A Unicode line separator becomes a newline. Stars between operands
stay: 2**10 is a power, 3*4 a product. In text of a language with a decimal comma, 1.234,5 becomes 1234.5.

`rewrite` converts the text of an answer without Markdown. It covers units in \text with powers, magnitude words, cents,
ordinals, reversed and angle brackets, empty sets, combinations, sines of degrees, polar form, residues, segments,
repeating decimals, and numbers in European form. Every pattern is linear in the text, and `normalize` has cut the text
to a bounded length.
"""
# ruff: noqa: RUF001 -- this module replaces characters that look like others

import re
from collections.abc import Callable, Mapping
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
_MYRIADS = {"\u4e07": 4, "\u842c": 4, "\ub9cc": 4, "\u4ebf": 8, "\u5104": 8, "\uc5b5": 8}


Replacement = str | Callable[[re.Match[str]], str]
Rules = tuple[tuple[re.Pattern[str], Replacement], ...]


def rules(replacements: Mapping[str, Replacement]) -> Rules:
    """Return the patterns, compiled, with their replacements, in the same order."""
    return tuple((re.compile(pattern), replacement) for pattern, replacement in replacements.items())


def _of_myriads(match: re.Match[str]) -> str:
    value = Fraction(match[1]) * 10 ** _MYRIADS[match[2]] + int(match[3] or 0)
    return str(value) if value.denominator == 1 else match[0]


_MARKUP = rules(
    {
        r"<\|[^|<>\s]{1,40}\|>|</?answer>": " ",
        r"(?<![0-9A-Za-z)}\]])\*\*\*?(?! )|(?<! )\*?\*\*(?![0-9A-Za-z(\\-])": "",
        r"(?<![0-9A-Za-z)}\]*^_{])\*([^\s*](?:[^*\n]{0,200}[^\s*])?)\*(?![0-9A-Za-z*({])": r"\1",
        r"(?<!\w)__(?=\S)|(?<=\S)__(?!\w)": "",
        r"(\d+(?:\.\d+)?) ?([\u4e07\u842c\ub9cc\u4ebf\u5104\uc5b5])(?:(\d{1,4})(?!\d))?": _of_myriads,
        # The next rule removes Indian thousands separators.
        r"(?<![\d,])\d{1,2}(?:,\d\d)+,\d{3}(?![\d,])": lambda match: match[0].replace(",", ""),
        r"(?<=\S) (?:veya|oder|ou|oppure|lub|или|または|或) (?=[A-Za-z] ?=)": " or ",
        r"(\b[Rr]atio\b[^.\n]{0,80}?)\b(\d+) (?:to|is to) (\d+)": r"\1\2:\3",
        r"\b(\d+) (?:dollars?|euros?) and (\d\d) cents?\b": r"\1.\2",
        r"(?<![\d.,])(\d{1,3}(?:[ \u00a0\u202f\u2009]\d{3})+)(?![\d,.]\d|\d)": lambda match: re.sub(
            r"\s", "", match[1]
        ),
        (
            r"(?<![\d.,])([1-9]\d{0,2}(?:\.\d{3})+)(?= ?(?:€|\\?[Ee]uros?\b|EUR\b|kr\b|reais\b))"
            r"|(?:(?<=€)|(?<=€ )|(?<=R\$)|(?<=R\$ ))([1-9]\d{0,2}(?:\.\d{3})+)(?![\d.,])"
        ): lambda match: match[0].replace(".", ""),
        r"(?<![\d)] )\b(?:minus|negative|Minus|Negative) (?=[\d$\\(.])": "-",
    }
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

_SCALES = "thousand|million|billion|trillion"
_DEGREES = r"(?:\^ ?\{? ?\\circ ?\}?|\\degree|°|\s?degrees?\b)"
_ANGLE = rf"(?:[({{] ?(\d+(?:\.\d+)?) ?{_DEGREES} ?[)}}]|(\d+(?:\.\d+)?) ?{_DEGREES})"
_MACRO = r"\\(?:text|textrm|textnormal|mathrm|mathit|mathsf|rm|operatorname|mbox) ?"
_UNIT_CONTENT = r"(?:[A-Za-z\u00b5\u03bcΩ/·.\s]|\\[,;: ]|\\cdot(?![A-Za-z])|\^ ?(?:\{-?\d\}|-?\d))+"
_NO_UNIT = (
    rf"(?:{_SCALES}|and|or|not|to|mod|a\.?m|p\.?m|cis|i|e|x|y|n|percent"
    rf"|times|plus|minus|students?|more|less|hours?|minutes?|st|nd|rd|th)"
)
_GAP = r"(?:\\[,;:! ]|[\s~·*/]|\\cdot(?![A-Za-z])|\\times(?![A-Za-z]))"
_UNIT_RUN = re.compile(
    rf"(?<=[\d}}])(?:{_GAP}*{_MACRO}\{{(?! *{_NO_UNIT}\b){_UNIT_CONTENT}\}}(?:\^ ?(?:\{{-?\d\}}|-?\d))?)+(?=[\s$.]*\Z)"
)
_DIGITS = r"\{?(\d{1,6})\}?"
_ORDINAL_WORDS = "first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth"
_ORDINALS = re.compile(rf"(?:the )?({_ORDINAL_WORDS})(?: place)?\.?", re.IGNORECASE)
_PHRASES = rules(
    {
        (
            r"(?i)(?:(?:has|have|is|are) )?(?:there (?:is|are|exists?) |it has "
            r"|the equation has )?no (?:real )?(?:solutions?|roots?)(?: exists?)?\.?|none"
            r"|(?:es gibt )?keine (?:reellen? )?lösung(?:en)?|(?:no hay|sin) soluci(?:ón|ones)"
            r"|(?:aucune|pas de) solution|nessuna soluzione|sem solução|нет решений|无解|無解|解なし|해가 없다"
        ): "no solution",
        r"(?i)(?:the )?(?:empty|null) set\.?": r"\\emptyset",
        r"(?i)(?:it )?(?:does not|doesn't) exist\.?|d\.?n\.?e\.?": "does not exist",
        r"(?:diverges to )?(?:positive )?infinity": r"\\infty",
        r"(?:diverges to )?negative infinity": r"-\\infty",
        r"(?i)(?:at )?(?:12 )?noon": "12:00 PM",
        r"(?i)(?:at )?(?:12 )?midnight": "12:00 AM",
        r"(?:line )?segment ([A-Z]{2})": r"\1",
    }
)
_WORDS = {
    "monday": "lunes|lundi|montag|segunda-feira|lunedì|星期一|周一|月曜日|월요일",
    "tuesday": "martes|mardi|dienstag|terça-feira|martedì|星期二|周二|火曜日|화요일",
    "wednesday": "miércoles|mercredi|mittwoch|quarta-feira|mercoledì|星期三|周三|水曜日|수요일",
    "thursday": "jueves|jeudi|donnerstag|quinta-feira|giovedì|星期四|周四|木曜日|목요일",
    "friday": "viernes|vendredi|freitag|sexta-feira|venerdì|星期五|周五|金曜日|금요일",
    "saturday": "sábado|samedi|samstag|sabato|星期六|周六|土曜日|토요일",
    "sunday": "domingo|dimanche|sonntag|domenica|星期日|星期天|周日|日曜日|일요일",
    "yes": "ja|sí|si|oui|sim|sì|是|是的|はい|да|نعم",
    "no": "nein|non|não|否|不是|いいえ|нет|لا",
    "true": "wahr|verdadero|verdadeira?|verdadera|vrai|vero|真|正确|верно",
    "false": "falsch|falso|falsa|faux|假|错误|неверно",
}
_TRANSLATIONS = tuple((re.compile(words, re.IGNORECASE), word) for word, words in _WORDS.items())
_REALS = re.compile(
    r"(?:x ?\\in ?)?(?:\\mathbb ?\{? ?R ?\}?|\u211d)|(?:all |the )?(?:set of )?(?:all )?real(?: number)?s",
    re.IGNORECASE,
)


def _permutations(match: re.Match[str]) -> str:
    n, k = (int(group) for group in match.groups() if group is not None)
    return rf"\frac{{{n}!}}{{{n - k}!}}" if n >= k else match[0]


_REWRITES = rules(
    {
        rf"\\text(?:rm)? ?\{{ ?((?:{_SCALES})\b)([^{{}}]*)\}}": r" \1\2",
        r"\{\\(?:rm|bf|it) ([^{}]*)\}|\\(?:mathbf|boldsymbol|mathrm) ?\{(-?\d+)\}": r"\1\2",
        r"(?:\\left ?[\[(] ?)?\\begin\{array\}\{[^{}]*\}": r"\\begin{pmatrix}",
        r"\\end\{array\}(?: ?\\right ?[\])])?": r"\\end{pmatrix}",
        r"(?<![\w)}\]])\+ ?\\infty": r"\\infty",
        r"\\(?:operatorname|mathrm|text) ?\{ ?cis ?\}|\\cis\b|\bcis(?= ?[\d(\\])": r"\\cis ",
        r"\\(?:mathrm|text) ?\{ ?(C|P) ?\}(?=[(_^])": r"\1",
        r"(?<=\d)\{,\}(?=\d{1,2}(?!\d))": ".",
        rf"(?<=\d) ?(?:\\[,;! ])? ?{_MACRO}\{{ ?([eE] ?[-+]?\d*) ?\}}": r"\1",
        r"\\(?:varnothing|empty)(?![A-Za-z])|\\\{ *\\\}|\u2205|\u00f8(?![a-z])|^\{ *\}$": r"\\emptyset ",
        r"\\[lr]angle(?![A-Za-z])|[\u27e8\u27e9\u2329\u232a]|^<(?=[^<>]*,[^<>]*>$)|(?<=\d)>$": lambda match: (
            "(" if match[0] in ("\\langle", "\u27e8", "\u2329", "<") else ")"
        ),
        r"\\overline ?\{ ?([A-Z]{2}) ?\}": r"\1",
        r"(\d+) ?\^ ?\{? ?(?:\\(?:text|mathrm|textrm) ?\{)? ?(?:st|nd|rd|th) ?\}*|\b(\d+)(?:st|nd|rd|th)\b": r"\1\2",
        rf"\\(sin|cos|tan|cot|sec|csc|cis) ?{_ANGLE}": r"\\\1(\\frac{\2\3\\pi}{180})",
        r"\\cis ?(?:\(((?:[^()]|\([^()]*\))*)\)|(\\frac\{[^{}]*\}\{[^{}]*\}|\\pi))": r"(\\cos(\1\2)+i\\sin(\1\2))",
        rf"\{{? ?{_DIGITS} ?\\choose ?{_DIGITS} ?\}}?": r"\\binom{\1}{\2}",
        (
            rf"(?<![A-Za-z\\])C ?\( ?(\d+) ?, ?(\d+) ?\)"
            rf"|(?:\{{\}} ?)?[_^] ?{_DIGITS} ?C ?_ ?{_DIGITS}"
        ): r"\\binom{\1\3}{\2\4}",
        (
            rf"(?<![A-Za-z\\}}])C_ ?{_DIGITS} ?\^ ?{_DIGITS}"
            rf"|(?<![A-Za-z\d])(\d+) ?C ?(\d+)(?![A-Za-z\d])"
        ): r"\\binom{\1\3}{\2\4}",
        rf"(?<![A-Za-z\\])P ?\( ?(\d+) ?, ?(\d+) ?\)|(?:\{{\}} ?)?[_^] ?{_DIGITS} ?P ?_ ?{_DIGITS}": _permutations,
        r"^(\d+) to (\d+)$": r"\1:\2",
        r"(?<=[^\s]) (?:veya|oder|ou|o|oppure|lub|или|または|或) (?=[A-Za-z] ?=|-?\d)": " or ",
        r"^\$?\((\d+)\)_ ?\{?(\d+)\}?\$?$": r"\1_\2",
        r"^\$?[A-Z] ?\(([^();]*); ?([^();]*)\)\$?$": r"(\1,\2)",
        r"^\$?(?:[a-z] ?= ?)?\\pm ?(\d+)\$?$": r"\1, -\1",
        r"\u2261": r"\\equiv ",
        (
            r"^(?:\$|\\\()?(?:[^$]{1,80}\\equiv ?)?(-?\d+) ?(?:\\pmod ?\{? ?(\d+) ?\}?"
            r"|\(? ?(?:\\bmod|\\mod|\bmod) ?\{? ?(\d+) ?\}? ?\)?)"
        ): r"\1 \\pmod{\2\3}",
        (
            r"(?<=\d)\\dot ?\{?(\d)\}?(\d*)\\dot ?\{?(\d)\}?"
            r"|(?<=\.)\\dot ?\{?(\d)\}?(\d*)\\dot ?\{?(\d)\}?"
        ): r"\\overline{\1\2\3\4\5\6}",
        r"(?<=[\d.])\\dot ?\{?(\d)\}?": r"\\overline{\1}",
        r"(?<![\w.])(\d*\.\d*)\((\d{1,12})\)(?!\d)": r"\1\\overline{\2}",
        r"(?<![\d.,])([1-9]\d{0,2}(?:\.\d{3})+),(\d+)(?![\d,.])": lambda match: (
            match[1].replace(".", "") + "." + match[2]
        ),
        r"(?<![\d.,])([1-9]\d{0,2}(?:\.\d{3}){2,})(?![\d,.])": lambda match: match[1].replace(".", ""),
        r"(?<=\d) ?(?:zł|kr|Kč|Ft|₺|₽|руб\.?|рублей|Euro|EUR|CHF)\.?$|^(?:Rp|R\$|CHF|kr) ?(?=\d)": "",
        r"(?<=\d)( ?)(?:¢|\\cent(?![a-z])|cents?\b|\\text ?\{ ?(?:cents?|¢) ?\})": "¢",
    }
)
_REPEATING = re.compile(r"(-?\d{0,12}\.\d{0,20}?)(\d{1,8}?)(\2+)(?:\.{2,3}|…|\\[lc]?dots)")
_INTERVAL = re.compile(r"([\[\]]) ?([^\[\];,]{1,60}?)(,\d[^\[\];,]{0,30})? ?([;,]) ?([^\[\];]{1,60}?) ?([\[\]])")


def plain(text: str) -> str:
    """Return `text` without Markdown and chat-template marks, stripped."""
    text = _SUPERSCRIPT.sub(lambda match: "^{" + match[0].translate(_NORMAL_SIZE) + "}", text.translate(_PLAIN))
    if _CONTINENTAL.search(text) and not _ENGLISH.search(text):
        text = _DOT_THOUSANDS.sub(lambda match: match[0].replace(".", ""), _DECIMAL_COMMA.sub(".", text))
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    return text.strip()


def rewrite(text: str) -> str:
    """Return an answer in the notation that the other rules read."""
    text = _UNIT_RUN.sub("", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    bare = text.strip(" $")
    if match := _REPEATING.fullmatch(bare):
        lead, period, rest = match.groups()
        if (len(rest) // len(period) + 1) * len(period) >= 3:
            return lead + rf"\overline{{{period}}}"
    return _reversed_brackets(text)


def rewrite_phrase(text: str) -> str:
    """Return the standard form of an answer that is a known phrase (an ordinal, no solution, noon); else the text."""
    if not text or text[0].isdigit() or len(text) > 60:
        return text
    text = re.sub(r"(?:입니다|이다|です|だ)$|^(?:it is|it's|that is|this is|será|es|ist|sera|è|é) ", "", text)
    if _REALS.fullmatch(text):
        return r"(-\infty,\infty)"
    for pattern, word in _TRANSLATIONS:
        if pattern.fullmatch(text):
            return word
    if match := _ORDINALS.fullmatch(text):
        return str(_ORDINAL_WORDS.split("|").index(match[1].lower()) + 1)
    return next((pattern.sub(phrase, text) for pattern, phrase in _PHRASES if pattern.fullmatch(text)), text)


def is_single_word(text: str) -> bool:
    """Return whether a text is one word that can be an answer within a sentence: true, a weekday, seventh, zero."""
    is_known = text.lower() in (*_WORDS, *_ORDINAL_WORDS.split("|"), "zero")
    return is_known or any(words.fullmatch(text) for words, _ in _TRANSLATIONS)


def _reversed_brackets(text: str) -> str:
    r"""Rewrite ]2,5[ as (2,5) and [1,5;2[ as [1.5,2)."""
    if "[" not in text and "]" not in text:
        return text
    if 0 <= text.find("[") < text.find("]") and text.rfind("[") < text.rfind("]") and ";" not in text:
        return text
    text = re.sub(r"\\[,;:! ]", " ", text)

    def interval(match: re.Match[str]) -> str:
        left, first, decimals, mark, second, right = match.groups()
        if decimals and mark == ",":
            return match[0]
        first = first + (decimals or "").replace(",", ".")
        second = second.replace(",", ".") if mark == ";" else second
        return f"{'(' if left == ']' else '['}{first},{second}{')' if right == '[' else ']'}"

    return _INTERVAL.sub(interval, text)
