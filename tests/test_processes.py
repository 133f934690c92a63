"""Temporary folders: short enough for sockets with any TMPDIR, and removed only after their processes are dead."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_mega import processes
from grpo_mega.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def short() -> Iterator[Path]:
    """Create a folder with a name that is short enough for sockets, unlike pytest's folders."""
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def python(code: str, tmpdir: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", f"from grpo_mega import processes; enter = processes.enter_private_folder\n{code}"],
        env={**os.environ, "TMPDIR": str(tmpdir), "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    return said.strip()


@pytest.mark.parametrize("length", [70, 107, 200])
def test_sockets_work_with_a_long_tmpdir(length: int, tmp_path: Path) -> None:
    long = tmp_path / ("x" * length)
    long.mkdir()
    code = "enter()\nfrom multiprocessing import Manager\nwith Manager() as m: print(m.dict(a=1)['a'])\n"
    code += "import os; print(os.environ['TMPDIR'], processes.shared_folder())"
    one, folder, shared = output(python(code, long)).split()
    assert one == "1" and folder.startswith("/tmp/grpo-mega-") and not Path(folder).exists()
    assert Path(shared) == long and not list(long.iterdir())


def test_a_short_tmpdir_is_used_and_left_empty(short: Path) -> None:
    code = "from pathlib import Path; import tempfile\n"
    code += "folder = enter(); print(folder.stat().st_mode & 0o777, folder.parent, enter() == folder)\n"
    code += "print(Path(tempfile.mkdtemp()).parent == folder)"
    assert output(python(code, short)).split() == [str(0o700), str(short), "True", "True"]
    assert not list(short.iterdir())


def test_a_child_with_another_tmpdir_uses_it(short: Path) -> None:
    (short / "other").mkdir()
    code = "import os, subprocess, sys; enter()\n"
    code += "show = [sys.executable, '-c', 'from grpo_mega import processes; print(processes.shared_folder())']\n"
    code += "for more in ({}, {'TMPDIR': sys.argv[1]}): subprocess.run(show, env=os.environ | more)"
    process = python(code.replace("sys.argv[1]", repr(str(short / "other"))), short)
    assert output(process).split() == [str(short), str(short / "other")]


def test_an_error_in_one_line_if_no_folder_supports_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(processes, "_bases", lambda: [long, tmp_path / "file", tmp_path / "none"])
    with pytest.raises(ConfigError, match=r"TMPDIR=.*x: .*\(.*; set TMPDIR") as error:
        processes.make_folder()
    for reason in ("too long", "Not a directory", "No such file"):
        assert reason in str(error.value)
    assert not list(long.iterdir())


def test_only_folders_of_dead_processes_on_this_host_are_removed(short: Path) -> None:
    wait = "import time; print(enter(), flush=True); time.sleep(600)"
    dead, living = python(wait, short), python(wait, short)
    assert dead.stdout is not None and living.stdout is not None
    left, used = Path(dead.stdout.readline().strip()), Path(living.stdout.readline().strip())
    (left / "pymp-1").mkdir()
    dead.send_signal(signal.SIGKILL)
    dead.communicate()
    other_host, kept = short / "grpo-mega-000000-12345678", short / f"{left.name.rpartition('-')[0]}-kept"
    for folder in (other_host, kept):
        folder.mkdir(mode=0o700)
    (kept / processes.KEEP).touch()
    assert left.exists() and used.exists()
    output(python("processes.remove_unused_folders()", short))
    assert sorted(short.iterdir()) == sorted([used, other_host, kept])
    living.kill()
    living.communicate()
    output(python("enter()", short))
    assert sorted(short.iterdir()) == sorted([other_host, kept])


def test_a_file_system_without_locks_is_skipped(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", no_locks)
    monkeypatch.setattr(processes, "_bases", lambda: [short])
    with pytest.raises(ConfigError, match="Operation not supported"):
        processes.make_folder()
    assert not list(short.iterdir())
