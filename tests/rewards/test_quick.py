"""The exact path returns math-verify's verdicts quickly for any input, and the speedups of math-verify change no
verdict.
"""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega.rewards.math import accuracy as accuracy_module
from grpo_mega.rewards.math import answer, arithmetic, kinds, mathverify, notation, numbers, prose
from grpo_mega.rewards.math.accuracy import MAX_CHARS, accuracy, quick
from grpo_mega.rewards.math.notation import plain

ROOT = str(Path(__file__).resolve().parents[2])
FORMULAS = [
    *(
        "x^2",
        "5x^2+3x+7",
        "7+3x+5x^{2}",
        "3x^2-2x",
        "x^{n+1}y^2",
        "a^2+b^2=c^2",
        "(x+1)^2",
        "x^2+2x+1",
        "-x",
        "2^{10}",
        "5!",
    ),
    *(
        r"\frac{x^2}{2}",
        r"\frac{3\pi}{5}",
        r"\frac{3}{5}\pi",
        r"\sqrt{147}",
        r"7\sqrt{3}",
        r"3-\sqrt[3]{5}",
        r"\frac{1+\sqrt{5}}{2}",
    ),
    *(
        "(5,-3)",
        "(5, -3)",
        "(-3,5)",
        "(3,5]",
        "[3,5)",
        r"[0,\infty)",
        r"(-\infty,0]\cup[2,5)",
        r"\{3,8\}",
        r"\{8,3\}",
        "3,8",
        r"\{8\}",
    ),
    *(
        "x=5",
        "5",
        "0.5",
        r"\frac{1}{2}",
        "1/2",
        "x<5",
        r"1\leq x\leq 2",
        "[1,2]",
        r"\sin^2 x",
        r"e^{2x}",
        r"\log_2 8",
        r"2+3i",
    ),
    *(
        r"\begin{pmatrix}1\\2\end{pmatrix}",
        r"\left|-2\right|",
        "abc",
        "9*2",
        r"\frac{",
        "2)",
        "x+",
        r"50\%",
        r"3\pm\sqrt{2}",
    ),
]
PLAIN = f"""
import json, logging, sys
from math_verify import LatexExtractionConfig, LatexNormalizationConfig, parse, verify
for name in ("math_verify", "latex2sympy2_extended"):
    logging.getLogger(name).setLevel(logging.CRITICAL)
normalization = LatexNormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)
config = LatexExtractionConfig(boxed_match_priority=-1, normalization_config=normalization)
read = [parse(f"${{text}}$", [config], fallback_mode="no_fallback") for text in {FORMULAS!r}]
equal = [[int(verify(a, b, allow_set_relation_comp=True)) for b in read[i : i + 5]] for i, a in enumerate(read)]
print(json.dumps([[repr(expressions) for expressions in read], equal]))
"""


@pytest.mark.full
def test_formulas_are_read_and_compared_like_in_plain_math_verify() -> None:
    out = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True, check=True).stdout
    trees, equal = json.loads(out.splitlines()[-1])
    for _ in range(2):  # the second pass uses the parser's cache
        read = [mathverify.parse_answer(text.replace(r"\%", "%")) for text in FORMULAS]
        assert [repr(list(expressions)) for expressions in read] == trees
    for i, a in enumerate(read):
        assert [int(mathverify.is_equal_answer(a, b)) for b in read[i : i + 5]] == equal[i], a


ELEMENTS = st.one_of(
    st.integers(-12, 12).map(str),
    st.decimals(-3, 3, places=2).map(str),
    st.tuples(st.integers(0, 9), st.integers(1, 9)).map(lambda pair: rf"\frac{{{pair[0]}}}{{{pair[1]}}}"),
)
LISTS = st.tuples(st.sampled_from(["()", "[]", "[)", "(]", r"\{\}"]), st.lists(ELEMENTS, min_size=2, max_size=3))


def _written(brackets: str, elements: list[str]) -> str:
    half = len(brackets) // 2
    return brackets[:half] + ",".join(elements) + brackets[half:]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(LISTS, st.data())
def test_lists_of_numbers_are_compared_like_in_math_verify(gold: tuple[str, list[str]], data: st.DataObject) -> None:
    brackets, elements = gold
    other = data.draw(
        st.one_of(st.permutations(elements), st.lists(ELEMENTS, min_size=len(elements), max_size=len(elements)))
    )
    a, b = (numbers.parse_list(_written(brackets, texts)) for texts in (elements, other))
    is_equal = numbers.lists_equal(a, b) if a and b else None
    if is_equal is not None:
        trees = [mathverify.parse_answer(_written(brackets, texts)) for texts in (elements, other)]
        assert all(trees)
        assert is_equal == mathverify.is_equal_answer(trees[0], trees[1]), (elements, other)


@pytest.mark.parametrize(
    "text", ["(1,1)", "[2,1]", r"\{1,1,2\}", "(1)", "(1,x)", "[1,2,3]", "1,2", "(1/0,1)", "(50%,1)"]
)
def test_lists_that_math_verify_reads_differently_are_left_to_it(text: str) -> None:
    assert numbers.parse_list(text) is None


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.from_regex(answer._CANONICAL, fullmatch=True))
def test_the_rules_do_not_change_a_canonical_answer(text: str) -> None:
    assert answer.normalize_answer(text) == answer._by_rules(text)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(["\\boxed{", "\\fbox {", "\\boxed", "{", "}", "\\", "\\{", "\\}", "7", "x "]), max_size=14)
)
def test_searching_the_last_box_from_the_end_finds_the_same_box(parts: list[str]) -> None:
    text = "".join(parts)
    start = answer._last_command(text, len(text))
    box = (answer._closed_box(text, start) or answer._last_boxed_of_all(text)) if start >= 0 else None
    assert box == answer._last_boxed_of_all(text)


PIECES = [
    *(
        "(111,",
        "1,111",
        "1.1.",
        "((",
        "{{",
        "\\{",
        "\\frac{",
        "\\frac12",
        "\\text{a",
        "a b",
        "aaa ",
        "$",
        "\\(",
        "-1",
        "1e",
        " ",
    ),
    *(
        "=",
        "/",
        "1/",
        "^{",
        "\\circ",
        "1:",
        "and ",
        "%",
        ",",
        "\\,",
        "**",
        "\\boxed{",
        "#",
        "</answer>",
        "<answer>",
        "√(",
        "½",
    ),
]


def test_no_input_keeps_the_exact_path_busy() -> None:
    def give_up(number: int, frame: FrameType | None) -> None:
        raise AssertionError("one input took more than 5 s")

    before = signal.signal(signal.SIGALRM, give_up)
    try:
        for first in PIECES:
            bodies = [first * 20_000, *((first + then) * (MAX_CHARS // len(first + then)) for then in PIECES)]
            for text in (text for body in bodies for text in (body, rf"\boxed{{{body}}}")):
                signal.alarm(5)
                quick(text, "(1,2)")
                quick("7", text)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


ORDINARY = ["1", "12", "123", ",", ", ", " ", *"()[]{}xn-^/", r"\{", r"\}", r"\pi", r"\infty"]
WRITTEN = st.lists(st.sampled_from(ORDINARY), max_size=9).map("".join)


@settings(max_examples=800, deadline=None, derandomize=True)
@given(
    st.one_of(
        st.from_regex(answer._ORDINARY, fullmatch=True), st.lists(st.sampled_from(ORDINARY), max_size=9).map("".join)
    )
)
def test_the_skipped_rules_would_not_change_an_ordinary_formula(text: str) -> None:
    text = text.strip()
    if answer._ORDINARY.fullmatch(text):
        assert notation.rewrite(answer._last_row(plain(text).translate(answer._CHARACTERS))) == text
        found = answer._by_rules(text)
        assert notation.rewrite_phrase(found) == found


BUSY = [
    *(
        "1",
        "12",
        "123,",
        "111.",
        "1 111 ",
        ".",
        "..",
        ",",
        " ",
        "\n",
        " \n",
        "(",
        "[",
        "{",
        "}",
        "\\",
        "\\\\",
        "$",
        "*",
        "_",
        "`",
        "<|",
    ),
    *(
        "a",
        "abc ",
        "A",
        "2h ",
        "3 min ",
        "cm ",
        r"\text{cm}",
        r"\text{",
        "¢",
        "€",
        "5 cents ",
        "or ",
        " or ",
        "and ",
        "1 and ",
        "a, ",
    ),
    *(
        "a=1,",
        "x = ",
        "maybe ",
        "answer ",
        "is ",
        "ratio ",
        "1:",
        "-",
        "+",
        "解",
        "一 ",
        "ответ ",
        "はい",
        "٣",
        r"\frac{",
        r"\boxed",
    ),
    *(
        "[1,",
        "]",
        "^{",
        "^{-1}",
        r"\pmod",
        r"\dots",
        "1.1",
        "C(",
        "box",
        "####",
        "</answer>",
        "(a) ",
        "A) ",
        r"\dot{3}",
        "1万",
    ),
]
FRAMES = [
    *(
        "{}",
        r"\boxed{{{}}}",
        r"\boxed{{{}",
        r"\boxed{}",
        r"\boxed{{5}}{}",
        r"\boxed{{5}} the answer is {}",
        r"\boxed{{5}} maybe {}",
    ),
    *("#### {}", "<answer>{}</answer>", "The answer is ${}", r"\boxed{{5}} \boxed{}{{", "5 {} 7", "**{}**"),
]


@pytest.mark.parametrize("frame", FRAMES)
def test_time_is_linear_in_the_response_and_small_for_an_answer(frame: str) -> None:
    for pump in BUSY:
        seconds = []
        for size in (MAX_CHARS - 20, 400, 50_000, 100_000):
            text = frame.format((pump * size)[:size])
            started_at = time.process_time()
            quick(text, "5 cm", "length")
            quick(text, "x+1")
            seconds.append(time.process_time() - started_at)
        assert seconds[0] < 0.2 and seconds[1] < 0.4, (pump, seconds)  # quadratic time would take seconds
        assert seconds[3] < 3 * seconds[2] + 0.2, (pump, seconds)


def _patterns(value: object) -> list[re.Pattern[str]]:
    if isinstance(value, re.Pattern):
        return [value]
    return [pattern for item in value for pattern in _patterns(item)] if isinstance(value, tuple | list) else []


def test_every_pattern_is_fast_on_the_longest_clause() -> None:
    modules = (accuracy_module, answer, arithmetic, kinds, notation, numbers, prose)
    patterns = [pattern for module in modules for value in vars(module).values() for pattern in _patterns(value)]
    assert len(patterns) >= 150
    for pump in BUSY:
        text = (pump * prose.MAX_CLAUSE)[: prose.MAX_CLAUSE]
        for subject in (text, f"1{text}x", f"({text}"):
            for pattern in patterns:
                started_at = time.process_time()
                pattern.search(subject)
                pattern.fullmatch(subject)
                assert time.process_time() - started_at < 0.1, (pattern.pattern, pump)


def test_a_tuple_that_never_closes_is_searched_in_linear_time() -> None:
    assert answer.read_located(*answer.locate_answer("so we have (111" + ",111" * 400 + " and that is it")) is not None


def test_the_exact_path_returns_no_verdict_on_long_answers() -> None:
    for response, gold in [
        ("18", "18"),
        (r"so \boxed{2/4}", r"\boxed{\frac{1}{2}}"),
        (r"\boxed{(1, 2)}", "(1,2)"),
        ("", "5"),
        ("5", ""),
    ]:
        score, _ = quick(response, gold)
        assert score == accuracy("", response, gold, {}), (response, gold)
    assert quick("x+1", "1 + x") == (None, ("1 + x", "x+1"))
    assert quick(rf"\boxed{{{'1+' * 60}1}}", "61") == (None, None)


ENDINGS = [
    *(
        r"\boxed{",
        "}",
        "<answer>",
        "</answer>",
        "#### ",
        "The answer is ",
        "so ",
        "40",
        "11",
        "51",
        "+",
        "-",
        r"\times ",
        " = ",
        ".",
        "\n",
    ),
    *(
        "$",
        "**",
        " apples",
        r"\frac{102}{2}",
        "(",
        ")",
        "2^",
        "!",
        ", ",
        " and ",
        "%",
        "</think>",
        "51.0",
        r"\sqrt{2601}",
        "102/2",
        " plus ",
    ),
]


@settings(max_examples=600, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(ENDINGS), min_size=1, max_size=9), st.sampled_from(["stop", "length", None]), st.booleans()
)
def test_the_exact_path_agrees_on_responses_with_any_ending(
    parts: list[str], ending: str | None, unevaluated: bool
) -> None:
    response = "".join(parts)
    for gold in ("51", "(40,11)", "102/2", "x+1"):
        score, texts = quick(response, gold, ending, unevaluated=unevaluated)
        if score is not None or texts is None or gold != "x+1":  # math-verify is slow
            found = accuracy("", response, gold, {"finish_reason": ending}, unevaluated=unevaluated)
            assert score in (None, found), (response, gold, score, found)
            if ending == "length" and "51" not in response:
                assert gold != "51" or found.value != 1.0 or re.search(r"[!2^)]", response), response


def test_the_exact_path_does_not_import_math_verify() -> None:
    code = (
        "import sys; from grpo_mega.rewards.math.accuracy import quick; quick('x^2', 'x'); print(quick('18',"
        " '18')[0].verdict, 'math_verify' in sys.modules, 'sympy' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert out.split() == ["correct", "False", "False"]
