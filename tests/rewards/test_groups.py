"""Functions with TRL's signature: their arguments, one call for all samples of a prompt, and their rewards."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_mega.config.data import RewardsConfig
from grpo_mega.errors import ConfigError
from grpo_mega.rewards import RewardPool, RewardResult, registry
from grpo_mega.rewards.api import as_score, result_of
from grpo_mega.rewards.registry import takes_groups
from grpo_mega.rewards.scorer import Scorer
from grpo_mega.types import Group, Prompt, Sample

pytestmark = [pytest.mark.pool, pytest.mark.waiting]

MESSAGES = [{"role": "system", "content": "Think."}, {"role": "user", "content": "9+9=?"}]
ROW = {"level": "easy", "unit": "m", "final": 18}  # extra columns of the data; `final` holds the gold answer


@pytest.fixture(autouse=True)
def _user_functions_are_importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent))
    yield


def pool_of(*functions: dict[str, Any], **settings: Any) -> RewardPool:
    return RewardPool(
        RewardsConfig.model_validate({"functions": functions, "num_workers": 1, "deadline_s": 20} | settings)
    )


def scored(pool: RewardPool, *groups: Sequence[str], prompt: Any = MESSAGES) -> list[list[RewardResult]]:
    """Submit all samples in order, and each group after its last sample."""
    keys = []
    extras = {name: value for name, value in ROW.items() if name != "final"} | {"prefill": "<think>"}
    for number, responses in enumerate(groups):
        keys.append([(number, index) for index in range(len(responses))])
        for key, response in zip(keys[-1], responses, strict=True):
            pool.submit(key, "<user>9+9=?", response, "18", extras)
        pool.submit_group(keys[-1], {"prompts": prompt, "final": 18}, [[1] * len(response) for response in responses])
    results = pool.collect()
    return [[results[key] for key in some] for some in keys]


def test_functions_written_for_open_r1_work_together_with_ours() -> None:
    responses = [r"<think>x</think><answer>\boxed{18}</answer>", r"\boxed{17}", "no answer", r"\boxed{18}", "<think>"]
    module = importlib.import_module("trl_functions")
    completions = [[{"role": "assistant", "content": text}] for text in responses]
    names = ("trl_functions.accuracy_reward", "trl_functions.format_reward", "accuracy_reward")
    with pool_of(*({"name": name} for name in names), num_workers=2) as pool:
        (results,) = scored(pool, responses)
    expected = module.accuracy_reward(completions, ["18"] * 5), module.format_reward(completions)
    assert [[result.scores[name] for result in results] for name in names[:2]] == list(map(list, expected))
    assert expected == ([1.0, 0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0])
    assert {name for result in results for name in result.scores} == {*names[:2], "accuracy"}  # results use our name
    # Without </think> the whole response is an unfinished thought, so it has no answer.
    assert [result.scores["accuracy"] for result in results] == [1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("prompt", "completions", "prompts", "is_text"),
    [
        ("9+9=?", "as_data", "9+9=?", True),
        (MESSAGES, "as_data", MESSAGES, False),
        ("9+9=?", "messages", [{"role": "user", "content": "9+9=?"}], False),
        (MESSAGES, "text", "<user>9+9=?", True),
    ],
)
def test_a_group_is_one_call_with_lists_of_data_columns(
    prompt: Any, completions: str, prompts: Any, is_text: bool
) -> None:
    function = {"name": "trl_functions.Heard", "completions": completions, "options": {"level": "hard", "most": 7}}
    with pool_of(function) as pool:
        (first, second) = scored(pool, ["a", "bb", ""], ["c"], prompt=prompt)
    heard = [json.loads(result.verdicts["trl_functions.Heard"]) for result in first]
    assert [result.total for result in first] == [0.0, 1.0, 2.0]
    assert heard[0] == heard[1] == heard[2], "one call"
    assert heard[0] == {
        "call": 1, "prompts": [prompts] * 3, "completion_ids": [[1], [1, 1], []], "prefill": ["<think>"] * 3,
        "completions": [t if is_text else [{"role": "assistant", "content": t}] for t in ["a", "bb", ""]],
        "solution": ["18"] * 3, "answer": ["18"] * 3, "ground_truth": ["18"] * 3, "final": [18] * 3, "unit": ["m"] * 3,
        "level": "hard", "most": 7,  # options win over columns
    }  # fmt: skip
    last = json.loads(second[0].verdicts["trl_functions.Heard"])
    assert (last["call"], len(last["completions"])) == (2, 1)


def test_a_function_gets_only_arguments_it_names_and_may_be_a_coroutine() -> None:
    functions = (
        {"name": "trl_functions.chosen", "options": {"unit": "cm"}},
        {"name": "trl_functions.obey", "weight": 10},
    )
    with pool_of(*functions) as pool:
        (results,) = scored(pool, ["", "bb", "ccc"], prompt="9+9=?")
    assert [result.total for result in results] == [5.0, 2.0, 33.0]
    assert [result.scores["trl_functions.obey"] for result in results] == [0.5, None, 3.0]


def test_a_group_has_one_deadline_and_a_failure_costs_only_its_group() -> None:
    name = "trl_functions.obey"
    with pool_of({"name": name}, deadline_s=3) as pool:
        deeds = ("take long", "hang", "raise", "be short", "give text")
        results = dict(zip(deeds, scored(pool, *([deed, "b", "c"] for deed in deeds), prompt="p"), strict=True))
        counters = pool.counters
    totals = {deed: [result.total for result in some] for deed, some in results.items()}
    verdicts = {deed: [result.verdicts[name] for result in some] for deed, some in results.items()}
    assert totals == {deed: [0.5, None, 1.0] if deed == "take long" else [0.0] * 3 for deed in deeds} | {
        "give text": [0.5, None, 0.0]
    }
    assert verdicts["hang"] == ["timeout"] * 3 and counters["killed_workers"] == 1
    assert verdicts["raise"] == verdicts["be short"] == ["error"] * 3
    assert verdicts["give text"] == ["scored", "not_applicable", "error"]
    assert results["raise"][2].errors[name].startswith("KeyError: 'no such column' (in obey, trl_functions.py:")
    assert "2 rewards for 3 completions; return one, or None, for each" in results["be short"][0].errors[name]
    assert "the reward is str" in results["give text"][2].errors[name]


def test_a_function_that_needs_messages_reports_the_key_to_set() -> None:
    with pool_of({"name": "trl_functions.format_reward"}) as pool:
        (results,) = scored(pool, ["a", "b"], prompt="9+9=?")
    error = results[1].errors["trl_functions.format_reward"]
    assert "string indices" in error and "set the function's key completions: messages (in " in error


def test_the_scorer_submits_whole_groups_in_the_order_of_their_samples() -> None:
    prompts = [Prompt(n, f"<user>{n}", (1,), "18", extras=dict(ROW), raw_columns={"prompts": str(n)}) for n in range(3)]
    groups = [Group(p, [Sample(p, i, [p.id, i], [-1.0] * 2, "stop") for i in (2, 0, 1)]) for p in prompts]
    with pool_of({"name": "trl_functions.Heard"}, {"name": "len", "weight": 0.0}, num_workers=2) as pool:
        scorer = Scorer(pool, lambda ids: ".".join(map(str, ids)))
        for group in groups:
            for sample in group.samples:
                scorer.submit(sample)
        for group in (groups[0], groups[1]):
            scorer.submit_group(group.samples)
        scorer.keep([groups[1], groups[2]])
        scorer.finish()
    heard = [[json.loads(s.verdicts["trl_functions.Heard"]) for s in group.samples] for group in groups[1:]]
    assert [h["completions"] for h in heard[0]] == [["1.0", "1.1", "1.2"]] * 3
    assert [s.reward for s in groups[1].samples] == [2.0, 0.0, 1.0]
    assert [h["completion_ids"] for h in heard[0]] == [[[1, 0], [1, 1], [1, 2]]] * 3
    assert [h["completions"] for h in heard[1]] == [["2.2"], ["2.0"], ["2.1"]], (
        "each sample without a group is its own group"
    )
    assert {s.reward for s in groups[0].samples} == {None}, "the group was not kept"
    assert {s.verdicts["len"] for s in groups[1].samples} == {"wrong"}


def test_no_built_in_function_takes_groups() -> None:
    assert not any(takes_groups(registry.resolve_reward(name)) for name in registry.BUILT_IN)  # the pool calls len


@pytest.mark.parametrize(
    ("multiplies", "response", "total"),
    [
        ((), "<think>\na\n</think>\n<answer>\n18</answer>", 2.0 + 0.5 + 3 * 0.75),
        (("tag_count",), "<think>\na\n</think>\n<answer>\n18</answer>", (2.0 + 0.5) * 3 * 0.75),
        (("tag_count",), "<think>\na\n</think>\n<answer>\n17</answer>", 0.5 * 3 * 0.75),
        (("tag_count", "accuracy"), "<think>\na\n</think>\n<answer>\n18</answer>", 2.0 * 0.5 * 3 * 0.75),
        (("tag_count", "accuracy", "format"), "<think>\na\n</think>\n<answer>\n18</answer>", 2.0 * 0.5 * 3 * 0.75),
        (("accuracy",), "18", 0.0),
    ],
)
def test_rewards_are_added_by_weight_or_multiplied(multiplies: tuple[str, ...], response: str, total: float) -> None:
    weights = {"accuracy": 2.0, "format": 0.5, "tag_count": 3.0}
    functions = [{"name": n, "weight": w, "multiplies": n in multiplies} for n, w in weights.items()]
    config = RewardsConfig.model_validate({"functions": functions})
    outcomes = {n: as_score(registry.resolve_reward(n)("", response, "18", {}), response) for n in weights}
    found = result_of(weights, outcomes, {}, [f.name for f in config.functions if f.multiplies])
    assert found.total == pytest.approx(total)


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("cosine", {"max_len": 0}, "with options {'max_len': 0}: max_len=0: must be above 0"),
        ("cosine", {"max_length": 9}, "has no option 'max_length'; did you mean max_len?"),
        ("cosine", {"max_len": "long"}, "its option max_len='long': must be a number; correct it"),
        ("repetition_penalty", {"max_penalty": 0.5}, "max_penalty=0.5: must be at most 0"),
        ("repetition_penalty", {"ngram_size": 0}, "ngram_size=0: must be at least 1"),
        ("repetition_penalty", {"unit": "lines"}, "unit='lines': must be words or characters"),
        ("language_consistency", {"language": "xx"}, "language='xx': must be one of en, de, "),
        ("len", {"language": "en"}, "has no option 'language'; it takes none"),
        ("soft_overlong_punishment", {}, "is not a reward function here; set algorithm.overlong_buffer"),
    ],
)
def test_wrong_options_of_the_shaping_functions_are_refused_at_once(
    name: str, options: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(error)):
        registry.check_rewards(name, options, "lines", 5.0)
