"""The command line: light imports until a command runs, one line for user errors, ranks by torchrun or its own
launcher.
"""

import os
import re
import subprocess
import sys
import types
import urllib.request
from pathlib import Path

import httpx
import pytest
import requests
import yaml

from grpo_mega import cli
from grpo_mega.cli.checks import Violations
from grpo_mega.cli.checks.layout import world_size_problems
from grpo_mega.config import Config, LayoutConfig
from grpo_mega.distributed.launch import rank_environments
from grpo_mega.errors import RewardError
from tests.helpers.commands import HEAVY, imported, run_command
from tests.helpers.http_servers import serving


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """Return a config whose model and data exist."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    raw = {
        "run_dir": str(tmp_path / "run"),
        "steps": 1,
        "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
        "data": {"train": str(tmp_path / "train.jsonl")},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


@pytest.fixture
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in rank_environments({}, world_size=1)[0]:
        monkeypatch.setenv(name, "")  # so that pytest restores variables set by the code
        monkeypatch.delenv(name)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Replace train.run by a function that only records configs. Return the recorded configs."""
    configs: list[Config] = []
    module = types.ModuleType("grpo_mega.train")
    module.run = lambda config, hooks: configs.append(config)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "grpo_mega.train", module)
    monkeypatch.setattr("grpo_mega.train", module, raising=False)
    monkeypatch.setattr("grpo_mega.cli.planner.this_machine.find_all", lambda config, machine: Violations())
    return configs


def test_help_imports_nothing_heavy() -> None:
    for arguments in (["--help"], ["train", "--help"], ["sample", "--help"], ["convert", "--help"]):
        done = run_command(arguments)
        assert done.returncode == 0
        assert not imported(done) & (HEAVY | {"pydantic", "yaml"})


PROXY_CASES = [
    {"http_proxy": "PROXY"},
    {"HTTP_PROXY": "PROXY", "HTTPS_PROXY": "PROXY", "NO_PROXY": ".inside.example"},
    {"all_proxy": "PROXY", "no_proxy": "inside.example, 10.0.0.1", "NO_PROXY": "other.example"},
    {"http_proxy": "PROXY", "no_proxy": "127.0.0.1"},
    {"http_proxy": "PROXY", "no_proxy": "*"},
]


@pytest.mark.parametrize("given", PROXY_CASES)
def test_clients_reach_this_machine_directly_and_others_by_proxy(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """httpx is OpenAI's client. curl has the rule of most programs outside Python."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    with serving(lambda path, _: (200, {"by": "proxy" if "://" in path else "nobody"})) as url:
        for name, value in given.items():
            monkeypatch.setenv(name, value.replace("PROXY", url))
        assert cli.main(["config", "steps"]) == 0
        port = url.rpartition(":")[2]
        for host in ("127.0.0.1", "localhost"):
            assert httpx.get(f"http://{host}:{port}/x").json() == {"by": "nobody"}
            assert requests.utils.should_bypass_proxies(f"http://{host}/", None)
            assert urllib.request.proxy_bypass(host)
        assert requests.utils.should_bypass_proxies("http://[::1]:80/", None)
        if given.get("no_proxy") != "*":
            assert httpx.get("http://192.0.2.1/x").json() == {"by": "proxy"}
            assert not urllib.request.proxy_bypass("192.0.2.1")
    for name, value in given.items():
        if name.lower() == "no_proxy":
            assert {one.strip() for one in os.environ[name].split(",")} >= {one.strip() for one in value.split(",")}


@pytest.mark.parametrize("command", ["train", "eval", "check --layouts tp=2"])
def test_a_config_error_is_found_without_importing_anything_heavy(config_file: Path, command: str) -> None:
    name, *more = command.split()
    done = run_command([name, str(config_file), *more, "--set", "steps=0"])
    assert done.returncode == 2
    assert not imported(done) & HEAVY


def test_a_user_error_is_one_line_with_exit_code_2(
    config_file: Path, no_rank: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", str(config_file), "--set", "optimizer.learning_rate=1"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("grpo-mega: error: unknown key 'optimizer.learning_rate'; ")
    assert output.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("trian c.yaml", "'trian' is not a command; did you mean train? use one of init, sft, train, "),
        ("rank", "rank: must be started by a launcher; use train, eval, sample or check"),
        ("train {config} --setp steps=3", "unknown argument --setp; did you mean --set? see --help"),
        ("train {config} --unknown", "unknown argument --unknown; see --help"),
        ("train {config} --set steps 3", "unknown argument 3; write --set steps=3"),
        ("train {config} steps=3", "unknown argument steps=3; write --set steps=3"),
        ("eval {config} --optimizer.lr=1", "unknown argument --optimizer.lr; write --set optimizer.lr=VALUE"),
    ],
)
def test_an_unknown_argument_is_answered_with_the_likely_one(
    config_file: Path, no_rank: None, arguments: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = arguments.split()[0]
    try:
        code = cli.main(arguments.format(config=config_file).split())
    except SystemExit as end:  # argparse, after the command's usage
        code = end.code
    output = capsys.readouterr()
    usage, _, last = output.err.rstrip("\n").rpartition("\n")
    assert (code, output.out) == (2, "") and problem in last and "'rank'" not in output.err
    assert "unknown argument" not in problem or usage.startswith(f"usage: grpo-mega {command} [-h]")


@pytest.mark.parametrize(
    ("command", "takes"),
    [
        ("train", "a YAML file; see examples/"),
        ("check --layouts tp=2", "a YAML file; see examples/"),
        ("plan", "a YAML file; see examples/"),
        ("eval", "a run's folder, a config file, or a model's folder"),
        ("sample", "a run's folder, a config file, or a model's folder"),
        ("export out", "the run_dir of a run's config"),
        ("report", "the run_dir of a run's config"),
    ],
)
def test_a_missing_path_is_answered_with_what_the_command_takes(command: str, takes: str) -> None:
    name, *more = command.split()
    done = run_command([name, "nowhere", *more])
    problem = f"grpo-mega: error: nowhere: there is no such file or folder; {name} takes {takes}"
    assert done.returncode == 2 and done.stderr.startswith(problem) and done.stderr.count("\n") == 1
    assert not imported(done) & (HEAVY | {"pydantic", "yaml"})


def test_a_name_of_the_hub_is_answered_with_how_to_download_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sample", "Qwen/Qwen2.5-0.5B"]) == 2
    assert "`hf download Qwen/Qwen2.5-0.5B --local-dir FOLDER`" in capsys.readouterr().err


def test_a_missing_model_is_an_error_before_any_process_starts(
    config_file: Path, no_rank: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_mega.distributed.launch.run_ranks", None)
    assert cli.main(["train", str(config_file), "--set", "model.path=/none", "--set", "layout.tp=2"]) == 2
    assert "model.path=/none" in capsys.readouterr().err


def test_one_rank_runs_in_this_process(
    config_file: Path, no_rank: None, monkeypatch: pytest.MonkeyPatch, trained: list[Config]
) -> None:
    environments: list[dict[str, str]] = []
    program = sys.modules["grpo_mega.train"]
    monkeypatch.setattr(program, "run", lambda config, hooks: environments.append(dict(os.environ)))
    assert cli.main(["train", str(config_file), "--set", "steps=3"]) == 0
    (environment,) = environments
    assert (environment["RANK"], environment["WORLD_SIZE"]) == ("0", "1")
    assert environment["MASTER_PORT"].isdecimal() and "RANK" not in os.environ


def test_several_ranks_are_launched_with_the_same_config(
    config_file: Path, no_rank: None, trained: list[Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Run the command line that the launcher starts, as rank 3."""
    launched: list[tuple[int, Path]] = []

    def run_ranks(command: list[str], world_size: int, log_dir: Path, stdin: int) -> int:
        launched.append((world_size, log_dir))
        assert command[1:3] == ["-m", "grpo_mega.cli"]
        with monkeypatch.context() as rank:
            rank.setattr("grpo_mega.distributed.launch.REQUEST", Path(f"/proc/self/fd/{stdin}"))
            rank.setenv("RANK", "3")
            rank.setenv("WORLD_SIZE", "6")
            assert cli.main(command[3:]) == 0
        return 5

    monkeypatch.setattr("grpo_mega.distributed.launch.run_ranks", run_ranks)
    assert cli.main(["train", str(config_file), "--set", "layout.tp=2", "--set", "layout.dp=3"]) == 5
    assert launched == [(6, tmp_path / "run/logs")]
    assert [config.layout for config in trained] == [LayoutConfig(tp=2, dp=3)]


def test_under_torchrun_the_command_is_one_rank(
    config_file: Path, no_rank: None, trained: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert cli.main(["train", str(config_file), "--set", "layout.tp=2"]) == 0
    assert len(trained) == 1


def test_an_error_of_another_rank_names_the_rank(
    config_file: Path,
    no_rank: None,
    trained: list[Config],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(config: Config, hooks: object) -> None:
        raise RewardError("no sample can be scored")

    monkeypatch.setattr(sys.modules["grpo_mega.train"], "run", fail)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["train", str(config_file), "--set", "layout.tp=2"]) == 2
    assert capsys.readouterr().err.startswith("grpo-mega: error: rank 1: ")


@pytest.mark.parametrize(
    ("world_size", "layout", "problem"),
    [
        (
            "6",
            {"tp": 2, "cp": 2},
            r"WORLD_SIZE=6 is not a multiple of layout\.tp=2 times layout\.pp=1 times layout\.cp=2; start",
        ),
        ("2", {"cp": 2, "ep": 4}, r"WORLD_SIZE=2 .* times layout\.cp=2 times 2 for layout\.ep=4; start 4 processes"),
        ("6", {"cp": 2, "dp": 2}, r"WORLD_SIZE=6 contradicts layout\.tp=1, pp=1, cp=2, dp=2; start 4 processes"),
        (
            "6",
            {"tp": 2, "pp": 2},
            r"WORLD_SIZE=6 is not a multiple of layout\.tp=2 times layout\.pp=2; start 4 or 8 proc",
        ),
        ("2", {"tp": 4}, r"WORLD_SIZE=2 is not a multiple .*; start 4 processes, or change the layout"),
        ("8", {"tp": 2, "dp": 2}, r"WORLD_SIZE=8 contradicts layout\.tp=2, pp=1, dp=2; start 4 processes, or leave"),
        (
            "5",
            {"tp": 2, "engine_ranks": 2},
            r"WORLD_SIZE=5 less layout\.engine_ranks=2 is not .* start 4 or 6 processes",
        ),
        ("2", {"tp": 2, "engine_ranks": 2}, r"WORLD_SIZE=2 less layout\.engine_ranks=2 is not .* start 4 processes"),
        ("4", {"dp": 3, "engine_ranks": 2}, r"WORLD_SIZE=4 contradicts .*dp=3, engine_ranks=2; start 5 processes"),
    ],
)
def test_a_world_size_that_does_not_fit_the_layout_is_an_error(
    world_size: str, layout: dict[str, int], problem: str
) -> None:
    (found,) = world_size_problems(LayoutConfig(**layout), int(world_size))
    assert re.search(problem, found)


def test_world_sizes_that_fit_are_accepted() -> None:
    for world_size, layout in ((8, {}), (8, {"dp": 2}), (11, {"engine_ranks": 3})):
        assert not list(world_size_problems(LayoutConfig(tp=2, pp=2, **layout), world_size))


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_without_a_world_size_is_an_error(
    config_file: Path, no_rank: None, rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    assert cli.main(["train", str(config_file)]) == 2
    assert f"RANK={rank} is set but WORLD_SIZE=''; " in capsys.readouterr().err


def test_torchruns_world_size_is_one_of_the_rules_that_are_listed(
    config_file: Path, no_rank: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert cli.main(["train", str(config_file), "--set", "layout.tp=2", "--set", "data.train=/none.jsonl"]) == 2
    lines = capsys.readouterr().err
    assert "WORLD_SIZE=3 " in lines and "layout.tp=2" in lines and "/none.jsonl" in lines


def test_report_writes_a_page_into_the_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.5}\n')
    assert cli.main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/report.html\n"
    assert "reward/mean" in (tmp_path / "report.html").read_text()


def test_the_report_of_a_run_without_steps_mentions_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("steps: 3\n")
    assert cli.main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/report.html\n"
    assert "no step" in (tmp_path / "report.html").read_text()


def test_the_report_of_a_folder_without_metrics_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "name the run_dir" in capsys.readouterr().err


def test_a_closed_output_pipe_is_no_error(config_file: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "grpo_mega.cli", "plan", str(config_file)]
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert result.stderr == ""


LONG = "x" * 5000


@pytest.mark.parametrize(
    ("arguments", "start", "end"),
    [
        (["train", "{config}", "--set", f"{LONG}=1"], "unknown key 'xxx", "known keys here: "),
        (["train", "{config}", "--set", f"steps={'9' * 5000}"], "--set 'steps=999", "; correct it"),
        (["train", "{config}", "--set", "rewards=[\x01]"], "--set 'rewards=[\\x01]'", "U+0001 is not allowed"),
        (["train", "{config}", "--set", f"model.path={LONG}"], "xxx", ": must be a shorter path; name another"),
        (["train", "{config}", "--set", "data.heldout=a\0b"], "data.heldout.path=", "; give one"),
        (["train", LONG], "xxx", ": must be a shorter path; name another"),
        (["train", "{config}", f"--{LONG}"], "unknown argument --xxx", "xxx; see --help"),
        (["plan", "{config}", "--gpu", LONG], "argument --gpu: invalid choice: 'xxx", ")"),
        ([LONG], "'xxx", "report, config"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value)[:40],
)  # fmt: skip
def test_an_error_about_long_input_keeps_its_start_and_its_remedy(
    config_file: Path, no_rank: None, arguments: list[str], start: str, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.replace("{config}", str(config_file)) for word in arguments]
    if words[-1].startswith("--x") or "--gpu" in words:  # argparse's own errors
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert ended.value.code == 2
    else:
        assert cli.main(words) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    text = line.partition("error: ")[2]
    assert text.startswith(start) and end in text[-300:] and len(text) <= 600, line
