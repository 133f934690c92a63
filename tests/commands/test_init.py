"""`grpo-mega init`: a first config for a model and a dataset, with the reason for every value."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from grpo_mega import cli
from grpo_mega import config as configs
from grpo_mega.cli.checks.machine import card_of
from grpo_mega.cli.checks.model import KNOWN_MODELS, model_of
from grpo_mega.cli.commands.init import DataTokens, Setting, Target, choose
from grpo_mega.cli.planner.this_machine import Rates, cpu_card
from grpo_mega.errors import ConfigError
from grpo_mega.processes import HostRoom

ROOT = Path(__file__).resolve().parents[2]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
QUESTIONS = [{"question": f"What is {n} + {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(40)]
PROBLEMS = [{"problem": f"What is ${n} + {n}$?", "solution": f"$\\boxed{{{2 * n}}}$"} for n in range(40)]
VERL = [
    {
        "data_source": "sums",
        "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": f"{n} + {n}"}],
        "reward_model": {"ground_truth": str(2 * n), "style": "rule"},
    }
    for n in range(40)
]
OWN_REWARD = "def share_of_digits(prompt, response, answer, extras):\n    return sum(map(str.isdigit, response)) / 99\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of examples/tiny_random_model.py, which has no weights."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tiny_random_model.py", str(folder)])
        runpy.run_path(str(ROOT / "examples" / "tiny_random_model.py"), run_name="__main__")
    return folder


@pytest.fixture(autouse=True)
def folder(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with the model and datasets in several formats, on a machine without a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "tiny").symlink_to(tiny)
    write_lines(tmp_path / "questions.jsonl", QUESTIONS)
    (tmp_path / "problems.json").write_text(json.dumps(PROBLEMS))
    parquet.write_table(pyarrow.Table.from_pylist(VERL), tmp_path / "verl.parquet")
    (tmp_path / "splits").mkdir()
    write_lines(tmp_path / "splits/train.jsonl", QUESTIONS)
    write_lines(tmp_path / "splits/test.jsonl", QUESTIONS[:5])
    return tmp_path


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def known(name: str, folder: Path) -> str:
    """Write a folder of a well-known model's config with the tiny model's tokenizer."""
    shutil.copytree(folder / "tiny", folder / name)
    (folder / name / "config.json").write_text(json.dumps(KNOWN_MODELS[name].fields))
    return name


@pytest.mark.parametrize(
    ("data", "columns"),
    [
        ("questions.jsonl", ("question", "answer")),
        ("problems.json", ("problem", "solution")),
        ("verl.parquet", ("prompt", "reward_model.ground_truth")),
        ("splits", ("question", "answer")),
        pytest.param(
            f"{GSM8K}/train.jsonl",
            ("question", "answer"),
            marks=pytest.mark.skipif(not GSM8K.is_dir(), reason=f"{GSM8K} does not exist"),
        ),
    ],
)
def test_the_config_has_the_columns_and_lengths_of_the_data(data: str, columns: tuple[str, str], folder: Path) -> None:
    assert cli.main(["init", "tiny", data]) == 0
    config = configs.load(folder / "config.yaml")
    assert (config.data.prompt_column, config.data.answer_column) == columns
    assert (config.model.dtype, config.model.init, config.rollout.engine) == ("float32", "random", "embedded")
    assert config.data.max_prompt_length % 64 == 0 and config.rollout.max_response_length >= 128
    assert (config.data.system_prompt is None) == (data == "verl.parquet")  # its rows have a system message
    assert config.data.heldout_size is None if data == "splits" else config.data.heldout_size
    assert (config.data.heldout is not None) == (data == "splits")


def test_every_value_has_its_reason_beside_or_above_it(folder: Path) -> None:
    assert cli.main(["init", "tiny", "questions.jsonl"]) == 0
    lines = (folder / "config.yaml").read_text().splitlines()
    for number, line in enumerate(lines):
        if re.match(r" *\w+: \S", line):
            assert "  # " in line or lines[number - 1].lstrip().startswith("# "), line
    assert len(lines) < 50 and max(map(len, lines)) <= 120


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("nothing questions.jsonl", "model.path=nothing is not a folder; name the folder of a Hugging Face checkpoint"),
        ("splits questions.jsonl", "model.path=splits holds no config.json"),
        ("tiny nothing.jsonl", "dataset nothing.jsonl does not exist"),
        ("tiny empty.jsonl", "dataset empty.jsonl is empty"),
        (
            "tiny other.jsonl",
            "none of prompt, problem, question is among the columns text, gold; set data.prompt_column to one of them,"
            " here by --prompt-column",
        ),
        ("tiny other.jsonl --prompt-column text", "set data.answer_column to one of them, here by --answer-column"),
        (
            "tiny questions.jsonl --prompt-column qestion",
            "--prompt-column=qestion: must be a column of questions.jsonl",
        ),
        ("no_template questions.jsonl", "the tokenizer of model.path=no_template has no chat template"),
        ("no_tokenizer questions.jsonl", "model.path=no_tokenizer holds no tokenizer"),
        ("tiny questions.jsonl --out kept.yaml", "--out kept.yaml exists; name a file that does not"),
        ("tiny questions.jsonl --num-gpus 2", "--num-gpus=2: this machine has no GPU; name another one by --gpu"),
        ("tiny questions.jsonl --gpu h100 --num-gpus 0", "--num-gpus=0: must be at least 1"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    arguments: str, words: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty.jsonl").touch()
    (folder / "kept.yaml").write_text("mine")
    write_lines(folder / "other.jsonl", [{"text": "1+1", "gold": "2"}])
    for name, left_out in (("no_template", "tokenizer_config.json"), ("no_tokenizer", "tokenizer.json")):
        shutil.copytree(folder / "tiny", folder / name)
        (folder / name / left_out).unlink()
    for name in ("vocab.json", "merges.txt"):
        (folder / "no_tokenizer" / name).unlink(missing_ok=True)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert cli.main(["init", *arguments.split()]) == 2
    output = capfd.readouterr()
    model, data, *flags = arguments.split()
    assert output.out == f"reading {model} and {data}\n" * ("--out" not in flags)
    (line,) = output.err.splitlines()
    assert re.search(f"^grpo-mega: error: .*{words}", line)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_named_columns_are_used(folder: Path) -> None:
    write_lines(folder / "other.jsonl", [{"text": f"{n}+1", "gold": n + 1} for n in range(3)])
    options = ["--prompt-column", "text", "--answer-column", "gold", "--out", "deep/mine.yaml"]
    assert cli.main(["init", "tiny", "other.jsonl", *options]) == 0
    config = configs.load(folder / "deep/mine.yaml")
    assert (config.data.prompt_column, config.data.answer_column) == ("text", "gold")
    assert config.batch.prompts_per_step <= 3 and config.data.heldout_size is None


AWKWARD = "a\n- b: [c # d\r\x1b\x85\u2028\ufffe'\" &x *y 中"


def test_columns_and_files_of_any_name_are_written_as_they_are(folder: Path) -> None:
    """Line breaks, controls and YAML's own signs, in a value and in the reasons beside it."""
    write_lines(folder / f"{AWKWARD}.jsonl", [{AWKWARD: f"{n}+1", f"gold\x7f{AWKWARD}": n + 1} for n in range(3)])
    options = ["--prompt-column", AWKWARD, "--answer-column", f"gold\x7f{AWKWARD}", "--out", f"{AWKWARD}.yaml"]
    assert cli.main(["init", "tiny", f"{AWKWARD}.jsonl", *options]) == 0
    data = configs.load(folder / f"{AWKWARD}.yaml").data
    assert (data.prompt_column, data.answer_column) == (AWKWARD, f"gold\x7f{AWKWARD}")
    assert data.train[0].path == f"{AWKWARD}.jsonl"


@pytest.mark.parametrize(
    ("name", "num_gpus"),
    [
        ("qwen2.5-1.5b", 1),
        ("qwen3-8b", 8),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("qwen3-30b-a3b", 8), ("llama-3.1-70b", 64))),
    ],
)
def test_the_config_for_gpus_passes_the_plan_with_room_to_spare(
    name: str, num_gpus: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["init", known(name, folder), "questions.jsonl", "--gpu", "h100", "--num-gpus", str(num_gpus)]
    assert cli.main(arguments) == 0
    config = configs.load(folder / "config.yaml")
    assert (config.model.dtype, config.rollout.engine) == ("bfloat16", "sglang")
    assert config.layout.world_size == num_gpus
    capsys.readouterr()
    assert cli.main(["plan", "config.yaml", "--gpu", "h100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True


def test_a_model_that_fits_in_no_layout_is_one_line(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["init", known("llama-3.1-405b", folder), "questions.jsonl", "--gpu", "h100", "--num-gpus", "8"]
    assert cli.main(arguments) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "no layout that fits in the memory of 8 x H100 80GB SXM; give more GPUs by --num-gpus" in line


def chosen(target: Target, name: str = "qwen2.5-1.5b", prompts: tuple[int, ...] = (50, 60) * 50) -> dict[str, Any]:
    required = {"run_dir": "r", "model.path": "m", "data.train": "t"}
    settings = [Setting(key, value, "") for key, value in required.items()]
    found = choose(settings, model_of(KNOWN_MODELS[name].fields), DataTokens(prompts, (10,) * 9), target)
    return {setting.key: setting.value for setting in found}


def test_prompts_that_occur_twice_count_once(folder: Path) -> None:
    """A held-out prompt's copies are not trained on, so 19 different prompts are too few to hold some out."""
    write_lines(folder / "twice.jsonl", QUESTIONS[:19] * 10)
    assert cli.main(["init", "tiny", "twice.jsonl"]) == 0
    config = configs.load(folder / "config.yaml")
    assert config.data.heldout_size is None and config.batch.prompts_per_step <= 19
    assert "eval:" not in (folder / "config.yaml").read_text()


def on_cpu(gib: int) -> Target:
    rates = Rates(flops=160e9, copied_bytes=10e9, call_s=2e-6)
    return Target(cpu_card(1, HostRoom(gib << 30, gib << 30), rates), False, 1, 1, False, rates)


def test_prompts_longer_than_half_the_positions_are_one_line() -> None:
    with pytest.raises(ConfigError, match=r"at most 16384 tokens, half of the .* the shortest has 20000; name a model"):
        chosen(Target(card_of("h100"), True, 1, 1, True), prompts=(20000,) * 5)


def test_a_smaller_memory_gets_a_smaller_token_budget_until_nothing_fits() -> None:
    large, small = (chosen(on_cpu(gib)) for gib in (80, 50))
    longest = small["data.max_prompt_length"] + small["rollout.max_response_length"]
    assert small["batch.tokens_per_micro_batch"] == longest < large["batch.tokens_per_micro_batch"]
    with pytest.raises(ConfigError, match=r"no layout that fits in the memory of this machine's \d+ cores? and 8 GiB"):
        chosen(on_cpu(8))


def test_a_single_long_prompt_does_not_set_the_limit() -> None:
    target = Target(card_of("h100"), True, 8, 8, True)
    assert chosen(target, prompts=(50,) * 500 + (9000,))["data.max_prompt_length"] == 64
    assert chosen(target, prompts=(50,) * 500 + (100,))["data.max_prompt_length"] == 128


def test_without_sglang_gpus_use_the_embedded_engine() -> None:
    found = chosen(Target(card_of("h100"), True, 2, 2, False))
    assert found["rollout.engine"] == "embedded" and "rollout.tp" not in found


@pytest.mark.distributed
@pytest.mark.usefixtures("preloaded_python")
def test_the_written_config_trains_and_resumes_without_a_change(folder: Path) -> None:
    """The reward function is in a file in the config's folder, and the run starts in another folder."""
    (folder / "job").mkdir()
    (folder / "job/mine.py").write_text(OWN_REWARD)
    assert cli.main(["init", "tiny", "questions.jsonl", "--out", "job/config.yaml"]) == 0
    text = (folder / "job/config.yaml").read_text().replace("  dtype: float32", "  # dtype")
    (folder / "job/config.yaml").write_text(text)
    short = ["--set", "rollout.max_response_length=8", "--set", "eval.num_prompts=1", "--set", "checkpoint.interval=2"]
    rewards = ["--reward-funcs", "accuracy", "mine.py:share_of_digits"]
    for steps, more in ((2, []), (3, ["--resume"])):
        command = ["train", "job/config.yaml", *rewards, *short, "--set", f"steps={steps}", *more]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-m", "grpo_mega.cli", *command], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stderr
        assert "model.dtype=float32, because it is not set and" in done.stderr
    run_dir = folder / "runs/tiny-questions"
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss/total" in row] == [1, 2, 3]
    assert max(row["reward/mine.py:share_of_digits"] for row in rows if "loss/total" in row) > 0
    assert [start["dtype"] for start in json.loads((run_dir / "run.json").read_text())["starts"]] == ["float32"] * 2
    assert (run_dir / "hf/model.safetensors").is_file()
    assert configs.load(run_dir / "config.yaml").code_dir == folder / "job"  # eval of the run finds the function
