"""What every test of layers begins with."""

import pytest

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
