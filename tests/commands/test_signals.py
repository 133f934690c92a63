"""Every long command answers the first Ctrl-C at once and ends at the first or the second one, as real processes.

A reward function holds the command at a known place, so no test depends on speed: it prints a line and waits while a
file exists. A command that runs for long joins COMMANDS.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.runs import metrics
from tools.benchmarks import kills

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("preloaded_python")]

ROOT = Path(__file__).resolve().parents[2]
HELD = "the reward function waits"
REWARD = f"""
import time
from pathlib import Path

def held(prompt, response, answer, extras):
    if Path(__file__).with_name("hold").exists():
        print({HELD!r}, flush=True)
    while Path(__file__).with_name("hold").exists():
        time.sleep(0.01)
    return sum(c in "aeiou" for c in response) / 9
"""


@dataclass(frozen=True)
class Command:
    """A command that ends at the first Ctrl-C. `arguments` follow the path of the config."""

    name: str
    arguments: str
    answer: str


COMMANDS = {
    "eval": Command("eval", "--out rows.jsonl", "ending; nothing is written"),
    "eval on two ranks": Command("eval", "--set layout.dp=2 --out rows.jsonl", "ending; nothing is written"),
    "sample": Command("sample", "--prompt Hi --out rows.jsonl", "ending; nothing is written"),
    "check": Command("check", "--layouts dp=2", "ending; no layout is compared"),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a config whose reward function waits while the file "hold" exists next to it."""
    folder = tmp_path_factory.mktemp("signals")
    path = kills.write_inputs(folder, "tp=1")
    (folder / "scoring.py").write_text(REWARD)
    (folder / "temporary").mkdir()
    config = json.loads(path.read_text())
    config["rewards"] |= {"functions": [{"name": "scoring.held"}], "deadline_s": 600.0}
    config |= {"checkpoint": {"interval": 0}, "run_dir": str(folder / "unused")}
    path.write_text(json.dumps(config))
    return path


@contextmanager
def started(inputs: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command, and kill it in the end, or if it takes too long."""
    folder = inputs.parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(folder))), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "grpo_mega.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=environment | {"TMPDIR": str(folder / "temporary")},
    )
    timer = threading.Timer(240, process.kill)
    timer.start()
    try:
        yield process
    finally:
        timer.cancel()
        process.kill()
        process.communicate()
        (folder / "hold").unlink(missing_ok=True)


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    """Return the first line with the pattern."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return line.strip()
    raise AssertionError(f"no line has {pattern!r}: {''.join(lines)}")


def answer_of(process: subprocess.Popen[str]) -> str:
    """Press Ctrl-C, and return the answer. The reward function still waits, so the answer waits for no work."""
    process.send_signal(signal.SIGINT)
    return read_until(process, "^grpo-mega: ").removeprefix("grpo-mega: ")


def check_nothing_is_left(inputs: Path) -> None:
    """Wait until the temporary folder is empty: the last process of a killed command removes its folder."""
    deadline = time.monotonic() + 60
    while left := [str(path) for path in (inputs.parent / "temporary").iterdir()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_ends_at_the_first_ctrl_c(inputs: Path, name: str) -> None:
    command = COMMANDS[name]
    (inputs.parent / "hold").touch()
    with started(inputs, command.name, str(inputs), *command.arguments.split()) as process:
        read_until(process, HELD)
        assert answer_of(process) == command.answer
        assert process.wait(timeout=60) == 130
        assert process.stdout is not None and "Traceback" not in process.stdout.read()
    assert not (inputs.parent / "rows.jsonl").exists()
    check_nothing_is_left(inputs)


@pytest.mark.parametrize("layout", ["dp=1", "dp=2"])
@pytest.mark.parametrize("is_pressed_again", [False, True])
def test_training_finishes_its_step_and_saves_or_ends_at_the_second_ctrl_c(
    inputs: Path, tmp_path: Path, layout: str, is_pressed_again: bool
) -> None:
    run_dir = tmp_path / "run"
    arguments = ("train", str(inputs), "--set", f"run_dir={run_dir}", "--set", f"layout.{layout}")
    with started(inputs, *arguments) as process:
        read_until(process, "step +2/16")
        (inputs.parent / "hold").touch()
        read_until(process, HELD)
        step = metrics(run_dir)[-1]["step"] + 1
        work = f"finishing step {step} and saving; press again to end now, losing steps 1-{step}"
        assert answer_of(process) == work
        if is_pressed_again:
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 130
        else:
            (inputs.parent / "hold").unlink()
            assert f"stopped after step {step} of 16 as requested" in read_until(process, "stopped after")
            assert process.wait(timeout=60) == 0
        assert process.stdout is not None and "Traceback" not in process.stdout.read()
    assert (run_dir / "checkpoints/latest").exists() is not is_pressed_again
    check_nothing_is_left(inputs)
