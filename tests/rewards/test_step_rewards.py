"""Step rewards from the function to the sample: pool, end tokens of steps, metrics, and options of functions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from grpo_mega.checkpoint_io.model import decoder
from grpo_mega.errors import ConfigError, RewardError
from grpo_mega.rewards import RewardPool, RewardResult, Step, registry
from grpo_mega.rewards.scorer import PIECE_SIZE, VERDICTS, Scorer, drop_unusable, tokens_at
from grpo_mega.tracking.metrics import heldout_metrics, rollout_metrics
from grpo_mega.types import Group, Prompt, Sample
from tests.helpers.reward_pools import reward_pool

pytestmark = [pytest.mark.pool, pytest.mark.waiting]

HERE = str(Path(__file__).resolve().parent)
MARKED, OTHER = "user_functions.marked", "user_functions.other_marks"
TEXT = "One. Two! 3 + 4 = 7, so é — 漢字 🙂🙂! Naïve 👩‍🚀 end.\n\nStep 2: <answer>7</answer>.\n"


@pytest.fixture(autouse=True)
def _user_functions_are_importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(HERE)
    yield


@pytest.fixture(scope="module")
def byte_level() -> Any:
    """Return a byte-level BPE tokenizer like Qwen's and Llama's: a token may span several characters, and vice
    versa.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=["<eos>"])
    tokenizer.train_from_iterator([TEXT, "end of the step. Step 3: the end!\n\n"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@pytest.fixture(scope="module")
def sentence_pieces() -> Any:
    """Return a tokenizer like Llama 2's. It drops the first token's space, so pieces decode differently from the whole
    text.
    """
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    special = ["<unk>", "<eos>", *(f"<0x{b:02X}>" for b in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, limit_alphabet=30)
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    plain = Tokenizer.from_str(tokenizer.to_str().replace('"special":true', '"special":false'))
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>")


def _check_against_all_prefixes(tokenizer: Any, ids: list[int]) -> None:
    text = decoder(tokenizer)(ids)
    prefixes = [decoder(tokenizer)(ids[: t + 1]) for t in range(len(ids))]
    ends = list(range(1, len(text) + 1))
    expected = [next(t for t, prefix in enumerate(prefixes) if prefix.startswith(text[:end])) for end in ends]
    assert tokens_at(ids, decoder(tokenizer), ends) == expected


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.lists(
        st.sampled_from(["é", "漢", "🙂", "👩‍🚀", " ", "  ", "\n", "end", "Step 2", ".", "<eos>", "x"]), max_size=120
    ),
    st.booleans(),
)
def test_a_step_ends_at_the_token_that_completes_its_text(
    byte_level: Any, sentence_pieces: Any, words: list[str], ends_by_itself: bool
) -> None:
    for tokenizer in (byte_level, sentence_pieces):
        ids = tokenizer("".join(words))["input_ids"] + [tokenizer.eos_token_id] * ends_by_itself
        _check_against_all_prefixes(tokenizer, ids)


def test_a_step_ends_at_that_token_even_if_tokens_are_no_valid_text(byte_level: Any) -> None:
    rng = random.Random(0)
    for length in (1, 5, PIECE_SIZE - 1, PIECE_SIZE, PIECE_SIZE + 1, 3 * PIECE_SIZE):
        for _ in range(5):
            _check_against_all_prefixes(byte_level, [rng.randrange(len(byte_level)) for _ in range(length)])


def test_few_tokens_are_decoded() -> None:
    num_decoded = 0

    def letters(ids: list[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(ids)
        return "".join(map(chr, ids))

    assert tokens_at([97] * 4000, letters, range(100, 4001, 100)) == list(range(99, 4000, 100))
    assert num_decoded < 40 * 4000  # decoding all prefixes would decode 8 million


EQUATIONS = str(
    Path(__file__).resolve().parents[2] / "examples" / "process_supervision/arithmetic_steps.py:arithmetic_steps"
)


def _pool(*functions: tuple[str, float], **arguments: Any) -> RewardPool:
    return reward_pool(functions, **arguments)


def test_steps_are_weighted_and_step_functions_do_not_change_the_reward() -> None:
    with _pool((MARKED, 2.0), ("format", 0.5), (OTHER, 1.0), (EQUATIONS, 0.0)) as pool:
        for key, response in enumerate(["a.b!c,", "none", "a.@", "1+1=2."]):
            pool.submit(key, "p", response, "1", {})
        found = list(pool.collect().values())
    assert found[0] == RewardResult(
        0.0,  # the format reward
        {MARKED: 0.0, "format": 0.0, OTHER: 0.25, EQUATIONS: None},
        {MARKED: "marked", "format": "malformed", OTHER: "marked", EQUATIONS: "no_steps"},
        (Step(2, 2.0), Step(2, 0.25), Step(4, -2.0), Step(6, 0.25)),
    )
    assert found[1].scores == {MARKED: None, "format": 0.0, OTHER: None, EQUATIONS: None}
    assert found[1].steps == ()
    assert (found[2].total, found[2].scores[MARKED], len(found[2].steps)) == (4.0, 2.0, 2)  # both a reward and steps
    assert found[3].scores[EQUATIONS] == 1.0  # weight 0 only logs the score
    assert found[3].steps == (Step(6, 2.0), Step(6, 0.25))


@pytest.mark.parametrize(
    ("response", "error"),
    [
        ("9", "ValueError: a step ends at character 9, after one that ends at 0, in a response of 1"),
        ("0", "ValueError: a step ends at character 0"),
        ("211", "ValueError: a step ends at character 1, after one that ends at 2"),
        ("x", "ValueError: the reward of a step is inf; return a finite number"),
    ],
)
def test_impossible_steps_are_an_error(response: str, error: str) -> None:
    with _pool(("user_functions.bad_steps", 1.0)) as pool:
        pool.submit(0, "p", response, "1", {})
        pool.submit(1, "p", "1", "1", {})
        assert [result.verdicts["user_functions.bad_steps"] for result in pool.collect().values()] == ["error", "x"]
        assert pool.first_error and error in pool.first_error


def _samples(tokenizer: Any, prompt: Prompt, responses: list[str]) -> list[Sample]:
    ids = [[*tokenizer(response)["input_ids"], tokenizer.eos_token_id] for response in responses]
    return [Sample(prompt, i, some, [-1.0] * len(some), "stop") for i, some in enumerate(ids)]


def test_the_scorer_sets_the_steps_of_samples_by_token(byte_level: Any) -> None:
    prompt = Prompt(0, "p", (1,), "7")
    responses = [TEXT, "no steps", ".,.", "🙂."]
    samples = _samples(byte_level, prompt, responses)
    with _pool((MARKED, 2.0), (OTHER, 1.0)) as pool:
        scorer = Scorer(pool, decoder(byte_level))
        for sample in samples:
            scorer.submit(sample)
        scorer.finish()
    for sample, response in zip(samples, responses, strict=True):
        expected: dict[int, float] = {}
        for i, c in enumerate(response):
            for value in {".": [2.0, 0.25], "!": [-2.0], ",": [0.25]}.get(c, []):
                (t,) = tokens_at(sample.response_ids, decoder(byte_level), [i + 1])
                expected[t] = expected.get(t, 0.0) + value
        assert dict(zip(sample.step_ends, sample.step_rewards, strict=True)) == expected
        assert sample.step_ends == sorted(set(sample.step_ends))
        assert sample.reward is None
        assert sample.is_scored == (response != "no steps")
        assert all(end < sample.response_len - 1 for end in sample.step_ends)  # the end-of-sequence token has no text
    group = Group(prompt, samples)
    assert drop_unusable([group]) == ([group], [])
    metrics = rollout_metrics([group], lambda one: one is not group)
    assert metrics["reward/mean"] == 0.0
    assert metrics[f"reward/{OTHER}"] == 0.25
    assert metrics["groups/zero_variance"] == 0.0
    assert rollout_metrics([group, Group(prompt, samples)], lambda one: one is not group)["groups/zero_variance"] == 0.5
    assert heldout_metrics([group])[f"eval/{OTHER}"] == 0.25


def test_a_missing_score_is_none() -> None:
    with _pool(("user_functions.no_score", 1.0)) as pool:
        for key, response in enumerate(["lost", "fine"]):
            pool.submit(key, "p", response, "1", {})
        lost, fine = pool.collect().values()
        assert (lost.total, lost.verdicts) == (None, {"user_functions.no_score": "error"})
        assert fine.total == 1.0
        assert lost.errors["user_functions.no_score"].startswith("NoScore: the scales are broken")


@pytest.mark.parametrize(("weight", "total"), [(1.0, None), (-0.5, None), (0.0, 2.0)])
def test_a_sample_with_a_missing_score_is_excluded(weight: float, total: float | None) -> None:
    with _pool(("user_functions.no_score", weight), (MARKED, 1.0)) as pool:
        for key, response in enumerate(["lost", "@.", "lost@."]):
            pool.submit(key, "p", response, "1", {})
        lost, whole, _ = pool.collect().values()
        assert lost.total is None and whole.total == 2.0 + weight
    with _pool(("user_functions.lose_all", weight), (MARKED, 1.0)) as pool:
        pool.submit(0, "p", "@.", "1", {})
        result = pool.collect()[0]
        assert (result.total, bool(result.steps)) == (total, weight == 0.0)


def test_a_users_function_may_return_a_number_or_none() -> None:
    name = "user_functions.half_of_them"
    with _pool((name, 2.0)) as pool:
        for key, response in enumerate(["one", "none"]):
            pool.submit(key, "p", response, "1", {})
        assert list(pool.collect().values()) == [
            RewardResult(1.0, {name: 0.5}, {name: "scored"}),
            RewardResult(None, {name: None}, {name: "not_applicable"}),
        ]


def test_the_function_gets_its_options_and_the_splitter() -> None:
    name = "user_functions.weighted_length"
    for more, splitter in (({}, "regex:;"), ({"step_splitter": "lines"}, "lines")):
        with _pool((name, 1.0), options={name: {"factor": 0.5, "unit": "cm", **more}}, step_splitter="regex:;") as pool:
            pool.submit(0, "p", "four", "1", {})
            assert pool.collect()[0] == RewardResult(2.0, {name: 2.0}, {name: f"cm|{splitter}"})


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("user_functions.weighted_length", {"factr": 1}, "has no option 'factr'; did you mean factor?"),
        (
            "user_functions.weighted_length",
            {"unit": "cm"},
            "needs the option 'factor'; add options: {factor: ...} to it",
        ),
        ("user_functions.weighted_length", {"factor": 1, "step_splitter": "word"}, "step_splitter='word' is unknown"),
        ("user_functions.marked", {"url": "x"}, "has no option 'url'; it takes none"),
    ],
)
def test_wrong_options_of_a_users_function_are_an_error_before_any_check(
    name: str, options: dict[str, Any], error: str
) -> None:
    with _pool((name, 1.0), options={name: options}) as pool, pytest.raises(RewardError) as raised:
        pool.wait_until_ready()
    assert str(raised.value).startswith("reward workers cannot start: ")
    assert error in str(raised.value)


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("accuracy", {"tolerance": 1}, "reward function 'accuracy' has no option 'tolerance'; it takes unevaluated"),
        ("format", {"tolerance": 1}, "reward function 'format' has no option 'tolerance'; it takes none"),
        ("reasoning_steps", {"step_splitter": "lines"}, "has no option 'step_splitter'; it takes none"),
        ("reward_model", {"url": "http://x", "step_spliter": "lines"}, "did you mean step_splitter?"),
        ("reward_model", {"url": "http://x", "step_splitter": "regex:("}, "is not a regular expression"),
    ],
)
def test_wrong_options_of_a_built_in_function_are_refused_at_once(
    name: str, options: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        registry.check_rewards(name, options, "blank-lines", 20.0)
    assert error in str(raised.value)


@pytest.mark.parametrize(
    ("name", "option", "value", "form"),
    [
        *(("accuracy", "unevaluated", value, "true or false") for value in ("no", "false", "", 0, 1, None, [])),
        *(("repetition_penalty", "ngram_size", value, "a whole number") for value in (True, 2.5)),
        *(("cosine", "max_value_correct", value, "a number") for value in (True,)),
        *(("language_consistency", "language", value, "a text") for value in (True, 3, None)),
    ],
)
def test_options_of_another_type_are_refused_at_once(name: str, option: str, value: Any, form: str) -> None:
    with pytest.raises(ConfigError) as raised:
        registry.check_rewards(name, {option: value}, "blank-lines", 20.0)
    assert option in str(raised.value) and f"must be {form}" in str(raised.value) and "\n" not in str(raised.value)


def test_options_of_the_right_type_are_accepted() -> None:
    registry.check_rewards("accuracy", {"unevaluated": True}, "blank-lines", 20.0)
    registry.check_rewards("cosine", {"max_len": 7, "min_value_correct": 0.25}, "blank-lines", 20.0)
    registry.check_rewards("repetition_penalty", {"ngram_size": 5, "unit": "characters"}, "blank-lines", 20.0)
    registry.check_rewards("language_consistency", {"language": "en"}, "blank-lines", 20.0)


def test_every_verdict_of_a_built_in_function_reaches_the_other_ranks() -> None:
    assert {"steps_right", "steps_wrong", "no_steps", "scored", "error", "timeout"} <= set(VERDICTS)
