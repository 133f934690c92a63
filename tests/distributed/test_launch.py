"""The local launcher: environment, logs, exit codes, signals, and no leftover processes."""

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

from grpo_mega.config import load
from grpo_mega.distributed.launch import launch, rank_environments, run_ranks
from grpo_mega.processes import HostRoom

LAUNCHER = "import sys; from pathlib import Path; from grpo_mega.distributed.launch import run_ranks; "
LAUNCHER += "sys.exit(run_ranks([sys.executable, '-c', sys.argv[1]], int(sys.argv[2]), Path(sys.argv[3])))"


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def start_launcher(program: str, world_size: int, log_dir: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LAUNCHER, program, str(world_size), str(log_dir)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_pids(folder: Path, count: int) -> list[int]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = [path for path in folder.glob("*.pid") if path.read_text()]
        if len(found) == count:
            return [int(path.read_text()) for path in found]
        time.sleep(0.05)
    raise AssertionError(f"{count} processes did not start in {folder}")


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until_dead(pids: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_alive, pids))


def write_pid(folder: Path, name: str = "rank") -> str:
    """Return the start of a program that writes its process id, so a test can wait for it."""
    path = f"'{folder}/{name}_' + os.environ['RANK'] + '.pid'"
    return f"import os, sys, time, signal; open({path}, 'w').write(str(os.getpid())); "


def test_ranks_get_torchruns_variables_and_a_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_mega.distributed.launch.num_cores", lambda: 9)
    first, second = rank_environments({"HOME": "/h", "RANK": "stale"}, world_size=2)
    assert (first["RANK"], first["LOCAL_RANK"], second["RANK"], second["LOCAL_RANK"]) == ("0", "0", "1", "1")
    assert first["WORLD_SIZE"] == second["LOCAL_WORLD_SIZE"] == "2"
    assert first["MASTER_ADDR"] == "127.0.0.1"
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert (first["OMP_NUM_THREADS"], first["HOME"]) == ("4", "/h")
    with socket.socket() as server:
        server.bind(("127.0.0.1", int(first["MASTER_PORT"])))
    assert rank_environments({"OMP_NUM_THREADS": "3"}, world_size=2)[0]["OMP_NUM_THREADS"] == "3"
    assert rank_environments({}, world_size=64)[0]["OMP_NUM_THREADS"] == "1"
    assert first["OMP_WAIT_POLICY"] == "passive"
    assert rank_environments({"OMP_WAIT_POLICY": "active"}, world_size=1)[0]["OMP_WAIT_POLICY"] == "active"


def test_no_threads_of_ranks_and_examples_spin_while_they_wait() -> None:
    """Check the settings that torch's OpenMP library prints."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    kept |= {"OMP_DISPLAY_ENV": "VERBOSE"}
    examples = Path(__file__).resolve().parents[2] / "examples"
    commands = [
        (kept, [str(examples / "answer_again.py"), "--help"]),
        (rank_environments(kept, world_size=1)[0], ["-c", "import torch"]),
    ]
    started = [
        subprocess.Popen([sys.executable, *c], env=e, stdout=PIPE, stderr=STDOUT, text=True) for e, c in commands
    ]
    for process in started:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0 and "GOMP_SPINCOUNT = '0'" in output, output


def test_rank_0_keeps_the_terminal_and_the_others_write_logs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = "import os, sys; print('out', os.environ['RANK']); print('err', os.environ['RANK'], file=sys.stderr)"
    assert run_ranks(python(program), 2, tmp_path / "logs") == 0
    assert capfd.readouterr() == ("out 0\n", "err 0\n")
    assert sorted((tmp_path / "logs/rank_1.log").read_text().splitlines()) == ["err 1", "out 1"]


def test_a_failed_rank_stops_the_others_and_is_named_with_its_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank_1.log").write_text("of an older run\n")
    program = (
        "import os, sys, time\n"
        "if os.environ['RANK'] != '1': time.sleep(60)\n"
        "print('loading'); print('out of memory', file=sys.stderr); sys.exit(7)"
    )
    started_at = time.monotonic()
    assert run_ranks(python(program), 3, tmp_path) == 7
    assert time.monotonic() - started_at < 30  # the other ranks sleep for 60 s
    line = capfd.readouterr().err
    assert line.startswith("grpo-mega: rank 1 exited with code 7; ") and line.count("\n") == 1
    assert line.endswith(f"{tmp_path}/rank_1.log ends: loading | out of memory\n")


def test_a_rank_that_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("grpo_mega.distributed.launch.SECONDS_TO_STOP", 0.5)
    program = write_pid(tmp_path) + (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"while len([f for f in os.listdir('{tmp_path}') if f.endswith('.pid')]) < 2: time.sleep(0.02)\n"
        "time.sleep(0.2)\n"
        "os.kill(os.getpid(), signal.SIGSEGV) if os.environ['RANK'] == '0' else time.sleep(60)"
    )
    assert run_ranks(python(program), 2, tmp_path) == 128 + signal.SIGSEGV
    assert "rank 0 was killed by SIGSEGV" in capfd.readouterr().err
    assert not any(map(is_alive, wait_for_pids(tmp_path, 2)))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait long enough that rank 0 reports its error on a busy machine."""
    monkeypatch.setattr("grpo_mega.distributed.launch.SECONDS_FOR_RANK_0_TO_FAIL", 60.0)


@pytest.mark.usefixtures("patient")
def test_an_error_on_every_rank_is_reported_only_by_rank_0(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = (
        "import os, sys, time; time.sleep(0.4 if os.environ['RANK'] == '0' else 0); "
        "print('grpo-mega: error: bad', file=sys.stderr); sys.exit(2)"
    )
    assert run_ranks(python(program), 2, tmp_path) == 2
    assert capfd.readouterr().err == "grpo-mega: error: bad\n"


def test_a_process_that_a_rank_left_behind_is_killed(tmp_path: Path) -> None:
    worker = write_pid(tmp_path, "worker") + "time.sleep(60)"
    program = (
        f"import os, subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {worker!r}])\n"
        f"path = '{tmp_path}/worker_0.pid'\n"
        "while not os.path.exists(path) or not os.path.getsize(path): time.sleep(0.02)"
    )
    assert run_ranks(python(program), 1, tmp_path) == 0
    assert wait_until_dead(wait_for_pids(tmp_path, 1))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_once_and_the_launcher_waits(tmp_path: Path, number: signal.Signals) -> None:
    program = (
        "import os, sys, time, signal\n"
        "caught = []\n"
        f"signal.signal({int(number)}, lambda *_: caught.append(1))\n" + write_pid(tmp_path) + "\n"
        "while not caught: time.sleep(0.02)\n"
        "time.sleep(0.5)\n"  # time to save
        f"open('{tmp_path}/caught_' + os.environ['RANK'], 'w').write(str(len(caught)))"
    )
    launcher = start_launcher(program, 2, tmp_path)
    pids = wait_for_pids(tmp_path, 2)
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=60)
    assert (launcher.returncode, errors) == (0, "")
    assert [(tmp_path / f"caught_{rank}").read_text() for rank in (0, 1)] == ["1", "1"]
    assert not any(map(is_alive, pids))


def test_a_second_ctrl_c_kills_the_ranks_and_exits_with_130(tmp_path: Path) -> None:
    program = (
        "import os, sys, time, signal\n"
        f"signal.signal(signal.SIGINT, lambda *_: open('{tmp_path}/caught_' + os.environ['RANK'], 'w').close())\n"
        + write_pid(tmp_path)
        + "time.sleep(60)"
    )
    launcher = start_launcher(program, 2, tmp_path)
    pids = wait_for_pids(tmp_path, 2)
    launcher.send_signal(signal.SIGINT)
    while len(list(tmp_path.glob("caught_*"))) < 2:
        time.sleep(0.02)
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate(timeout=60)
    assert (launcher.returncode, errors) == (130, "")
    assert not any(map(is_alive, pids))


def test_ranks_that_die_of_the_signal_give_its_exit_code(tmp_path: Path) -> None:
    launcher = start_launcher(write_pid(tmp_path) + "time.sleep(60)", 2, tmp_path)
    pids = wait_for_pids(tmp_path, 2)
    launcher.send_signal(signal.SIGTERM)
    _, errors = launcher.communicate(timeout=60)
    assert (launcher.returncode, errors) == (128 + signal.SIGTERM, "")
    assert not any(map(is_alive, pids))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the Linux kernel")
def test_ranks_die_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    launcher = start_launcher(write_pid(tmp_path) + "time.sleep(60)", 2, tmp_path)
    pids = wait_for_pids(tmp_path, 2)
    launcher.kill()
    assert wait_until_dead(pids)
    launcher.communicate(timeout=60)


def test_launch_runs_the_function_of_a_module_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "made"
    assert launch(os.mkdir, path, 1, tmp_path) == 0 and path.is_dir()
    assert launch(os.rmdir, path, 2, tmp_path / "logs") != 0, "one of two ranks finds no folder"
    assert not path.exists() and (tmp_path / "logs/rank_1.log").exists()
    assert os.environ.get("RANK") is None


@pytest.mark.usefixtures("patient")
def test_an_error_of_the_function_that_the_user_can_fix_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(load, tmp_path / "none.yaml", 2, tmp_path) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("grpo-mega: error: ") and "No such file" in line


@pytest.mark.parametrize("cause", ["", "little is available", "the kernel counts a kill"])
def test_a_rank_killed_by_sigkill_is_reported_with_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], cause: str
) -> None:
    """Rank 1 holds 500 MB and is killed as the kernel does it. Rank 0 misses it a moment before it has ended. The line
    names memory as the cause only if the figures allow it."""
    total = 2**34
    room = HostRoom(total, total // 20 if cause == "little is available" else total // 2)
    counts = itertools.count(7)
    monkeypatch.setattr("grpo_mega.distributed.launch.host_room", lambda: room)
    monkeypatch.setattr(
        "grpo_mega.distributed.launch.num_killed_for_memory", lambda: next(counts) if cause.startswith("the") else 7
    )
    monkeypatch.setattr("grpo_mega.distributed.launch.SECONDS_BETWEEN_READINGS", 0.1)
    monkeypatch.setattr("grpo_mega.distributed.launch.SECONDS_FOR_A_KILLED_RANK", 60)
    program = write_pid(tmp_path) + (
        "is_held = os.environ['RANK'] == '1'\n"
        f"while not is_held and not os.path.exists('{tmp_path}/missed'): time.sleep(0.02)\n"
        "if not is_held: sys.exit(1)\n"
        "held = b'1' * 500_000_000\n"
        "time.sleep(1)\n"
        f"open('{tmp_path}/missed', 'w')\n"
        "time.sleep(0.3)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert run_ranks(python(program), 2, tmp_path) == 128 + signal.SIGKILL
    probably = ", probably out of memory" if cause else ""
    pattern = rf"grpo-mega: rank 1 was killed by SIGKILL{probably} \(last seen 0\.5 GiB of 16; 2 ranks: 0\.5 GiB\); "
    pattern += r"see dmesg; .*rank_1\.log ends: \(empty\)\n"
    assert re.fullmatch(pattern, capfd.readouterr().err)
