"""Sizes that are equal by chance keep separate symbols in graphs with convolutions, and nowhere else."""

import math

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import tritium
from tritium import CompilationConfig, compat

EAGER = CompilationConfig(engine="eager")


def convolutions(rank: int = 2) -> nn.Module:
    layer = nn.Conv2d if rank == 2 else nn.Conv3d
    return nn.Sequential(layer(8, 8, 3, padding=1), nn.SiLU(), layer(8, 8, 3, padding=1)).eval()


def graphs_of(module: nn.Module, backend, shapes) -> list[int]:
    """How many graphs each call compiles."""
    compiled = torch.compile(module, backend=backend, dynamic=True)
    counts = []
    with torch.no_grad():
        for shape in shapes:
            before = compat.dynamo.graphs_compiled()
            value = torch.rand(shape)
            torch.testing.assert_close(compiled(value), module(value))
            counts.append(compat.dynamo.graphs_compiled() - before)
    return counts


SQUARE_FIRST = [(1, 8, 8, 8), (1, 8, 8, 12), (1, 8, 12, 8), (1, 8, 9, 7)]


# With eight channels, 20,480 elements are 51 pixels high and wide: torch chooses convolution routines by such limits.
BOTH_SIDES = [(1, 8, 12, 14), (1, 8, 60, 70), (1, 8, 20, 90), (1, 8, 300, 10)]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shapes", [SQUARE_FIRST, BOTH_SIDES], ids=["square", "both sides of a limit"])
def test_one_graph_takes_all_sizes(shapes, layout):
    net = convolutions().to(memory_format=layout)
    assert graphs_of(net, tritium.Backend(EAGER), shapes) == [1, 0, 0, 0]
    assert torch.fx.experimental._config.use_duck_shape is True


@pytest.mark.parametrize("shapes", [SQUARE_FIRST, BOTH_SIDES], ids=["square", "both sides of a limit"])
def test_other_backends_are_as_before(shapes):
    tritium.Backend()
    assert sum(graphs_of(convolutions(), "eager", shapes)) > 1


def test_modules_without_convolutions_are_as_before():
    tokens = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)).eval()
    assert sum(graphs_of(tokens, tritium.Backend(EAGER), [(8, 8, 8), (8, 12, 8), (9, 7, 8)])) > 1


def test_it_is_installed_once():
    output_graph = torch._dynamo.output_graph.OutputGraph
    tritium.Backend()
    first = output_graph.__init__, torch._C._select_conv_backend
    tritium.Backend(EAGER)
    assert (output_graph.__init__, torch._C._select_conv_backend) == first


def test_a_torch_that_it_does_not_know_is_left_alone(monkeypatch):
    class OutputGraph:
        def __init__(self, something_else):
            pass

    original = OutputGraph.__init__
    monkeypatch.setattr(torch._dynamo.output_graph, "OutputGraph", OutputGraph)
    assert compat.shapes.keep_sizes_apart(lambda backend, arguments: True) is False
    assert OutputGraph.__init__ is original


def test_the_backend_is_found_under_what_dynamo_wraps_around_it():
    backend = tritium.Backend()
    wrapped = torch._dynamo.repro.after_dynamo.wrap_backend_debug(
        torch._TorchCompileWrapper(backend, None, None, dynamic=True), "tritium"
    )
    assert compat.shapes.backend_of(wrapped) is backend
    assert compat.shapes.backend_of(backend) is backend


@pytest.mark.codegen
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_generated_code_is_right_on_both_sides_of_a_limit(layout):
    assert graphs_of(convolutions().to(memory_format=layout), tritium.Backend(), BOTH_SIDES) == [1, 0, 0, 0]


@pytest.mark.codegen
def test_videos_of_which_the_weights_alone_are_channels_last():
    """Here the routine decides the layout of the result: the guard stays, and the result is right."""
    net = convolutions(3).to(memory_format=torch.channels_last_3d)
    graphs_of(net, tritium.Backend(), [(1, 8, 3, 12, 14), (1, 8, 5, 600, 7), (1, 8, 4, 9, 9)])


class TestGroupNorm:
    @staticmethod
    def traced(shape, dtype, layout, marked):
        """What tracing knows of a GroupNorm on a GPU, which need not be there."""
        symbols = ShapeEnv()
        if marked:
            setattr(symbols, compat.shapes._MARK, True)
        mode = FakeTensorMode(shape_env=symbols)
        real = torch.empty(shape, dtype=dtype)
        real = real.repeat_interleave(2, -1)[..., ::2] if layout is None else real.contiguous(memory_format=layout)
        x = mode.from_tensor(real)
        with mode:
            x = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="cuda")
            weight, bias = (torch.empty(shape[1], dtype=dtype, device="cuda") for _ in range(2))
            found = torch.ops.aten.native_group_norm(
                x, weight, bias, x.shape[0], x.shape[1], math.prod(x.shape[2:]), 4, 1e-6
            )
        return {
            "symbolic": any(isinstance(size, torch.SymInt) for size in x.shape),
            "tensors": [([int(n) for n in (*t.shape, *t.stride())], t.dtype, t.device.type) for t in found],
            "guards": len(symbols.guards),
        }

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        ("shape", "layout"),
        [
            ((2, 8, 7, 63), torch.contiguous_format),
            ((2, 8, 7, 63), torch.channels_last),
            ((1, 8, 3, 5, 6), torch.channels_last_3d),
            ((3, 8, 100), torch.contiguous_format),
            # Channels before frames, pixels apart: computed as ever.
            ((2, 8, 7, 63), None),
        ],
    )
    def test_what_is_known_is_what_computing_it_gives(self, shape, dtype, layout):
        tritium.Backend()
        known, computed = (self.traced(shape, dtype, layout, marked) for marked in (True, False))
        assert known["symbolic"], "sizes are not symbolic: nothing is asked"
        assert known["tensors"] == computed["tensors"]
        assert known["guards"] <= computed["guards"]

    def test_nothing_is_computed(self, monkeypatch):
        tritium.Backend()
        asked = []
        computed = torch.var_mean
        monkeypatch.setattr(torch, "var_mean", lambda *args, **kwargs: asked.append(args) or computed(*args, **kwargs))
        for marked in (True, False):
            self.traced((2, 8, 7, 63), torch.float32, torch.contiguous_format, marked)
            assert bool(asked) is not marked
