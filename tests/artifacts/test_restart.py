"""What a process does not do for graphs that an earlier one compiled."""

import threading

import pytest

import tritium
from tritium import compat
from tritium.compiler import lower
from tritium.report.observation import Observation


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(lower, "_compiled_again", [])


def test_a_graph_of_an_earlier_process_starts_no_workers():
    assert lower._expected(Observation(), "cuda")
    with lower._without_workers():
        assert compat.inductor.setting("compile_threads") == 1


def test_workers_for_everything_else(monkeypatch):
    assert not lower._expected(None, "cuda")
    assert not lower._expected(Observation(), "cpu")
    with compat.inductor.inductor_patched({"fx_graph_cache": False}):
        assert not lower._expected(Observation(), "cuda")
    monkeypatch.setattr(lower, "_compiled_again", ["key"])
    assert not lower._expected(Observation(), "cuda")


def test_a_failed_hash_is_left_to_who_needs_it(monkeypatch):
    asked = []

    def broken():
        asked.append(threading.current_thread())
        raise OSError("unreadable")

    monkeypatch.setattr("torch._inductor.codecache.torch_key", broken)
    monkeypatch.setattr("tritium.compat.inductor._preparing", {})
    compat.inductor.start_hashing()
    compat.inductor.start_hashing()
    from tritium.compat import inductor

    for thread in inductor._preparing.values():
        thread.join()
    assert len(asked) == 1
    assert asked[0] is not threading.current_thread()


def test_work_for_dynamo_s_log_is_done_for_its_readers_alone(monkeypatch):
    import torch._logging
    from torch._dynamo import guards, symbolic_convert

    tritium.Backend()
    line = test_work_for_dynamo_s_log_is_done_for_its_readers_alone.__code__.co_firstlineno + 1
    assert symbolic_convert.get_funcname(__file__, line) is None
    assert guards.profile_guard_manager() == 0.0
    torch._logging.set_logs(trace_call=True, guards=True)
    try:
        assert symbolic_convert.get_funcname(__file__, line).startswith("test_work_for_dynamo")
        with pytest.raises(TypeError):
            guards.profile_guard_manager()
    finally:
        torch._logging.set_logs()
    monkeypatch.setenv("TORCH_TRACE", "somewhere")
    with pytest.raises(TypeError):
        guards.profile_guard_manager()
