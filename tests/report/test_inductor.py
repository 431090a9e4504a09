"""With code generation: what reaches Inductor computes the same, and what it did is reported."""

import pytest
import torch
from torch import nn

import tritium
from support.fidelity import assert_no_worse
from support.small_models import Block, Stack, block_inputs, flux, flux_inputs

pytestmark = pytest.mark.codegen


class Freezes(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)

    def forward(self, x):
        return nn.functional.linear(x, torch.cat([self.q.weight, self.k.weight * 2]))


def test_flux_is_close_and_explained():
    model, inputs = flux(), flux_inputs()
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    with torch.inference_mode():
        eager = model(**inputs)[0]
        compiled = torch.compile(model, backend="tritium")
        actual = compiled(**inputs)[0]
        model.double()
        exact = model(**wide)[0]
    assert_no_worse(actual, eager, exact)
    report = tritium.explain(compiled)
    assert (report.sites["rms_norm"].inductor, report.sites["mul_add"].inductor) == (6, 5)
    assert [(entry["op"], entry["count"]) for entry in report.fallbacks] == [
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", 2)
    ]
    kernels = report.kernels
    assert len(kernels) > 10
    for kernel in kernels:
        assert kernel["ops"]
        assert kernel["bytes_read"] > 0
        assert kernel["bytes_written"] > 0
        assert kernel["ideal_bytes"] > 0
        assert kernel["measured_us"] is None
    gelu = next(kernel for kernel in kernels if "gelu" in kernel["name"])
    assert "aten.tanh" in gelu["ops"]
    assert any(line.startswith("activations.py:") for line in gelu["source_lines"])
    assert "Fallback 2x aten._scaled_dot_product" in str(report)


def test_rewritten_graphs_compile_and_numbers_hold():
    model = Stack(2)
    config = tritium.CompilationConfig(force_provider="reference")
    with torch.inference_mode():
        compiled = torch.compile(model, backend=tritium.Backend(config), dynamic=True, fullgraph=True)
        for tokens in (7, 63, 100):
            x, gate = block_inputs(tokens=tokens)
            torch.testing.assert_close(compiled(x, gate), model(x, gate))
    report = tritium.explain(compiled)
    graphs = len(report.records)
    assert graphs <= 2
    assert (report.sites["rms_norm"].fused, report.sites["mul_add"].fused) == (2 * graphs, 2 * graphs)
    assert {"tritium.rms_norm.default", "tritium.gated_residual.default"} <= {entry["op"] for entry in report.fallbacks}


def test_gradients_through_inductor():
    model, (x, gate) = Block(), block_inputs()
    compiled = torch.compile(model, backend="tritium")
    compiled(x, gate).square().sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model(x, gate).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
    assert tritium.explain(compiled).sites["rms_norm"].declined == 1


def test_frozen_values_reach_inductor_and_follow_the_weights():
    config = tritium.CompilationConfig(enable_freezing=True)
    first, second, x = Freezes(), Freezes(), torch.randn(5, 16)
    with torch.no_grad():
        expected = first(x), second(x)
        for model in (first, second):
            model.compile(backend=tritium.Backend(config), dynamic=True)
        torch.testing.assert_close((first(x), second(x)), expected)
        first.q.weight.add_(1)
        second.load_state_dict(Freezes().state_dict())
        for rows in (5, 9):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(first(x), Freezes.forward(first, x))
            torch.testing.assert_close(second(x), Freezes.forward(second, x))
    report = tritium.explain(first)
    assert len(tritium.explain().records) == 1
    assert [entry["declined"] for entry in report.frozen] == [None]
    assert not any("aten.cat" in kernel["ops"] for kernel in report.kernels)


def test_complex_numbers_are_a_fallback_with_a_reason():
    def rotate(x, freqs):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * freqs).flatten(-2).type_as(x)

    x, freqs = torch.randn(2, 7, 16), torch.polar(torch.ones(7, 8), torch.rand(7, 8))
    with torch.inference_mode():
        compiled = torch.compile(rotate, backend="tritium")
        torch.testing.assert_close(compiled(x, freqs), rotate(x, freqs))
    report = tritium.explain(compiled)
    reasons = {entry["reason"] for entry in report.fallbacks if "complex64" in entry["op"]}
    assert reasons == {"Inductor generates no code for complex numbers"}
    assert (
        "Fallback 1x aten.mul.Tensor(complex64[2, 7, 8], complex64[7, 8])  # Inductor generates no code for complex "
        "numbers, has_lowering=True, has_decomposition=False"
    ) in str(report)


def test_operators_and_pairs_in_the_report():
    """What was lowered, what was called and why, and which kernels stayed two."""

    def function(x, w):
        rows = nn.functional.layer_norm(x, (48,))
        # The mean and the variance are computed once and read by two kernels: a product lies between them.
        return rows.cos() @ w, rows.sum(1), torch.linalg.svdvals(w)

    x, w = torch.randn(2, 9, 48), torch.randn(48, 48)
    with torch.inference_mode():
        compiled = torch.compile(function, backend="tritium")
        compiled(x, w)
    report = tritium.explain(compiled)
    lowered = {entry["op"]: entry["count"] for entry in report.lowered}
    assert lowered["aten.cos.default"] == 1
    assert lowered["aten.var_mean.correction"] == 1
    assert not any("mm" in op or "svd" in op for op in lowered)
    (fallback,) = report.fallbacks
    assert fallback["op"] == "aten._linalg_svd.default"
    assert fallback["arguments"] == {"float32[48, 48]": 1}
    assert (fallback["has_lowering"], fallback["has_decomposition"]) == (False, False)
    generated = {kernel["name"] for kernel in report.kernels if kernel["kind"] == "generated"}
    for pair in report.not_fused:
        assert {pair["first"], pair["second"]} <= generated
        assert pair["bytes_passed"] + pair["bytes_shared"] > 0
        assert pair["reason"]
    text = str(report)
    assert "Lowered 1x aten.cos.default" in text
    assert (
        "Fallback 1x aten._linalg_svd.default(float32[48, 48])  # Inductor has no lowering for it, has_lowering="
        in text
    )
    assert report.not_fused
    assert f"{report.not_fused[0]['reason']}" in text.partition("Not fused (")[2]
    assert report.to_dict()["not_fused"] == report.not_fused


def test_an_inductor_error_is_local(monkeypatch, tmp_path):
    """A lowering that raises deep inside Inductor: the model runs on its untouched graph, and the report tells."""
    from torch._inductor import lowering

    model, inputs = Block(), block_inputs()
    config = tritium.CompilationConfig(force_provider="reference", graph_log_url=str(tmp_path))
    overload = torch.ops.tritium.rms_norm.default

    def explode(*args, **kwargs):
        raise RuntimeError("this lowering is broken")

    monkeypatch.setitem(lowering.lowerings, overload, explode)
    with torch.inference_mode(), pytest.warns(RuntimeWarning, match="lowering failed"):
        compiled = torch.compile(model, backend=tritium.Backend(config))
        torch.testing.assert_close(compiled(*inputs), model(*inputs))
    report = tritium.explain(compiled)
    assert len(report.failures) == 1
    assert "this lowering is broken" in report.failures[0]["reason"]
    assert report.records[0].engine == "inductor"
    assert report.kernels
    assert report.sites["rms_norm"].reasons == {"lowering failed, see failures": 1}
    assert list(tmp_path.rglob("failed-lowering-rewritten.onnx"))


@pytest.mark.codegen
def test_what_the_model_packs_reaches_an_op_packed(monkeypatch):
    """Inductor lays out what it computes as it likes, unless an op says that it cares."""
    from tritium.ops import op

    seen = []

    def spy(which, *arguments, original=op.Op.compute):
        seen.extend(value.stride() for value in arguments[:2])
        return original(which, *arguments)

    def function(x, y, s):
        x = x.exp().transpose(1, 2).contiguous() + s * y
        return x, torch.nn.functional.layer_norm(x, (60,)) * (1 + s) + s

    monkeypatch.setattr(op.Op, "compute", spy)
    config = tritium.CompilationConfig(force_provider={"residual_norm_modulate": "reference"})
    x, y, s = torch.randn(2, 60, 7), torch.randn(2, 7, 60), torch.randn(2, 1, 60)
    with torch.inference_mode():
        compiled = torch.compile(function, backend=tritium.Backend(config), fullgraph=True)
        torch.testing.assert_close(compiled(x, y, s), function(x, y, s))
    assert seen == [(420, 60, 1), (420, 60, 1)]
