"""How generated code launches the kernels of rewritten sites."""

import pytest
import torch
from torch import fx

import tritium
from tritium import ops
from tritium.compiler.passes import fuse


@pytest.mark.parametrize(
    ("provider", "expected"), [("triton", True), ("inductor", False), ("reference", False), (["triton"], False)]
)
def test_traced_kernels_are_found_by_their_provider(provider, expected):
    graph = fx.Graph()
    x = graph.placeholder("x")
    overload = ops.catalog()["residual_norm_modulate"].overload
    graph.output(graph.call_function(overload, (x, x), {"provider": provider}))
    assert fuse.has_traced_kernels(graph) is expected


def test_operators_of_the_model_are_none():
    graph = fx.Graph()
    graph.output(graph.call_function(torch.relu, (graph.placeholder("x"),), {"provider": "triton"}))
    assert not fuse.has_traced_kernels(graph)


def test_a_graph_without_kernels_requests_nothing():
    compiled = torch.compile(torch.nn.LayerNorm(8), backend=tritium.Backend(tritium.CompilationConfig(engine="eager")))
    with torch.inference_mode():
        compiled(torch.ones(2, 8))
    (entry,) = [entry for entry in tritium.explain(compiled).passes if entry["name"] == "fuse"]
    assert entry["requests"] == []
    assert fuse.STATIC_LAUNCH.settings == {"static_launch_user_defined_triton_kernels": True}
