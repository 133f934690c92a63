"""The sets of package versions: the set of an installation, and the commands that refuse other versions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from grpo_mega import cli
from grpo_mega.distributed.launch import rank_environments
from grpo_mega.distributed.versions import SETS, find_set, installed_set
from tests.helpers.versions import fake_packages
from tools.benchmarks import kills

ROOT = Path(__file__).resolve().parents[2]
ONE = {"megatron-core": "0.16.1", "torch": "2.13.0", "transformers": "5.12.1", "sglang": "0.5.21"}
TWO = {"megatron-core": "0.19.2", "torch": "2.14.1", "transformers": "5.19.0", "sglang": "0.5.23"}
REASON = "SGLang's kernels and its Rust radix tree load on a torch that they were not built for and misread tensors"


@pytest.mark.parametrize(
    ("versions", "name", "others"),
    [
        (ONE, "one", ""),
        (TWO, "two", ""),
        (ONE | {"torch": "2.13.0+cpu"}, "one", ""),
        (TWO | {"torch": "2.14.1+cu130"}, "two", ""),
        (ONE | {"torch": "2.14.0"}, "one", "torch"),
        (ONE | {"torch": "2.14.1"}, "one", "torch"),
        (ONE | {"torch": "2.13.0rc1"}, "one", "torch"),
        (ONE | {"torch": "2.13.0.post1"}, "one", "torch"),
        (TWO | {"torch": "2.14.1.dev20261101+cpu"}, "two", "torch"),
        (TWO | {"torch": "2.14.1a0+git1234567.nv26.10"}, "two", "torch"),
        (TWO | {"transformers": "5.24.0", "sglang": "0.5.22"}, "two", "transformers sglang"),
        (ONE | {"transformer-engine": "2.9.0"}, "one", ""),
        (ONE | {"transformer-engine": "2.11.0+cu13"}, "one", ""),
        (ONE | {"transformer-engine": "2.12.0"}, "one", "transformer-engine"),
        (ONE | {"transformer-engine": "2.12.0rc1"}, "one", "transformer-engine"),
        (ONE | {"transformer-engine": "2.10.0.dev1"}, "one", "transformer-engine"),
        (ONE | {"transformer-engine": "2.20.2"}, "one", "transformer-engine"),
        (TWO | {"transformer-engine": "2.20.2"}, "two", ""),
        (TWO | {"transformer-engine": "2.16.0"}, "two", "transformer-engine"),
        (TWO | {"transformer-engine": "2.21"}, "two", "transformer-engine"),
        # The set is that of megatron-core, even if everything else is of the other set.
        (TWO | {"megatron-core": "0.16.1"}, "one", "torch transformers sglang"),
        (TWO | {"megatron-core": "0.18.2"}, "two", "megatron-core"),
        (ONE | {"megatron-core": "0.15.3", "torch": "2.12.0"}, "one", "megatron-core torch"),
        # SGLang and Transformer Engine need not be there. pip installs the others.
        ({"megatron-core": "0.19.2", "torch": "2.14.1", "transformers": "5.19.0"}, "two", ""),
        ({"torch": "2.14.1", "transformers": "5.19.0"}, "two", ""),
    ],
)
def test_a_set_is_found_by_megatron_core_or_else_by_most_packages(
    versions: dict[str, str], name: str, others: str
) -> None:
    found, unmet = find_set(versions)
    assert (found, list(unmet)) == (name, others.split())


def test_the_installed_packages_are_a_tested_set() -> None:
    """A failure means that the tests run in an environment that no user is allowed to train in."""
    found = installed_set()
    assert found.record in SETS and not found.problems and not found.notes
    assert found.versions["torch"] == version("torch") and "math-verify" in found.versions


@pytest.mark.parametrize("value", ["1", "0", "true", ""])
def test_only_the_value_1_allows_other_versions(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = installed_set().record
    monkeypatch.syspath_prepend(fake_packages(tmp_path, {"torch": "2.12.5+cu128", "sglang": "0.5.20"}))
    monkeypatch.setenv("GRPO_MEGA_UNTESTED_VERSIONS", value)
    found = installed_set()
    assert found.record == f"{name} with torch=2.12.5, sglang=0.5.20"
    assert [bool(found.problems), len(found.notes)] == ([False, 2] if value == "1" else [True, 0])
    if value == "1":
        assert all("not tested" in note for note in found.notes)
        assert found.notes[0].startswith("torch=2.12.5+cu128: ") and found.notes[1].startswith("sglang=0.5.20: ")


def test_a_checkpoint_of_the_same_set_needs_no_line() -> None:
    ours = installed_set()
    assert ours.change(ours.record) == []
    [line] = ours.change("nine")
    assert "set nine" in line and f"set {ours.record}; " in line


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config that would train, with its run_dir beside it."""
    folder = tmp_path_factory.mktemp("inputs")
    config = kills.write_inputs(folder, "tp=2")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"run_dir": str(folder / "run")}))
    return config


def test_a_start_with_another_torch_is_refused_in_one_line(inputs: Path, tmp_path: Path) -> None:
    fakes = fake_packages(tmp_path, {"torch": "2.12.5", "megatron-core": "0.16.1", "transformers": "5.12.1"})
    fake_packages(tmp_path, {"sglang": "0.5.23"})
    environment = os.environ | {"PYTHONPATH": f"{fakes}:{ROOT}"}
    command = [sys.executable, "-m", "grpo_mega.cli", "train", str(inputs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "", done
    [line] = [line for line in done.stderr.splitlines() if "note: " not in line]
    assert line.startswith("grpo-mega: error: torch=2.12.5, sglang=0.5.23: must be torch==2.13.0, sglang==0.5.21 ")
    assert REASON in line and line.endswith("GRPO_MEGA_UNTESTED_VERSIONS=1")
    assert not (inputs.parent / "run").exists()


@pytest.mark.parametrize(
    "command",
    [
        "train CONFIG",
        "eval CONFIG",
        "check CONFIG --layouts pp=2",
        "sample CONFIG --prompt Hi",
        "plan CONFIG --gpu cpu",
    ],
)
def test_every_command_with_ranks_refuses_or_names_the_difference(
    command: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in rank_environments({}, world_size=1)[0]:
        monkeypatch.setenv(name, "")  # so that pytest restores variables set by the code
        monkeypatch.delenv(name)
    for function in ("train.launch", "eval.launch", "check.launch_processes"):
        monkeypatch.setattr(f"grpo_mega.cli.commands.{function}", lambda *request: 3)
    monkeypatch.syspath_prepend(fake_packages(tmp_path, {"transformers": "5.13.0"}))
    arguments = [*command.replace("CONFIG", str(inputs)).split(), "--set", f"run_dir={tmp_path / 'run'}"]
    assert cli.main(arguments) == 2
    output = capfd.readouterr()
    text = " ".join((output.out + output.err).split())  # plan wraps its lines
    assert text.count("transformers=5.13.0: must be transformers==") == 1 and "=1" in text, text
    if command.startswith("plan"):
        return
    monkeypatch.setenv("GRPO_MEGA_UNTESTED_VERSIONS", "1")
    cli.main(arguments)
    output = capfd.readouterr()
    assert output.err.count("note: transformers=5.13.0: is not tested; set ") == 1, output
    assert "must be" not in output.err


def test_a_plan_for_other_machines_only_notes_versions_here(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(fake_packages(tmp_path, {"transformers": "5.13.0"}))
    assert cli.main(["plan", str(inputs), "--gpu", "h100", "--set", "device=auto"]) == 0
    assert "transformers=5.13.0: must" in " ".join(capfd.readouterr().out.split())


def test_outputs_of_megatron_need_a_tested_set(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(fake_packages(tmp_path, {"torch": "2.12.5"}))
    model = str(inputs.parent / "model")
    assert cli.main(["verify", model, model]) == 2
    assert "error: torch=2.12.5: must be torch==" in capfd.readouterr().err
    assert cli.main(["verify", model, model, "--no-logits"]) == 2
    assert "not a checkpoint" in capfd.readouterr().err  # the folder is read
