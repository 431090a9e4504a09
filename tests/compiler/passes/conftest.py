import pytest

from tritium.compiler.passes import channels_last


@pytest.fixture
def anywhere(monkeypatch):
    """Convert convolutions also on this CPU, where the pass would decline."""
    monkeypatch.setattr(channels_last, "decline", lambda device_type, fidelity: None)
