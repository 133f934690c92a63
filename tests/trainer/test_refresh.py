"""Between iterations: the command that refreshes the reward model, and the server that must answer afterwards.

test_resume.py covers whole runs.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_mega.config import Config, validate
from grpo_mega.errors import ConfigError, RefreshError
from grpo_mega.tracking.progress import Timers
from grpo_mega.trainer.reward_model_refresh import refresh_rewards_if_due
from tests.helpers.servers import is_true_within

BASE = {
    "steps": 9,
    "model": {"path": "m"},
    "data": {"train": "t"},
    "algorithm": {"kl_beta": 0.1, "ref_model_sync_steps": 2},
}


def make_config(run_dir: Path, command: str, **rewards: Any) -> Config:
    return validate(BASE | {"run_dir": str(run_dir), "rewards": {"refresh_command": command, **rewards}})


def refresh(config: Config, step: int, others: tuple[str | None, ...] = ()) -> list[str]:
    """Run the refresh as the first rank. `others` are the problems of the other ranks. Return the messages."""
    messages: list[str] = []
    rendezvous = SimpleNamespace(all_gather=lambda phase, value, deadline_s: [value, *others])
    parts = {"rollouts": SimpleNamespace(rendezvous=rendezvous), "log": SimpleNamespace(message=messages.append)}
    job: Any = SimpleNamespace(config=config, is_main=True, timers=Timers(), **parts)
    refresh_rewards_if_due(job, step)
    return messages


def test_the_command_runs_when_an_iteration_ends_with_the_path_of_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("MINE", "kept")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    config = make_config(Path("run"), "env > seen")
    for step in (0, 1, 3):
        assert refresh(config, step) == [] and not (tmp_path / "seen").exists()
    assert refresh(config, 4) == ["iteration 2 has ended: running rewards.refresh_command"]
    seen = dict(line.split("=", 1) for line in (tmp_path / "seen").read_text().splitlines() if "=" in line)
    ours = {name.removeprefix("GRPO_MEGA_"): value for name, value in seen.items() if name.startswith("GRPO_MEGA_")}
    run_dir = str(tmp_path / "run")
    assert ours == {"REPLAY": f"{run_dir}/replay.jsonl", "ITERATION": "2", "STEP": "4", "RUN_DIR": run_dir}
    assert seen["MINE"] == "kept" and not seen.keys() & {
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "TORCHELASTIC_USE_AGENT_STORE",
    }


@pytest.mark.parametrize("fraction", [0.0, 0.34, 1.0])
def test_the_replay_has_the_last_iteration_and_a_share_of_earlier_ones(tmp_path: Path, fraction: float) -> None:
    rows = [{"step": step, "iteration": (step + 1) // 2, "index": i} for step in range(1, 7) for i in range(5)]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_config(tmp_path, "true")
    config = config.model_copy(update={"data": config.data.model_copy(update={"replay_fraction": fraction})})
    drawn = []
    for _ in range(2):
        refresh(config, 6)
        drawn.append([json.loads(line) for line in (tmp_path / "replay.jsonl").read_text().splitlines()])
    assert drawn[0] == drawn[1] == [row for row in rows if row in drawn[0]]
    assert drawn[0][-10:] == rows[20:] and len(drawn[0]) == 10 + round(20 * fraction)
    assert fraction != 0.34 or {row["iteration"] for row in drawn[0]} == {1, 2, 3}


def test_a_command_that_takes_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    config = make_config(
        tmp_path, "sleep 60 & echo $! > pid; wait".replace("pid", str(tmp_path / "pid")), refresh_deadline_s=3.0
    )
    with pytest.raises(
        RefreshError,
        match=r"rewards.refresh_command was not done after rewards.refresh_deadline_s=3; see .*refresh-000002.log",
    ):
        refresh(config, 2)
    status = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    until = time.monotonic() + 10
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_problem_of_one_rank_is_raised_on_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(RefreshError, match="elsewhere"):
        refresh(make_config(tmp_path, "true"), 2, (None, "elsewhere"))


def test_a_server_that_is_gone_after_the_command_ends_the_run(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    function = {"name": "reward_model", "options": {"url": url}}
    with pytest.raises(RefreshError, match=r"after rewards.refresh_command, reward_model: no server answers at url="):
        refresh(make_config(tmp_path, "true", functions=[function]), 2)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"algorithm": {"ref_model_sync_steps": 4}}, "algorithm.ref_model_sync_steps=4 needs algorithm.kl_beta > 0"),
        (
            {"algorithm": {"ref_model_mixup_alpha": 0.5}},
            "algorithm.ref_model_mixup_alpha=0.5 needs algorithm.ref_model_sync",
        ),
        (
            {"precision": {"fp8": "hybrid", "fp8_parameters": True, "fp8_reference": True}},
            "with precision.fp8_parameters=true; leave ref_model_sync_steps out",
        ),
        (
            {"algorithm": {}, "rewards": {"refresh_command": "true"}},
            "needs algorithm.ref_model_sync_steps, iterations to run between",
        ),
        ({"data": {"train": "t", "replay_fraction": 0.2}}, "data.replay_fraction=0.2 needs rewards.refresh_command"),
    ],
)
def test_settings_that_cannot_be_iterated_are_named_in_one_line(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(BASE | {"run_dir": "r"} | changes)
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_the_command_ends_when_its_trainer_is_killed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    code = f"import sys; sys.path[:] = {[str(Path(__file__).parent), *sys.path]}; from test_refresh import *\n"
    code += "refresh(make_config(Path('run'), 'echo $$ > pid; exec sleep 600'), 2)"
    trainer = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    path = tmp_path / "pid"
    assert is_true_within(60, lambda: path.exists() and path.read_text().strip())
    trainer.kill()
    trainer.wait()
    assert is_true_within(10, lambda: not Path(f"/proc/{path.read_text().strip()}").exists())
