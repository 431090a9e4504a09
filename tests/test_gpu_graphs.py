"""Static graphs where they are CUDA's own. What holds on every device is in compiler/capture, which run on a GPU too."""

import threading

import pytest
import torch

import tritium
from support import capture, scripts
from tritium import Backend, CompilationConfig
from tritium.compiler.capture import auto
from tritium.compiler.capture.region import CAPTURED_AROUND

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def region(run, names=("x",), **config):
    return capture.region(run, DEVICE, names, **config)


class TestStreams:
    def test_replaying_waits_for_nothing(self):
        f, _ = region(lambda x: torch.relu(x) * 2)
        inputs = [torch.full((1024,), float(value), device=DEVICE) for value in range(4)]
        # A result that is held over the next call: from there on results are copied, and nothing is captured any more.
        held = f(inputs[0])
        f(inputs[1])
        del held
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            results = [f(value) for value in inputs]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for value, result in enumerate(results):
            assert bool((result == 2 * value).all())

    def test_streams_do_not_interfere(self):
        weight = torch.randn(2048, 2048, device=DEVICE)
        f, _ = region(lambda x: (x @ weight).relu() @ weight)
        streams = [torch.cuda.Stream() for _ in range(3)]
        inputs = [torch.randn(2048, 2048, device=DEVICE) for _ in range(12)]
        expected = [(x @ weight).relu() @ weight for x in inputs]
        torch.cuda.synchronize()
        sums = []
        for place, x in enumerate(inputs):
            with torch.cuda.stream(streams[place % 3]):
                result = f(x)
                sums.append(result.double().sum())
                del result
        torch.cuda.synchronize()
        for found, right in zip(sums, expected, strict=True):
            assert found == right.double().sum()

    def test_a_thread_that_has_multiplied_nothing_captures_again(self):
        x = torch.randn(64, 64, device=DEVICE)
        f, record = region(lambda x: x @ x)
        held = [f(x)]
        # This one finds the result held, and so captures again, before it has a handle of cuBLAS.
        thread = threading.Thread(target=lambda: held.append(f(x)))
        thread.start()
        thread.join()
        assert torch.equal(*held)
        assert record.captures[0].declined is None
        assert record.captures[0].copies

    def test_inside_a_capture_of_the_caller_nothing_is_replayed(self):
        f, record = region(lambda x: x * 2)
        x = torch.ones(4, device=DEVICE)
        f(x)
        hits = record.captures[0].hits
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = f(x)
        x.fill_(5)
        graph.replay()
        assert y.tolist() == [10.0] * 4
        assert record.captures[0].hits == hits
        assert record.captures[1].declined == CAPTURED_AROUND[1]


class TestRefusals:
    def test_a_call_that_waits_for_the_device_is_not_captured(self):
        f, record = region(lambda x: x * float(x.sum().item()))
        x = torch.ones(4, device=DEVICE)
        stream = torch.cuda.current_stream()
        with pytest.warns(RuntimeWarning, match="could not be captured"):
            assert f(x).tolist() == [4.0] * 4
        assert torch.cuda.current_stream() == stream
        assert torch.randn(4, device=DEVICE).isfinite().all(), "random numbers are as before"
        assert f(x * 2).tolist() == [16.0] * 4
        assert record.captures[0].declined
        g, _ = region(lambda x: x + 1)
        assert g(x).tolist() == [2.0] * 4, "a capture that failed does not spoil the next one"
        assert len(g) == 1

    def test_a_tensor_on_the_host_would_be_baked_in(self):
        f, record = region(lambda x, t: x * t, ("x", "t"))
        x = torch.ones(4, device=DEVICE)
        for value in (2.0, 3.0):
            assert f(x, torch.tensor(value)).tolist() == [value] * 4
        assert record.captures[0].declined == "t is on cpu: its value would be baked into a graph on cuda:0"


class TestPool:
    def test_the_last_graph_may_go_and_another_come(self):
        x = torch.randn(256, 256, device=DEVICE)
        f, _ = region(lambda x: x @ x)
        expected = x @ x
        kept = [f(x) for _ in range(3)]
        f.clear()
        kept += [f(x) for _ in range(3)]
        assert all(torch.equal(result, expected) for result in kept)

    def test_workspaces_that_others_clear_are_not_missed(self):
        x = torch.randn(512, 512, device=DEVICE, dtype=torch.bfloat16)
        f, _ = region(lambda x: x @ x)
        expected = f(x).clone()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        filling = [torch.full((1 << 20,), 7.0, device=DEVICE) for _ in range(32)]
        for _ in range(5):
            assert torch.equal(f(x), expected)
        assert all(bool((block == 7).all()) for block in filling)


class TestAuto:
    def decided(self, model, x):
        """The report's row of a model after enough calls; each call ends before the next one, as a caller may do."""
        f = torch.compile(model, backend=Backend(CompilationConfig(graphs="auto", engine="eager")))
        with torch.inference_mode():
            expected = model(x)
            for _ in range(auto.CALLS_TO_DECIDE + 2):
                torch.testing.assert_close(f(x), expected)
                torch.cuda.synchronize()
        return next(entry for entry in tritium.explain(f).passes if entry["name"] == "capture"), f

    def test_long_kernels_are_left_alone(self):
        big = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) / 90

        def compute_bound(x):
            for _ in range(4):
                x = x @ big
            return x

        entry, _ = self.decided(compute_bound, big)
        assert "graphs='auto'" in entry["declined"]

    def test_short_kernels_are_captured(self):
        def launch_bound(x):
            for place in range(200):
                x = (x + place).sin()
            return x

        entry, f = self.decided(launch_bound, torch.ones(8, device=DEVICE))
        assert "the device was idle for" in entry["summary"]
        assert all(row["declined"] is None for row in tritium.explain(f).captures)


@pytest.mark.codegen
@pytest.mark.parametrize("arguments", [["shapes", "--apart"], ["guidance"]], ids=lambda arguments: arguments[0])
def test_the_promises_that_the_benchmark_checks(arguments):
    """500 calls of 24 shapes in any order, and 28 steps with guidance in two calls."""
    assert scripts.load("benchmarks/static_graphs.py").main([*arguments, "--device", DEVICE]) == 0
