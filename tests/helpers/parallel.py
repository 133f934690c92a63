"""The tests in several processes (pytest-xdist): which process runs which tests, and a line of progress per minute.

A file's tests run in one process, one after the other, and so do the files that share a server. Files with slow tests
come first, so that the processes end at about the same time.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
from xdist.scheduler.loadfile import LoadFileScheduling

INTERVAL = 60.0  # seconds between lines
SLOW = ("sglang", "distributed", "waiting", "pool")  # marks, slowest first
SHARED_SERVER = frozenset(
    f"tests/sglang/test_{name}.py" for name in ("conversations", "generation", "server_life", "sglang_client")
)


def sort_by_marks(items: list[pytest.Item]) -> None:
    """Sort files by the slowest mark of their tests. The order inside a file does not change."""
    ranks: dict[str, int] = {}
    for item in items:
        marks = (number for number, mark in enumerate(SLOW) if item.get_closest_marker(mark))
        group = group_of(item.nodeid)
        ranks[group] = min(ranks.get(group, len(SLOW)), next(marks, len(SLOW)))
    items.sort(key=lambda item: ranks[group_of(item.nodeid)])


def group_of(nodeid: str) -> str:
    """Return the name of the tests that run in the same process as this test."""
    file = nodeid.partition("::")[0]
    return "shared server" if file in SHARED_SERVER else file


class Groups(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def remove_node(self, node: Any) -> str | None:
        """Return the test that ended the process. The others of its file run in a new one; xdist would run it, too."""
        for unit in self.assigned_work[node].values():
            for nodeid, is_done in unit.items():
                if not is_done:
                    unit[nodeid] = True
                    super().remove_node(node)
                    return str(nodeid)
        return super().remove_node(node)

    def _reschedule(self, node: Any) -> None:
        if node not in self.registered_collections:  # a new process has yet to collect its tests
            return
        with contextlib.suppress(OSError):  # the process has ended; `remove_node` follows
            super()._reschedule(node)
            while self._pending_of(self.assigned_work[node]) < 2 and not node.shutting_down:
                super()._reschedule(node)  # a process starts a test only if it knows the next one


class Progress:
    """Prints a line per minute and per failed test instead of a dot per test."""

    def __init__(self) -> None:
        self._num_tests, self._num_done, self._num_failed = 0, 0, 0
        self._running: dict[str, None] = {}
        self._is_finished = threading.Event()

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Groups:
        return Groups(config, log)

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._num_tests = len(ids)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._terminal: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        threading.Thread(target=self._report, daemon=True).start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._num_failed += 1
            self._terminal.write_line(f"failed: {report.nodeid}")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)
        self._num_done += 1

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> Any:
        category, _, _ = yield
        return category, "", ""

    def pytest_sessionfinish(self) -> None:
        self._is_finished.set()

    def _report(self) -> None:
        minutes = 0
        while not self._is_finished.wait(INTERVAL):
            minutes += 1
            running = ", ".join(nodeid.partition("[")[0] for nodeid in list(self._running)) or "starting"
            counts = f"{self._num_done} of {self._num_tests} tests, {self._num_failed} failed"
            self._terminal.write_line(f"{minutes} min | {counts} | {running}")
