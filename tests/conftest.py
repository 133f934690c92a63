"""Three levels of tests. By default pytest leaves out the tests marked `full` and `sweep`: further cases of large
matrices.

`--all` adds the tests marked `full`, as CI does. `--sweep` runs all tests. A test that is left out still runs if an
argument names it (`FILE::TEST`), or if `-m` contains its mark. `-n N` runs the tests in N processes
(helpers/parallel.py).

Tests marked `sglang` are skipped if SGLang is not installed.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import preloaded
from tests.helpers.disks import fill, mounted


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests marked `full`: more cases of each matrix")
    parser.addoption("--sweep", action="store_true", help="run all tests: the whole of every matrix")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin would take the cores of other processes
    # A script starts background processes with SIGINT ignored, and the commands that tests start would inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("numprocesses", None):
        from tests.helpers.parallel import Progress  # imports pytest-xdist

        os.environ["PRELOADED_PYTHON"] = preloaded.python()  # one server for all processes
        config.pluginmanager.register(Progress())


def pytest_collection_finish() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # the models of tests are too small for several threads


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("sglang") and importlib.util.find_spec("sglang") is None:
        pytest.skip("needs SGLang; tests/run.sh without --fast installs it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marks = {"sweep"} if config.getoption("--all") else {"full", "sweep"}
    marks = set() if config.getoption("--sweep") else {mark for mark in marks if mark not in config.option.markexpr}
    named = [argument.split("::", 1) for argument in config.args if "::" in argument]
    asked = [((config.invocation_params.dir / path).resolve(), f"::{test}") for path, test in named]
    left_out = [item for item in items if any(map(item.get_closest_marker, marks)) and not is_asked_for(item, asked)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    if hasattr(config, "workerinput"):
        from tests.helpers.parallel import sort_by_marks

        sort_by_marks(items)


@pytest.fixture(autouse=True)
def restored_environment() -> Iterator[None]:
    """Restore the variables that a test's code sets for its own children (http_client.py)."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="module")
def preloaded_python() -> Iterator[None]:
    """Start the module's programs by sys.executable from a Python that has imported everything heavy
    (helpers/preloaded.py).
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", preloaded.python())
        yield


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    with mounted(tmp_path / "disk", "256k") as folder:
        yield folder


@pytest.fixture
def full_disk(small_disk: Path) -> Path:
    """A file system on which files can be made, and nothing be written into them."""
    fill(small_disk)
    return small_disk


def is_asked_for(item: pytest.Item, asked: list[tuple[Path, str]]) -> bool:
    name = item.nodeid[item.nodeid.index("::") :]
    return any(item.path == path and name.startswith(test) for path, test in asked)
