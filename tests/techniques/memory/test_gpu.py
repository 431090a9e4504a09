"""On a real GPU: streams, page-locked copies, captured graphs, and what the allocator counts. Run with -m gpu."""

import pytest
import torch

import tritium
from support.small_models import flux, flux_inputs
from support.streamed import Stack, note, optimized, plan, tokens
from tritium.techniques.memory.link import link_to
from tritium.techniques.memory.units import module_bytes

pytestmark = pytest.mark.gpu

WIDTH = 1024


@pytest.fixture
def model():
    return Stack(8, WIDTH).cuda().bfloat16()


def wide_tokens():
    return tokens(256, WIDTH).cuda().bfloat16()


def memory(model, resident, slots=2, *, stays=False):
    """Return a budget for this many blocks beside what else is on the device; `stays` counts the model too."""
    block = sum(parameter.nbytes for parameter in model.blocks[0].parameters())
    rest = sum(parameter.nbytes for parameter in model.embed.parameters())
    held = torch.cuda.memory_allocated() - (0 if stays else len(model.blocks) * block + rest)
    size = (resident + slots) * (block + 4096) + rest + 4 * 256 * WIDTH * 2 * 12
    # A sixteenth is kept for workspaces.
    return int((held + size) * 16 / 15) + 2**20


@pytest.mark.parametrize("graphs", ["off", "only", "with_compile"])
@pytest.mark.parametrize("resident", [0, 3])
def test_equal_to_resident_weights(model, graphs, resident):
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    x = wide_tokens()
    with torch.inference_mode():
        expected = model(x)
        # What the test holds counts: the copies, the input, the result and cuBLAS's workspace.
        settings = plan(memory(model, resident), graphs=graphs)
        with tritium.optimize(model, settings) as handle:
            results = [model(x) for _ in range(6)]
            torch.cuda.synchronize()
            found = note(handle)
            assert found["streamed"]
            assert not found["misses"]
            assert found["unlocked"] == 0
            if graphs != "off":
                assert len(handle.captures) >= 2
    assert all(torch.equal(result, expected) for result in results)
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    assert all(value.is_cuda for value in model.parameters())


def test_from_the_host_within_the_budget():
    model = Stack(12, WIDTH).bfloat16()
    reference = Stack(12, WIDTH).cuda().bfloat16()
    x = wide_tokens()
    with torch.inference_mode():
        expected = reference(x)
        size = memory(reference, 2, stays=True)
        with tritium.optimize(model, plan(size, how="eager")) as handle:
            assert next(model.parameters()).is_cuda
            assert torch.equal(model(x), expected)
            torch.cuda.reset_peak_memory_stats()
            for _ in range(3):
                assert torch.equal(model(x), expected)
            assert torch.cuda.max_memory_allocated() <= size
            assert note(handle)["streamed"]
    assert not next(model.parameters()).is_cuda


def test_flux_compiled_and_captured():
    model = flux(4, 6).cuda()
    inputs = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in flux_inputs().items()}
    with torch.inference_mode():
        expected = model(**inputs)[0]
        size = torch.cuda.memory_allocated() - module_bytes(model) + 760_000
        settings = plan(size, graphs="with_compile")
        with tritium.optimize(model, settings) as handle:
            assert all(torch.equal(model(**inputs)[0], expected) for _ in range(4))
            assert note(handle)["streamed"]
            assert len(handle.captures) < 20


def test_sleep_gives_the_memory_back(model):
    x = wide_tokens()
    with torch.inference_mode(), optimized(model, memory(model, 4), graphs="with_compile") as handle:
        expected = model(x)
        captures = len(handle.captures)
        before = torch.cuda.memory_allocated()
        asleep = handle.sleep()
        assert torch.cuda.memory_allocated() <= before - asleep.weights
        handle.wake()
        assert torch.equal(model(x), expected)
        assert len(handle.captures) == captures == asleep.captures


def test_other_streams_and_inference_modes(model):
    x = wide_tokens()
    with torch.no_grad():
        expected = model(x)
        with optimized(model, memory(model, 1)):
            model(x)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                inside = model(x)
            torch.cuda.current_stream().wait_stream(side)
            with torch.inference_mode():
                again = model(x)
            assert torch.equal(inside, expected)
            assert torch.equal(again, expected)


def test_the_link_is_measured():
    assert 1e9 < link_to(torch.device("cuda", 0)).rate() < 1e12


def test_a_call_inside_a_capture_is_refused(model):
    x = wide_tokens()
    with torch.no_grad(), optimized(model, memory(model, 1), how="eager"):
        model(x)
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(tritium.errors.PipelineError, match="captures each block"), torch.cuda.graph(graph):
            model(x)
