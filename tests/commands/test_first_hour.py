"""A new user's first hour: every command finds a mistake before it starts anything, and is never silent."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from grpo_mega import cli
from grpo_mega.distributed.launch import rank_environments
from tests.helpers.commands import imported, run_command
from tests.helpers.models import make_model, save_checkpoint
from tools.benchmarks import kills

GOODS = "'mine.goods': mine has no function goods; did you mean good? check the name"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    kills.write_inputs(folder, "tp=1")
    return folder


@pytest.fixture
def folder(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: config.json, a model without weights, data, and reward functions in mine.py."""
    shutil.copytree(inputs, tmp_path, dirs_exist_ok=True)
    text = (tmp_path / "config.json").read_text().replace(str(inputs), str(tmp_path))
    config = json.loads(text) | {"run_dir": str(tmp_path / "run")}
    config["rewards"]["functions"] = [{"name": "mine.good"}]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text("def good(prompt, response, answer, extras):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    for name in rank_environments({}, world_size=1)[0]:
        monkeypatch.setenv(name, "")  # so that pytest restores variables set by the code
        monkeypatch.delenv(name)
    monkeypatch.setattr("grpo_mega.distributed.launch.run_ranks", None)  # no rank is ever started
    monkeypatch.setattr("grpo_mega.cli.commands.train.launch", lambda *request: 2)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "function", "problem"),
    [
        *((command, "{name: mine.goods}", GOODS) for command in ("train", "eval", "check --layouts pp=2", "plan")),
        ("train", "{name: needs.f}", "importing needs failed with ModuleNotFoundError: No module named 'nowhere'; "),
        ("train", "{name: mine.good, options: {scale: 2}}", "'mine.good' has no option 'scale'; it takes none"),
    ],
)
def test_every_command_finds_a_reward_function_that_does_not_work(
    folder: Path, command: str, function: str, problem: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "needs.py").write_text("import nowhere\nf = print\n")
    name, *more = command.split()
    assert cli.main([name, "config.json", *more, "--set", f"rewards.functions=[{function}]"]) == 2
    output = capfd.readouterr()
    lines = [line for line in (output.out + output.err).splitlines() if problem in line]
    assert len(lines) == 1 and "reward function '" in lines[0], output
    assert "Traceback" not in output.err and "registry.py" not in output.err


@pytest.mark.parametrize("command", ["train", "plan", "plan --gpu cpu"])
def test_weights_that_a_random_start_ignores_are_a_note(
    folder: Path, command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    name, *more = command.split()
    for has_weights in (False, True):
        cli.main([name, "config.json", *more])
        output = capfd.readouterr()
        note = f"model.init=random: the weights in {folder / 'model'} are not read, and training starts from random"
        assert " ".join((output.out + output.err).split()).count(note) == has_weights, output  # plan wraps its notes
        (folder / "model/model.safetensors").touch()


def test_a_model_that_a_server_on_a_cpu_pads_is_found_by_every_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    model = json.loads((folder / "model/config.json").read_text())
    (folder / "model/config.json").write_text(json.dumps(model | {"intermediate_size": 48}))
    for command in (
        "train config.json",
        "eval config.json",
        "sample config.json --prompt Hi",
        "plan config.json --gpu cpu",
    ):
        assert cli.main([*command.split(), "--set", "rollout.engine=sglang"]) == 2
        output = capfd.readouterr()
        assert " ".join((output.out + output.err).split()).count("SGLang pads an MLP of 48 rows on a CPU") == 1, command


@pytest.mark.parametrize(
    ("layouts", "problems"),
    [
        ("tp:2", ["--layouts tp:2: 'tp:2' must be like tp=2; write layouts like \"tp=2 pp=2 tp=2,pp=2\""]),
        ("2 dp=2,", ["--layouts 2: '2' must be like tp=2; ", "--layouts dp=2,: '' must be like tp=2; "]),
        (" ", ["--layouts=' ': must name a layout; write it like "]),
        ("tpp=2", ["unknown key 'layout.tpp'; did you mean 'tp'?"]),
        ("tp=two dp=2", ["layout.tp='two': must be a whole number; "]),
    ],
)
def test_a_wrong_layout_of_check_is_named_with_its_flag(
    folder: Path, layouts: str, problems: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", "config.json", "--layouts", layouts]) == 2
    output = capfd.readouterr()
    lines = [line for line in output.err.splitlines() if "note: " not in line]
    assert output.out == "" and len(lines) == len(problems)
    assert all(f"grpo-mega: error: {problem}" in line for line, problem in zip(lines, problems, strict=True)), lines


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("convert model taken", "taken exists; remove it or name another output"),
        ("convert model none/out", "none, the parent of out, is not a folder; make it or name another output"),
        ("convert nowhere out", "nowhere is not a folder; name the folder of a checkpoint"),
        ("verify model nowhere", "model is not a checkpoint: "),
        ("export run taken", "taken exists; name a folder that does not"),
    ],
)
def test_a_missing_or_taken_folder_is_found_before_the_imports(folder: Path, command: str, problem: str) -> None:
    (folder / "taken").mkdir()
    (folder / "taken/file").touch()
    (folder / "run").mkdir()
    done = run_command(command.split())
    assert done.returncode == 2 and done.stderr.startswith(f"grpo-mega: error: {problem}"), done.stderr
    assert not imported(done) & {"torch", "megatron", "transformers"} and len(done.stdout.splitlines()) == 1


@pytest.mark.full
def test_verify_names_each_part_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A part that takes longer than a second prints its line. Here every part does."""
    monkeypatch.setattr("grpo_mega.tracking.progress.SECONDS_OF_SILENCE", 0.0)
    save_checkpoint(make_model("llama"), tmp_path / "a")
    capfd.readouterr()
    assert cli.main(["verify", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    lines = capfd.readouterr().out.splitlines()
    parts = [
        "comparing configs and tensors",
        "importing torch and Megatron-core to run both models",
        f"computing the outputs of A, {tmp_path / 'a'}",
        f"computing the outputs of B, {tmp_path / 'a'}",
        "the same",
    ]
    assert [line for line in lines if line in parts] == parts, lines
