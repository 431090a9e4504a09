"""On a real GPU: streams, page-locked copies, captured graphs, and what the allocator counts. Run with -m gpu."""

import gc

import pytest
import torch

import tritium
from support.small_models import flux, flux_inputs
from support.streamed import Stack, note, optimized, plan, tokens
from tritium.techniques.memory.estimate import MARGIN, estimate
from tritium.techniques.memory.link import link_to
from tritium.techniques.memory.units import ALIGNMENT

pytestmark = pytest.mark.gpu

WIDTH = 1024


@pytest.fixture
def model():
    return Stack(8, WIDTH).cuda().bfloat16()


def wide_tokens():
    return tokens(256, WIDTH).cuda().bfloat16()


def in_units(module):
    """The bytes of a module's weights where each begins at a multiple."""
    return sum(-(-parameter.nbytes // ALIGNMENT) * ALIGNMENT for parameter in module.parameters())


def budget_for(model, blocks, args, kwargs, resident, *, slots=2, stays=False):
    """Return a budget for this many blocks and the planner's own activations, beside what else is on the device.

    It forces the other blocks to be streamed. `stays` counts the model on the device too.
    """
    # Memory of earlier tests must not come free between this and the first call.
    gc.collect()
    sizes = [in_units(block) for block in blocks]
    held = torch.cuda.memory_allocated() - (0 if stays else in_units(model))
    activations = 2 * MARGIN * estimate(model, args, kwargs, blocks).peak
    wanted = (resident + slots) * max(sizes) + in_units(model) - sum(sizes) + activations
    # A sixteenth is kept for workspaces.
    size = int((held + wanted) * 16 / 15) + 4096
    assert in_units(model) > 0.6 * (size - held), "it would stay on the device as a whole"
    assert activations / 2 + (resident + slots) * max(sizes) < sum(sizes), "nothing would be streamed"
    return size


def memory(model, resident, *, stays=False):
    return budget_for(model, list(model.blocks), (wide_tokens(),), {}, resident, stays=stays)


def places(handle):
    """The ranges that blocks have on the device, each of which has one capture."""
    found = note(handle)
    return len(found["resident"]) + min(found["slots"], len(found["streamed"]))


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
    # Weights of 63 MB, and activations of less than 1 MB.
    model = flux(4, 6, heads=16).cuda()
    inputs = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in flux_inputs().items()}
    with torch.inference_mode():
        # Of the same code: references of ops round otherwise than the model's own.
        with tritium.optimize(model, plan(None, graphs="with_compile")):
            expected = model(**inputs)[0].clone()
        size = budget_for(model, [*model.transformer_blocks, *model.single_transformer_blocks], (), inputs, 2)
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
        assert captures == places(handle)
        gc.collect()
        before = torch.cuda.memory_allocated()
        asleep = handle.sleep()
        assert asleep.captures == captures
        assert asleep.weights > 4 * in_units(model.blocks[0])
        assert torch.cuda.memory_allocated() <= before - asleep.weights
        handle.wake()
        assert torch.equal(model(x), expected)
        # cuBLAS's workspace comes and goes with captures, so the second plan may keep another number of blocks.
        assert len(handle.captures) == places(handle)


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
