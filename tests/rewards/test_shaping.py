"""Rewards that shape a response, compared with values of open-r1's functions.

Values: huggingface/open-r1, src/open_r1/rewards.py at commit 1416fa0cf21595d2083b399a2a0bbddd7f6e9563, with math-verify
0.9.0. Values of soft_format: allenai/open-instruct, open_instruct/ground_truth_utils.py at
e6c3044aa6201c8bfa4573c1b03142af599e730d, soft_format_reward_func. open-r1 got gold answers as $...$.
"""

from __future__ import annotations

import time
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega.config.data import ALIASES, RewardsConfig
from grpo_mega.rewards import Score, registry
from grpo_mega.rewards.math.accuracy import accuracy
from grpo_mega.rewards.shaping import SHAPING, len_reward
from grpo_mega.tracking.metrics import has_full_marks
from grpo_mega.types import Prompt, Sample


def value_of(name: str, response: str, answer: str = "18", prefill: str = "", **options: Any) -> float | None:
    found = registry.bind(name, options, "lines")("p", response, answer, {"prefill": prefill})
    return found.value if isinstance(found, Score) else found


def cosine_of(response: str, answer: str = "18", **options: Any) -> float | None:
    return registry.bind("cosine", options, "lines")(accuracy("p", response, answer, {}), len(response)).value  # type: ignore[union-attr]


def padded(text: str, length: int) -> str:
    return text + "." * (length - len(text))


# response -> reasoning_steps_reward
STEPS: dict[str, float] = {
    "": 0.0,
    "Step 1: add.\nStep 22: halve.\nStep 3: stop.": 1.0,
    "1. Add.\n2. Halve.\n3. Stop.": 0.333333333333,
    "First, add. Second, halve.": 0.666666666667,
    "first, add.\n- halve\n* stop\n- go": 1.0,
    "Next,Next,Finally,": 1.0,
    "Step1: no. Step : no.\nFirst add": 0.0,
    "\n1. Not at the start\n-": 0.333333333333,
    "Step 4:1. x": 0.333333333333,
}

# response -> (tag_count_reward, soft_format_reward_func)
TAGS: dict[str, tuple[float, float]] = {
    "<think>\na\n</think>\n<answer>\n5\n</answer>": (1.0, 1.0),
    "<think>a</think><answer>5</answer>": (0.0, 1.0),
    "<think>\na\n</think>\n\n<answer>\n5\n</answer>": (1.0, 1.0),
    "<think>\n<think>\na\n</think>\n<answer>5\n</answer>\n</answer>": (0.25, 1.0),
    "": (0.0, 0.0),
    "\n</think>\n\n<answer>\n": (0.5, 0.0),
    "<answer>\n5\n</answer>": (0.25, 0.0),
    "text </think>  \n <answer>5</answer> more": (0.0, 1.0),
    "</think><answer>5": (0.0, 0.0),
    "</think>x<answer></answer></think><answer></answer>": (0.0, 1.0),
}

# response -> get_repetition_penalty_reward for (ngram_size, max_penalty) = (2, -1), (3, -0.5), (1, -0.7)
REPETITIONS: dict[str, tuple[float, float, float]] = {
    "": (0.0, 0.0, 0.0),
    "one two": (0.0, 0.0, 0.0),
    "this is a this is a test": (-0.333333333333, -0.1, -0.3),
    "A a A a a": (-0.75, -0.333333333333, -0.56),
    "the same again the same again the same again": (-0.625, -0.285714285714, -0.466666666667),
    "no word comes twice here": (0.0, 0.0, 0.0),
    "x\ty\nx y  x": (-0.5, -0.166666666667, -0.42),
    "one": (0.0, 0.0, 0.0),
}

# (start of the response, gold answer, length) -> get_cosine_scaled_reward(), (-10, 0, 1, 2, 500)
COSINES: dict[tuple[str, str, int], tuple[float, float]] = {
    ("\\boxed{18}", "18", 10): (0.999876640091, 1.99901336421),
    ("\\boxed{18}", "18", 137): (0.977199920589, 1.82591686265),
    ("\\boxed{18}", "18", 1000): (0.5, 2.0),
    ("\\boxed{17}", "18", 11): (-0.999850737089, -9.98806253181),
    ("\\boxed{17}", "18", 333): (-0.87522665634, -2.5090744733),
    ("\\boxed{17}", "18", 1000): (-0.5, -10.0),
    ("\\boxed{\\frac{1}{2}}", "\\frac{2}{4}", 500): (0.75, 1.0),
    ("no answer", "18", 77): (-0.992720988955, -9.42615655666),
}

# (starts of the group's responses with their lengths), gold answer, len_reward
LENGTHS: list[Any] = [
    (
        [("\\boxed{18}", 10), ("\\boxed{18}", 73), ("\\boxed{17}", 31), ("\\boxed{17}", 110), ("none", 57)],
        "18",
        [0.5, -0.13, 0.0, -0.5, 0.0],
    ),
    ([("\\boxed{x+1}", 11), ("\\boxed{1+x}", 12), ("\\boxed{x}", 14)], "x + 1", [0.5, 0.166666666667, -0.5]),
    ([("\\boxed{1}", 20), ("\\boxed{2}", 20)], "1", [0.0, 0.0]),
    ([("\\boxed{1}", 20)], "1", [0.0]),
]


@pytest.mark.parametrize("response", STEPS)
def test_signs_of_steps_count_as_in_open_r1(response: str) -> None:
    assert value_of("reasoning_steps", response) == pytest.approx(STEPS[response], rel=1e-9)


@pytest.mark.parametrize("response", TAGS)
def test_tags_count_as_in_open_r1_and_soft_format_is_as_in_open_instruct(response: str) -> None:
    assert (value_of("tag_count", response), value_of("soft_format", response)) == TAGS[response]


def test_tags_opened_by_the_chat_template_count_as_part_of_the_response() -> None:
    assert value_of("tag_count", "a\n</think>\n<answer>\n5\n</answer>", prefill="<think>\n") == 1.0
    assert value_of("soft_format", "\n<answer>5</answer>", prefill="<think>\n</think>") == 1.0


@pytest.mark.parametrize("response", REPETITIONS)
def test_repeated_ngrams_have_the_penalty_of_open_r1(response: str) -> None:
    options = ((2, -1.0), (3, -0.5), (1, -0.7))
    found = [value_of("repetition_penalty", response, ngram_size=size, max_penalty=most) for size, most in options]
    assert found == pytest.approx(list(REPETITIONS[response]), rel=1e-9)


def test_scripts_without_spaces_repeat_characters() -> None:
    assert value_of("repetition_penalty", "我们 算一下我们算", ngram_size=2, unit="characters") == pytest.approx(-2 / 7)
    assert value_of("repetition_penalty", "我们算一下我们算", ngram_size=2) == 0.0


@pytest.mark.parametrize("case", COSINES)
def test_the_cosine_over_the_length_equals_open_r1(case: tuple[str, str, int]) -> None:
    start, gold, length = case
    found = [
        cosine_of(padded(start, length), gold),
        cosine_of(
            *(padded(start, length), gold),
            min_value_wrong=-10,
            max_value_wrong=0,
            min_value_correct=1,
            max_value_correct=2,
            max_len=500,
        ),
    ]
    within = [length <= most for most in (1000, 500)]
    expected = COSINES[case]
    assert [f for f, is_in in zip(found, within, strict=True) if is_in] == pytest.approx(
        [e for e, is_in in zip(expected, within, strict=True) if is_in], rel=1e-9
    )


def test_beyond_max_len_the_cosine_is_constant_unlike_open_r1() -> None:
    """open-r1 returns 1.0 for a correct answer of 200 characters if max_len is 100, as for a length of 0."""
    right = [cosine_of(padded(r"\boxed{18}", n), max_len=100) for n in (100, 137, 200, 5000)]
    wrong = [cosine_of(padded(r"\boxed{17}", n), max_len=100) for n in (100, 137, 200, 5000)]
    assert right == pytest.approx([0.5] * 4) and wrong == pytest.approx([-0.5] * 4)


@pytest.mark.parametrize(("responses", "gold", "expected"), LENGTHS)
def test_lengths_are_normalized_over_the_group_as_in_open_r1(
    responses: list[tuple[str, int]], gold: str, expected: list[float]
) -> None:
    texts = [padded(start, length) for start, length in responses]
    scores = len_reward([accuracy("p", text, gold, {}) for text in texts], [len(text) for text in texts])
    assert [score.value for score in scores] == pytest.approx(expected, rel=1e-9)


def test_an_unreadable_gold_answer_has_no_value() -> None:
    """open-r1 treats every answer as correct in this case."""
    unreadable = Score(None, "gold_unparsable")
    assert len_reward([unreadable] * 2, [1, 2]) == [unreadable] * 2
    assert cosine_of("a", "???") is None


def of_script(word: str, names: tuple[str, ...]) -> bool:
    return all(unicodedata.name(letter).startswith(names) for letter in word)


@pytest.mark.parametrize(
    ("response", "language", "expected"),
    [
        ("So the answer is 18.", "en", 1.0),
        ("So the 答案 is 18", "en", 3 / 5),
        ("So the 答案 is 18", "zh", 2 / 5),
        ("<think>\n答案是十八\n</think>\n<answer>all in English</answer>", "zh", 1.0),
        ("<think>\nx = 2y, also \\frac{a}{b} gilt\n</think>", "de", 1.0),
        ("これは答えです because 答え", "ja", 9 / 10),
        ("답은 eighteen 입니다", "ko", 2 / 3),
        ("Ответ is 18", "ru", 1 / 2),
        ("18 = 2 * 9", "en", 0.0),
        ("", "en", 0.0),
        ("<think>wait 等", "en", 1 / 2),
    ],
)
def test_language_consistency_is_the_share_of_the_thoughts_words(response: str, language: str, expected: float) -> None:
    assert value_of("language_consistency", response, language=language) == pytest.approx(expected)


@settings(max_examples=200, derandomize=True)
@given(st.lists(st.sampled_from(["the", "Größe", "Ответ", "답은", "λόγος", "18", "+", "答", "の"]), max_size=8))
def test_language_consistency_uses_the_unicode_names_of_letters(words: list[str]) -> None:
    letters = [word for word in words if word[0].isalpha()]
    for language, names in {
        "en": ("LATIN",), "ru": ("CYRILLIC",), "ko": ("HANGUL",), "el": ("GREEK",), "zh": ("CJK",),
        "ja": ("CJK", "HIRAGANA"),
    }.items():  # fmt: skip
        own = sum(of_script(word, names) for word in letters)
        share = own / len(letters) if letters else 0.0
        assert value_of("language_consistency", " ".join(words), language=language) == pytest.approx(share)


@pytest.mark.parametrize(
    "name", ["reasoning_steps", "tag_count", "soft_format", "repetition_penalty", "language_consistency"]
)
@pytest.mark.parametrize("piece", ["</think>", "<answer> ", "Step 1", "\n-", "a ", "\\frac", " ", "答"])
def test_they_take_linear_time_on_adversarial_text(name: str, piece: str) -> None:
    started = time.process_time()
    value_of(name, piece * (200_000 // len(piece)))
    assert time.process_time() - started < 1.0


def test_names_of_open_r1_are_aliases_of_these_functions() -> None:
    raw = [
        {"name": name, "weight": 2.0} for name in ("accuracy_reward", "format_reward", "length", "cosine_scaled_reward")
    ]
    functions = RewardsConfig.model_validate({"functions": raw}).functions
    assert [function.name for function in functions] == ["accuracy", "format", "len", "cosine"]
    assert set(ALIASES.values()) <= registry.BUILT_IN.keys() and not ALIASES.keys() & registry.BUILT_IN.keys()
    with pytest.raises(ValueError, match="names 'format' twice"):
        RewardsConfig.model_validate({"functions": [{"name": "format"}, {"name": "format_reward"}]})


def test_shaping_rewards_do_not_affect_full_marks() -> None:
    def marked(**scores: float) -> bool:
        return has_full_marks(Sample(Prompt(0, "p", (1,), "1"), 0, [1], [-1.0], "stop", scores=dict(scores)))

    assert (
        marked(accuracy=1.0, repetition_penalty=-0.2, len=0.1)
        and not marked(accuracy=0.0, len=1.0)
        and not marked(len=1.0)
    )
    assert registry.BUILT_IN.keys() >= SHAPING
