"""Linears in 8 bits: which are rewritten, what they share, and where their scales come from."""

import pytest
import torch
from torch import nn

import tritium
from tritium.compiler.passes.input_scales import forget_input_scales, set_input_scales
from tritium.compiler.passes.quantize import Precision, quantize_linears
from tritium.errors import PipelineError
from tritium.ops import quantize_rows, scaled_linear

EAGER = tritium.CompilationConfig(engine="eager", fidelity="fast")


class Projections(nn.Module):
    """Three projections of one value and one of another."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in "qkv")
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.out(torch.tanh(q) * k + v)


class Keep:
    """An early pass that notes the calls of a graph as the pass before it left them."""

    def __init__(self) -> None:
        self.graphs = []

    def __call__(self, graph, context):
        self.graphs.append([node.target for node in graph.nodes])


def nodes(graph, op):
    return [target for target in graph if target is op.overload]


def compiled_with(model, linears, config=EAGER):
    keep = Keep()
    passes = [quantize_linears(linears), tritium.passes.Pass("keep", keep, early=True)]
    return torch.compile(model, backend=tritium.Backend(config, passes=passes)), keep


def every_linear(precision):
    return dict.fromkeys(["q", "k", "v", "out"], precision)


def in_8_bits(linear, x, dtype, scale=None, rotate=0):
    q, rows = quantize_rows.reference(x, dtype, rotate, scale)
    weight, weight_scale = quantize_rows.quantize_weight(linear.weight, dtype, rotate)
    return scaled_linear.reference(q, rows, weight, weight_scale, linear.bias, x.dtype)


@pytest.mark.parametrize("precision", [Precision("fp8"), Precision("int8"), Precision("int8", rotate=16)], ids=str)
def test_one_quantization_for_each_value(precision):
    model, x = Projections(), torch.randn(2, 40, 32)
    with torch.no_grad():
        run, keep = compiled_with(model, every_linear(precision))
        made = run(x)
    (graph,) = keep.graphs
    assert len(nodes(graph, quantize_rows.OP)) == 2
    assert len(nodes(graph, scaled_linear.OP)) == 4
    dtype = torch.int8 if precision.format == "int8" else torch.float8_e4m3fn
    with torch.no_grad():
        q, k, v = (in_8_bits(linear, x, dtype, rotate=precision.rotate) for linear in (model.q, model.k, model.v))
        expected = in_8_bits(model.out, torch.tanh(q) * k + v, dtype, rotate=precision.rotate)
    torch.testing.assert_close(made, expected, rtol=1e-3, atol=1e-3)


class TestStaticScales:
    def set_all(self, model, scales, step=None):
        for linear in (model.q, model.k, model.v, model.out):
            set_input_scales(linear.weight, scales, step)

    def expected(self, model, x, scale):
        q, k, v = (in_8_bits(linear, x, torch.int8, scale) for linear in (model.q, model.k, model.v))
        return in_8_bits(model.out, torch.tanh(q) * k + v, torch.int8, scale)

    def test_the_registered_scale_is_used(self):
        model, x = Projections(), torch.randn(40, 32)
        with torch.no_grad():
            self.set_all(model, torch.tensor(2.0**-4))
            run, keep = compiled_with(model, every_linear(Precision("int8", scales="static")))
            torch.testing.assert_close(run(x), self.expected(model, x, torch.tensor(2.0**-4)))
            assert len(nodes(keep.graphs[0], quantize_rows.OP)) == 2
            # Another scale: no other code.
            self.set_all(model, torch.tensor(2.0**-5))
            torch.testing.assert_close(run(x), self.expected(model, x, torch.tensor(2.0**-5)))
            assert len(keep.graphs) == 1

    def test_a_step_selects_the_scale_without_recompiling(self):
        model, x = Projections(), torch.randn(40, 32)
        scales, step = torch.tensor([2.0**-3, 2.0**-4, 2.0**-6]), torch.zeros((), dtype=torch.int64)
        with torch.no_grad():
            self.set_all(model, scales, step)
            run, keep = compiled_with(model, every_linear(Precision("int8", scales="step", steps=3)))
            for number in (0, 1, 2, 7):
                step.fill_(number)
                torch.testing.assert_close(run(x), self.expected(model, x, scales[min(number, 2)]))
        assert len(keep.graphs) == 1

    def test_blocks_share_code_and_have_scales_of_their_own(self):
        models, x = [Projections(), Projections()], torch.randn(40, 32)
        linears = every_linear(Precision("int8", scales="static"))
        keep = Keep()
        backend = tritium.Backend(
            EAGER, passes=[quantize_linears(linears), tritium.passes.Pass("keep", keep, early=True)]
        )
        with torch.no_grad():
            for model, scale in zip(models, (2.0**-4, 2.0**-6), strict=True):
                self.set_all(model, torch.tensor(scale))
                model.compile(backend=backend)
            for _ in range(2):
                for model, scale in zip(models, (2.0**-4, 2.0**-6), strict=True):
                    torch.testing.assert_close(model(x), self.expected(model, x, torch.tensor(scale)))
        assert len(keep.graphs) == 1

    def test_without_scales_a_linear_stays(self):
        model, x = Projections(), torch.randn(40, 32)
        with torch.no_grad():
            run, _ = compiled_with(model, every_linear(Precision("int8", scales="static")))
            torch.testing.assert_close(run(x), model(x))
        assert "no scale of its input was set" in str(tritium.explain(run).to_dict()["passes"])

    def test_scales_that_were_removed_are_an_error(self):
        model, x = Projections(), torch.randn(40, 32)
        with torch.no_grad():
            self.set_all(model, torch.tensor(2.0**-4))
            run, _ = compiled_with(model, every_linear(Precision("int8", scales="static")))
            run(x)
            forget_input_scales(model.q.weight)
            with pytest.raises(PipelineError, match="no scale of its input was set"):
                run(x)

    @pytest.mark.parametrize("scales", [torch.ones(2, 2), torch.ones(3), torch.zeros(1), torch.tensor(float("nan"))])
    def test_bad_scales_are_refused(self, scales):
        with pytest.raises(ValueError, match="scales are"):
            set_input_scales(torch.randn(4, 4), scales)
