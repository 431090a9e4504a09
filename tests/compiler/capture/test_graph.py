"""The lane of a GPU, on a stand-in for `torch.cuda` that writes down what is asked of it: the order of things, not their effect."""

import contextlib
import inspect

import pytest
import torch

from tritium.compiler.capture.graph import WARM_UPS, CudaLane, Lane

# The signature before anything stands in for it.
RECORDING = inspect.signature(torch.cuda.graph.__init__)


class Stream:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


class Cuda:
    """What a lane uses of torch.cuda."""

    def __init__(self, monkeypatch):
        self.log = []
        self.current = Stream(self.log, "main")
        self.side = Stream(self.log, "side")
        self.recording = False
        self.pools = 0
        self.fails_at_end = False
        for name, value in {
            "device": lambda device: contextlib.nullcontext(),
            "current_stream": lambda device=None: self.current,
            "Stream": lambda device: self.side,
            "stream": self.on_stream,
            "CUDAGraph": lambda: f"graph {len([entry for entry in self.log if 'recorded' in entry])}",
            "graph": self.graph,
            "graph_pool_handle": self.new_pool,
            "memory_reserved": lambda device: 0,
            "synchronize": lambda device=None: self.log.append("synchronize"),
            "is_initialized": lambda: True,
            "is_current_stream_capturing": lambda: self.recording,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: self.log.append("clear"), raising=False)

    def new_pool(self):
        self.pools += 1
        return f"pool {self.pools}"

    @contextlib.contextmanager
    def on_stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, graph, **settings):
        RECORDING.bind(None, graph, **settings)
        assert settings["stream"] is self.side
        assert settings["capture_error_mode"] == "thread_local"
        self.recording = True
        try:
            yield
        finally:
            self.recording = False
            if self.fails_at_end:
                raise RuntimeError("the recording was invalidated")
        self.log.append(f"recorded {graph} into {settings['pool']}")


@pytest.fixture
def cuda(monkeypatch):
    return Cuda(monkeypatch)


@pytest.fixture
def lane(cuda):
    return CudaLane(torch.device("cuda", 0))


def test_warm_ups_run_on_a_side_stream(cuda, lane):
    lane.warm_up(lambda: cuda.log.append(f"run on {cuda.current.name}"))
    assert cuda.log == ["side waits for main", *["run on side"] * WARM_UPS, "main waits for side"]


def test_a_caller_on_another_stream_waits_for_the_last_one(cuda, lane):
    lane.order()
    lane.order()
    assert cuda.log == []
    cuda.current = Stream(cuda.log, "other")
    lane.order()
    lane.order()
    assert cuda.log == ["other waits for main"]


def test_recordings_share_a_pool_that_an_empty_one_keeps(cuda, lane):
    lane.capture(lambda: (1,), [])
    graph, results = lane.capture(lambda: (2,), [])
    recorded = [entry for entry in cuda.log if entry.startswith("recorded")]
    assert recorded == ["recorded graph 0 into pool 1", "recorded graph 0 into pool 1", "recorded graph 2 into pool 1"]
    assert (graph, results) == ("graph 2", (2,))
    assert cuda.log[0] == cuda.log[-1] == "clear"


def test_results_that_are_given_up_share_memory():
    lane, x = Lane(torch.device("cpu")), torch.ones(4)

    def run(scale):
        whole = x * scale
        return whole[:2], whole[2:], x, None

    captured = [lane.capture(lambda scale=scale: run(scale), [], [x]) for scale in (2.0, 3.0)]
    for scale, (graph, results) in zip((2.0, 3.0), captured, strict=True):
        graph.replay()
        assert [leaf.tolist() for leaf in results[:2]] == [[scale] * 2] * 2
        assert results[2] is x
        assert results[3] is None
    places = [[leaf.untyped_storage().data_ptr() for leaf in results[:2]] for _, results in captured]
    assert len({place for pair in places for place in pair}) == 1
    # Results that nothing gives up keep their memory.
    kept = [lane.capture(lambda: run(2.0), [])[1][0] for _ in range(2)]
    assert kept[0].data_ptr() != kept[1].data_ptr()


def test_the_first_error_is_told_and_the_pool_is_left(cuda, lane):
    cuda.fails_at_end = True

    def broken():
        raise ValueError("mine")

    lane._pool = "pool 0"
    with pytest.raises(ValueError, match="mine"):
        lane.capture(broken, [])
    with pytest.raises(RuntimeError, match="invalidated"):
        lane.capture(lambda: (1,), [])
    cuda.fails_at_end = False
    lane.capture(lambda: (1,), [])
    assert cuda.log[-2].endswith(f"pool {cuda.pools}")
    assert cuda.pools == 2


def test_what_goes_while_something_is_recorded_goes_later(cuda, lane):
    lane.capture(lambda: lane.retire("one"), [])
    assert "synchronize" not in cuda.log
    assert lane._retired == ["one"]
    lane.retire("two")
    assert cuda.log[-1] == "synchronize"
    assert lane._retired == []


def test_generators_are_registered(cuda, lane, monkeypatch):
    class Graph(str):
        def register_generator_state(self, generator):
            cuda.log.append(f"registered {generator}")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph("graph 1"))
    lane.capture(lambda: (1,), ["mine"])
    assert cuda.log[0] == "registered mine"
