"""Graphs with generated code: their results, and the report of their code generation."""

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


def test_frozen_values_reach_inductor_and_follow_the_weights():
    config = tritium.CompilationConfig(enable_freezing=True)
    model = Freezes()
    with torch.no_grad():
        model.compile(backend=tritium.Backend(config), dynamic=True)
        for rows in (5, 9):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(model(x), Freezes.forward(model, x))
            model.q.weight.add_(1)
            torch.testing.assert_close(model(x), Freezes.forward(model, x))
    report = tritium.explain(model)
    assert [entry["declined"] for entry in report.frozen] == [None]
    assert not any("aten.cat" in kernel["ops"] for kernel in report.kernels)


def test_operators_and_pairs_in_the_report():
    """What was lowered, what was called and why, and which kernels stayed two."""

    def function(x, w, freqs):
        rows = nn.functional.layer_norm(x, (48,))
        turned = torch.view_as_complex(x.reshape(2, 9, 24, 2)) * freqs
        # The mean and the variance are computed once and read by two kernels, with a product between them.
        return rows.cos() @ w, rows.sum(1), torch.linalg.svdvals(w), torch.view_as_real(turned).flatten(-2)

    inputs = torch.randn(2, 9, 48), torch.randn(48, 48), torch.polar(torch.ones(9, 24), torch.rand(9, 24))
    with torch.inference_mode():
        compiled = torch.compile(function, backend="tritium")
        torch.testing.assert_close(compiled(*inputs), function(*inputs))
    report, text = tritium.explain(compiled), str(tritium.explain(compiled))
    lowered = {entry["op"]: entry["count"] for entry in report.lowered}
    assert lowered["aten.cos.default"] == 1
    assert lowered["aten.var_mean.correction"] == 1
    assert not any("mm" in op or "svd" in op for op in lowered)
    assert "Lowered 1x aten.cos.default" in text
    (svd,) = [entry for entry in report.fallbacks if entry["op"] == "aten._linalg_svd.default"]
    assert svd["arguments"] == {"float32[48, 48]": 1}
    for call, reason in (
        ("_linalg_svd.default(float32[48, 48])", "Inductor has no lowering for it, has_lowering=False"),
        (
            "mul.Tensor(complex64[2, 9, 24], complex64[9, 24])",
            "Inductor generates no code for complex numbers, has_lowering=True",
        ),
    ):
        assert f"Fallback 1x aten.{call}  # {reason}, has_decomposition=False" in text
    generated = {kernel["name"] for kernel in report.kernels if kernel["kind"] == "generated"}
    assert report.not_fused
    for pair in report.not_fused:
        assert {pair["first"], pair["second"]} <= generated
        assert pair["bytes_passed"] + pair["bytes_shared"] > 0
        assert pair["reason"] in text.partition("Not fused (")[2]


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
