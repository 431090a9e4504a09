"""Predicates of graphs: sizes that may change, convolutions that dominate."""

import pytest
import torch
from torch import fx, nn

from tritium.graph import NODES_PER_CONVOLUTION, is_conv_heavy, is_dynamic


def captured(function, *inputs, dynamic=None) -> fx.Graph:
    graphs = []

    def keep(gm, example_inputs):
        graphs.append(gm.graph)
        return gm.forward

    torch.compile(function, backend=keep, dynamic=dynamic)(*inputs)
    return graphs[0]


def test_a_graph_with_free_symbols_is_dynamic():
    x, marked = torch.ones(3, 4), torch.ones(3, 4)
    torch._dynamo.mark_dynamic(marked, 1)
    assert not is_dynamic(captured(lambda x: x + 1, x, dynamic=False))
    assert is_dynamic(captured(lambda x: x + 1, x, dynamic=True))
    torch._dynamo.reset()
    assert is_dynamic(captured(lambda x: x + 1, marked))


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose"])
def test_every_kind_of_convolution_counts(rank, kind):
    conv, x = getattr(nn, f"{kind}{rank}d")(2, 2, 3).requires_grad_(False), torch.randn(1, 2, *[5] * rank)
    assert is_conv_heavy(captured(conv, x))
    assert not is_conv_heavy(captured(lambda x: x.relu(), x))
    # The graph after AOTAutograd.
    assert is_conv_heavy(fx.experimental.proxy_tensor.make_fx(lambda x: conv(x))(x).graph)


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_the_threshold_is_exact(extra):
    graph = fx.Graph()
    x = graph.placeholder("x")
    x = graph.call_function(torch.conv2d, (x, x))
    # placeholder, convolution and output are three of them.
    for _ in range(NODES_PER_CONVOLUTION - 3 + extra):
        x = graph.call_function(torch.relu, (x,))
    graph.output(x)
    assert is_conv_heavy(graph) == (len(graph.nodes) < 300) == (extra < 0)
