"""Linears whose weights arrive quantized run through Tritium's ops, if the fidelity allows it."""

import pytest
import torch
from torch import nn

import tritium
from support.arrived_quantized import ROWS, WHOLE, Float8Tensor, Int8Tensor, Projections, RowFloat8, exactly
from tritium.compiler.passes import quantized_weights
from tritium.passes import Applied


def decibels(found, exact):
    return float(10 * torch.log10(exact.square().sum() / (found.double() - exact).square().sum()))


def compiled(model, *inputs, fidelity="fast"):
    """Return the results, the names of the operators in the graph after the passes, and the pass's record."""
    kept = []

    def keep(graph, _context):
        kept.extend(node.target for node in graph.nodes if node.op == "call_function")
        return Applied("kept")

    config = tritium.CompilationConfig(engine="eager", fidelity=fidelity)
    last = tritium.plugins.Pass("keep", keep)
    run = torch.compile(model, backend=tritium.Backend(config, passes=[last]))
    with torch.no_grad():
        out = run(*inputs)
    report = tritium.explain(run)
    assert report.failures == []
    record = next(entry for entry in report.passes if entry["name"] == quantized_weights.NAME)
    return out, [str(target) for target in kept], record


def counted(operators, op):
    # Fusions take quantizations into the op that computes the input.
    return sum(name.startswith("tritium.") and op in name for name in operators)


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


def x_of(dtype=torch.float32):
    return torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize(("kind", "least"), [(Int8Tensor, 36), (Float8Tensor, 25)])
def test_linears_of_torchao_share_a_quantization(kind, least):
    model, x = Projections(kind), x_of()
    found, operators, record = compiled(model, x)
    assert counted(operators, "quantize") == 1
    assert counted(operators, "scaled_linear") == 2
    assert not any("linear" in name and "tritium" not in name for name in operators)
    assert record["summary"] == "2 linears with quantized weights rewritten"
    normed = model.norm(x)
    for out, linear in zip(found, (model.a, model.b), strict=True):
        assert least < decibels(out, exactly(linear, normed)) < 60


def test_stored_int8_weights():
    model, x = Projections(Int8Tensor, None), x_of()
    found, operators, _ = compiled(model, x)
    assert (counted(operators, "weight_only_linear"), counted(operators, "quantize")) == (2, 0)
    assert decibels(found[0], exactly(model.a, model.norm(x))) > 100


@pytest.mark.parametrize(
    ("kind", "inputs", "fidelity", "reason"),
    [
        (Int8Tensor, ROWS, "close", quantized_weights.NOT_FAST),
        (Int8Tensor, WHOLE, "fast", "its inputs have no scale for each row"),
        (Float8Tensor, None, "fast", "weights in float8 alone are unpacked by Inductor as well"),
    ],
)
def test_others_stay_with_a_reason(kind, inputs, fidelity, reason):
    model, x = Projections(kind, inputs), x_of()
    found, operators, record = compiled(model, x, fidelity=fidelity)
    assert not any("tritium" in name for name in operators)
    assert record["left_alone"] == {reason: 2}
    for out, expected in zip(found, model(x), strict=True):
        torch.testing.assert_close(out, expected)


class Twice(nn.Module):
    """Two linears of diffusers that read one value."""

    def __init__(self):
        super().__init__()
        self.a, self.b = RowFloat8(64, 32), RowFloat8(64, 48)

    def forward(self, x):
        return self.a(x), self.b(x)


def test_linears_of_diffusers_share_a_quantization():
    model, x = Twice(), x_of(torch.bfloat16)
    found, operators, record = compiled(model, x)
    assert counted(operators, "quantize") == 1
    assert counted(operators, "scaled_linear") == 2
    # What computed their scales is gone.
    assert not any("_scaled_mm" in name or "truediv" in name for name in operators)
    assert record["summary"] == "2 linears with quantized weights rewritten"
    for out, linear in zip(found, (model.a, model.b), strict=True):
        assert out.shape == (2, 40, linear.out_features)
        assert decibels(out, exactly(linear, x)) > 25


@pytest.mark.gpu
def test_diffusers_own_linear_on_a_gpu():
    """Its scaled product runs on GPUs alone; elsewhere the weight is dequantized."""
    utils = pytest.importorskip("diffusers.quantizers.bfl.utils")
    like = RowFloat8(64, 32)
    model = utils.BFLFP8RLinear(64, 32, compute_dtype=torch.bfloat16)
    model.weight, model.bias, model.weight_scale = like.weight, like.bias, like.weight_scale
    x = x_of(torch.bfloat16).cuda()
    found, operators, _ = compiled(model.cuda(), x)
    assert counted(operators, "quantize") == counted(operators, "scaled_linear") == 1
    assert decibels(found, exactly(like.cuda(), x)) > 25


def test_a_product_with_other_scales_stays():
    class Static(RowFloat8):
        def forward(self, x):
            rows = x.reshape(-1, self.in_features).float()
            scale = torch.full((rows.shape[0], 1), 0.01)
            q = (rows / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
            return torch._scaled_mm(q, self.weight.T, scale, self.weight_scale[None, :], out_dtype=torch.bfloat16)

    model, x = Static(64, 32), x_of(torch.bfloat16)
    kept = []
    config = tritium.CompilationConfig(engine="eager", fidelity="fast")
    last = tritium.plugins.Pass("keep", lambda graph, _: kept.extend(str(node.target) for node in graph.nodes))
    with torch.no_grad():
        found = torch.compile(model, backend=tritium.Backend(config, passes=[last]))(x)
        torch.testing.assert_close(found, model(x))
    assert any("_scaled_mm" in name for name in kept)
    assert not any("tritium" in name for name in kept)
