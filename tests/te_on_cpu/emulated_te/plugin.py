"""`pytest -p tests.te_on_cpu.emulated_te.plugin --te-version 2.11.0`: run this pytest process on the emulation."""

from __future__ import annotations

import gc

import pytest

from tests.te_on_cpu.emulated_te.launcher import DEFAULT


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--te-version", default=DEFAULT, help="Transformer Engine version to run on emulated kernels")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Install the emulation before a conftest imports anything."""
    from tests.te_on_cpu.emulated_te.package import emulate

    emulate(early_config.known_args_namespace.te_version)


def pytest_collection_finish() -> None:
    """Exempt all imports from garbage collection: each policy of a test collects, and would visit them in 0.25 s."""
    gc.collect()
    gc.freeze()
