"""Fixtures of the census."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny models: a second thread costs more than it computes, far more on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
