"""Find the answer that a text states: the last one announced, else the last one in bold, else the last expression.

`read_passage` reads the conclusion of a response. `read_marked` reads the content of a tag, a box or a `####` line that
holds more than an expression. Both return text for `normalize.normalize_answer`, or None. "The answer is 16 students
out of 20" announces 16: after an announcement the first expression counts, elsewhere the last one. An expression that
the text denies ("not 5", "more than 5") is not an answer, and a text with two answers ("6 or 9", "2 hours and 30
minutes") keeps both. Only the last TAIL characters are read, so time is bounded.
"""

import re

from grpo_mega.rewards.math.notation import is_single_word, plain

# Number of characters to search from the end. A longer answer does not count.
TAIL = 2000
# Longest phrase without a number or formula that counts as an answer.
MAX_PHRASE_WORDS = 5
# Number of announcements to try, the last one first, and characters to read after each.
MAX_ANNOUNCED, MAX_CLAUSE = 8, 400
MAX_TITLE = 20  # maximum number of characters before "answer" in a heading

_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3"  # for use within a regex character class

_MONTHS = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)\.?"
)
_FUNCTION = re.compile(
    "and|or|(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|exp|sqrt|inf|infinity|mod|gcd|lcm|max|min|pi", re.IGNORECASE
)
_DIGITS = r"(?<![A-Za-z_\d])(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+(?![A-Za-z]))?"
_ATOM = (
    rf"(?:\d*\\[dtc]?frac\{{[^{{}}]*\}}\{{[^{{}}]*\}}|\d*\\sqrt\{{[^{{}}]*\}}|\d*√\d+"
    rf"|\\?[$€£¥₹]?-?{_DIGITS}(?: ?(?:π|\\pi(?![A-Za-z])))?)"
)
# No thousands separators: (1,234) would match in two ways, and time would be exponential in the number of commas.
_ELEMENT = r"(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+(?![A-Za-z]))?"
_EXPRESSION = re.compile(
    rf"[(\[] ?-?{_ELEMENT}(?: ?, ?-?{_ELEMENT})+ ?[)\]]"  # matches a tuple or an interval
    rf"|(?:{_MONTHS}) \d{{1,2}}(?:st|nd|rd|th)?, \d{{4}}|\d{{1,2}}(?:st"
    rf"|nd|rd|th)?(?: of)? (?:{_MONTHS}),? \d{{4}}|\d{{4}}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?)?(?!\d)"
    r"|(?<![\d.,])\d{1,6} ?(?:h|hours?|hrs?|days?),? (?:and )?\d{1,6} ?(?:min(?:ute)?s?|h(?:ou)?rs?)\b"
    r"(?:,? (?:and )?\d{1,6} ?s(?:ec(?:ond)?s?)?\b)?"
    r"|(?<![A-Za-z_\d])\d{1,2}:\d\d(?!\d)(?: ?[aApP]\.?[mM]\b\.?)?"  # matches a time of day
    rf"|(?:(?<![\w)\]}}.])[-+])?{_ATOM}"
    rf"(?:(?:(?<=\d):(?=\d)| ?(?:[-+/^\u00d7·÷±]|\*\*?|\\times|\\cdot|\\div|\\pm) ?)\(?{_ATOM}\)?)*"
    r"(?: ?(?:\\?%|percent\b|¢|cents?\b)| (?:thousand|[mb]illion|trillion)\b)?"
)
_FORMULA = re.compile(
    r"\$\$(?P<display>[^$]+)\$\$|\\\[(?P<bracket>(?:[^\\]|\\[^\[\]])+)\\\]|\\\((?P<inline>(?:[^\\]|\\[^()])+)\\\)"
    r"|(?<!\\)\$(?!\s)(?P<dollar>[^$\n]+)(?<![\s\\])\$(?!\d)"  # prices such as "$5 and $6" are not a formula
)
_JOIN = re.compile(
    r"\s*(?P<equals>=|\\approx|≈)\s*|\s*(?:[,;]\s*(?:and|or)\b|[,;]|(?:and|or|und|oder|et|ou|o|y|u|e|oppure|lub|veya|ve|и|или)\b|或者?|または)\s*"
)
_TIMES = r"[+*/^\u00d7÷·]|\\times\b|\\cdot\b|\\div\b"
_WORD_FOR_OPERATOR = r"(?:plus|minus|times|divided by|multiplied by)"
_JOINT = re.compile(r"\s*(?:(?:,\s*)?(?:or|and|oder|und|ou|et|o|y|e|veya|ve)\b|,|;)\s*")
_COMPOUND = re.compile(  # matches 2 hours and 30 minutes; 40 plus 11; 40 apples + 11 apples; 50% of 84
    rf"(?:\s*[A-Za-z]+,?)?\s+(?:and|or|to|{_WORD_FOR_OPERATOR})\s+\\?[$€£]?[\d(\\]|\s*(?:to|through)\s+[$€£]?\d"
    rf"|(?:\s*[A-Za-z]+)?\s*(?:{_TIMES})\s*\\?[$€£]?[\d(\\A-Za-z]|\s*(?:[A-Za-z]+\s*)?-\s*\\?[$€£]?\d"
    r"|(?<=%)\s*of\s+[$€£]?\d|(?:\s*\w+)?\s+or\s+(?:more|less|fewer|greater|above|below)\b"
)
_OPERATOR_BEFORE = re.compile(  # matches x + 11, 40 plus 11, 40 apples - 11, but not a bullet or a dash
    rf"(?:\S ?(?:{_TIMES}|\\pm)|(?:[\d)}}\]]|\b[A-Za-z]|\d\s[A-Za-z]+) ?-|\b{_WORD_FOR_OPERATOR})[ $(]*$"
    r"|\b(?:sum|product|difference|quotient) (?:of|between) [\d\s.,$-]*(?:and )?$|\b(?:half|twice|double|triple|%)"
    r" (?:of )?$"
)
_OPERATOR_AFTER = re.compile(
    r"[$)]* ?(?:[+*^\u00d7÷·]|\\times\b|\\cdot\b|\\div\b|/ ?[\d(\\]|/ ?[A-Za-z]\b|- ?(?:[\d$(\\]|[A-Za-z]\b))"
    r"|[$)]* ?\w* or (?:more|less|fewer|greater|above|below)\b"
)
_OPEN = re.compile(rf"(?:[-=<>≈]|{_TIMES}|\\approx|\bequals|\b{_WORD_FOR_OPERATOR})[ $?_.*…\\)\]]*$")
# Possible continuations of a response that was cut off. If one changes the answer, the answer may be incomplete.
_AFTER_NUMBER, _AFTER_WORD = ("7", "/7", " + 7", " 7", " million"), (" 7", " million")
_WORD_AFTER_NUMBER = re.compile(r"[\d)}$*],? ?([A-Za-z]+)$")
_WORDS_OF_NUMBERS = """
    hundred thousand million billion trillion percent and or to plus minus times divided multiplied
    """.split()  # noqa: SIM905  # a list of texts is three times as long

_HEDGE = re.compile(
    r"(?:\b(?:could|might|may)(?: also| well| just as well| instead)* be|\b(?:or"
    r" )?(?:possibly|perhaps|maybe)|\balternatively,?"
    r"|\b(?:actually|wait|correction|sorry|rather),?(?: no,?)?(?: the)?(?: (?:correct"
    r"|right|final))?(?: (?:answer|it|that|this))?"
    r"(?: (?:is|should be|must be))?|könnte auch|podría(?: también)? ser|pourrait(?: aussi)? être|potrebbe(?: anche)?"
    r" essere"
    r"|может быть|也?可能是)[ :]*[$€£*(\\]{0,3}(-?\d[\d.,]*\d|-?\d)(?![\w(]| ?[-+*/=^])",
    re.IGNORECASE,
)
# Usual texts after the box.
_USUAL_ENDS = frozenset(("", ".", "$", "$.", "$$", "\n", "\n\\]", "\\]", "\\)", "\\).", "**", "**."))
_NUMERAL = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_LETTER = "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f"
_WORD = re.compile(
    rf"(?<![{_LETTER}\\])(?:[{_LETTER}]{{3,}}|(?i:it|is|so|we|he|be|of|by|at|on|as)(?![{_LETTER}]))|[{_CJK}]+|[\u0400-\u04ff\u0600-\u06ff\u0900-\u097f]{{2,}}"
)
_BESIDE = frozenset("$%.,:;}")  # characters that end the formula or the clause before a word
_COMMAND = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname|begin|end) ?\{[^{}]*\}|\\[A-Za-z]+"
)

_KEYWORD = (
    r"(?<![A-Za-z])(?:answers?|ans|(?:correct|right|best) (?:option|choice)s?)\b|\b(?:option|choice)(?=:| is\b)"
    r"|故选|应选|答案|答え|정답|\bответ|\brespuesta|\bréponse|\bresposta|\bantwort|\bantwoord|\bcevap|\bjawaban|\brisposta|\bodpowiedź|उत्तर"  # noqa: RUF001
)
_IS = r"\b(?:is|are|equals|would be|should be|must be|est|es|ist|é)\b|是|为|為|は|은|는"
_ANNOUNCED = re.compile(
    rf"(?:{_KEYWORD})(?P<link>[^\n.:=]{{0,40}}?(?:{_IS})\s*:?|[^\n.:=!?]{{0,20}}(?::|=|→|->)|[ \t]*(?=\n))[:=\s]*",
    re.IGNORECASE,
)
_SOUGHT = re.compile(
    r"\b(?:find|get|check|verify|compute|calculate|determine|obtain|reach|round|simplify|write)\b[^.:]*$"
)
_REASON = re.compile(  # matches the start of an explanation after an answer
    r"[,;]? (?=(?:because|since|as|for|given|when|if)\b)"
    rf"|, ?(?=(?!and\b|or\b)(?:[a-z]{{3,}}|[{_CJK}]))"
    rf"|(?<=\S) ?(?=\([^()]*(?:[A-Za-z]{{3}}|=|[{_CJK}]))"
)
_NAME = re.compile(r"[A-Za-z]{3,}(?=, \d)")  # matches Monday in "Monday, 3 days after Friday"
_OFFER = re.compile(  # matches closing offers of chat models
    r"\s(?:Would you|Do you (?:want|have|need)|Shall I|Want me|Let me know|Feel free|I hope|Hope"
    r" (?:this|that)|Please let"
    r"|If you (?:have|need|want|would))\b[^\n]*$"
)
_NOTE = re.compile(
    r"[\s*_>#-]*(?:\((?=[^()]*[A-Za-z]{3})|(?:quick )?(?:check|note"
    r"|verification|verify|remark|explanation|nota|probe|hinweis|comprobación"
    r"|vérification|remarque|should|remember|by the way|keep in mind|if you|let me)\b)",
    re.IGNORECASE,
)
_OUTCOME = re.compile(
    r"\b((?:does not|doesn't) exist|(?:has|have|is|are) no (?:real )?solutions?|no (?:real )?solutions?(?: exists?)?"
    r"|diverges to (?:positive |negative )?infinity|(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day)[.!*\s]*$"
)
_YES_OR_NO = re.compile(r"(Yes|No|True|False)(?: ?[\u2014\u2013,.:!;]| - )")
_NUMBER_WORD = re.compile(
    r"\b(?:is|are|equals|exactly|leaves|remain|get|has|have|had|makes"
    r"|total of|:) \**((?:twenty|thirty|forty|fifty|sixty|seventy|eighty"
    r"|ninety|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen)"
    r"(?:-(?:one|two|three|four|five|six|seven|eight|nine))?)\**(?: [a-z]+| of (?:them|these|those))?[.!*\s]*$"
)
_SENTENCE_END = re.compile(r"(?<!\bRs)(?<!\bNo)(?<!\bvs)(?<![ap]\.m)[.!?](?=\s|$)|\n")
_FILLER = re.compile(
    r"(?:(?:the|either|both|approximately|about|around|roughly|exactly|simply|just|only|equal"
    r" to|option|choice|therefore|thus"
    r"|indeed)\b|≈|\\approx|[:=,*\s])+",
    re.IGNORECASE,
)
_CHOICE = re.compile(
    r"\(?(?P<closed>[A-J])\)(?!\s*(?:,|and\b|or\b)\s*\([A-J])"
    r"|(?P<bare>[A-HJ])(?![\w'(])(?!\s*(?:[-=+*/^<>]|,\s*\(?[A-J]\b|(?:and|or)\s+\(?[A-J]\b))"
    r"(?!\s+(?!because\b|since\b|as\b|for\b|by\b|with\b)[a-z])"
)
_CHOSEN = re.compile(r"(?<![A-Za-z])(?<!or )(?<!and )\(?([A-J])\)? is (?:the )?(?:correct|right|answer)\b")
_DENIED = re.compile(
    r"(?:\bbetween(?: \S+ and)?|\bnot|n't|\bnever|\bcannot|≠|\\neq?|\bthan|\binstead of|\bout of"
    r"|\bof (?:the|all|his|her|their))"
    r"(?: (?:be|equal|to|just|simply|the|a|all|exactly))*[ $*]*$"
)
_DENIED_CHARS = 40
_REMARK = re.compile(rf"\((?=[^()]*(?:[A-Za-z]{{3}}|[{_CJK}≈]|\\approx))[^()\n]*\)")
_ROUNDED = re.compile(r",? ?\(?(?:(?:which|that) is )?(?:roughly|approximately|about|around|approx\.|≈|or about|~) ?")
_NO_ANSWER = re.compile(
    r"(?:wrong|incorrect|correct|right|as follows|below|above|found|clear|the following|obtained|therefore|unknown)\b",
    re.IGNORECASE,
)

_BOLD_WORDS = re.compile(r"[^\W\d_]+(?:(?:, | )[^\W\d_]+){0,5}")
_EMPHASIS = re.compile(r"(?<![\w)}\]*])\*{1,2}([^\s*][^*\n]*)\*{1,2}(?![\w(*])")
_LIST_MARKER = re.compile(r"\d+[.)]")


def read_passage(text: str) -> str | None:
    """Return the whole text if it is a bare expression or a short phrase, else the answer that its tail states."""
    text = text.strip()
    written = _OFFER.sub("", text[-TAIL:])
    while (parts := written.rstrip().rpartition("\n\n"))[0].strip() and _NOTE.match(parts[2]):
        written = parts[0]  # the last paragraph checks or explains the answer, or is in brackets
    tail = plain(written)
    is_whole = len(text) <= TAIL and ("\n" not in tail or "\\begin{" in tail)
    if is_whole and not is_prose(tail):
        return tail or None
    bold = _emphasized(written)
    *_, chosen = ("", *_CHOSEN.findall(tail))
    found = _announced(tail, bold) or bold or chosen or _last_expression(tail)
    hedge = _HEDGE.search(tail.rpartition("\n")[2]) if found else None
    if found and hedge and hedge[1] not in found:
        return f"{found} or {hedge[1]}"
    return found or (_phrase(tail) if is_whole else None)


def read_announced(text: str) -> str | None:
    """Return the answer that a cut-off text announces, unless a continuation could change it."""
    found, last = _announced(plain(text[-TAIL:])), text[-1:]
    word = _WORD_AFTER_NUMBER.search(text[-TAIL:])
    if found is None or (word and any(whole.startswith(word[1].lower()) for whole in _WORDS_OF_NUMBERS)):
        return None
    if last in "$*)]}\n":
        return found if not _OPEN.search(found) else None
    continuations = _AFTER_WORD if last.isalpha() else _AFTER_NUMBER
    is_complete = all(_announced(plain(text[-TAIL:] + more)) == found for more in continuations)
    return found if is_complete else None


def other_answer(answer: str, text: str) -> str | None:
    """Return the number that `text`, after an answer, calls possible or states instead: "but it could also be 19"."""
    if text in _USUAL_ENDS or (len(text) < 40 and not any(char.isdigit() for char in text)):
        return None
    *_, hedge = (None, *_HEDGE.finditer(text[:MAX_CLAUSE]))
    if hedge:
        return hedge[1]
    later = _announced(plain(text[-MAX_CLAUSE:])) if text.strip() and _NUMERAL.fullmatch(answer) else None
    later = (later or "").strip("$ ")
    return later if _NUMERAL.fullmatch(later) and later.replace(",", "") != answer.replace(",", "") else None


def read_marked(text: str) -> str | None:
    """Return the answer in a text marked as the answer. For a single sentence, prefer the expression at its start."""
    text = plain(text[-TAIL:])
    if not is_prose(text):
        return text or None
    is_sentence = _SENTENCE_END.search(text.rstrip(".!? ")) is None
    return _announced(text) or (_read_clause(text) if is_sentence else None) or read_passage(text)


def read_start(text: str) -> str | None:
    """Return the expression or letter at the start of `text`."""
    match = _EXPRESSION.match(text) or re.match(r"\(?[A-Za-z](?![A-Za-z])\)?", text)
    return match[0] if match else None


def is_prose(text: str) -> bool:
    """Return whether `text` has words apart from formulas: "18 dollars" and "It is x" do, "x + 1" and "cost = 18" do
    not.

    A single word without a number is not prose but an answer ("Friday").
    """
    if _ANNOUNCED.match(text):
        return True
    text = _COMMAND.sub(" ", re.sub(r"\\[\[\]()]", "$", text[-TAIL:]))
    for word in _WORD.finditer(text):
        if _FUNCTION.fullmatch(word[0]):
            continue
        before, after = text[: word.start()].rstrip(" (")[-1:], text[word.end() :].lstrip(" ).,:;!'")[:1]
        if before.isalnum() or before in _BESIDE or after.isalnum() or after == "$":
            return True
    return False


def _announced(text: str, bold: str | None = None) -> str | None:
    """Return the answer after the last "the answer is", "Answer:" or heading "Answer" that has an answer after it.

    If words follow the announcement, an expression in `bold` takes precedence over other expressions after it.
    """
    for match in reversed([*_ANNOUNCED.finditer(text)][-MAX_ANNOUNCED:]):
        before = text[: match.start()].rpartition("\n")[2]
        is_heading = not match["link"].strip()
        if (is_heading and len(before) > MAX_TITLE) or (":" in match["link"] and _SOUGHT.search(before)):
            continue
        rest = text[match.end() : match.end() + MAX_CLAUSE]
        formula = _FORMULA.match(rest)
        end = _SENTENCE_END.search(rest, formula.end() if formula else 0)
        clause = rest[: end.start()] if end else rest
        if found := _read_clause(clause, bold):
            return found
    return None


def _read_clause(clause: str, bold: str | None = None) -> str | None:
    return _read_start(clause) or (clause.strip() and bold) or _last_expression(clause) or _phrase(clause)


def _read_start(clause: str) -> str | None:
    """Return the expression, choice or phrase at the start of a clause."""
    filler = _FILLER.match(clause)
    clause = clause[filler.end() if filler else 0 :].rstrip(" .!?,;:")
    if choice := _CHOICE.match(clause):
        value = clause[choice.end() :].strip(" .:)")
        has_value = choice["closed"] and value and not is_prose(value)
        return f"({choice['closed']}) {value}" if has_value else choice["closed"] or choice["bare"]
    if clause.count("}") > clause.count("{"):  # the extra brace closes a JSON object
        clause = clause.rstrip('} "\n')
    head = _REASON.split(clause)[0].rstrip(" .!?,;:")
    if head and not is_prose(head):
        return head
    leading = _leading(clause) or _NAME.match(clause)
    if leading:
        return leading if isinstance(leading, str) else leading[0]
    return _phrase(head) if head != clause and len(head.split()) <= 2 else None


def _leading(clause: str) -> str | None:
    """Return the expressions at the start of the clause: "3, 5 and 7", or 16 for "2 * 8 = 16"; the clause if units join
    two.
    """
    items: list[str] = []
    end = position = 0
    while item := _FORMULA.match(clause, position) or _EXPRESSION.match(clause, position):
        items.append(item[item.lastgroup or 0].strip())
        end = item.end()
        join = _JOIN.match(clause, end)
        if join is None:
            break
        position = join.end()
        if join["equals"] and (_FORMULA.match(clause, position) or _EXPRESSION.match(clause, position)):
            items.clear()
    rest = clause[end:]
    if not items or re.match(r"[A-Za-z0-9_^\\{]", rest) or "=" in rest:
        return None
    return clause if _COMPOUND.match(rest) else ", ".join(items)


def _emphasized(text: str) -> str | None:
    """Return the expression in bold in the last line, if there is exactly one."""
    line = text.rstrip().rpartition("\n")[2]
    found = [plain(bold) for bold in _EMPHASIS.findall(line) if not _LIST_MARKER.fullmatch(bold.strip())]
    answers = [
        bold
        for bold in found
        if _FORMULA.match(bold) or _EXPRESSION.match(bold) or ("=" in bold and not is_prose(bold))
    ]
    word = found[0].strip(" .!") if len(found) == 1 and not answers and not _NO_ANSWER.match(found[0]) else ""
    if _BOLD_WORDS.fullmatch(word) and (line.rstrip(" .!*").endswith(word) or is_single_word(word)):
        return word
    return _read_clause(answers[0]) if len(answers) == 1 else None


def _last_expression(text: str) -> str | None:
    """Return the last formula, or the last number or expression after it. Skip denied ones and ones only in a
    remark.
    """
    if _OPEN.search(text[-_DENIED_CHARS:]):
        return None
    if verdict := _YES_OR_NO.match(text.rpartition("\n")[2]):
        return verdict[1]
    if outcome := _OUTCOME.search(text[-MAX_CLAUSE:]) or _NUMBER_WORD.search(text[-MAX_CLAUSE:]):
        return outcome[1]
    formulas = [match for match in _FORMULA.finditer(text) if match[match.lastgroup or 0].strip()]
    start = formulas[-1].end() if formulas else 0
    end = len(text)
    while end > start:  # searches sentence by sentence, the last one first
        begin = max(start, text.rfind("\n", start, end - 1) + 1, text.rfind(". ", start, end - 1) + 1)
        found = _last_stated(text, [*_EXPRESSION.finditer(text, begin, end)], formulas[-1].end() if formulas else -1)
        if found is not None:
            return found or None
        end = begin
    joined = formulas[-1:]  # the last formulas, if "or", "and" or a comma joins them: "$x = 4$ or $x = -4$"
    for before in reversed(formulas[:-1]):
        if not _JOINT.fullmatch(text, before.end(), joined[0].start()):
            break
        joined.insert(0, before)
    if len(joined) > 1:
        return ", ".join(match[match.lastgroup or 0].strip() for match in joined)
    return _last_stated(text, formulas) or None


def _last_stated(text: str, found: list[re.Match[str]], formula_end: int = -1) -> str | None:
    """Return the last match that is not denied and not a remark; "" if it is an operand of unread arithmetic."""
    while found:
        match = found.pop()
        before = text[max(0, match.start() - _DENIED_CHARS) : match.start()]
        if _DENIED.search(before):
            continue
        if _OPERATOR_BEFORE.search(before.rpartition("\n")[2]) or _OPERATOR_AFTER.match(text, match.end()):
            return ""
        line = text.rfind("\n", 0, match.start()) + 1
        remark = text.rfind("(", line, match.start())
        is_remark = remark >= 0 and (span := _REMARK.match(text, remark)) is not None and span.end() >= match.end()
        # Skip 7.389 in "$e^2$, roughly 7.389".
        if 0 <= formula_end <= match.start() and _ROUNDED.fullmatch(text, formula_end, match.start()):
            continue
        if is_remark and (
            formula_end > line or (found and line <= found[-1].start())
        ):  # 4 in "16 eggs (4 boxes)" is skipped
            continue
        return match[match.lastgroup or 0].strip()
    return None


def _phrase(text: str) -> str | None:
    """Return the text if it is a few words without a number."""
    text = text.strip(" .!?")
    is_short = 0 < len(text.split()) <= MAX_PHRASE_WORDS
    return text if is_short and not re.search(r"\d", text) and not _NO_ANSWER.match(text) else None
