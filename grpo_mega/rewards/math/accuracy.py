"""The accuracy reward: compare the response's answer with the gold answer.

Both are read by `answer.extract_answer` and `normalize.normalize_answer`. Verdicts: "correct" (1.0), "wrong" (0.0),
"unparsable" (0.0, the response has no answer that can be read) and "gold_unparsable" (None; it depends on the gold
answer alone, so that all samples of a prompt get it and the caller can drop the prompt).

Two plain numbers are compared exactly (`numbers`), and so are pairs, intervals and sets of them (`lists`); two times of day
and two phrases by their text (`quick`), everything else by math-verify: equations against their right-hand side, sets in any
order, tuples and intervals in order, expressions up to algebra. There is no timeout here, since none that lives inside the
process can stop every input: run it in the pool.
"""

from functools import lru_cache
from typing import Any

from grpo_mega.rewards.api import Score
from grpo_mega.rewards.math import mathverify
from grpo_mega.rewards.math.answer import whole_turn
from grpo_mega.rewards.math.quick import (
    CORRECT,
    GOLD_UNPARSABLE,
    UNPARSABLE,
    WRONG,
    compare,
    is_plain,
    judge,
    read,
    right_side,
    without_choices,
)

# The forms that answers commonly have, so that the parser's tables have been built for them.
_FORMS = (
    ("x + 1", "1 + x"),
    (r"\frac{3\sqrt{2}}{2}", r"\frac{3}{\sqrt{2}}"),
    ("2x^2-3xy+4", "4-3xy+2x^{2}"),
    ("(3,-5)", r"(3,\frac{1}{2})"),
    (r"[0,\infty)", r"(-\infty,0]\cup[2,5)"),
    (r"\{1,2\}", "2,1"),
    (r"\frac{\pi}{4}", r"2\pi"),
    ("x<5", r"1\leq x\leq 2"),
    (r"3\pm 2\sqrt{5}", r"1+2i"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&0\\0&1\end{pmatrix}"),
    ("2^{10}", r"5!\cdot 3"),
    (r"\sqrt[3]{4}", r"\left|-2\right|"),
    (r"(x+1)(x-2)", r"\frac{x+1}{x-2}"),
    ("x^3-2x^2+x-1", "-x^2+3x"),
    (r"\frac{1+\sqrt{5}}{2}", r"2\sqrt{3}-1"),
    (r"-\frac{2\pi}{3}", r"24-4\pi"),
    (r"\frac{3}{4}\pi", r"\sqrt{15}"),
    (r"\left(-\frac{1}{2},\sqrt{3}\right)", r"(1,2,x)"),
    (r"[-1,\sqrt{2}]", r"(-2,\pi]"),
    (r"\{-1,\frac{1}{2},\sqrt{2}\}", r"\{x,3\}"),
)


def accuracy(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> Score:
    """Score the response against the gold `answer`; the verdicts are in the module's docstring."""
    gold, text = without_choices(read(answer), read(whole_turn(response, extras)))
    return judge(gold, text) or _judge_by_math_verify(gold, text)


def warm_up() -> None:
    """Import math-verify and build its parser's tables, which takes one to two seconds, so that no check pays for it."""
    for gold, text in _FORMS:
        accuracy("", rf"\boxed{{{text}}}", rf"\boxed{{{gold}}}", {})


def _judge_by_math_verify(gold: str, text: str) -> Score:
    if not is_plain(gold) and not _parse_gold(gold):
        return GOLD_UNPARSABLE
    if not text:
        return UNPARSABLE
    is_correct = compare(gold, text)
    if is_correct is None:
        parsed = mathverify.parse(right_side(gold, text))
        if not parsed:
            return UNPARSABLE
        is_correct = mathverify.verify(_parse_gold(gold), parsed)
    return CORRECT if is_correct else WRONG


@lru_cache(maxsize=256)
def _parse_gold(gold: str) -> tuple[Any, ...]:
    """Parse a gold answer; cached because a group shares it."""
    return mathverify.parse(gold)
