"""Timing on the GPU excludes other threads and processes. The lock is a file, so no GPU is needed here."""

import contextvars
import tempfile
import threading
import time

import pytest

from tritium import measure


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture
def held_elsewhere(in_process):
    """True if another process waits for the lock for so long."""

    def held(seconds=0.3, *, shared=False):
        program = (
            "import tempfile, warnings; from tritium import measure\n"
            f"tempfile.tempdir, measure.PATIENCE = {tempfile.gettempdir()!r}, {seconds}\n"
            f"with warnings.catch_warnings(record=True) as caught, measure.gpu_lock('cuda', shared={shared}):\n"
            "    print(len(caught))"
        )
        return in_process(program, loaded=True).strip() == "1"

    return held


def is_held():
    return measure._HOLDS_GPU.get()


def run_in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_another_process_waits_until_the_outer_lock_is_released(held_elsewhere):
    with measure.gpu_lock("cuda"):
        with measure.gpu_lock("cuda"), measure.gpu_lock("cuda"):
            pass
        assert is_held()
        assert held_elsewhere()
    with pytest.raises(ValueError, match="mine"), measure.gpu_lock("cuda"):
        raise ValueError("mine")
    assert not is_held()
    assert not held_elsewhere()


def test_what_is_not_timed_waits_only_for_what_is(held_elsewhere):
    with measure.gpu_lock("cuda", shared=True):
        assert not is_held(), "a timing inside must still ask for the GPU alone"
        assert not held_elsewhere(shared=True)
        assert held_elsewhere()
    with measure.gpu_lock("cuda"):
        assert held_elsewhere(shared=True)


def test_another_thread_waits():
    order, started = [], threading.Event()

    def second():
        started.set()
        with measure.gpu_lock("cuda"):
            order.append("second")

    with measure.gpu_lock("cuda"):
        thread = run_in_thread(second)
        started.wait()
        time.sleep(0.1)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def test_a_thread_in_a_copied_context_shares_the_lock():
    with measure.gpu_lock("cuda"):
        held, context = [], contextvars.copy_context()
        run_in_thread(lambda: held.append(context.run(is_held))).join(10)
        assert held == [True]
        assert is_held()


def test_waiting_has_a_limit(monkeypatch):
    monkeypatch.setattr(measure, "PATIENCE", 0.05)
    ran = []

    def impatient():
        with pytest.warns(RuntimeWarning, match="the GPU was measured on for 0.05 s"), measure.gpu_lock("cuda"):
            ran.append(is_held())

    with measure.gpu_lock("cuda"):
        run_in_thread(impatient).join(10)
    assert ran == [True]
    assert not is_held()


def test_a_cpu_has_no_lock():
    with measure.gpu_lock("cpu"):
        assert not is_held()
