"""Plans of known models without their files: table fields compared with transformers, and the command in a fresh
clone.
"""

from __future__ import annotations

import json
import socket
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_mega import cli
from grpo_mega.cli.checks.model import KNOWN_MODELS, find_known_model
from grpo_mega.weights.architecture import shape_of
from grpo_mega.weights.families import family_of

ROOT = Path(__file__).resolve().parents[2]
PARAMETERS = {  # number of parameters stated on the hub
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.1-70b": 70_553_706_496,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
}


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a working folder without models and data, on a machine without a network."""
    (tmp_path / "slurm").symlink_to(ROOT / "slurm")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)

    def refuse(*_: Any) -> None:
        raise AssertionError("a plan must not use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    return tmp_path


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_known_model_has_its_published_number_of_parameters(name: str) -> None:
    fields = dict(KNOWN_MODELS[name].fields)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    assert theirs.num_parameters() == PARAMETERS[name]
    shape = shape_of(fields)
    assert sum(map(prod, family_of(shape.model_type).hf_tensors(shape).values())) == PARAMETERS[name]
    assert theirs.__class__.__name__ == fields["architectures"][0]


def test_every_known_model_is_checked() -> None:
    assert set(PARAMETERS) == set(KNOWN_MODELS)


def test_a_folder_named_like_a_known_model_stands_for_that_model() -> None:
    for folder in ("models/Meta-Llama-3-70B-Instruct", "/x/llama-3-70b", "META-LLAMA-3-70B-INSTRUCT"):
        assert find_known_model(Path(folder).name) is KNOWN_MODELS["llama-3-70b"]
    for folder in ("models/Meta-Llama-3.1-70B-Instruct", "llama-3-70b-mine", "runs/tiny/model", "."):
        assert find_known_model(Path(folder).name) is None


@pytest.mark.parametrize(
    ("config", "source"),
    [
        ("slurm/llama3_70b.yaml", "meta-llama/Meta-Llama-3-70B-Instruct"),
        ("slurm/llama3_70b_bf16.yaml", "meta-llama/Meta-Llama-3-70B-Instruct"),
        ("slurm/llama3_70b_32k.yaml", "meta-llama/Llama-3.1-70B-Instruct"),
        ("slurm/qwen2.5_72b.yaml", "Qwen/Qwen2.5-72B-Instruct"),
        ("examples/qwen2.5-1.5b.yaml", "Qwen/Qwen2.5-1.5B-Instruct"),
        ("examples/qwen3-8b.yaml", "Qwen/Qwen3-8B"),
        ("examples/qwen3-8b-32k.yaml", "Qwen/Qwen3-8B"),
        ("examples/qwen3-8b-lora.yaml", "Qwen/Qwen3-8B"),
    ],
)
def test_the_recipes_are_planned_in_a_fresh_clone(
    config: str, source: str, clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", config]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"is not here: planned with the fields of {source}'s config.json" in said


def test_a_named_model_replaces_the_model_of_the_config(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = KNOWN_MODELS["qwen3-30b-a3b"]
    (clone / "own.json").write_text(json.dumps(dict(known.fields)))
    plans = []
    for choice in (["--model", "qwen3-30b-a3b"], ["--model", known.source], ["--model-config", "own.json"]):
        assert cli.main(["plan", "slurm/llama3_70b_bf16.yaml", "--json", *choice]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[0] == plans[1] == plans[2]
    assert not any("is not here" in note for note in plans[0]["notes"])


def test_an_existing_model_is_planned_even_if_its_folder_has_a_known_name(
    clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = clone / "models/Meta-Llama-3-70B-Instruct"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(KNOWN_MODELS["llama-3-70b"].fields | {"num_hidden_layers": 160}))
    assert cli.main(["plan", "slurm/llama3_70b.yaml"]) == 1
    said = capsys.readouterr().out
    assert "llama, 139.0B parameters" in said and "is not here" not in said
    assert cli.main(["plan", "slurm/llama3_70b.yaml", "--model", "llama-3-70b"]) == 0
    assert "llama, 70.6B parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--model", "gpt-2"], "--model gpt-2: must be one of llama-3-70b, llama-3.1-405b, "),
        (
            ["--model", "qwen3-8b", "--model-config", "c.json"],
            "--model qwen3-8b and --model-config c.json name two models; ",
        ),
        (["--set", "model.path=models/mine"], "or plan with --model NAME (llama-3-70b, llama-3.1-405b, "),
    ],
)
def test_an_unknown_model_is_reported_with_the_known_models(
    arguments: list[str], line: str, clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "slurm/llama3_70b_bf16.yaml", *arguments]) == 2
    output = capsys.readouterr()
    assert line in " ".join((output.out + output.err).split())
