"""Several datasets: shares per step, order, ids and held-out prompts depend only on the data and the seed."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from grpo_mega.config import RolloutConfig
from grpo_mega.config.data import DataConfig
from grpo_mega.data import RunData, Sampler, load_data
from grpo_mega.data.load import IDS_PER_SET, check_data, split_off
from grpo_mega.errors import ConfigError
from grpo_mega.types import Prompt
from tests.helpers.models import make_tokenizer

MIXES = [
    ((100, 50), (1.0, 1.0), 8),
    ((100, 30, 7), (5.0, 3.0, 0.4), 10),
    ((40, 40, 40), (1.0, 1.0, 1.0), 10),
    ((9, 200), (1.0, 2.0), 12),  # one set is hardly larger than its share of a step
    ((300, 5), (1.0, 0.01), 16),  # most steps take nothing from one set
]


def counts_of(sampler: Sampler, sizes: tuple[int, ...], step: int) -> list[int]:
    ends = list(itertools.accumulate(sizes))
    found = Counter(
        next(n for n, end in enumerate(ends) if index < end) for index in [draw.row for draw in sampler.draws(step)]
    )
    return [found[n] for n in range(len(sizes))]


@pytest.mark.parametrize(("sizes", "weights", "prompts_per_step"), MIXES)
def test_every_step_has_the_share_of_each_set_rounded_up_or_down(
    sizes: tuple[int, ...], weights: tuple[float, ...], prompts_per_step: int
) -> None:
    shares = [prompts_per_step * w / sum(weights) for w in weights]
    for seed in range(3):
        sampler = Sampler(sizes, weights, prompts_per_step, seed, shuffle=True)
        counts = [counts_of(sampler, sizes, step) for step in range(200)]
        assert all(sum(count) == prompts_per_step for count in counts)
        assert all(abs(c - share) < 1 for count in counts for c, share in zip(count, shares, strict=True))
        for done in (20, 200):  # the mean equals the share
            drawn = [sum(column) for column in zip(*counts[:done], strict=True)]
            assert all(abs(d - done * share) < 4 for d, share in zip(drawn, shares, strict=True))


def test_over_many_seeds_the_mean_of_the_first_step_is_the_share() -> None:
    draws = [counts_of(Sampler((9, 9), (1.0, 3.0), 2, seed, shuffle=True), (9, 9), 0)[0] for seed in range(400)]
    assert abs(sum(draws) / len(draws) - 0.5) < 0.1


@pytest.mark.parametrize(("sizes", "weights", "prompts_per_step"), MIXES)
@pytest.mark.parametrize("shuffle", [True, False])
def test_steps_of_several_sets_have_unique_prompts_and_whole_epochs(
    sizes: tuple[int, ...], weights: tuple[float, ...], prompts_per_step: int, shuffle: bool
) -> None:
    sampler = Sampler(sizes, weights, prompts_per_step, 3, shuffle=shuffle)
    steps = [[draw.row for draw in sampler.draws(step)] for step in range(150)]
    assert all(len(set(step)) == prompts_per_step for step in steps)
    firsts = [0, *itertools.accumulate(sizes)]
    for first, size in zip(firsts, sizes, strict=False):
        drawn = [index for step in steps for index in step if first <= index < first + size]
        for epoch in range(len(drawn) // size):
            assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(first, first + size))


def test_a_step_of_several_sets_does_not_depend_on_earlier_steps() -> None:
    sizes, weights = (30, 11, 50), (1.0, 0.7, 2.0)
    sampler = Sampler(sizes, weights, 9, 1, shuffle=True)
    before = [[draw.row for draw in sampler.draws(step)] for step in range(60)]
    for step in (59, 7, 0, 23):
        assert [draw.row for draw in Sampler(sizes, weights, 9, 1, shuffle=True).draws(step)] == before[step]
    assert [draw.row for draw in Sampler(sizes, weights, 9, 2, shuffle=True).draws(0)] != before[0]


def test_mini_batches_of_a_step_are_mixed_too() -> None:
    sampler = Sampler((100, 100), (3.0, 1.0), 32, 0, shuffle=True)
    for step in range(20):
        indices = [draw.row for draw in sampler.draws(step)]
        for mini_batch in (indices[:8], indices[8:16], indices[16:24], indices[24:]):
            assert sum(index >= 100 for index in mini_batch) == 2


def test_sets_of_equal_size_have_different_orders() -> None:
    sampler = Sampler((64, 64), (1.0, 1.0), 32, 0, shuffle=True)
    drawn = [index for step in range(4) for index in [draw.row for draw in sampler.draws(step)]]
    first, second = [i for i in drawn if i < 64], [i - 64 for i in drawn if i >= 64]
    assert first != second
    assert first == [
        i for step in range(4) for i in [draw.row for draw in Sampler([64], [1.0], 16, 0, shuffle=True).draws(step)]
    ]


def test_a_set_smaller_than_its_share_of_a_step_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"data\.train\.1 has 3 .*0\.5 .*=8 .* 4 per step; lower"):
        Sampler((100, 3), (1.0, 1.0), 8, 0, shuffle=True)


def write(path: Path, questions: list[str], answers: str = "answer") -> str:
    path.write_text("".join(json.dumps({"prompt": q, answers: str(len(q))}) + "\n" for q in questions))
    return str(path)


def load(**data: Any) -> RunData:
    return load_data(DataConfig.model_validate(data), make_tokenizer())


def test_ids_are_unique_and_do_not_change_when_another_set_grows(tmp_path: Path) -> None:
    one, other = write(tmp_path / "a.jsonl", ["p", "q"]), write(tmp_path / "b.jsonl", ["r", "s"], "solution")
    before = load(train=[one, {"path": other, "weight": 2}])
    assert [p.id for p in before.train] == [0, 1, IDS_PER_SET, IDS_PER_SET + 1]
    assert before.sizes == (2, 2)
    write(tmp_path / "a.jsonl", ["p", "q", "t"])
    assert {p.text: p.id for p in before.train}.items() <= {
        p.text: p.id for p in load(train=[one, other]).train
    }.items()


def test_each_set_has_its_own_columns_with_the_defaults_of_data(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", ["p"])
    (tmp_path / "b.json").write_text(json.dumps([{"problem": "r", "gold": 5}]))
    other = {"path": str(tmp_path / "b.json"), "prompt_column": "problem", "answer_column": "gold"}
    data = load(train=[one, other], heldout=other)
    assert [p.answer for p in data.train] == ["1", "5"]
    assert [p.text for p in data.heldout_sets[""]] == ["<user>r<assistant>"]
    assert data.notes[-1].endswith(
        "1 prompts of at most 3 tokens; 1 prompts of data.train have the text of a held-out prompt"
    )


def prompts(texts: list[str], first_id: int = 0) -> list[Prompt]:
    return [Prompt(first_id + i, text, (1,), "a") for i, text in enumerate(texts)]


def test_no_text_is_on_both_sides_of_a_split_for_any_order_of_rows() -> None:
    texts = [f"question {i % 40}" for i in range(60)]
    train, heldout = split_off([prompts(texts), prompts(texts[:10], 100)], 10)
    held = {p.text for p in heldout}
    assert len(heldout) == len(held) == 10
    assert not held & {p.text for part in train for p in part}
    assert sum(map(len, train)) == 70 - sum(text in held for text in texts + texts[:10])
    _, again = split_off([prompts(texts[::-1])], 10)
    assert [p.text for p in again] == [p.text for p in heldout]


@pytest.mark.parametrize("split", [{"heldout_size": 5}, {"heldout_fraction": 0.25}])
def test_held_out_prompts_are_split_off_from_train(tmp_path: Path, split: dict[str, Any]) -> None:
    path = write(tmp_path / "a.jsonl", [*map(str, range(18)), "3", "4"])
    data = load(train=path, **split)
    assert len(data.heldout_sets[""]) == 5
    assert data.sizes == (len(data.train),)
    assert not {p.text for p in data.heldout_sets[""]} & {p.text for p in data.train}
    assert "held out: 5 prompts" in data.notes[-1]
    assert load(train=path, **split) == data


@pytest.mark.parametrize(
    ("split", "problem"),
    [
        ({"heldout_size": 4}, "4 held-out prompts leave nothing of the 4 different prompts of data.train; lower"),
        ({"heldout_fraction": 0.1}, "data.heldout_fraction=0.1 of 4 prompts is less than one; raise it"),
    ],
)
def test_a_split_that_leaves_a_side_empty_is_an_error(tmp_path: Path, split: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(train=write(tmp_path / "a.jsonl", ["a", "b", "c", "d"]), **split)


def test_all_rows_are_checked_without_a_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ["a", "b"])
    check_data(DataConfig.model_validate({"train": path}), 2, RolloutConfig())
    with pytest.raises(ConfigError, match=r"batch\.prompts_per_step=3 .* 2 prompts"):
        check_data(DataConfig.model_validate({"train": path}), 3, RolloutConfig())
    with pytest.raises(ConfigError, match=r"b\.jsonl:1: prompt='' "):
        check_data(
            DataConfig.model_validate({"train": path, "heldout": write(tmp_path / "b.jsonl", [""])}), 2, RolloutConfig()
        )
    with pytest.raises(ConfigError, match=r"data\.heldout=.*a\.jsonl .*data\.train"):
        check_data(DataConfig.model_validate({"train": path, "heldout": f"{tmp_path}/./a.jsonl"}), 2, RolloutConfig())


def test_digests_depend_on_the_rows_and_not_on_their_location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A JSONL file, Parquet and a hub dataset have equal digests. Changed answers, extras, order or sizes change
    them.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows: list[dict[str, Any]] = [{"prompt": q, "answer": str(i), "level": {"of": i}} for i, q in enumerate("pqr")]

    def digest(rows: list[dict[str, Any]], path: str = "a.jsonl") -> str:
        Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = load(train=[{"path": path}], heldout_sets={"h": path}).digests
        assert found.keys() == {f"data.train={path}", f"data.heldout_sets.h={path}"}
        return found[f"data.train={path}"]

    for folder in ("set", "owner/name"):
        Path(folder).mkdir(parents=True)
        parquet.write_table(pa.Table.from_pylist(rows), f"{folder}/train.parquet")
    same = {digest(rows), digest(rows, "set"), digest(rows, "hub:owner/name")}
    changed = [
        [{**row, name: value} if row is rows[1] else row for row in rows]
        for name, value in (("answer", "7"), ("level", 3))
    ]
    changed += [[rows[0], rows[2], rows[1]], rows[:2], [*rows, {"prompt": "line\u2028", "answer": "3"}]]
    assert len(same) == 1 and len({*same, *map(digest, changed)}) == 6
