"""~ in a path is the user's home: in all paths of a config, on all command lines, and in flags of TRL."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Any

import pytest

from grpo_mega import config as configs
from grpo_mega.cli.commands.options import (
    ConvertOptions,
    EvalOptions,
    ExportOptions,
    PlanOptions,
    RunOptions,
    add_options,
    read_options,
)
from grpo_mega.cli.commands.trl import find_data
from grpo_mega.config import Config
from grpo_mega.config.base import FilePath, Section
from tools.benchmarks.gpu.models import MODELS
from tools.benchmarks.weight_sync.__main__ import shape_of

RAW: dict[str, Any] = {
    "run_dir": "~/run",
    "steps": 1,
    "model": {"path": "~/models/a~b"},
    "teachers": {"main": {"path": "~/teacher"}},
    "algorithm": {"distill_beta": 1.0},
    "data": {
        "train": ["~/a.jsonl", {"path": "~/b@train"}, "hub:owner/~name", "./~/c.jsonl"],
        "heldout_sets": {"x": "~/x.jsonl"},
        "pass_rates": "~/rates.jsonl",
        "max_pass_rate": 0.9,
    },
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_the_tilde_is_the_home_in_every_path_of_a_config(home: Path) -> None:
    config = configs.validate(RAW)
    assert (config.run_dir, config.model.path) == (home / "run", home / "models/a~b")
    assert config.teachers["main"].path == home / "teacher"
    assert config.data.pass_rates == home / "rates.jsonl"
    train = [f"{home}/a.jsonl", f"{home}/b@train", "hub:owner/~name", "./~/c.jsonl"]
    assert [source.path for source in config.data.train] == train
    assert config.data.heldout_sets["x"].path == f"{home}/x.jsonl"
    assert "~/" not in configs.dump(config).replace("./~/", "")


def path_keys(section: type[Section]) -> list[str]:
    """Return the path keys below a section that do not expand ~."""
    found: list[str] = []
    for name, field in section.model_fields.items():
        pending = [field.annotation]
        while pending:
            one = pending.pop()
            if one is Path and not field.metadata and FilePath not in typing.get_args(field.annotation):
                found.append(f"{section.__name__}.{name}")
            elif isinstance(one, type) and not isinstance(one, types.GenericAlias) and issubclass(one, Section):
                found += path_keys(one)
            elif one is not FilePath:
                pending += typing.get_args(one)
    return found


def test_every_path_of_the_config_expands_the_tilde() -> None:
    assert path_keys(Config) == []


def test_the_tilde_is_the_home_on_command_lines(home: Path) -> None:
    for options, arguments in (
        (EvalOptions, ["~/run", "--model", "~/m", "--out", "~/o"]),
        (PlanOptions, ["~/c.yaml"]),
        (ExportOptions, ["~/run", "~/out"]),
        (RunOptions, ["~/run"]),
        (ConvertOptions, ["~/hf", "~/out", "--config", "~/side"]),
    ):
        parser = argparse.ArgumentParser()
        add_options(parser, options)
        read = read_options(options, parser.parse_args(arguments))
        paths = [value for value in vars(read).values() if isinstance(value, Path)]
        assert len(paths) == sum("~" in argument for argument in arguments)
        assert all(path.parent == home for path in paths)


def test_every_script_expands_the_tilde_in_paths() -> None:
    root = Path(__file__).resolve().parents[1]
    num_paths = 0
    for path in (path for folder in ("slurm", "tools", "examples") for path in sorted((root / folder).rglob("*.py"))):
        text = path.read_text(encoding="utf-8")
        num_paths += text.count("type=user_path")
        assert not re.search(r"type=(?:pathlib\.)?Path\b", text), path
    assert num_paths > 10


def test_the_tilde_is_the_home_in_scripts(home: Path) -> None:
    save_json(home / "model" / "config.json", MODELS["llama-160m"])
    assert shape_of("~/model/config.json") == shape_of("llama-160m")
    save_json(home / "checks" / "n1.json", {"problems": ["\u2028hot"], "fingerprint": {}})
    script = Path(__file__).resolve().parents[1] / "tools" / "check_node.py"
    done = subprocess.run([sys.executable, script, "--compare", "~/checks", "n1"], capture_output=True, text=True)
    assert "node n1: \u2028hot" in done.stderr
    subprocess.run([sys.executable, script, "--out", "~/checks"], capture_output=True)
    assert len(list((home / "checks").iterdir())) == 2


def save_json(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def test_the_tilde_is_the_home_in_data_sets(home: Path) -> None:
    (home / "set").mkdir()
    (home / "set.jsonl").write_text("{}\n")
    assert find_data("~/set.jsonl", None, None) == f"{home}/set.jsonl"
    assert find_data("~/set", None, "test") == f"{home}/set@test"
