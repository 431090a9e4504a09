"""The garbage collector comes back, whatever happens."""

import gc

import pytest

from tritium.compiler import collector


@pytest.fixture(autouse=True)
def enabled():
    gc.enable()
    yield
    gc.enable()


def test_paused_inside_and_back_afterwards():
    with collector.paused():
        assert not gc.isenabled()
        with collector.paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_back_after_an_error():
    with pytest.raises(RuntimeError, match="mine"), collector.paused():
        raise RuntimeError("mine")
    assert gc.isenabled()


def test_who_switched_it_off_keeps_it_off():
    gc.disable()
    with collector.paused():
        pass
    assert not gc.isenabled()
