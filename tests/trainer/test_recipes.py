"""The recipes of examples/recipes/: those for 2 cores take a step on a small model, and the others are planned."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mega.cli.commands.config import find_keys
from grpo_mega.config import Config, load
from grpo_mega.config.aliases import RECIPES
from tests.helpers.models import make_model, save_checkpoint
from tests.helpers.runs import metrics

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("preloaded_python")]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FILES = sorted((EXAMPLES / "recipes").glob("*.yaml"))
RUN = [path for path in FILES if "include: ../quickstart.yaml" in path.read_text()]
ELSEWHERE = {"process_supervision", "mt_grpo", "opd", "partial", "sft"}  # recipes with files of their own, or sft
SMALL = ["steps=2", "batch.prompts_per_step=4", "batch.mini_batches=1", "algorithm.group_size=2"]
SMALL += ["rollout.max_response_length=6", "eval.num_prompts=2", "rewards.num_workers=1", "log.progress=false"]
CHANGED = {  # the random model solves no prompt, and has no experts
    "pass_rates": ["data.min_pass_rate=0.0"],
    "expert_parallel": ["model.path=moe"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write what the quickstart writes."""
    folder = tmp_path_factory.mktemp("recipes")
    quickstart = folder / "runs/quickstart"
    for path, family in (("task/sft/hf", "qwen2"), ("run/hf", "qwen2")):
        save_checkpoint(make_model(family), quickstart / path)
    save_checkpoint(make_model("qwen3_moe"), folder / "moe")
    for name, first in (("train", 0), ("heldout", 40)):
        rows = [json.dumps({"prompt": f"{i}+1=?", "answer": str(i + 1)}) + "\n" for i in range(first, first + 9)]
        (quickstart / f"task/{name}.jsonl").write_text("".join(rows))
    return folder


def run(folder: Path, *arguments: str | Path) -> str:
    command = [sys.executable, "-m", "grpo_mega.cli", *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def sets(*overrides: str) -> list[str]:
    return [flag for override in overrides for flag in ("--set", override)]


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_a_recipe_for_two_cores_takes_its_steps(path: Path, folder: Path) -> None:
    if path.stem == "pass_rates":
        asked = ["--train-set", "--samples", "4", "--out", "runs/pass_rates.jsonl"]
        run(folder, "eval", EXAMPLES / "quickstart.yaml", *asked, *sets(*SMALL, "eval.num_prompts=null"))
    run(folder, "train", path, *sets(*SMALL, *CHANGED.get(path.stem, [])))
    steps = [row for row in metrics(folder / load(path).run_dir) if "loss/total" in row]
    assert [row["step"] for row in steps] == [1, 2]


@pytest.mark.parametrize("path", [path for path in FILES if path not in RUN], ids=lambda path: path.stem)
def test_a_recipe_for_a_gpu_is_planned(path: Path, folder: Path) -> None:
    output = run(folder, "plan", path, "--gpu", "h100", *sets("model.path=Qwen2.5-1.5B"))
    assert "\nFITS" in output and "tokens per second" in output


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recipe_is_short_and_says_its_needs(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 15
    assert "Needs" in " ".join(line for line in lines if line.startswith("#"))


def test_the_table_of_methods_has_a_line_for_each_that_loads() -> None:
    lines = [line.split() for line in (EXAMPLES / "recipes/methods.txt").read_text().splitlines() if line[0] != "#"]
    assert {name for name, *_ in lines} == set(RECIPES) - ELSEWHERE
    for name, *flags in lines:
        overrides = flags[1::2]
        assert flags == sets(*overrides)
        assert load(EXAMPLES / "quickstart.yaml", overrides).algorithm.recipe == name


def test_every_key_is_shown_by_an_example_a_recipe_or_a_readme() -> None:
    root = EXAMPLES.parent
    pages = [*root.glob("*.md"), *root.glob("[a-z]*/**/README.md"), *root.glob("slurm/*.*"), *root.glob("tools/*.sh")]
    files = [path for path in EXAMPLES.rglob("*") if path.suffix in {".yaml", ".sh", ".txt", ".py", ".md"}]
    text = "\n".join(path.read_text() for path in (*pages, *files, root / "grpo_mega/config/aliases.py"))
    shown = set(re.findall(r"\w+", text))
    assert [key.name for key in find_keys(Config) if key.name.rpartition(".")[2] not in shown] == []
