"""YAML: a value is what the user wrote, or an error with its line. Written text reads back with any YAML reader."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from grpo_mega import config
from grpo_mega.errors import ConfigError
from grpo_mega.yaml_text import dump_yaml, parse_value, parse_yaml

# Plain scalars and their values in YAML 1.2's core schema (section 10.3.2 of the specification).
CORE_SCHEMA: dict[str, Any] = {
    "true": True,
    "True": True,
    "FALSE": False,
    "null": None,
    "~": None,
    "": None,
    "Null": None,
    "0": 0,
    "-19": -19,
    "+7": 7,
    "0777": 777,
    "0o17": 15,
    "0xfF": 255,
    "12345678901234567890": 12345678901234567890,
    "1e-6": 1e-6,
    "1E3": 1000.0,
    "3.0e-7": 3e-7,
    ".5": 0.5,
    "-2.": -2.0,
    "12e03": 12000.0,
    ".inf": math.inf,
    "-.INF": -math.inf,
    **{text: text for text in ("yes", "no", "on", "off", "y", "n", "Yes", "NO", "tRUE", "nULL", "none", "None")},
    **{
        text: text
        for text in ("1:30", "190:20:30.15", "1_000", "0b101", "0o8", "2024-01-01", "2024-01-01 10:00:00", "1.2.3")
    },
    **{text: text for text in ("inf", "nan", "1e", "e3", "+", ".", "-.", "0x", "1,000", "12h", "=", "٣")},
}
TEXTS = st.text(st.characters(exclude_characters="\0"), max_size=40)
WHOLE_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WHOLE_TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WHOLE_TEXTS, inner, max_size=3),
    max_leaves=9,
)
AWKWARD = (
    "#### x",
    "a # b",
    "You are: helpful",
    "yes",
    "1:30",
    " lead",
    "trail ",
    "'q'",
    '"q"',
    "[x]",
    "{a: b}",
    "- a",
    "*a",
    "&a",
)
BOMB = "a0: &a0 [x]\n" + "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9))
BASE: dict[str, Any] = {"run_dir": "r", "steps": 1, "model": {"path": "m"}, "data": {"train": "t.jsonl"}}


@pytest.mark.parametrize("text", CORE_SCHEMA)
def test_a_plain_value_is_read_by_the_core_schema_of_yaml_1_2(text: str) -> None:
    expected = CORE_SCHEMA[text]
    for value in (parse_yaml(f"a: {text}")["a"], parse_yaml(f"- {text}")[0], parse_value(text)):
        assert (type(value), value) == (type(expected), expected)


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ("a: 1\nb: 2\na: 1", 3, "a"),
        ("a: 1\n\n# c\n'a': 2", 4, "a"),
        ("x:\n  y:\n    z: 1\n    w: 2\n    z: 1", 5, "x.y.z"),
        ("x: {y: [{z: 1, w: 2,\n z: 3}]}", 2, "x.y.0.z"),
        ("- {p: 1}\n- p: 1\n  p: 2", 3, "1.p"),
        ("s: {a: 1}\nt: 2\ns: {b: 1}", 3, "s"),
        ("b: &x {c: 1, c: 2}\nd: *x", 1, "b.c"),
    ],
)
def test_a_key_given_twice_is_refused_with_its_path_and_line(text: str, line: int, key: str) -> None:
    with pytest.raises(ValueError, match=rf"^line {line}: key '{key}' .*line \d+$"):
        parse_yaml(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: &b {c: 1}\nd: {<<: *b}", "line 2: key 'd.<<': merge keys are not read"),
        ("a: !!python/object:os.system x", "line 1: key 'a': tag "),
        ("a: !!timestamp 2024-01-01", "line 1: key 'a': tag "),
        ("a: !!set {x}", "line 1: key 'a': tag "),
        ("a: !!int 1:30", "line 1: key 'a': '1:30' is not of its tag !!int"),
        ("a: !!bool yes", "line 1: key 'a': 'yes' is not of its tag !!bool"),
        ("a: &x [1, *x]", "contains itself"),
        ("? [a]\n: b", "line 1: a key must be text"),
        ("a: 1\n---\nb: 2", "a single document"),
        ("a: " + "7" * 5000, "line 1: key 'a': a number of 5,000 digits is too long"),
        ("a: 1\nb: 'x\0y'", "line 2: U+0000 is not allowed in YAML"),
        ("a: 1\n\n\x1b[31m: 2", "line 3: U+001B is not allowed in YAML"),
        ("a: [\x7f]", "line 1: U+007F is not allowed in YAML"),
        ("\x9f", "line 1: U+009F is not allowed in YAML"),
        ("a: \ufffe", "line 1: U+FFFE is not allowed in YAML"),
        ('a: "\\U99999999"', "not YAML"),
        ('a: "\\U00110000"', "not YAML"),
        ("[" * 20_000, "nested too deeply"),
        ("{a: " * 20_000, "nested too deeply"),
        (BOMB, "more than 100,000 values"),
    ],
)  # fmt: skip
def test_values_that_would_need_a_guess_are_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_yaml(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_an_alias_stands_for_its_value() -> None:
    assert parse_yaml("a: &x {b: [1, yes]}\nc: *x\nd: [*x, *x]") == {
        "a": {"b": [1, "yes"]},
        "c": {"b": [1, "yes"]},
        "d": [{"b": [1, "yes"]}] * 2,
    }


@given(st.text(max_size=40))
def test_written_text_reads_back_here_and_with_yaml_1_1(text: str) -> None:
    written = dump_yaml({"a": text, "b": [text], "c": {"d": text}})
    assert parse_yaml(written) == {"a": text, "b": [text], "c": {"d": text}}
    if not any("\ud800" <= character <= "\udfff" for character in text):
        assert yaml.safe_load(written)["a"] == text


@pytest.mark.parametrize(
    "text", [*CORE_SCHEMA, *AWKWARD, "\u2028a", "a\n# b\n", "\ud800", "a\x85b", "\ufeffa", "\U0001f600"]
)
def test_text_that_looks_like_another_value_is_written_as_text(text: str) -> None:
    assert parse_yaml(dump_yaml({"a": text, text: 1})) == {"a": text, text: 1}


@given(JSON)
def test_json_is_read_as_json(value: Any) -> None:
    """This includes escaped surrogate pairs for one character, because flags pass their values as JSON."""
    assert parse_value(json.dumps([value])) == [value]


@pytest.mark.parametrize(
    "key", ["data.system_prompt", "data.prompt_column", "log.wandb_project", "rewards.refresh_command"]
)
@pytest.mark.parametrize("text", [*AWKWARD, *(text for text in CORE_SCHEMA if text not in ("null", ""))])
def test_set_keeps_the_text_of_a_key_that_is_text(key: str, text: str, tmp_path: Path) -> None:
    assert value_of(tmp_path, [*_NEEDED.get(key, ()), f"{key}={text}"], key) == text


@given(TEXTS.filter(lambda text: text.strip() != "null" and not any("\ud800" <= c <= "\udfff" for c in text)))
def test_any_text_of_set_is_kept(text: str) -> None:
    raw: dict[str, Any] = {**BASE, "data": {"train": "t"}}
    config.apply_override(raw, f"data.system_prompt={text}")
    assert config.validate(raw).data.system_prompt == text


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("run_dir=runs/a #1: b", "run_dir", Path("runs/a #1: b")),
        ("run_dir=null", "run_dir", Path("null")),
        ("data.prompt_column=null", "data.prompt_column", None),
        ("data.answer_column=null", "data.answer_column", None),
        ("data.train=a #1: b.jsonl", "data.train.0.path", "a #1: b.jsonl"),
        ("data.train=[a, 'b #c']", "data.train.1.path", "b #c"),
        ("data.heldout=x: y", "data.heldout.path", "x: y"),
        ("data.heldout_sets.a=x # y", "data.heldout_sets.a.path", "x # y"),
        ("teachers.m.path=a#b: c", "teachers.m.path", Path("a#b: c")),
        ("rollout.server_args.x=yes", "rollout.server_args.x", "yes"),
        ("rollout.server_args.x=a # b", "rollout.server_args.x", "a # b"),
        ("rollout.server_args.x=1e-6", "rollout.server_args.x", 1e-6),
        ("optimizer.lr=1e-6", "optimizer.lr", 1e-6),
        ("optimizer.clip_grad=2", "optimizer.clip_grad", 2.0),
        ("layout.dp=null", "layout.dp", None),
        ("optimizer.betas=[0.9, 0.99]", "optimizer.betas", (0.9, 0.99)),
        ("optimizer={lr: 1e-5}", "optimizer.lr", 1e-5),
        ("log.wandb=true", "log.wandb", True),
        ("log.profile=3", "log.profile", "3"),
    ],
)
def test_set_reads_text_as_text_and_other_values_as_yaml(tmp_path: Path, override: str, key: str, value: Any) -> None:
    needed = ("algorithm.distill_beta=1",) if override.startswith("teachers") else ("steps=9",)
    assert value_of(tmp_path, [*needed, override], key) == value


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("seed=1:30", "seed='1:30': must be a whole number; write"),
        ("seed=7 #8", "seed='7 #8': must be a whole number; write"),
        ("seed=7.0", "seed=7.0: must be a whole number; write"),
        ("seed=true", "seed=True: must be a whole number; write"),
        ("seed='7'", "seed=\"'7'\": must be a whole number; write"),
        ("optimizer.lr=yes", "optimizer.lr='yes': must be a number; write"),
        ("optimizer.lr=true", "optimizer.lr=True: must be a number; write"),
        ("optimizer.lr=1_000", "optimizer.lr='1_000': must be a number; write"),
        ("optimizer.betas=[true, 0.9]", "optimizer.betas.0=True: must be a number; write"),
        ("optimizer.betas=0.9", "optimizer.betas=0.9: must be a list; write"),
        ("algorithm.std_ddof=true", "algorithm.std_ddof=True: must be a whole number; write"),
        ("log.wandb=yes", "log.wandb='yes': must be true or false; write"),
        ("log.wandb=1", "log.wandb=1: must be true or false; write"),
        ("rollout.routing_replay=on", "rollout.routing_replay='on': must be true or false; write"),
        (
            "rewards.functions=[{name: accuracy, weight: yes}]",
            "rewards.functions.0.weight='yes': must be a number; write",
        ),
        ("rewards.functions=[{name: 5}]", "rewards.functions.0.name=5: must be text; put"),
        ("layout=[1]", "layout=[1]: "),
        ("run_dir=", "run_dir='': must be the name of a file or folder; give"),
        ("optimizer.betas=[0.9, 0.9] # x", "--set 'optimizer.betas=[0.9, 0.9] # x': "),
        ("rewards.functions=[{name: format, name: accuracy}]", "key '0.name' is given twice"),
        ("seed=" + "9" * 5000, "a number of 5,000 digits"),
    ],
)
def test_a_value_of_another_type_is_refused_in_one_line(tmp_path: Path, override: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        value_of(tmp_path, [override], "seed")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "line", ["seed: yes", "seed: 1:30", "seed: '7'", "log: {progress: no}", "optimizer: {lr: '1e-6'}"]
)
def test_numbers_and_booleans_of_a_file_are_not_text(line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be a (whole )?number; write|must be true or false; write"):
        value_of(tmp_path, [], "seed", dump_yaml(BASE) + line)


def test_a_section_given_twice_is_refused_with_key_and_line(tmp_path: Path) -> None:
    text = dump_yaml(BASE)
    says = rf"y\.yaml: line {text.count(chr(10)) + 1}: key 'data' is given twice, first in line \d; correct the file"
    with pytest.raises(ConfigError, match=says):
        value_of(tmp_path, [], "seed", text + "data: {shuffle: false}\n")


def value_of(folder: Path, overrides: list[str], key: str, text: str | None = None) -> Any:
    (folder / "y.yaml").write_text(text or dump_yaml(BASE), encoding="utf-8")
    value: Any = config.load(folder / "y.yaml", overrides)
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else value[int(part)] if part.isdigit() else getattr(value, part)
    return value


_NEEDED = {"rewards.refresh_command": ("algorithm.ref_model_sync_steps=1", "algorithm.kl_beta=0.1")}
