"""The life of a server process: its environment and arguments, its answers, and no leftovers however it ends.

A start takes ten seconds, so each start serves several tests. Ends that do not depend on the progress of a start are
tested early.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo_mega.errors import EngineError
from grpo_mega.rollout.sglang import server as servers_module
from grpo_mega.rollout.sglang.server import Server
from tests.helpers.servers import (
    TRAINERS,
    Tree,
    check_gone,
    generate,
    is_true_within,
    make_settings,
    running,
    trainers_environment,
)

pytestmark = pytest.mark.sglang
OWNER = Path(__file__).with_name("owner.py")


@pytest.fixture
def empty(temporary: Path) -> Iterator[Path]:
    """Yield the folder for temporary files of a trainer's environment, separate from the shared server's. It must be
    empty at the end."""
    folder = temporary / "t"
    folder.mkdir()
    with trainers_environment(folder):
        yield folder
    folder.rmdir()  # fails unless it is empty


def start_owner(model: Path, folder: Path, tp: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(OWNER), str(model), str(folder), str(tp)], stdout=subprocess.PIPE, text=True
    )


def wait_for_sglang(look: Callable[[], Tree]) -> Tree:
    """Wait until the guardian has forked, long before the server is ready."""
    assert is_true_within(20, lambda: len(look().pids) >= 2)
    return look()


def environment_of(pid: int) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in entry)


def test_a_started_server_generates_token_ids_with_logprobs(server: Server) -> None:
    assert server.is_alive()
    answers = generate(server, num_tokens=8, num_samples=3)
    assert len(answers) == 3
    for answer in answers:
        logprobs = answer["meta_info"]["output_token_logprobs"]
        assert [entry[1] for entry in logprobs] == answer["output_ids"]
        assert len(logprobs) == 8
        assert all(entry[0] < 0 for entry in logprobs)


def test_no_server_process_inherits_the_trainers_variables(server: Server) -> None:
    tree = Tree.of(server)
    (scheduler,) = tree.named("sglang::scheduler")
    for pid in tree.pids:
        assert {name for name, value in environment_of(pid).items() if TRAINERS.get(name) == value} == set()
    assert TRAINERS.keys() & environment_of(scheduler).keys() - {"MASTER_ADDR", "MASTER_PORT"} == {"OMP_NUM_THREADS"}
    own = [environment_of(scheduler).get(name) for name in ("MASTER_ADDR", "MASTER_PORT")]
    assert own == ["127.0.0.1", server.url.rpartition(":")[2]], "its own address, not the job's"
    assert environment_of(scheduler)["OMP_NUM_THREADS"] == "2"


def test_its_log_is_in_its_folder_and_short(server: Server) -> None:
    path = Path(server.tail().split(" ends: ")[0])
    assert path.name == "server.log"
    assert path.parent.name.startswith("engine")
    text = path.read_text()
    assert "Ignore import error" not in text  # it imported only the models of our families
    assert text.count("\n") < 40


def test_an_argument_that_sglang_does_not_know_is_one_clear_line(model: Path, tmp_path: Path, empty: Path) -> None:
    with running(Server(make_settings(model, tmp_path, server_args={"no_such_argument": 7}))) as server:
        tree = wait_for_sglang(lambda: Tree.of(server))
        with pytest.raises(EngineError) as caught:
            server.wait_until_healthy()
        problem = "unrecognized arguments: --no-such-argument 7"
        assert (
            str(caught.value) == f"the SGLang server of {tmp_path} did not start: {problem}; see {tmp_path}/server.log"
        )
        assert not server.is_alive()
        check_gone(tree, empty)


@pytest.mark.full
def test_a_used_port_is_replaced_and_an_exception_ends_the_server(
    model: Path,
    tmp_path: Path,
    empty: Path,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    taken = int(server.url.rpartition(":")[2])
    free_ports = servers_module.free_ports
    offers = [[taken]]
    monkeypatch.setattr(servers_module, "free_ports", lambda *asked: offers.pop() if offers else free_ports(*asked))
    other = Server(make_settings(model, tmp_path, shows_progress=True))
    with pytest.raises(ZeroDivisionError), running(other):
        other.wait_until_healthy()
        assert not offers
        assert other.url != server.url
        lines = capsys.readouterr().out.splitlines()
        assert lines and all(
            re.fullmatch(r"waiting for the SGLang server(: \d+ s of at most \d+ s)?", line) for line in lines
        )
        generate(other)
        tree = Tree.of(other)
        assert len(tree.pids) == 4  # guardian, SGLang, scheduler, detokenizer
        started_at = time.monotonic()
        raise ZeroDivisionError
    assert time.monotonic() - started_at < 15
    check_gone(tree, empty, seconds=0)
    assert server.is_alive()
    generate(server)


@pytest.mark.full
def test_a_server_over_two_processes_goes_with_its_owner_by_kill_9(model: Path, tmp_path: Path, empty: Path) -> None:
    owner = start_owner(model, tmp_path, tp=2)
    assert owner.stdout is not None
    reachable = Server(make_settings(model, tmp_path))
    reachable.url, reachable.key = owner.stdout.readline().split()
    assert len(generate(reachable, num_samples=4)) == 4
    tree = Tree.below(owner.pid)
    assert len(tree.named("sglang::scheduler")) == 2
    assert len(tree.shared_memory) >= 2
    assert len(tree.ports) > 2
    owner.kill()
    owner.communicate()
    check_gone(tree, empty)


@pytest.mark.full
def test_a_server_goes_with_its_owner_by_sigterm(model: Path, tmp_path: Path, empty: Path) -> None:
    owner = start_owner(model, tmp_path, tp=1)
    assert owner.stdout is not None
    assert owner.stdout.readline().startswith("http")
    tree = Tree.below(owner.pid)
    assert len(tree.named("sglang::")) == 2
    owner.terminate()
    owner.communicate()
    check_gone(tree, empty)


@pytest.mark.parametrize("victim", ["owner", "guardian", "SGLang"])
def test_a_server_that_still_starts_ends_with_any_of_its_processes(
    victim: str, model: Path, tmp_path: Path, empty: Path
) -> None:
    owner = start_owner(model, tmp_path, tp=1)
    tree = wait_for_sglang(lambda: Tree.below(owner.pid))
    guardian, sglang = tree.pids
    os.kill({"owner": owner.pid, "guardian": guardian, "SGLang": sglang}[victim], signal.SIGKILL)
    _, _ = owner.communicate(timeout=60)  # the owner raises if another process was killed
    assert owner.returncode == (-signal.SIGKILL if victim == "owner" else 1)
    check_gone(tree, empty)


def test_a_server_can_be_stopped_while_it_starts(model: Path, tmp_path: Path, empty: Path) -> None:
    server = Server(make_settings(model, tmp_path))
    server.start()
    tree = wait_for_sglang(lambda: Tree.of(server))
    server.stop()
    server.stop()
    assert not server.is_alive()
    check_gone(tree, empty, seconds=0)


def test_a_server_that_is_not_ready_in_time_is_ended(model: Path, tmp_path: Path, empty: Path) -> None:
    server = Server(make_settings(model, tmp_path, start_deadline_s=1))
    server.start()
    with pytest.raises(EngineError, match=r"was not ready after 1 s; .*server\.log ends: "):
        server.wait_until_healthy()
    assert not server.is_alive()
