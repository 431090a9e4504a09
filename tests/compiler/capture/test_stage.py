"""A graph is cut at boundary ops, which run between its captured pieces."""

import pytest
import torch
from torch import nn

import tritium
from support.capture import captures, compiled
from tritium import CompilationConfig, compat
from tritium.bench import workloads

BOUNDARY_CALLS = []


@tritium.plugins.custom_op("tests::boundary_sort", outputs=["x"], boundary=True)
def boundary_sort(x: torch.Tensor) -> torch.Tensor:
    BOUNDARY_CALLS.append(tuple(x.shape))
    return x.sort(dim=-1).values


class TestPieces:
    @staticmethod
    def model(x, w):
        y = x * 2 + w
        z = boundary_sort(y)
        u = (z - y).relu()
        return boundary_sort(u) + y, z

    @pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.codegen)])
    @pytest.mark.parametrize("graphs", ["only", "with_compile"])
    def test_what_stands_between_boundaries_is_captured(self, device, graphs, engine):
        f = compiled(self.model, CompilationConfig(graphs=graphs, engine=engine))
        results, expected = [], []
        for _ in range(3):
            x, w = torch.randn(3, 5, device=device), torch.randn(5, device=device)
            expected.append(self.model(x, w))
            BOUNDARY_CALLS.clear()
            results.append(f(x, w))
            assert BOUNDARY_CALLS == [(3, 5), (3, 5)], "boundary ops run once a call, recorded or not"
        for found, right in zip(results, expected, strict=True):
            for one, other in zip(found, right, strict=True):
                torch.testing.assert_close(one, other)
        report = tritium.explain(f)
        assert [entry["piece"] for entry in report.captures] == [0, 2, 4]
        assert all(entry["hits"] == 3 for entry in report.captures)
        assert "cut at 2 boundary ops" in next(e["summary"] for e in report.passes if e["name"] == "capture")

    @pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.codegen)])
    def test_sizes_views_and_writes_cross_a_boundary(self, device, engine):
        def model(x, n):
            row = x[0]
            x.mul_(n)
            y = boundary_sort(x)
            y.add_(row)
            return y.view(-1)[: x.shape[0]] * n, row, boundary_sort(y)

        f = compiled(model, CompilationConfig(graphs="with_compile", engine=engine), dynamic=True)
        for size, n in ((3, 2), (4, 3), (3, 2), (5, 4)):
            x = torch.randn(size, 6, device=device)
            ours, theirs = x.clone(), x.clone()
            found, right = f(ours, n), model(theirs, n)
            torch.testing.assert_close(ours, theirs)
            for one, other in zip(found, right, strict=True):
                torch.testing.assert_close(one, other)

    def test_weights_of_pieces_are_known(self, device, config):
        model = nn.Linear(5, 5).to(device).requires_grad_(False)
        f = compiled(lambda x: boundary_sort(model(x)) @ model.weight, config)
        x = torch.randn(3, 5, device=device)
        for _ in range(2):
            torch.testing.assert_close(f(x), model(x).sort(dim=-1).values @ model.weight)
        assert all("weight" not in entry["bucket"] for entry in captures(f))

    def test_weights_of_a_stock_model_itself_are_known(self, config):
        # Its own parameter, which Dynamo spells differently from those of its blocks.
        (pixart,) = workloads.find("pixart")
        built = pixart.build("cpu", torch.float32, small=True)
        f = torch.compile(built.model, backend=tritium.Backend(config))
        with torch.inference_mode():
            assert torch.equal(f(**built.inputs)[0], built.model(**built.inputs)[0])
        (entry,) = captures(f)
        assert entry["declined"] is None
        assert entry["bucket"].startswith("hidden_states 1x4x16x16 float32")
        assert "scale_shift_table" not in entry["bucket"]


def test_a_graph_that_cannot_be_lowered_is_captured(device, monkeypatch):
    def compile_fx(gm, example_inputs):
        raise RuntimeError("no code today")

    monkeypatch.setattr(compat.inductor, "compile_fx", compile_fx)
    scale = nn.Parameter(torch.full((4,), 2.0, device=device), requires_grad=False)
    model = nn.Module()
    model.register_parameter("scale", scale)
    f = compiled(
        lambda x: x * (model.scale * 3), CompilationConfig(graphs="with_compile", enable_freezing=True), dynamic=False
    )
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="no code today"):
        for _ in range(2):
            assert f(torch.ones(2, 4, device=device)).tolist() == [[6.0] * 4] * 2
    (entry,) = captures(f)
    assert (entry["bucket"], entry["hits"], entry["declined"]) == ("x 2x4 float32", 2, None)
