"""The ND-tiling workaround: its gate, its registration, its requests."""

import itertools

import pytest
import torch
from torch import fx, nn
from tritium.tiling.predicates import NODES_PER_CONVOLUTION

import tritium
from tritium.compiler.pipeline import passes_for
from tritium.graph import is_conv_heavy, is_dynamic
from tritium.passes import ConfigRequest, Decline, PassContext
from tritium.tiling import nd_tiling


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


@pytest.mark.parametrize(
    ("version", "dynamic", "conv_heavy"),
    list(itertools.product([(2, 9), (2, 10), (2, 11), (2, 13), (3, 0)], [False, True], [False, True])),
)
def test_the_whole_truth_table(version, dynamic, conv_heavy):
    fires = nd_tiling.gate(version, dynamic=dynamic, conv_heavy=conv_heavy) is None
    assert fires == (version < (2, 11) and dynamic and conv_heavy)


def test_every_refusal_has_its_own_reason():
    reasons = {
        nd_tiling.gate((2, 11), dynamic=True, conv_heavy=True),
        nd_tiling.gate((2, 10), dynamic=False, conv_heavy=True),
        nd_tiling.gate((2, 10), dynamic=True, conv_heavy=False),
    }
    assert len(reasons) == 3
    assert None not in reasons


class TestPredicates:
    def test_dynamic_means_a_placeholder_with_free_symbols(self):
        assert not is_dynamic(captured(lambda x: x + 1, torch.ones(3, 4), dynamic=False))
        assert is_dynamic(captured(lambda x: x + 1, torch.ones(3, 4), dynamic=True))

    def test_dynamic_by_mark(self):
        x = torch.ones(3, 4)
        torch._dynamo.mark_dynamic(x, 1)
        assert is_dynamic(captured(lambda x: x + 1, x))

    def test_a_symbol_that_is_only_a_number_counts(self):
        graph = fx.Graph()
        x = graph.placeholder("x")
        graph.output(x)
        assert not is_dynamic(graph)

    def test_conv_heavy(self, convolution):
        conv, x = convolution
        assert is_conv_heavy(captured(lambda x: conv(x).relu(), x))
        assert not is_conv_heavy(captured(lambda x: x.relu(), x))

    def test_post_grad_graphs_count_too(self, convolution):
        conv, x = convolution
        graph = fx.experimental.proxy_tensor.make_fx(lambda x: conv(x))(x).graph
        assert is_conv_heavy(graph)

    @pytest.mark.parametrize("extra", [-1, 0, 1])
    def test_the_threshold_is_exact(self, extra):
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
    def test_every_kind_of_convolution(self, rank, kind):
        conv = getattr(nn, f"{kind}{rank}d")(2, 2, 3).requires_grad_(False)
        assert is_conv_heavy(captured(conv, torch.randn(1, 2, *[5] * rank)))


class TestPass:
    def context(self, version) -> PassContext:
        return PassContext(tritium.CompilationConfig(), "cpu", torch_version=version)

    def test_requests_on_an_old_version(self, convolution):
        conv, x = convolution
        graph = captured(conv, x, dynamic=True)
        request = nd_tiling.PASS.run(graph, self.context((2, 10)))
        assert isinstance(request, ConfigRequest)
        assert dict(request.settings) == {
            "triton.prefer_nd_tiling": True,
            "triton.max_tiles": 3,
            "triton.tile_reductions": True,
        }
        assert "2.10" in request.because

    def test_declines_on_this_version(self, convolution):
        conv, x = convolution
        outcome = nd_tiling.PASS.run(captured(conv, x, dynamic=True), self.context((2, 13)))
        assert isinstance(outcome, Decline)
        assert "2.13" in outcome.reason

    def test_registration(self, monkeypatch):
        def names(config):
            return [entry.name for entry in passes_for(config, (), ())]

        assert "nd_tiling_workaround" in names(tritium.CompilationConfig())
        off = tritium.PassConfig(enable_nd_tiling_workaround=False)
        assert "nd_tiling_workaround" not in names(tritium.CompilationConfig(pass_config=off))
        monkeypatch.setenv("TRITIUM_PASS_CONFIG__ENABLE_ND_TILING_WORKAROUND", "0")
        assert "nd_tiling_workaround" not in names(tritium.CompilationConfig())
        monkeypatch.setenv("TRITIUM_PASS_CONFIG__ENABLE_ND_TILING_WORKAROUND", "1")
        assert "nd_tiling_workaround" in names(tritium.CompilationConfig())

    def test_the_report_says_why_it_stayed_off(self, convolution):
        conv, x = convolution
        compiled = torch.compile(conv, backend=tritium.Backend(tritium.CompilationConfig(engine="eager")), dynamic=True)
        with torch.inference_mode():
            compiled(x)
        entry = next(e for e in tritium.explain(compiled).passes if e["name"] == "nd_tiling_workaround")
        assert "tiles symbolic sizes itself" in entry["declined"]
        assert entry["requests"] == []
