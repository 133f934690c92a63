"""read_rows: equal rows from JSONL, JSON, Parquet, folders and hub names. Errors name the unreadable source and the
remedy.
"""

import gzip
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from grpo_mega import http_client
from grpo_mega.data.rows import is_same, read_rows
from grpo_mega.errors import ConfigError

ROWS: list[dict[str, Any]] = [
    {"problem": "1+1", "solution": "2", "level": 3},
    {"problem": "2+2", "solution": "4", "level": 1},
    {"problem": "3+3", "solution": "6", "level": 2},
]
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"}]


def rows_of(path: Path | str) -> list[dict[str, Any]]:
    return [row.values for row in read_rows(str(path))]


def write_jsonl(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), path)


def make_json(folder: Path) -> str:
    (folder / "a.json").write_text(json.dumps(ROWS, indent=1))
    return "a.json"


def make_json_with_byte_order_mark(folder: Path) -> str:
    (folder / "a.json").write_text(json.dumps(ROWS), encoding="utf-8-sig")
    return "a.json"


def make_jsonl(folder: Path) -> str:
    write_jsonl(folder / "a.jsonl", ROWS)
    return "a.jsonl"


def make_parquet(folder: Path) -> str:
    write_parquet(folder / "a.parquet", ROWS)
    return "a.parquet"


def make_folder_of_parquet(folder: Path) -> str:
    write_parquet(folder / "set/train-00000-of-00002.parquet", ROWS[:2])
    write_parquet(folder / "set/train-00001-of-00002.parquet", ROWS[2:])
    write_parquet(folder / "set/test.parquet", ROWS[:1])
    return "set"


def make_folder_with_split(folder: Path) -> str:
    (folder / "set").mkdir()
    write_jsonl(folder / "set/train.jsonl", ROWS[:1])
    write_jsonl(folder / "set/test.jsonl", ROWS)
    return "set@test"


def make_saved_set(folder: Path) -> str:
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "saved")
    return "saved"


def make_saved_splits(folder: Path) -> str:
    datasets.disable_progress_bars()
    datasets.DatasetDict({"validation": datasets.Dataset.from_list(ROWS)}).save_to_disk(folder / "saved")
    return "saved@validation"


def make_hub_copy(folder: Path) -> str:
    """Make a folder with the hub name. `datasets` uses it instead of the http_client."""
    write_parquet(folder / "owner" / "test.parquet", ROWS)
    (folder / "owner").rename(folder / "name")
    (folder / "owner").mkdir()
    (folder / "name").rename(folder / "owner" / "name")
    return "hub:owner/name@test"


MAKERS = [
    make_json,
    make_json_with_byte_order_mark,
    make_jsonl,
    make_parquet,
    make_folder_of_parquet,
    make_folder_with_split,
    make_saved_set,
    make_saved_splits,
    make_hub_copy,
]


@pytest.mark.parametrize("make", MAKERS, ids=lambda f: f.__name__)
def test_rows_are_the_same_from_every_source(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = make(tmp_path)
    rows = list(read_rows(path))
    assert [row.values for row in rows] == ROWS
    assert [row.index for row in rows] == [0, 1, 2]
    assert all(row.place.startswith(path) for row in rows)
    copies = list((tmp_path / "cache").rglob("*.arrow"))
    assert bool(copies) == path.startswith("hub:")  # local data is not copied


ANSWERS: list[list[Any]] = [
    [12345678901234567890123, 7],
    [9007199254740993, 0.5],
    ["2024-01-05", "2024-02-05"],
    ["007", 7, "2024-01-05T10:00:00Z"],
    [{"x": 9007199254740993}, {"x": 0.5, "y": ["2024-01-05"]}],
    [True, "a\u2028b", None, -0.0, 10**30],
]


def write_lines(folder: Path, rows: list[Any]) -> None:
    write_jsonl(folder / "train.jsonl", rows)


def write_list(folder: Path, rows: list[Any]) -> None:
    (folder / "train.json").write_text("\n " + json.dumps(rows, indent=1))


def write_lines_with_another_suffix(folder: Path, rows: list[Any]) -> None:
    write_jsonl(folder / "train.json", rows)


def write_compressed(folder: Path, rows: list[Any]) -> None:
    with gzip.open(folder / "train.jsonl.gz", "wt") as file:
        file.write("\n" + "".join(json.dumps(row) + "\n\n" for row in rows))


def write_several_files(folder: Path, rows: list[Any]) -> None:
    (folder / "data").mkdir()
    write_jsonl(folder / "data/train-00001-of-00002.jsonl", rows[1:])
    (folder / "data/train-00000-of-00002.json").write_text(json.dumps(rows[:1]))
    write_jsonl(folder / "data/test.jsonl", [{"prompt": "other", "answer": "x"}])


def write_configured_files(folder: Path, rows: list[Any]) -> None:
    (folder / "parts").mkdir()
    write_jsonl(folder / "parts/z.jsonl", rows)
    write_jsonl(folder / "other.jsonl", rows[::-1])
    files = "[{split: train, path: parts/*.jsonl}, {split: test, path: other.jsonl}]"
    (folder / "README.md").write_text(f"---\nconfigs: [{{config_name: default, data_files: {files}}}]\n---\n")


JSON_FOLDERS = [
    write_lines,
    write_list,
    write_lines_with_another_suffix,
    write_compressed,
    write_several_files,
    write_configured_files,
]


@pytest.mark.parametrize("write", JSON_FOLDERS, ids=lambda f: f.__name__)
def test_json_has_the_same_values_in_a_folder_as_in_a_file(write: Any, tmp_path: Path) -> None:
    for number, answers in enumerate(ANSWERS):
        rows = [{"prompt": f"q{i}", "answer": answer} for i, answer in enumerate(answers)]
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder, rows)
        found = list(read_rows(str(folder)))
        assert repr([row.values for row in found]) == repr(rows)
        assert [row.index for row in found] == list(range(len(rows)))
        assert found[-1].place.startswith(f"{folder}, row {len(rows) - 1} (") and not found[0].is_columnar


def test_values_of_several_types_are_the_same_in_parquet_of_datasets(tmp_path: Path) -> None:
    rows = [{"a": "x", "b": [1]}, {"a": 7, "b": "y"}, {"a": None, "b": {"x": '"'}}]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    datasets.disable_progress_bars()
    datasets.Dataset.from_json(str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path)).to_parquet(tmp_path / "a.parquet")
    assert rows_of(tmp_path / "a.parquet") == rows


def test_a_bad_line_in_a_folder_is_named_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"a": 1}\n{"a": }\n')
    with pytest.raises(ConfigError, match=r"/train\.jsonl:2 .*; write one JSON object"):
        rows_of(tmp_path)


def test_json_that_is_neither_lines_nor_a_list_is_left_to_datasets(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text('{\n"a": [1, 2],\n"b": [3, 4]\n}')
    (row,) = rows_of(tmp_path)
    assert row == {"a": [1, 2], "b": [3, 4]}


def test_messages_in_parquet_and_in_folders_are_lists_of_mappings(tmp_path: Path) -> None:
    write_parquet(tmp_path / "set/train.parquet", [{"prompt": MESSAGES, "answer": "2"}])
    for path in (tmp_path / "set", tmp_path / "set/train.parquet"):
        assert rows_of(path) == [{"prompt": MESSAGES, "answer": "2"}]


@pytest.mark.parametrize(
    ("path", "arguments"),
    [
        ("hub:openai/gsm8k", ("openai/gsm8k", None, "train")),
        ("hub:openai/gsm8k:main", ("openai/gsm8k", "main", "train")),
        ("hub:openai/gsm8k:main@test", ("openai/gsm8k", "main", "test")),
        ("hub:o/n@train[:10%]", ("o/n", None, "train[:10%]")),
    ],
)
def test_a_hub_name_has_owner_name_config_and_split(
    path: str, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str | None, *, split: str) -> list[dict[str, Any]]:
        asked.append((name, config, split))
        return ROWS

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(http_client, "use_cache_if_unreachable", lambda: False)
    assert rows_of(path) == ROWS
    assert asked == [arguments]


def spoil(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "lines.json", ROWS)
    (tmp_path / "object.json").write_text('{"data": []}')
    (tmp_path / "numbers.json").write_text("[1, 2]")
    (tmp_path / "latin.jsonl").write_bytes('{"a": "é"}'.encode("latin-1"))
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "table.csv").write_text("a,b\n")
    (tmp_path / "empty").mkdir()
    write_parquet(tmp_path / "set/train.parquet", ROWS)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("none.jsonl", r"none\.jsonl does not exist; name a file, a folder or hub:owner/name"),
        ("none@train", r"none@train does not exist"),
        ("table.csv", r"suffix '\.csv'; the formats are \.jsonl, \.json, \.parquet, or folders of them"),
        ("lines.json", r"lines\.json is not JSON \(Extra data.*\); name it \.jsonl if it holds one object per line"),
        ("object.json", r"object\.json holds a JSON dict; write a list of objects"),
        ("numbers.json", r"numbers\.json, row 0 is a JSON int, not an object"),
        ("latin.jsonl", r"latin\.jsonl is not UTF-8"),
        ("cut.parquet", r"cut\.parquet is not a readable Parquet file \(ArrowInvalid: "),
        ("empty", r"empty cannot be read \(EmptyDatasetError: .*\); put \.parquet, \.jsonl or \.json files there"),
        (
            "set@nope",
            r"set@nope cannot be read \(ValueError: Bad split: nope\. Available splits: \['train'\]\); .*@split",
        ),
        ("hub:a b", r"'hub:a b' does not have the form hub:owner/name\[:config\]\[@split\]"),
    ],
)
def test_an_unreadable_source_is_named_in_one_line_with_the_remedy(
    path: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ConfigError, match=problem) as caught:
        rows_of(path)
    assert "\n" not in str(caught.value)


def test_a_hub_set_that_cannot_be_loaded_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*arguments: Any, **options: Any) -> None:
        raise ConnectionError("Couldn't reach\nthe hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(http_client, "use_cache_if_unreachable", lambda: False)
    message = "dataset hub:o/n cannot be loaded (ConnectionError: Couldn't reach the hub); check name"
    with pytest.raises(ConfigError, match=re.escape(message)):
        rows_of("hub:o/n")


@pytest.mark.parametrize("address", ["refuses", "never answers"])
def test_a_hub_that_does_not_answer_is_one_line_without_retries(address: str, tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if address == "never answers":
            server.listen(1)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        program = "from grpo_mega.data.rows import read_rows; list(read_rows('hub:some/set'))"
        variables = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=variables | {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=120,
        )
    last = done.stderr.splitlines()[-1]
    assert "ConfigError: dataset hub:some/set" in last and url in last
    assert "Retry" not in done.stderr + done.stdout


def test_two_paths_to_one_data_set_are_equal(tmp_path: Path) -> None:
    write_parquet(tmp_path / "set/train.parquet", ROWS)
    folder = str(tmp_path / "set")
    assert is_same(folder, f"{tmp_path}/./set@train")
    assert not is_same(folder, f"{folder}@test")
    assert is_same("hub:o/n@test", "hub:o/n@test")
    assert not is_same("hub:o/n", folder)
