"""An error on one rank ends all ranks at once: one line, exit code 2, and no folder of a run that never started."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from grpo_mega.rewards.scorer import MIN_PROMPTS, MIN_SAMPLES
from tests.helpers.models import make_model, save_checkpoint

pytestmark = pytest.mark.usefixtures("preloaded_python")

ROOT = Path(__file__).resolve().parents[2]
UP = "model.layers.1.mlp.up_proj.weight"
RAISES = "import os\n\ndef f(prompt, response, answer, extras):\n    return 1 / (os.environ['RANK'] == '0')\n"
NUM_PROMPTS = 2 * MIN_PROMPTS  # each of two ranks gets half of them


def train(folder: Path, **sections: Any) -> tuple[int, list[str], float]:
    """Run training on two ranks. Return the exit code, the lines of standard error without warnings, and the
    seconds.
    """
    raw = {
        "run_dir": "run",
        "steps": 1,
        "device": "cpu",
        "model": {"path": "model", "dtype": "float32"},
        "data": {"train": "train.jsonl", "max_prompt_length": 64},
        "rollout": {"max_response_length": 4},
        "algorithm": {"group_size": MIN_SAMPLES // MIN_PROMPTS},
        "rewards": {"functions": [{"name": "format"}], "num_workers": 1},
        "batch": {"prompts_per_step": NUM_PROMPTS, "tokens_per_micro_batch": 256},
        "log": {"progress": False},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(raw | sections))
    rows = [{"prompt": f"1+{number}=?", "answer": str(1 + number)} for number in range(NUM_PROMPTS)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "PYTHONWARNINGS": "ignore"}
    started_at = time.monotonic()
    command = [sys.executable, "-m", "grpo_mega.cli", "train", "config.yaml"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stderr.splitlines(), time.monotonic() - started_at


@pytest.mark.distributed
def test_nan_in_the_slice_of_one_rank_is_reported_once_and_leaves_nothing(tmp_path: Path) -> None:
    path = save_checkpoint(make_model("qwen2"), tmp_path / "model") / "model.safetensors"
    tensors = load_file(path)
    tensors[UP][-1, -1] = torch.nan  # in the rows of tensor-parallel rank 1
    save_file(tensors, path)
    code, lines, _ = train(tmp_path, layout={"tp": 2})
    assert (code, len(lines)) == (2, 1), lines
    assert lines[0].startswith(f"grpo-mega: error: model/model.safetensors: {UP} holds NaN or infinity; fetch")
    assert not (tmp_path / "run").exists()


@pytest.mark.distributed
def test_a_reward_that_raises_on_the_samples_of_one_rank_ends_all(tmp_path: Path) -> None:
    save_checkpoint(make_model("qwen2"), tmp_path / "model")
    (tmp_path / "own_rewards.py").write_text(RAISES)
    code, lines, seconds = train(tmp_path, layout={"dp": 2}, rewards={"functions": [{"name": "own_rewards.f"}]})
    assert (code, len(lines)) == (2, 1), lines
    assert "'own_rewards.f'" in lines[0] and f" {MIN_SAMPLES} samples" in lines[0]
    assert seconds < 150  # it does not wait for a deadline of the other rank
