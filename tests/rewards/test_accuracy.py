"""Verdicts of the accuracy reward: tables of hard cases, math-verify as the oracle, and GSM8K against itself."""
# ruff: noqa: RUF001 -- some cases contain look-alike characters

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega.rewards.api import Score
from grpo_mega.rewards.math.accuracy import accuracy, quick
from grpo_mega.rewards.math.answer import normalize_answer
from grpo_mega.rewards.math.numbers import numbers_equal, parse_number

GSM8K = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k" / "test.jsonl"

CORRECT = [  # (gold, response)
    ("18", "The answer is 18 dollars."),
    ("... so 9 * 2 = 18.\n#### 18", "<think>x</think><answer>18</answer>"),
    ("1000", r"\boxed{1{,}000}"),
    ("70,000", "#### $70000"),
    ("18", "18.00"),
    ("18", "x = 18"),
    ("18", "9 * 2 = 18"),
    ("x = 5", "5"),
    ("0.50", "1/2"),
    ("1/2", ".5"),
    (r"\frac{1}{2}", "0.5"),
    (r"\dfrac12", "2/4"),
    (r"-\frac{3}{4}", "-0.75"),
    ("1 1/2", "1.5"),
    (r"1\frac12", "3/2"),
    ("1/3", "0.333333"),
    (r"0.\overline{3}", "1/3"),
    (r"\frac{100}{3}", "33.333333"),
    ("-5", "−5"),
    ("(-5)", "-5"),
    ("50", "50%"),
    ("50%", "50"),
    ("50%", "0.5"),
    ("0.5", "50%"),
    ("12.5%", "12.5"),
    ("0.5%", "0.005"),
    ("90", r"90^\circ"),
    (r"90^\circ", "90 degrees"),
    ("3:30", "3:30 PM"),
    ("3:30 PM", "03:30 p.m."),
    ("3:4", "3/4"),
    ("9" * 900, "9" * 900),
    ("300000000", r"3 \times 10^8"),
    ("1.5e3", "1500"),
    ("(1, 2)", "(1,2)"),
    ("(100,200)", "(100, 200)"),
    (r"\{1, 2\}", "2, 1"),
    ("[1, 2)", r"\left[1,2\right)"),
    ("1 and 2", "x=1 or x=2"),
    (r"(-\infty, 5)", "x < 5"),
    (r"\sqrt{2}/2", r"\frac{1}{\sqrt2}"),
    ("(x+1)^2", "x^2 + 2x + 1"),
    ("1/8", "2^-3"),
    ("1024", "2**10"),
    ("2\\pi", "2π"),
    ("y = 2x + 1", "2x+1"),
    (r"\text{Friday}", "friday"),
    ("B", r"\textbf{(B)}"),
    ("no solution", "No  solution"),
    ("x", "$x$"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("5 cm", "5"),
    ("5", "5 m"),
    ("16", "The answer is **16**."),
    ("16", "#### 16 (4 boxes)"),
    ("C", r"\boxed{\textbf{(C)}\ 12}"),
    ("12", r"\boxed{\textbf{(C)}\ 12}"),
    (r"\textbf{(C)}\ 12", "C"),
    (r"\textbf{(C)}\ 12", "12"),
    (r"\textbf{(C)}\ \sqrt{12}", r"\boxed{2\sqrt{3}}"),
    ("16", "The answer is sixteen."),
    ("three quarters", "0.75"),
    ("3,5", r"The roots are \boxed{3} and \boxed{5}."),
    ("7", r"<think>maybe \boxed{5}</think> The answer is 7."),
    ("0.33", "1/3 = 0.33"),
    (r"\pm 3", "3, -3"),
]

WRONG = [
    ("18", "17"),
    ("18", "-18"),
    ("18", "1.8"),
    ("1,234", "1 or 234"),
    ("(1,234)", "1234"),
    ("(1, 2)", "(2, 1)"),
    ("[1, 2]", "(1, 2)"),
    ("(1, 2)", "(1, 2, 3)"),
    (r"\{1, 2, 3\}", r"\{1, 2\}"),
    ("0.33", "1/3"),
    ("0.0000001", "0.0000002"),  # math-verify calls them equal
    ("0.000001", "0.0000014"),
    (r"1.6 \times 10^{-19}", r"1.7 \times 10^{-19}"),  # math-verify calls them equal
    ("9" * 900, "9" * 899 + "8"),
    ("100000000000000000001", "100000000000000000000"),
    ("50%", "5%"),
    ("50", "0.5%"),
    ("50%", "5000%"),
    ("3t", "3"),  # math-verify reads t as a unit and calls them equal
    ("5", "5x"),
    ("stop", "pots"),  # math-verify reads both as the same product of letters
    ("Friday", "18"),
    ("18", "Friday"),
    ("A", "B"),
    ("3:30", "1:10"),
    ("3:30 PM", "3:30 AM"),
    ("3:30 PM", "3:30"),
    ("x = 5", "y = 5"),
    ("2k+1", "2n+1"),
    ("1/2", "1/0"),
    ("5", r"<think>maybe \boxed{5}</think> The answer is 7."),
    ("18", "17=18"),
    ("17", "17=18"),
    ("18", r"\boxed{18\pm 0}"),
    ("18", "18 ± 2"),
    ("3", r"\pm 3"),
    ("5", r"\boxed{3} and \boxed{5}"),
    ("B", r"\boxed{\textbf{(C)}\ 12}"),
    (r"\textbf{(C)}\ 12", r"\boxed{\textbf{(D)}\ 12}"),
    (r"\textbf{(C)}\ 12", r"\boxed{\textbf{(C)}\ 14}"),
    ("120", "The answer is 5!"),
    ("16", "The answer is seventeen."),
    ("2516_8", "2516_9"),
]

ARITHMETIC = {  # unevaluated answers for gold answers with plain numbers
    "51": [
        *(
            "40+11",
            "40 + 11 apples",
            "(40)+(11)",
            "60-9",
            r"\$40+\$11",
            "1{,}000-949",
            "40+5+6",
            "(40+11)",
            "{40+11}",
            "51+0",
            "--51",
        ),
        *(
            "-(-51)",
            "x = 40+11",
            "51 = 40+11",
            r"40+\text{ }11",
            "|-51|+0",
            "7^2+2",
            r"\sqrt{2500+101}",
            r"\sqrt{49}+44",
        ),
        *("x-x+51", r"\pi-\pi+51", r"\frac{51x}{x}", r"\frac{100+2}{2}", "2^{5}+19", "(40+11)^1", "e^{0}+50"),
        *(
            r"17\times 3",
            r"3\cdot 17",
            "3*17",
            "3×17",
            "3 · 17",
            "3 x 17",
            "3(17)",
            "(3)(17)",
            r"51\cdot 1",
            r"0.5\cdot 102",
            "5.1*10",
        ),
        *(
            r"100\%\cdot 51",
            "102/2",
            "102 ÷ 2",
            r"102\div 2",
            "102:2",
            r"\frac{102}{2}",
            r"\dfrac{510}{10}",
            r"\frac{25.5}{0.5}",
        ),
        *(
            r"{102\over 2}",
            r"\frac{51}{1}\cdot 1",
            r"\frac{2^{5}\cdot 51}{32}",
            r"3\cdot 17=3\cdot 17",
            r"\text{40 plus 11}",
        ),
    ],
    "12.5": ["50/4", r"\frac{25.0}{2}", "10+2.5"],
    r"\frac{3}{4}": [r"\frac{1}{2}+\frac{1}{4}", r"3\cdot\frac14", "1.5/2", r"1-\frac{1}{4}"],
    "-5": ["-(2+3)", "-2-3", "1-6"],
    "50%": ["25%+25%", r"5\cdot 10\%"],
    "forty-two": ["40+2", r"6\times 7"],
    "(3,5)": ["(1+2,5)", r"(3,\frac{10}{2})"],
    r"\{1,2\}": [r"\{1,1+1\}"],
    "x=5": ["x=2+3", "2+3"],
    "3,5": ["3,4+1", "x=3 or x=4+1"],
    r"(-\infty,2]": [r"(-\infty,1+1]", r"x\leq 1+1"],
    r"\begin{pmatrix}1\\2\end{pmatrix}": [r"\begin{pmatrix}1\\1+1\end{pmatrix}"],
}
CLOSED_FORMS = [
    *(("1024", "2^{10}"), ("1024", "(2^5)^2"), ("120", "5!"), ("120", r"\binom{10}{3}"), ("120", r"\frac{10!}{3!7!}")),
    *(
        ("42", r"\sqrt{1764}"),
        ("42", r"\frac{42}{1}"),
        ("42", "40+2=42"),
        ("540", "6!-180"),
        ("33", r"\binom{11}{2}-22"),
    ),
    *(
        ("300000000", r"3\times 10^8"),
        ("0.5", "1/2"),
        ("1/2", "2/4"),
        ("1.5", r"1\frac12"),
        ("12.34", r"\frac{1234}{100}"),
    ),
    *(
        ("1/8", r"(\frac{1}{2})^3"),
        ("-3/4", r"\frac{-3}{4}"),
        ("3,-5", "x=3, y=-5"),
        ("3,-5", "-5 and 3"),
        ("(3,-5)", "(3, -5)"),
    ),
    *((r"\begin{pmatrix}1\\-2\end{pmatrix}", r"\begin{pmatrix} 1 \\ -2 \end{pmatrix}"), (r"\{1,2\}", "a=1, b=1+1=2")),
    *(
        (r"(-\infty,-1]\cup[2,3)", r"(-\infty, -1] \cup [2, 3)"),
        ("x+1", "1+x"),
        ("2^{10}-1", "2^{10}-1"),
        (r"2\pi", r"\pi+\pi"),
    ),
]

UNPARSABLE = [
    *(
        ("51", text)
        for text in (
            "51=",
            "51 +",
            r"\boxed{51=}",
            r"\boxed{51+}",
            r"\boxed{51\times}",
            r"\boxed{\times 51}",
            "#### 51 -",
        )
    ),
    *(
        ("51", text)
        for text in (r"\boxed{40+11=}", "has 40 + 11 =", "has 40 + 11 = ?", "x+1 =", "<answer>51 = </answer>")
    ),
    ("18", ""),
    ("18", "<answer></answer> 18"),
    ("18", r"\boxed{\frac{1}"),
    ("18", r"\boxed{}"),
    ("18", "???"),
    ("5", r"<think>maybe \boxed{5}"),
    ("5", r"<think>maybe \boxed{5}</think>"),
    ("5", r"\boxed{not 5}"),
    ("5", r"\boxed{\text{not }5}"),
    ("5", "The answer is not 5."),
]


@pytest.mark.parametrize(("gold", "response"), CORRECT)
def test_equal_answers_are_correct(gold: str, response: str) -> None:
    assert accuracy("", response, gold, {}) == Score(1.0, "correct")


@pytest.mark.parametrize(("gold", "response"), WRONG)
def test_different_answers_are_wrong(gold: str, response: str) -> None:
    assert accuracy("", response, gold, {}) == Score(0.0, "wrong")


@pytest.mark.parametrize(("gold", "response"), UNPARSABLE)
def test_a_response_without_a_readable_answer_is_unparsable(gold: str, response: str) -> None:
    assert accuracy("", response, gold, {}) == Score(0.0, "unparsable")


@pytest.mark.parametrize(
    ("gold", "answer"), [(gold, answer) for gold, answers in ARITHMETIC.items() for answer in answers]
)
def test_arithmetic_is_no_answer_if_the_gold_answer_is_evaluated(gold: str, answer: str) -> None:
    for response in (
        answer,
        rf"\boxed{{{answer}}}",
        f"<answer>{answer}</answer>",
        f"So\n#### {answer}",
        f"The answer is ${answer}$.",
    ):
        for finish_reason in ("stop", "length", None):
            assert accuracy("", response, gold, {"finish_reason": finish_reason}).value == 0.0, (
                response,
                finish_reason,
            )


@pytest.mark.parametrize(("gold", "answer"), CLOSED_FORMS)
def test_a_closed_form_is_an_answer(gold: str, answer: str) -> None:
    assert accuracy("", rf"\boxed{{{answer}}}", gold, {}) == Score(1.0, "correct")


def test_an_option_accepts_arithmetic_but_no_unfinished_text() -> None:
    for answer in ("40+11", r"17\times 3", "102/2", r"\boxed{60-9}"):
        assert accuracy("", answer, "51", {}, unevaluated=True) == Score(1.0, "correct")
    for response, finish_reason in ((r"\boxed{51=}", "stop"), ("40 + 11 =", "stop"), ("so 40 + 11", "length")):
        assert accuracy("", response, "51", {"finish_reason": finish_reason}, unevaluated=True).value == 0.0


def test_a_cut_off_response_is_rewarded_for_a_completed_answer() -> None:
    extras = {"finish_reason": "length"}
    assert accuracy("", r"so \boxed{51}, which is 40 +", "51", extras) == Score(1.0, "correct")
    assert accuracy("", "in another. 40 + 11 is 51", "51", extras) == Score(0.0, "unparsable")
    assert accuracy("", "in another. 40 + 11 is 51", "51", {"finish_reason": "stop"}) == Score(1.0, "correct")


@pytest.mark.parametrize("gold", ["", "####", r"\boxed{\frac{1", r"\frac{1", "???", "<answer></answer>"])
@pytest.mark.parametrize("response", ["18", "", r"\frac{1"])
def test_an_unreadable_gold_answer_is_reported_for_any_response(gold: str, response: str) -> None:
    assert accuracy("", response, gold, {}) == Score(None, "gold_unparsable")


NUMBERS = st.one_of(
    st.integers(-(10**12), 10**12).map(str),
    st.decimals(-1000, 1000, places=3).map(str),
    st.tuples(st.integers(-20, 20), st.integers(1, 20)).map(lambda pair: rf"\frac{{{pair[0]}}}{{{pair[1]}}}"),
    st.tuples(st.integers(0, 20), st.integers(1, 20)).map(lambda pair: f"{pair[0]}/{pair[1]}"),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(NUMBERS, NUMBERS)
def test_plain_numbers_are_compared_like_in_math_verify(gold: str, response: str) -> None:
    math_verify = pytest.importorskip("math_verify")

    def verdict(a: str, b: str) -> bool:
        parsed = [math_verify.parse(f"${text}$", parsing_timeout=None) for text in (a, b)]
        return bool(math_verify.verify(*parsed, timeout_seconds=None))

    for a, b in ((gold, response), (gold, gold)):
        numbers = [parse_number(normalize_answer(text)) for text in (a, b)]
        assert numbers[0] and numbers[1]
        assert numbers_equal(numbers[0], numbers[1]) == verdict(a, b)


@pytest.mark.parametrize("text", ["x", "1/0", "1,2", "1 2", "(1)/(2)", "", "-", ".", "%", "1" * 5000, "1e9999", "٣"])
def test_text_that_is_no_plain_number_is_left_to_math_verify(text: str) -> None:
    assert parse_number(text) is None


def _gsm8k() -> list[str]:
    if not GSM8K.exists():
        pytest.skip(f"{GSM8K} does not exist")
    return [json.loads(line)["answer"] for line in GSM8K.read_text().splitlines()]


def test_all_gsm8k_solutions_are_correct_against_their_own_answers() -> None:
    solutions = _gsm8k()
    assert len(solutions) == 1319
    for solution in solutions:
        answer = solution.rpartition("####")[2].strip()
        for response in (
            solution,
            f"<think>{solution}</think><answer>{answer}</answer>",
            rf"It is \boxed{{{answer}}}.",
        ):
            assert accuracy("", response, solution, {}) == Score(1.0, "correct"), (answer, response)


def test_all_gsm8k_solutions_are_wrong_against_answers_off_by_one() -> None:
    for solution in _gsm8k():
        body, _, answer = solution.rpartition("####")
        value = int(answer.replace(",", ""))
        for off in (value - 1, value + 1):
            assert accuracy("", solution, f"#### {off}", {}) == Score(0.0, "wrong"), (answer, off)
            assert accuracy("", f"{body}#### {off:,}", solution, {}) == Score(0.0, "wrong"), (answer, off)


def test_math_verify_itself_agrees_on_gsm8k() -> None:
    """Write answers as sums, so that none is compared as a plain number."""
    for solution in _gsm8k()[::20]:
        value = int(solution.rpartition("####")[2].replace(",", ""))
        assert accuracy("", rf"\boxed{{{value - 7}+7}}", solution, {}, unevaluated=True) == Score(1.0, "correct")
        assert accuracy("", rf"\boxed{{{value - 7}+8}}", solution, {}, unevaluated=True) == Score(0.0, "wrong")


@pytest.mark.parametrize(
    ("response", "is_right"),
    [
        (r"maybe \boxed{5}", False),  # the response was cut off
        (r"maybe \boxed{7}</think> The answer is 5.", True),
        (r"maybe \boxed{5}</think> The answer is 7.", False),
    ],
)
def test_a_thought_opened_by_the_chat_template_is_a_thought(response: str, is_right: bool) -> None:
    assert (accuracy("", response, "5", {"prefill": "<think>\n"}).value == 1.0) is is_right


@pytest.mark.parametrize("text", ["51=", "51 +", "51-", r"51\times", r"\times 51", "51 /", "40+11 =", "51 <"])
def test_an_answer_that_ends_in_an_operator_is_refused_at_once(text: str) -> None:
    assert quick(rf"\boxed{{{text}}}", "51") == (Score(0.0, "unparsable"), None)
