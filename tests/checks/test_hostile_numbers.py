"""Numbers that no run can mean, for every numeric key of the config: refused in one line, or harmless in checks and
plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_mega import cli, config
from grpo_mega.cli import checks
from grpo_mega.errors import ConfigError
from tests.helpers.models import make_model, save_checkpoint

HUGE_DIGITS = "1" + "0" * 5000
VALUES = (".inf", "-.inf", ".nan", "1e308", "-1e308", str(10**30), "-1", "0", "1e-320", HUGE_DIGITS)
MAY_NOT_BE_ZERO_OR_LESS = (
    "steps",
    "batch.prompts_per_step",
    "rollout.max_response_length",
    "layout.tp",
    "optimizer.lr",
)


def numeric_keys(schema: dict[str, Any], node: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each key whose value may be a number, by the JSON schema; 0 is the index of a list's item."""
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    if node.get("type") in ("integer", "number"):
        yield path
    for name, inner in node.get("properties", {}).items():
        yield from numeric_keys(schema, inner, (*path, name))
    for inner in node.get("anyOf", []):
        yield from numeric_keys(schema, inner, path)
    if isinstance(node.get("items"), dict):
        yield from numeric_keys(schema, node["items"], (*path, "0"))
    if isinstance(node.get("additionalProperties"), dict):
        yield from numeric_keys(schema, node["additionalProperties"], (*path, "some_name"))


SCHEMA = config.Config.model_json_schema()
KEYS = sorted(set(numeric_keys(SCHEMA, SCHEMA)))
ITEMS = {  # the other keys of a list's item
    "rewards.functions": {"name": "format"},
    "data.train": {"path": "train.jsonl"},
    "teachers": {"path": "model"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    save_checkpoint(make_model("qwen2"), path / "model")
    rows = [json.dumps({"prompt": f"{i}+1=?", "answer": str(i + 1)}) for i in range(5)]
    (path / "train.jsonl").write_text("\n".join(rows) + "\n")
    return path


def raw_with(folder: Path, key: tuple[str, ...], text: str) -> str:
    """Return a config in YAML, which is JSON but for the value."""
    raw: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "steps": 3,
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_length": 61},
        "rollout": {"max_response_length": 5},
        "rewards": {"functions": [{"name": "format"}]},
        "batch": {"prompts_per_step": 2, "tokens_per_micro_batch": 257},
        "algorithm": {"group_size": 3},
    }
    node: Any = raw
    for i, part in enumerate(key[:-1]):
        following = [] if key[i + 1] == "0" else {}
        if isinstance(node, list):
            node.append(dict(ITEMS.get(".".join(key[:i]), {})))
            node = node[-1]
        else:
            if not isinstance(node.get(part), dict) or isinstance(following, list):
                node[part] = following
            node = node[part]
    if isinstance(node, list):
        node.append("VALUE")
    else:
        node[key[-1]] = "VALUE"
    return json.dumps(raw).replace('"VALUE"', text)


@pytest.fixture(autouse=True)
def template_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The template is the same for all numbers, and its check starts a process."""
    monkeypatch.setattr("grpo_mega.cli.checks.tokenizer.bound_problem", lambda template: None)


def test_the_schema_has_the_numeric_keys_that_are_tried() -> None:
    names = {".".join(key) for key in KEYS}
    assert len(names) > 90
    assert {*MAY_NOT_BE_ZERO_OR_LESS, "rollout.oversample", "seed", "rewards.functions.0.weight"} <= names


@pytest.mark.parametrize("key", KEYS, ids=".".join)
def test_a_number_that_no_run_can_mean_is_one_line_or_harmless(
    key: tuple[str, ...], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    num_refused = 0
    for text in VALUES:
        path.write_text(raw_with(folder, key, text))
        try:
            one = config.load(path)
            checks.check_config(one, checks.this_machine(one.layout))
        except ConfigError as error:
            num_refused += 1
            assert all("\n" not in str(line) and len(str(line)) < 600 for line in error.args)
        assert cli.main(["plan", str(path), "--gpu", "h100"]) in (0, 1, 2)
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        assert not any(word in printed.out.split() for word in ("nan", "inf")), text
    assert num_refused >= 4, "infinities, NaN and 5,000 digits are no number of any key"


@pytest.mark.parametrize("key", MAY_NOT_BE_ZERO_OR_LESS)
@pytest.mark.parametrize("text", ["0", "-1", "-1e308", ".nan", "1e308", str(10**38)])
def test_sizes_and_rates_are_refused_with_their_key_and_value(
    key: str, text: str, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(raw_with(folder, tuple(key.split(".")), text))
    with pytest.raises(ConfigError, match=rf"^{key}=[^\n]+: [^\n]+$"):
        config.load(path)
