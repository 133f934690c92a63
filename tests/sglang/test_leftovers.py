"""Leftovers of a server are removed as soon as no living process uses them, and not before."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mega import processes
from grpo_mega.processes import descendants
from grpo_mega.rollout.sglang import server_main
from tests.helpers.servers import is_true_within


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(processes, "_bases", lambda: [tmp_path])
    monkeypatch.setattr(processes, "_check_socket", lambda folder: None)  # pytest's folders have long names
    monkeypatch.setattr(server_main, "SHARED_MEMORY", tmp_path)
    return tmp_path


def test_a_folder_stays_as_long_as_a_process_forked_from_its_maker_lives(base: Path) -> None:
    folder, lock = processes.make_folder()
    (folder / "socket").touch()
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    os.close(lock)
    server_main.remove_unused()
    assert (folder / "socket").exists()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    server_main.remove_unused()
    assert not list(base.iterdir())


def test_folders_of_killed_makers_go_and_folders_of_others_stay(base: Path) -> None:
    (base / f"{processes._prefix()}dead").mkdir()
    (base / "someone-elses").mkdir()
    server_main.remove_unused()
    assert [path.name for path in base.iterdir()] == ["someone-elses"]


def test_shared_memory_goes_once_no_process_has_it_open(base: Path) -> None:
    for name in ("sglang_loads_1", "sgl_shm_mq_1", "torch_1"):
        (base / name).touch()
    with (base / "sgl_shm_mq_1").open():
        server_main.remove_unused()
        assert sorted(path.name for path in base.iterdir()) == ["sgl_shm_mq_1", "torch_1"]
    server_main.remove_unused()
    assert [path.name for path in base.iterdir()] == ["torch_1"]


def test_descendants_are_found_at_any_depth_and_zombies_do_not_count() -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    child = subprocess.Popen([sys.executable, "-c", program])
    assert is_true_within(20, lambda: len(descendants(child.pid)) == 1)
    (grandchild,) = descendants(child.pid)
    assert {child.pid, grandchild} <= set(descendants(os.getpid()))
    os.kill(grandchild, signal.SIGKILL)
    child.kill()
    # Although the parent has not waited for it.
    assert is_true_within(20, lambda: child.pid not in descendants(os.getpid()))
    child.wait()
