"""Two small runs from the command line: with the flags of TRL and open-r1 on the arithmetic task, then resumed; and
with `grpo-mega train --reward-funcs`, where one function is the user's.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from grpo_mega import config as configs
from grpo_mega.config import Config
from tools.benchmarks import kills

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("preloaded_python")]

ROOT = Path(__file__).resolve().parents[2]
SEED = (
    "--model_name_or_path deepseek-ai/deepseek-base --dataset_name math_dataset "
    "--reward_funcs accuracy format --output_dir output/grpo_math"
)
FLAGS = (
    "--max_steps 3 --num_generations 4 --per_device_train_batch_size 8 --gradient_accumulation_steps 2 "
    "--max-prompt-length 32 --max-completion-length 16 --learning-rate 1e-3 --beta 0.01 --loss_type dapo --bf16 false "
    "--tensor_parallel 2 --save_steps 2 --eval_steps 3 --logging_steps 1 --report_to none"
)
OWN_NAME = "my_package.my_rewards.share_of_digits"
OWN_REWARD = """
def share_of_digits(completions, question, solution, prompts, completion_ids, **kwargs):
    assert len(completions) in (1, 4), "one call for each group, in training and in evaluation"
    assert len(completions) == len(completion_ids) and len(set(map(str, prompts))) == 1 and prompts == question
    if int(solution[0]) % 2:
        return [None] * len(completions)
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a working folder that holds the model and the dataset of the seed's command: an untrained model, and
    sums.
    """
    folder = tmp_path_factory.mktemp("grpo")
    arithmetic = load(ROOT / "examples" / "arithmetic.py")
    torch.manual_seed(0)
    tokenizer = arithmetic.make_tokenizer()
    train, heldout = arithmetic.make_problems(random.Random(0))
    (folder / "deepseek-ai").mkdir()
    arithmetic.save(folder / "task", arithmetic.make_model(tokenizer), tokenizer, train[:24], heldout[:8])
    (folder / "task" / "model").rename(folder / "deepseek-ai" / "deepseek-base")
    (folder / "math_dataset").mkdir()
    for name, split in (("train", "train"), ("heldout", "test")):  # with the columns of common problem sets
        rows = [json.loads(line) for line in (folder / "task" / f"{name}.jsonl").read_text().splitlines()]
        rows = [{"question": row["prompt"], "answer": row["answer"]} for row in rows]
        (folder / "math_dataset" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_package").mkdir()
    (folder / "my_package" / "my_rewards.py").write_text(OWN_REWARD)
    return folder


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up here
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def output_dir(folder: Path) -> Path:
    """Run the seed's command with one more reward function, a tiny batch, and two ranks."""
    command = SEED.replace("accuracy format", f"accuracy format {OWN_NAME}")
    output = run(folder, f"grpo_mega.grpo {command} {FLAGS}")
    assert "note: --logging_steps has no effect" in output
    return folder / "output" / "grpo_math"


def run(folder: Path, command: str) -> str:
    """Run `python -m COMMAND` in the folder. Return its output."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tools'}", "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-m", *command.split()]
    result = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def steps(run_dir: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss/total" in row]


def config_of(run_dir: Path) -> Config:
    return configs.validate(yaml.safe_load((run_dir / "config.yaml").read_text()))


def test_the_flags_are_in_the_config_that_the_run_has_written(output_dir: Path) -> None:
    config = config_of(output_dir)
    assert (config.steps, config.batch.prompts_per_step, config.algorithm.group_size) == (3, 4, 4)
    assert (config.data.prompt_column, config.model.dtype, config.layout.tp) == (None, "float32", 2)
    assert [f.name for f in config.rewards.functions] == ["accuracy", "format", OWN_NAME]
    (start,) = json.loads((output_dir / "run.json").read_text())["starts"][:1]
    assert start["command"][:2] == ["grpo-mega", "grpo"]


def test_it_trains_on_all_rewards_and_evaluates_on_the_test_split(output_dir: Path) -> None:
    rows = steps(output_dir)
    assert [row["step"] for row in rows[:3]] == [1, 2, 3]
    assert {"reward/accuracy", "reward/format", f"reward/{OWN_NAME}"} <= rows[0].keys()
    assert all(row["grad_norm"] > 0 for row in rows)
    assert not any("error" in name for row in rows for name in row), "its function got what it asserts"
    assert (output_dir / "heldout-000003.jsonl").read_text().count("\n") == 8


def test_a_users_function_does_not_count_for_samples_where_it_returns_none(output_dir: Path) -> None:
    rows = [json.loads(line) for line in (output_dir / "heldout-000003.jsonl").read_text().splitlines()]
    scores = {sum(map(int, re.findall(r"\d+", row["prompt"]))) % 2: row["scores"][OWN_NAME] for row in rows}
    assert scores[1] is None and isinstance(scores[0], float)


def test_transformers_loads_the_trained_model(output_dir: Path) -> None:
    trained = AutoModelForCausalLM.from_pretrained(output_dir / "hf").state_dict()
    before = AutoModelForCausalLM.from_pretrained(output_dir.parents[1] / "deepseek-ai" / "deepseek-base").state_dict()
    assert trained.keys() == before.keys()
    assert not torch.equal(trained["lm_head.weight"], before["lm_head.weight"])


@pytest.mark.full
def test_it_resumes_with_more_steps_and_an_early_stop_keeps_the_weights(output_dir: Path) -> None:
    """The ratio of the only mini-batch is 1, beyond the limit, so the optimizer takes no step."""
    command = SEED.replace("accuracy format", f"accuracy format {OWN_NAME}")
    before = AutoModelForCausalLM.from_pretrained(output_dir / "hf").state_dict()
    more = "--resume --set algorithm.early_stop_imp_ratio=0.9"
    run(output_dir.parents[1], f"grpo_mega.grpo {command} {FLAGS.replace('--max_steps 3', '--max_steps 4')} {more}")
    rows = steps(output_dir)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["dropped_mini_batches"] for row in rows] == [0, 0, 0, 1] and "grad_norm" not in rows[3]
    after = AutoModelForCausalLM.from_pretrained(output_dir / "hf").state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.full
def test_train_takes_reward_functions_and_weights_from_the_command_line(tmp_path: Path) -> None:
    config = kills.write_inputs(tmp_path, "tp=2")
    own = "tools.benchmarks.kills.share_of_vowels"
    run(
        tmp_path,
        f"grpo_mega.cli train {config} --reward-funcs format {own} --reward-weights 0.5 2 --set steps=1 --set"
        f" eval.interval=0 --set run_dir={tmp_path / 'run'}",
    )
    found = [(f.name, f.weight) for f in config_of(tmp_path / "run").rewards.functions]
    assert found == [("format", 0.5), (own, 2.0)]
    (row,) = steps(tmp_path / "run")
    assert row["reward/mean"] == pytest.approx(0.5 * row["reward/format"] + 2 * row[f"reward/{own}"], rel=1e-5)
