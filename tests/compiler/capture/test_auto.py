"""Under graphs="auto" a bucket is captured only if the device waits for the host."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import tritium
from support.capture import compiled
from tritium import CompilationConfig
from tritium.compiler.capture import Region, Spec, auto
from tritium.compiler.capture.auto import Decisions
from tritium.compiler.capture.graph import WARM_UPS
from tritium.report.records import GraphRecord, PassRecord

AUTO = CompilationConfig(graphs="auto")


class TestAuto:
    def test_a_cpu_is_left_alone_and_told_so(self):
        f = compiled(lambda x: x + 1, CompilationConfig(graphs="auto", engine="eager"))
        f(torch.ones(3))
        report = tritium.explain(f)
        assert report.captures == []
        entry = next(entry for entry in report.passes if entry["name"] == "capture")
        assert "a CPU launches nothing" in entry["declined"]

    def test_a_device_that_waits_is_captured(self, timed):
        f, entry, record = timed(host=[8.0], device=8.0, replay=5.0)
        f.call(auto.CALLS_TO_DECIDE)
        assert len(f.region) == 1
        assert record.captures[0].declined is None
        assert entry.summary == "graphs='auto': the device was idle for 38 % of a call (8.00 ms, 5.00 ms replayed)"
        assert f.ran == auto.CALLS_TO_DECIDE + WARM_UPS + 1, "besides the caller's, only the runs that a capture needs"

    def test_a_replay_that_saves_little_is_dropped(self, timed):
        f, entry, record = timed(host=[8.0], device=8.0, replay=7.92)
        f.call(auto.CALLS_TO_DECIDE + 2)
        assert len(f.region) == 0
        assert entry.declined == record.captures[0].declined
        assert entry.declined.endswith("idle for 1 % of a call (8.00 ms, 7.92 ms replayed): less than 5 %")

    @pytest.mark.parametrize(
        ("figures", "reason"),
        [
            ({"host": [1.0]}, "the host issues a call in 1.00 of 8.00 ms"),
            # One slow call of the host decides nothing.
            ({"host": [1.0, 8.0, 1.0]}, "the host issues a call in 1.00 of 8.00 ms"),
            ({"host": [8.0], "began_idle": False}, "3 of 3 calls began while it was busy"),
        ],
    )
    def test_a_device_that_does_not_wait_is_left_alone(self, timed, figures, reason):
        f, entry, record = timed(device=8.0, replay=5.0, **figures)
        f.call(auto.CALLS_TO_DECIDE)
        assert f.ran == auto.CALLS_TO_DECIDE, "nothing was captured"
        assert reason in entry.declined
        assert record.captures[0].declined == entry.declined

    def test_nothing_waits_for_events_of_the_device(self, timed):
        f, _, record = timed(host=[8.0], device=8.0, replay=5.0)
        f.done = False
        f.call(20)
        assert len(f.region) == 0
        assert record.captures[0].declined == auto.UNDECIDED
        f.done = True
        f.call(auto.CALLS_TO_DECIDE)
        assert len(f.region) == 1

    def test_each_shape_has_its_own_answer(self, timed):
        f, entry, record = timed(host=[8.0], device=8.0, replay=5.0)
        f.call(auto.CALLS_TO_DECIDE, size=2)
        f.host = [1.0]
        f.call(auto.CALLS_TO_DECIDE, size=3)
        assert [row.declined is None for row in record.captures] == [True, False]
        assert entry.changed
        assert "idle for 38 %" in entry.summary
        assert "does not wait" in entry.summary

    def test_other_weights_take_the_decision_of_the_shape(self, timed):
        f, _, record = timed(host=[8.0], device=8.0, replay=5.0)
        f.call(auto.CALLS_TO_DECIDE)
        other = torch.ones(1)
        f.call(1, weight=other)
        assert len(f.region) == 2
        assert all(row.declined is None for row in record.captures)

    def test_each_piece_of_a_graph_has_its_own_answer(self):
        entry = PassRecord("capture", changed=True, summary="cut at 1 boundary op")
        decisions = Decisions(entry)
        first, second = decisions.of((0, "x")), decisions.of((2, "x"))
        assert first is not second
        first.settle(why="idle")
        second.settle(declined="busy")
        assert entry.summary == "cut at 1 boundary op; graphs='auto': idle; busy"
        assert entry.declined is None

    def test_a_capture_that_fails_leaves_the_calls_right(self, timed):
        f, _, record = timed(host=[8.0], device=8.0, replay=5.0)
        f.region._capture = lambda *_: (_ for _ in ()).throw(RuntimeError("no memory"))
        with pytest.warns(RuntimeWarning, match="could not be captured"):
            f.call(auto.CALLS_TO_DECIDE)
        assert record.captures[0].declined == "RuntimeError: no memory"


@dataclass
class Timed:
    """A region on a device whose clock a test sets: `device` ms a call, `replay` ms a replay, `host` ms to issue one."""

    host: list[float]
    device: float
    replay: float
    began_idle: bool = True
    done: bool = True
    now: float = 0.0
    ran: int = 0
    # Kept: the captures of weights that are gone go with them.
    weight: Any = field(default_factory=lambda: torch.ones(1))
    region: Any = None

    def run(self, x, weight):
        self.ran += 1
        return (x * weight,)

    def call(self, count, size=2, weight=None):
        weight = self.weight if weight is None else weight
        for _ in range(count):
            assert self.region(torch.full((size,), 3.0), weight)[0].tolist() == [3.0] * size


@pytest.fixture
def timed(monkeypatch):
    """A region under graphs="auto" whose events read a clock of the test's own."""
    state = Timed([], 0.0, 0.0)

    class Event:
        def __init__(self):
            self.at = state.now

        def query(self):
            return state.done

        def elapsed_time(self, later):
            return later.at - self.at

    def sampled(device, run):
        start = Event()
        result = run()
        captured = any(
            entry.captured is not None for weights in state.region.sets for entry in weights.entries.values()
        )
        state.now += state.replay if captured else state.device
        host = state.host[0] if len(state.host) == 1 else state.host.pop(0)
        return auto.Sample(start, Event(), host, state.began_idle), result

    monkeypatch.setattr(auto, "sampled", sampled)

    def make(**figures):
        for name, value in figures.items():
            setattr(state, name, value)
        entry, record = PassRecord("capture", changed=True), GraphRecord("0/0", "run", "eager", "cpu")
        state.region = Region(state.run, Spec(("x", "weight"), weights=(1,)), AUTO, record, Decisions(entry))
        return state, entry, record

    return make
