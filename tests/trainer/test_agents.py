"""Runs with an agent whose server or rank is killed while conversations are in progress.

The agent's second turn waits while a file exists, so each kill happens in the middle of a rollout.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.servers import Tree, is_true_within
from tests.trainer.test_engine_failures import Run, check_nothing_is_left, temporary
from tools.benchmarks import kills

__all__ = ["temporary"]

pytestmark = [pytest.mark.distributed, pytest.mark.waiting]

AGENT = """
import asyncio
from pathlib import Path

HERE = Path(__file__).parent

async def run(chat, prompt):
    message = await chat(prompt.messages)
    if (HERE / "hold").exists():
        (HERE / "waits").touch()
        while (HERE / "hold").exists():
            await asyncio.sleep(0.01)
    text = message["content"] or ""
    last = await chat([*prompt.messages, message, {"role": "user", "content": str(len(text))}])
    return sum(c in "aeiou" for c in text + (last["content"] or "")) / 80
"""


class AgentRun(Run):
    """A run whose conversations wait in their second turn after `hold`, until `release`."""

    def hold(self) -> None:
        """Return when a conversation waits."""
        folder = self.folder.parent
        (folder / "hold").touch()
        self.wait_for((folder / "waits").exists)

    def release(self) -> None:
        for name in ("hold", "waits"):
            (self.folder.parent / name).unlink(missing_ok=True)

    def samples(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.folder / "samples.jsonl").read_text().splitlines()]


@pytest.fixture
def released(tmp_path: Path) -> Iterator[None]:
    yield
    (tmp_path / "hold").unlink(missing_ok=True)


def write_config(folder: Path, layout: str, **keys: object) -> Path:
    """Write model, data, agent and config. `keys` have dots instead of "__"."""
    (folder / "agent.py").write_text(AGENT)
    rollout = {"agent": f"{folder}/agent.py:run", "max_turns": 2, "agent_timeout_s": 300.0} | kills.LENGTHS
    path = kills.write_inputs(folder, layout, rollout)
    config = json.loads(path.read_text())
    config["log"]["samples_per_step"] = 1000
    config["eval"]["interval"] = 0
    for key, value in keys.items():
        section, _, name = key.rpartition("__")
        (config[section] if section else config)[name] = value
    path.write_text(json.dumps(config))
    return path


@pytest.mark.full
@pytest.mark.sglang
@pytest.mark.usefixtures("released")
def test_a_server_at_tp2_may_be_killed_while_agents_talk(tmp_path: Path, temporary: Path) -> None:
    """A restart repeats the lost conversations. Without a restart left the run ends with one line."""
    engine = {"rollout__engine": "sglang", "rollout__tp": 2, "rollout__max_restarts": 1}
    config = write_config(tmp_path, "dp=2", steps=1000, **engine)
    run = AgentRun(config, tmp_path / "run")
    run.wait_for_steps(2)
    tree = Tree.below(run.process.pid)
    assert len(tree.named("sglang::scheduler")) == 2
    run.hold()
    os.kill(tree.named("sglang::scheduler")[1], signal.SIGKILL)
    run.wait_for(lambda: len(run.restarts()) == 1)
    run.release()
    run.wait_for_steps(2)
    tree = Tree.below(run.process.pid)
    run.hold()
    os.kill(tree.named("sglang::scheduler")[0], signal.SIGKILL)
    log = run.end()
    assert run.process.returncode == 2 and "Traceback" not in log, log
    (line,) = [line for line in log.splitlines() if "error:" in line]
    assert re.search(r"the engine of rank 0 failed 2 times .*; a checkpoint of step \d+ is in .*/checkpoints$", line)
    check_nothing_is_left(tree, temporary)

    last = len(run.steps())
    assert [row["step"] for row in run.steps()] == list(range(1, last + 1)) and last >= 4
    assert max(row["mismatch/abs_max"] for row in run.steps()) < 1e-5
    samples = run.samples()
    everything = [(step, index) for step in range(1, last + 1) for index in range(4) for _ in range(4)]
    assert sorted((s["step"], s["index"]) for s in samples) == everything  # type: ignore[type-var]
    assert len({(s["step"], s["prompt_id"], s["index"]) for s in samples}) == len(samples)
    assert sum(row["agent/turns"] > 1.5 for row in run.steps()) == last


@pytest.mark.full
@pytest.mark.usefixtures("released")
def test_a_rank_killed_while_agents_talk_ends_the_run_which_resumes(tmp_path: Path, temporary: Path) -> None:
    config = write_config(tmp_path, "dp=2", steps=4)
    whole = AgentRun(config, tmp_path / "whole")
    assert "error" not in whole.end() and whole.process.returncode == 0
    run = AgentRun(config, tmp_path / "run")
    run.wait_for_steps(1)
    run.hold()
    tree = Tree.below(run.process.pid)
    os.kill(rank_of(tree, 1), signal.SIGKILL)
    log = run.end()
    assert run.process.returncode == 128 + signal.SIGKILL and "Traceback" not in log, log
    assert log.count("rank 1 was killed by SIGKILL (last seen ") == 1, log
    check_nothing_is_left(tree, temporary)
    run.release()
    resumed = AgentRun(config, tmp_path / "run", "--resume")
    assert "resumed after step" in resumed.end() and resumed.process.returncode == 0
    assert kills.read_end(tmp_path / "run") == kills.read_end(tmp_path / "whole")


@pytest.mark.full
def test_the_model_of_guess_number_plays_after_two_steps_of_sft(tmp_path: Path) -> None:
    examples, task = kills.harness.ROOT / "examples", tmp_path / "task"
    subprocess.run([sys.executable, str(examples / "guess_number.py"), str(task)], check=True)
    of_sft = [f"model.path={task}/model", f"data.train={task}/sft.jsonl", "steps=2"]
    given = [f"model.path={task}/sft/hf", f"data.train={task}/train.jsonl", f"data.heldout={task}/heldout.jsonl"]
    given += ["steps=2", "layout.tp=1", "batch.prompts_per_step=4", "batch.mini_batches=1", "log.samples_per_step=64"]
    for name, recipe, run_dir, overrides in (
        ("sft", "guess_number_sft.yaml", task / "sft", of_sft),
        ("train", "guess_number.yaml", tmp_path / "run", given),
    ):
        arguments = [part for override in overrides for part in ("--set", override)]
        kills.finish(kills.start(examples / recipe, run_dir, arguments, name=name), run_dir)
    rows = kills.read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows if "loss/total" in row] == [1, 2]
    assert all(row["agent/turns"] > 1 for row in rows if "loss/total" in row)
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    replies = {one["content"] for sample in samples for one in sample["messages"] if one["role"] == "user"}
    assert "10-40?" in replies and replies & {"higher", "lower", "Answer with a number."}


def rank_of(tree: Tree, rank: int) -> int:
    """Return the process of a rank."""
    environments = {pid: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in tree.pids}
    found = [pid for pid, env in environments.items() if f"RANK={rank}".encode() in env]
    assert is_true_within(0, lambda: bool(found)), tree.pids
    return min(found)
