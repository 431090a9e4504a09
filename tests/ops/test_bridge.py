"""The custom-op bridge: an opaque kernel that does not break the graph."""

import itertools

import pytest
import torch
from torch import Tensor

import tritium
from tritium.errors import CustomOpError
from tritium.ops import bridge

EAGER = tritium.CompilationConfig(engine="eager")
_numbers = itertools.count()


def fresh(stem: str = "op") -> str:
    """Operators live as long as the process: every test needs a name of its own."""
    return f"tritium_test::{stem}_{next(_numbers)}"


def numpy_double(x: Tensor) -> Tensor:
    """Opaque: Dynamo could not trace into this."""
    return torch.from_numpy(x.detach().cpu().numpy() * 2).to(x.device)


def capture(function, *inputs):
    compiled = torch.compile(function, backend=tritium.Backend(EAGER), fullgraph=True)
    with torch.inference_mode():
        result = compiled(*inputs)
    return result, tritium.explain(compiled)


def test_it_keeps_the_graph_whole():
    @tritium.plugins.custom_op(fresh(), outputs=["x"])
    def op(x: Tensor, factor: float = 1.0) -> Tensor:
        return numpy_double(x) * factor

    result, report = capture(lambda x: op(x + 1, 3.0) - 1, torch.ones(3, 4))
    assert torch.equal(result, torch.full((3, 4), 11.0))
    assert len(report.records) == 1


def test_dynamic_shapes():
    @tritium.plugins.custom_op(fresh(), outputs=["x"])
    def op(x: Tensor) -> Tensor:
        return numpy_double(x)

    compiled = torch.compile(lambda x: op(x) + 1, backend=tritium.Backend(EAGER), fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for size in (2, 7, 63):
            assert torch.equal(compiled(torch.ones(size, 3)), torch.full((size, 3), 3.0))
    assert len(tritium.explain(compiled).records) == 1


def test_several_outputs_by_parameter_name():
    @tritium.plugins.custom_op(fresh(), outputs=["k", "q"])
    def swap(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return k.clone(), q.clone()

    q, k = torch.ones(2, 3), torch.zeros(4, dtype=torch.float64)
    (first, second), _ = capture(lambda q, k: swap(q, k), q, k)
    assert torch.equal(first, k)
    assert torch.equal(second, q)


def test_outputs_by_a_function():
    def meta(x: Tensor, n: int) -> Tensor:
        return x.new_empty(n, x.shape[0])

    @tritium.plugins.custom_op(fresh(), outputs=meta)
    def rows(x: Tensor, n: int) -> Tensor:
        return x.expand(n, -1).clone()

    result, _ = capture(lambda x: rows(x, 3) * 2, torch.ones(5))
    assert torch.equal(result, torch.full((3, 5), 2.0))


def test_results_are_contiguous_as_promised():
    @tritium.plugins.custom_op(fresh(), outputs=["x"])
    def op(x: Tensor) -> Tensor:
        return x.clone().t().clone().t()

    assert op(torch.randn(3, 4)).is_contiguous()


def test_another_device_has_its_own_implementation():
    @tritium.plugins.custom_op(fresh(), outputs=["x"])
    def op(x: Tensor) -> Tensor:
        raise AssertionError("the CPU has its own")

    @op.register_kernel("cpu")
    def _(x):
        return x * 3

    assert torch.equal(op(torch.ones(2)), torch.full((2,), 3.0))


def test_autograd():
    @tritium.plugins.custom_op(fresh(), outputs=["x"])
    def op(x: Tensor) -> Tensor:
        return numpy_double(x)

    op.register_autograd(lambda ctx, gradient: gradient * 2, setup_context=lambda ctx, inputs, output: None)
    x = torch.ones(3, requires_grad=True)
    torch.compile(lambda x: op(x).sum(), backend=tritium.Backend(EAGER))(x).backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_boundaries_are_found():
    @tritium.plugins.custom_op(fresh(), outputs=["x"], boundary=True)
    def cut(x: Tensor) -> Tensor:
        return x * 2

    @tritium.plugins.custom_op(fresh(), outputs=["x"])
    def whole(x: Tensor) -> Tensor:
        return x * 3

    graphs = []

    def look(graph, context):
        graphs.append((bridge.boundaries(graph.nodes), bridge.in_graph(graph)))

    backend = tritium.Backend(EAGER, passes=[tritium.plugins.Pass("look", look)])
    with torch.inference_mode():
        torch.compile(lambda x: whole(cut(x) + cut(x + 1)), backend=backend)(torch.ones(3))
    nodes, found = graphs[0]
    assert len(nodes) == 2
    assert [op.name for op in found] == [cut.name, whole.name]
    assert [file.name for file in cut.files()] == ["test_bridge.py"]


class TestErrors:
    @pytest.mark.parametrize("name", ["noname", "a::b::c", "a::", "my-lib::op"])
    def test_names(self, name):
        with pytest.raises(CustomOpError, match="must be 'namespace::name'"):
            tritium.plugins.custom_op(name, outputs=["x"])

    @pytest.mark.parametrize(
        ("outputs", "message"),
        [(["z"], r"outputs \['z'\] name no parameter; parameters: x"), ("x", "list of parameter names")],
    )
    def test_outputs_that_name_nothing(self, outputs, message):
        with pytest.raises(CustomOpError, match=message):

            @tritium.plugins.custom_op(fresh(), outputs=outputs)
            def op(x: Tensor) -> Tensor:
                return x

    def test_a_second_declaration(self):
        name = fresh()

        def declare():
            @tritium.plugins.custom_op(name, outputs=["x"])
            def op(x: Tensor) -> Tensor:
                return x.clone()

        declare()
        with pytest.raises(CustomOpError, match=r"exists already, declared in .*test_bridge\.py"):
            declare()

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            (lambda x: x[:1].clone(), r"returned \(1, 4\) torch.float32, its outputs promise \(3, 4\)"),
            (lambda x: x.double(), "returned .* torch.float64, its outputs promise .* torch.float32"),
            (lambda x: (x.clone(), x.clone()), "returned 2 results, its outputs promise 1"),
        ],
    )
    def test_a_broken_promise(self, body, message):
        @tritium.plugins.custom_op(fresh(), outputs=["x"])
        def op(x: Tensor) -> Tensor:
            return body(x)

        with pytest.raises(CustomOpError, match=message):
            op(torch.ones(3, 4))
