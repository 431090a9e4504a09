"""What a process does not do for graphs that an earlier one compiled."""

import threading
import types

import pytest
import torch
from torch._subclasses import FakeTensorMode

import tritium
from tritium import api, compat
from tritium.artifacts import files, observations
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


class TestWorkers:
    @pytest.fixture(autouse=True)
    def _started(self, monkeypatch):
        self.started = []
        monkeypatch.setattr("torch._inductor.async_compile.maybe_warm_pool", lambda: self.started.append("pool"))
        monkeypatch.setattr("tritium.compat.inductor._preparing", {})

    def _start(self):
        compat.inductor.start_workers()
        for thread in compat.inductor._preparing.values():
            thread.join()

    def test_start_once(self):
        self._start()
        self._start()
        assert self.started == ["pool"]

    def test_do_not_start_if_this_process_compiles(self):
        with compat.inductor.inductor_patched({"compile_threads": 1}):
            self._start()
        assert not self.started

    def test_a_torch_without_them_compiles_as_usual(self, monkeypatch):
        monkeypatch.delattr("torch._inductor.async_compile.maybe_warm_pool")
        self._start()
        assert not self.started

    def test_start_with_optimize_if_the_cache_is_empty(self):
        with FakeTensorMode():
            weights = [[torch.empty(2, device=name)] for name in ("cuda", "cpu")]
        modules = (types.SimpleNamespace(parameters=one.copy) for one in weights)
        gpu, cpu = ([types.SimpleNamespace(module=module)] for module in modules)
        with compat.inductor.empty_cache():
            assert api._needs_workers(gpu, tritium.Plan(), None)
            assert not api._needs_workers(cpu, tritium.Plan(), None)
            assert not api._needs_workers([], tritium.Plan(), None)
            assert not api._needs_workers(gpu, tritium.Plan(config=tritium.CompilationConfig(engine="eager")), None)
            loaded = files.ArtifactSummary("file", 1, 1, 0, 0, 0)
            assert not api._needs_workers(gpu, tritium.Plan(), loaded)
            observations.store().save("key", Observation())
            assert not api._needs_workers(gpu, tritium.Plan(), None)
