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


@pytest.fixture
def convolution():
    return nn.Conv2d(3, 4, 3).requires_grad_(False), torch.randn(1, 3, 8, 9)


def test_dynamic_means_a_placeholder_with_free_symbols():
    assert not is_dynamic(captured(lambda x: x + 1, torch.ones(3, 4), dynamic=False))
    assert is_dynamic(captured(lambda x: x + 1, torch.ones(3, 4), dynamic=True))


def test_dynamic_by_mark():
    x = torch.ones(3, 4)
    torch._dynamo.mark_dynamic(x, 1)
    assert is_dynamic(captured(lambda x: x + 1, x))


def test_a_symbol_that_is_only_a_number_counts():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(x)
    assert not is_dynamic(graph)


def test_conv_heavy(convolution):
    conv, x = convolution
    assert is_conv_heavy(captured(lambda x: conv(x).relu(), x))
    assert not is_conv_heavy(captured(lambda x: x.relu(), x))


def test_post_grad_graphs_count_too(convolution):
    conv, x = convolution
    graph = fx.experimental.proxy_tensor.make_fx(lambda x: conv(x))(x).graph
    assert is_conv_heavy(graph)


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


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose"])
def test_every_kind_of_convolution(rank, kind):
    conv = getattr(nn, f"{kind}{rank}d")(2, 2, 3).requires_grad_(False)
    assert is_conv_heavy(captured(conv, torch.randn(1, 2, *[5] * rank)))
