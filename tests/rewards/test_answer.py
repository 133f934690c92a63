"""Extraction and normalization of answers, as tables."""
# ruff: noqa: RUF001 -- some cases contain look-alike characters

import time

import pytest

from grpo_mega.rewards.math.answer import locate_answer, normalize_answer, read_located
from grpo_mega.rewards.math.prose import TAIL

EXTRACTED = [
    # marked answers, in their order of precedence
    ("<think>3</think><answer>18</answer>", "18"),
    ("<answer>1</answer> no, <answer>2</answer>", "2"),
    ("<answer>1</answer> junk </answer>", "1"),
    ("<answer>\n 18 \n</answer> and \\boxed{5} #### 6", "18"),
    ("<answer>so \\boxed{7}.</answer>", "7"),
    ("<answer>2 * 9\n#### 18</answer>", "18"),
    ("<answer></answer> but 5", None),
    ("<answer>1</answer> again <answer>2", "1"),
    (r"\boxed{1} then \boxed{\frac{1}{2}} #### 3", r"\frac{1}{2}"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"\boxed{4} but \boxed{\frac{1}{2}", None),
    (r"so x = 3 and \boxed{\frac{3", None),
    (r"stray } and { \boxed{4}", "4"),
    (r"\boxed{x = \boxed{5}}", "5"),
    (r"\fbox{6}", "6"),
    (r"\boxed{}", None),
    ("She has 9 * 2 = $<<9*2=18>>18.\n#### 18", "18"),
    ("#### 5\n#### 6 apples\nmore 7", "6 apples"),
    # bare answers, as in the answer column of a dataset
    ("x^2+1", "x^2+1"),
    ("Friday", "Friday"),
    ("no solution", "no solution"),
    ("1/2", "1/2"),
    ("$80,000", "$80,000"),
    # the last expression
    ("The answer is 18 dollars.", "18"),
    ("It is 18", "18"),
    ("So we get 12 * 4 = 48 apples.", "48"),
    ("12 * 4 = 48\n48 + 2 = 50", "50"),
    ("half of it is 1/2 then", "1/2"),
    ("We find that $x = 3$ works.", "x = 3"),
    ("We find $x = 3$, hence 4 apples.", "4"),
    (r"Hence \(\frac{3}{4}\) remains.", r"\frac{3}{4}"),
    (r"Thus \[x = 7\] holds.", "x = 7"),
    ("One costs $5 and the other $6", "$6"),
    ("He pays $1,234.50.", "$1,234.50"),
    ("That leaves 50% of them.", "50%"),
    ("The point is (3, 4).", "(3, 4)"),
    ("The temperature is -5 now", "-5"),
    ("They meet at 3:30 PM today", "3:30 PM"),
    ("Step 1: 5 apples", "5"),
    ("The answer is B.", "B"),
    ("The answer is x^2+1.", "x^2+1"),
    ("**The answer is: 42**", "42"),
    ("<think>there are 5</think> 18", "18"),
    ("<think>a thought</think>\n<answer>18", "18"),
    # the conclusion counts instead of the thought
    (r"<think>maybe \boxed{5}</think> The answer is 7.", "7"),
    (r"<think>maybe <answer>5</answer></think> The answer is 7.", "7"),
    (r"maybe \boxed{5}</think> The answer is 7.", "7"),
    (r"<think>maybe \boxed{5}</think>", None),
    (r"<think>maybe \boxed{5}", None),
    (r"<think>a</think> \boxed{6} <think>or \boxed{5}", None),
    (r"<reasoning>maybe \boxed{5}</reasoning> 7", "7"),
    # announced answers; the first one counts
    ("The answer is **16**.", "16"),
    ("**Answer:** 5", "5"),
    ("The final answer is: **$16$**.", "$16$"),
    ("**Final Answer**\n\n16 of 20", "16"),
    ("The answer is: 16 students out of 20.", "16"),
    ("The answer is 17. Check: 17 + 1 = 18.", "17"),
    ("The answer is the sum of 5 and 7, which is 12.", "12"),
    ("The answer is 2 * 8 = 16 students, as 3 > 2.", "16"),
    ("The answer is 3, 5 and 7 for n = 2.", "3, 5 and 7"),
    ("The answer is either 6 or 9.", "6 or 9"),
    ("The answer is 2 hours and 30 minutes.", "2 hours and 30 minutes"),
    ("Let us check the answer: 2 * 3 = 6.\nSo 7 remain.", "7"),
    ("Answer: 42!", "42"),
    ("答案是１６个。", "16"),
    # answers in bold, and negated answers
    ("So **16** of these 20 passed", "16"),
    ("**3.** Add 5 to get 8", "8"),
    ("2**10", "2**10"),
    ("3*4*5", "3*4*5"),
    ("That is 143, not 1430", "143"),
    ("It is not 5", None),
    ("That makes 16 eggs (4 boxes)", "16"),
    # letters
    ("The correct option is B", "B"),
    ("The answer is (C) 12.", "(C) 12"),
    ("The answer is D because 3 < 4.", "D"),
    ("Option D is correct, because 3 < 4.", "D"),
    ("The answer is: A total of 16 apples", "16"),
    # other forms of boxes and ####
    (r"\boxed 5", "5"),
    (r"\boxed5 apples", "5"),
    (r"\boxed{3} and $\boxed{5}$", "3, 5"),
    (r"\boxed{3} \text{ or } x = \boxed{5}", "3, 5"),
    (r"\boxed{5}, \boxed{5}", "5"),
    (r"\boxed{3}. Then \boxed{5}", "5"),
    ("#### 2. Add\n\nThat is 7", "7"),
    ("#### Step 2: Add 3\n\nThat is 7", "7"),
    ("#### Friday", "Friday"),
    ("#### Friday\nThat is in 3 days", "3"),
    # arithmetic that is only partly numeric, and text that stops inside arithmetic
    ("She has 40 apples + 11 apples", None),
    ("She has 40 plus 11", None),
    ("She has 40 + x", None),
    ("That is x + 11", None),
    ("So 5 + 3 = 8. Then 8 * 2 =", None),
    ("That is half of 84", None),
    ("It is the sum of 40 and 11", None),
    ("The answer is 40 plus 11.", "40 plus 11"),
    ("* 16 apples are left", "16"),
    ("Total - 16 apples", "16"),
    ("", None),
    ("I have no idea what this could be about", None),
]

CUT = [  # answers of responses that ended at the length limit
    (r"so \boxed{51}. Wait, 40 +", "51"),
    (r"\boxed{51", None),
    (r"\boxed{5} no, \boxed{51", None),
    (r"\boxed{3} and", None),
    (r"\boxed{3} and $\boxed{5", None),
    (r"\boxed{3} or $x = \box", None),
    (r"\boxed{3}, so", "3"),
    (r"$\boxed{3}$", "3"),
    (r"\boxed 5", None),
    (r"\boxed 5 apples", "5"),
    ("<answer>51</answer>", "51"),
    ("<answer>It is 51</answer> and", "It is 51"),
    ("<answer>51", None),
    ("#### 51", None),
    ("#### 51 ", None),
    ("#### 51\n", "51"),
    ("The answer is 51", None),
    ("The answer is 51.", None),
    ("The answer is 51. Now", "51"),
    ("The answer is 51\n", "51"),
    ("The answer is 51 apples", "51"),
    ("The answer is 51, because", "51"),
    ("The answer is $51$", "$51$"),
    (r"The answer is \(51\)", r"\(51\)"),
    ("The answer is **51**", "51"),
    ("**Answer:** 51\n\nLet us check: 40 +", "51"),
    ("The answer is 2 hours and 3", None),
    ("The answer is 3 mil", None),
    ("The answer is 3 million", None),
    ("The answer is 40 + 11", None),
    ("The answer is 40 + 11 =", None),
    ("The answer is 40 + 11 = 51", None),
    ("The answer is 40 + 11 = 51 apples", "51"),
    ("The answer is 1,", None),
    (r"The answer is \frac{3", None),
    ("51", None),
    ("David has 40 + 11 = 51 apples.\nHe", None),
    ("So he has **51** apples.", None),
    ("We find $x = 51$.", None),
    ("<think>The answer is 51. Now", None),
]

NORMALIZED = [
    # many forms of one number
    *[(text, "1234") for text in ("1,234", "$1,234", r"\$1,234", "1{,}234", r"1\,234", r"1,\!234", "1 234", "1234.")],
    *[(text, "1234") for text in ("1,234 dollars", "US$1,234", "1,234 USD", "**1,234**", "$1,234$", r"\(1{,}234\)")],
    *[
        (text, "18")
        for text in ("18 km", "18km", "18 km/h", "18 m/s", "18 cm^2", r"18\text{ cm}^2", "18 meters per second")
    ],
    *[
        (text, "18")
        for text in ("18°", r"18^\circ", r"18^{\circ}", "18 degrees", "18 °C", r"\approx 18", "= 18", "{18}")
    ],
    *[
        (text, "18")
        for text in (r"\text{The answer is }18", "The answer is 18 dollars.", "$18 per day", r"\text{18 dollars}")
    ],
    *[(text, "50%") for text in ("50%", r"50\%", "50 percent", r"50\text{ percent}", "50 %")],
    *[(text, "-5") for text in ("-5", "−5", "–5", "$-5", "-$5")],
    ("1,234,567.89", "1234567.89"),
    # commas between elements
    ("(1,2)", "(1,2)"),
    ("(100,200)", "(100, 200)"),
    ("[1,234]", "[1, 234]"),
    ("(1,234, 5)", "(1234, 5)"),
    ("100, 200, 300", "100, 200, 300"),
    (r"\{100,200,300\}", r"\{100, 200, 300\}"),
    ("0,500", "0,500"),
    # letters that are not units
    ("5x", "5x"),
    ("3t", "3t"),
    ("3 sin x", "3 sin x"),
    (r"2\mathrm{e}", "2e"),
    # words and choices
    (r"\text{Friday}", "Friday"),
    *[(text, "B") for text in ("(B)", "B.", r"\text{(B)}", r"\textbf{(B)}\quad", "B")],
    *[(text, "(C) 12") for text in (r"\textbf{(C)}\ 12", r"\textbf{(C) }12", "(C) 12", "C) 12", r"\mathrm{(C)}~12")],
    # negated answers, and parts that belong together
    ("not 5", ""),
    (r"\text{not }5", ""),
    (r"16 \text{ students out of } 20", "16"),
    (r"2\text{ hours and }30\text{ minutes}", "2 hours and 30 minutes"),
    ("16 (4 boxes)", "16"),
    ("Answer: (1,2)", "(1,2)"),
    ("minus 8", "-8"),
    *[(text, "2500000") for text in ("2.5 million", "2.5 million dollars", "２，５００，０００")],
    *[(text, "16") for text in ("**16**", "*16*", "`16`", "__16__", "１６", "16^{}", "16 cm each")],
    # formulas
    ("x = 5", "x = 5"),
    (r"\left(1,2\right)", "(1,2)"),
    (r"3 \text{ and } 4", "3 and 4"),
    ("2**10", "2^10"),
    ("2^-3", "2^{-3}"),
    ("√2", r"\sqrt{2}"),
    ("2π", r"2\pi"),
    ("3:30 PM", "3:30 PM"),
    ("  ", ""),
    ("$", ""),
]


def extract_answer(response: str, is_cut: bool = False) -> str | None:
    return read_located(*locate_answer(response, is_cut), is_cut)


@pytest.mark.parametrize(("response", "answer"), EXTRACTED)
def test_the_answer_is_extracted_as_the_rules_say(response: str, answer: str | None) -> None:
    assert extract_answer(response) == answer


@pytest.mark.parametrize(("response", "answer"), CUT)
def test_a_cut_off_response_has_the_answer_that_it_completed(response: str, answer: str | None) -> None:
    assert extract_answer(response, is_cut=True) == answer


@pytest.mark.parametrize(("text", "canonical"), NORMALIZED)
def test_every_way_of_writing_an_answer_has_one_canonical_form(text: str, canonical: str) -> None:
    assert normalize_answer(text) == canonical


@pytest.mark.parametrize(("text", "canonical"), NORMALIZED)
def test_normalization_is_idempotent(text: str, canonical: str) -> None:
    assert normalize_answer(canonical) == canonical


PIECES = [
    *(
        "<answer>",
        r"\boxed{",
        "####",
        "(",
        "$",
        "$ 1",
        r"\(",
        "1,",
        "word ",
        "1-",
        "{",
        "-",
        "\\",
        "<think>",
        "**",
        "*a",
    ),
    *(r"\boxed{1}, ", r"\boxed{1} and ", r"\boxed *a* ", r"\boxed{(A), ", r"\[1", "#### 1\n", "\u2028", "(abc 5"),
    *(
        "the answer is not 5 ",
        "答案是≠5",
        "option is out of 5 ",
        "B is correct ",
        "5 apples and ",
        ", because ",
        "Answer:\n",
    ),
]


@pytest.mark.parametrize("piece", PIECES)
def test_extraction_takes_linear_time_on_adversarial_text(piece: str) -> None:
    text = piece * (200_000 // len(piece))
    normalize_answer(extract_answer(f"{piece} \\boxed{{{piece}}}") or "")  # compiles the patterns
    started = time.process_time()
    found = extract_answer(text)
    normalize_answer(found or "")
    assert time.process_time() - started < 0.5
    assert found is None or len(found) <= max(TAIL, len(text))
