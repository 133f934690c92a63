"""Fixtures of tests with a real server: a model, and a server at TP1, started as a trainer's rank starts it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_mega.rollout.sglang.server import Server
from tests.helpers.servers import make_settings, ready, trainers_environment, write_model


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="package")
def temporary() -> Iterator[Path]:
    """Return a folder for the files of servers. Its path is short, because socket names must be short."""
    with tempfile.TemporaryDirectory(prefix="gm", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="package")
def shared_server(model: Path, temporary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(make_settings(model, tmp_path_factory.mktemp("engine")))
    server.key = f"-{server.key}"  # a key may start with "-", but arguments must not be taken from it
    with ready(server, temporary):
        yield server


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, shared_server: Server, temporary: Path) -> Server:
    """Return the server that some files share. Start it again if a test of another file has killed it."""
    from tests.helpers.parallel import SHARED_SERVER  # imports pytest-xdist

    assert request.node.nodeid in SHARED_SERVER, "add the file to SHARED_SERVER, so that no other server starts"
    if not shared_server.is_alive():
        shared_server.kill()
        with trainers_environment(temporary):
            shared_server.start()
        shared_server.wait_until_healthy()
    return shared_server
