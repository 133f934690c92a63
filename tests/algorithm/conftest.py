"""Fixtures for tests that compute on a few tokens."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Use one thread. With so little work, several threads wait for each other and are much slower on a busy
    machine.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
