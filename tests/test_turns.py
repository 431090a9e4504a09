"""Who measures on a GPU waits for others who do. None is needed: turns are about files and threads."""

import subprocess
import sys
import tempfile
import threading
import time

import pytest
import torch

from tritium import turns
from tritium.layers.attention import choice


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def taken_elsewhere(seconds=0.3):
    """Whether another process finds the turn taken for so long."""
    program = (
        "import sys, tempfile, warnings; from tritium import turns; tempfile.tempdir = sys.argv[1]\n"
        "turns.PATIENCE = float(sys.argv[2])\n"
        "with warnings.catch_warnings(record=True) as caught, turns.turn('cuda'): print(len(caught))"
    )
    command = [sys.executable, "-c", program, tempfile.gettempdir(), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip() == "1"


def test_who_has_the_turn_goes_on():
    with turns.turn("cuda"):
        assert turns.held()
        with turns.turn("cuda"), turns.turn("cuda"):
            assert turns.held()
        assert turns.held(), "the inner one has not given it back"
    assert not turns.held()


def test_another_process_waits():
    with turns.turn("cuda"):
        with turns.turn("cuda"):
            pass
        assert taken_elsewhere()
    assert not taken_elsewhere()


def test_another_thread_waits():
    order, started = [], threading.Event()

    def second():
        started.set()
        with turns.turn("cuda"):
            order.append("second")

    thread = threading.Thread(target=second)
    with turns.turn("cuda"):
        thread.start()
        started.wait()
        time.sleep(0.1)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def test_a_thread_that_is_waited_for_has_the_turn():
    with turns.turn("cuda"):
        found = []
        thread = threading.Thread(target=turns.lent(lambda: found.append(turns.held())))
        thread.start()
        thread.join(10)
        assert found == [True]
        assert turns.held()
    assert turns.lent(turns.held)() is False


def test_an_error_gives_the_turn_back():
    with pytest.raises(ValueError, match="mine"), turns.turn("cuda"):
        raise ValueError("mine")
    assert not turns.held()
    assert not taken_elsewhere()


def test_nobody_waits_for_ever(monkeypatch):
    monkeypatch.setattr(turns, "PATIENCE", 0.05)
    ran = []

    def impatient():
        with pytest.warns(RuntimeWarning, match="another thread has measured on the GPU"), turns.turn("cuda"):
            ran.append(turns.held())

    with turns.turn("cuda"):
        thread = threading.Thread(target=impatient)
        thread.start()
        thread.join(10)
    assert ran == [True]
    assert not turns.held()


def test_a_cpu_has_no_turns():
    with turns.turn("cpu"):
        assert not turns.held()
        assert not taken_elsewhere()


class TestWhoMeasures:
    def test_attention_is_compared_in_turn(self, monkeypatch):
        """Also where the caller has the turn: the thread that measures is another one."""
        monkeypatch.setattr(choice, "_can_measure", lambda where: True)
        monkeypatch.setattr(choice, "_device_name", lambda where: "a GPU")
        seen = []

        def measured():
            with turns.turn("cuda"):
                seen.append(turns.held())

        choice.recall(torch.device("cuda"), "a key", measured)
        assert not turns.held()
        with turns.turn("cuda"):
            choice.recall(torch.device("cuda"), "a key", measured)
        assert seen == [True, True]
