"""Staging folders in a node's memory: folders that a run uses or removes. distributed/test_checkpoints.py covers
saving.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_mega.processes import remove_unlocked
from grpo_mega.trainer import saving

STRANGER = 12345  # a user id


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(saving, "MEMORY", tmp_path)
    return tmp_path


def folder(memory: Path, name: str, mode: int = 0o700) -> Path:
    path = memory / f"grpo_mega-staging-{name}"
    path.mkdir(mode=mode)
    path.chmod(mode)
    (path / "__0_0.distcp").touch()
    return path


def test_folders_of_killed_runs_are_removed_and_folders_in_use_stay(memory: Path) -> None:
    left, used = folder(memory, "left"), folder(memory, "used")
    descriptor = os.open(used, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    remove_unlocked(saving.PREFIX, saving.MEMORY)
    assert (left.exists(), used.exists()) == (False, True)
    os.close(descriptor)
    remove_unlocked(saving.PREFIX, saving.MEMORY)
    assert not used.exists()


def test_the_next_run_removes_the_folder_of_a_run_killed_while_staging(memory: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from grpo_mega.trainer import saving\n"
        "made = saving.make_locked_folder(saving.PREFIX, Path(sys.argv[1])); print(made[0], flush=True)\n"
        "time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(memory)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    made = Path(process.stdout.readline().strip())
    assert made.parent == memory and saving.is_private(made)
    remove_unlocked(saving.PREFIX, saving.MEMORY)
    assert made.exists(), "it is in use"
    process.kill()
    process.communicate()
    until = time.monotonic() + 10
    while made.exists() and time.monotonic() < until:
        remove_unlocked(saving.PREFIX, saving.MEMORY)
    assert not made.exists()


def test_links_are_not_followed(memory: Path, tmp_path: Path) -> None:
    precious = folder(memory, "precious").rename(tmp_path / "precious")
    link = memory / "grpo_mega-staging-link"
    link.symlink_to(precious)
    remove_unlocked(saving.PREFIX, saving.MEMORY)
    assert (precious / "__0_0.distcp").exists() and link.is_symlink()
    assert not saving.is_private(link)


def test_a_folder_that_other_users_may_enter_is_not_private(memory: Path) -> None:
    assert saving.is_private(folder(memory, "closed"))
    for mode in (0o755, 0o750, 0o701):
        assert not saving.is_private(folder(memory, f"{mode:o}", mode))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to give files away (run as root)")
def test_folders_of_another_user_are_neither_used_nor_removed(memory: Path) -> None:
    theirs = folder(memory, "theirs")
    os.chown(theirs, STRANGER, STRANGER)
    remove_unlocked(saving.PREFIX, saving.MEMORY)
    assert (theirs / "__0_0.distcp").exists()
    assert not saving.is_private(theirs)
