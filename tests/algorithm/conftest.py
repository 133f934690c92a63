"""All of these tests compute on a few tokens."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Several threads that share so little wait for one another: many times slower on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
