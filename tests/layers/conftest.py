"""What every test of layers begins with."""

import pytest
import torch

from tritium import tuning
from tritium.layers import eager


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, tmp_path):
    """Tables in a folder of the test's own, and an empty memory."""
    monkeypatch.setattr(tuning.tables, "user_folder", lambda: tmp_path)
    monkeypatch.setattr(eager, "_CHOSEN", {})
    tuning.forget()
    yield
    tuning.forget()


@pytest.fixture(scope="session")
def random():
    """Normal numbers of a shape, the same for the same seed."""

    def make(*shape, dtype=torch.float32, seed=0):
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    return make
