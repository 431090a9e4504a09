"""Operators that AOTAutograd takes apart."""

import pytest
import torch

from tritium import compat


@pytest.fixture
def operator():
    """An operator that is traced as another function, and the number of times that function has run."""
    library = torch.library.Library("tritium_test_traced", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    torch.library.register_fake("tritium_test_traced::twice", lambda x: torch.empty_like(x), lib=library)
    runs = []

    def traced(x):
        runs.append(x)
        return x + x

    compat.traced.take_apart("tritium_test_traced::twice", library, traced)
    yield torch.ops.tritium_test_traced.twice, runs
    library._destroy()


def test_an_operator_is_traced_once_a_call(operator):
    twice, runs = operator
    graphs = []

    def keep(gm, inputs):
        graphs.append(gm)
        return gm.forward

    def lower(gm, inputs):
        return torch._dynamo.backends.common.aot_autograd(fw_compiler=keep)(gm, inputs)

    x = torch.randn(7)
    with torch.no_grad():
        result = torch.compile(lambda x: twice(twice(x.sin())), backend=lower)(x)
    assert torch.equal(result, x.sin() * 4)
    assert len(runs) == 2
    targets = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert targets == [torch.ops.aten.sin.default, torch.ops.aten.add.Tensor, torch.ops.aten.add.Tensor]
