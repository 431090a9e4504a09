"""Adaptive norms, activations, norms of codecs, and the regions made of them."""

import time
from collections import Counter
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import tritium
from support.fidelity import assert_no_worse
from support.recognition import EAGER, check_no_site, recognise
from support.small_models import flux, flux_inputs
from tritium import fusions
from tritium.compiler.passes.exact import NOT_EQUAL
from tritium.fusions import group_norm_silu, patterns
from tritium.fusions.match import Recogniser
from tritium.graph import copied
from tritium.ops import op as op_module


def layer(x, eps=1e-6):
    return F.layer_norm(x, (x.shape[-1],), eps=eps)


def rms(x, w=None):
    return F.rms_norm(x, (x.shape[-1],), w, 1e-6)


# [B, H] modulation is viewed by the model; t is the shift.
MODULATIONS = {
    "LN * (1 + s)[:, None] + t[:, None]": lambda x, s, t: layer(x) * (1 + s)[:, None] + t[:, None],
    "LN * (1 + s[:, None]) + t[:, None]": lambda x, s, t: layer(x) * (1 + s[:, None]) + t[:, None],
    "t + (s + 1) * LN": lambda x, s, t: t.unsqueeze(1) + (s.unsqueeze(1) + 1.0) * layer(x),
    "addcmul": lambda x, s, t: torch.addcmul(t[:, None], layer(x), 1 + s[:, None]),
    "n + n * s + t": lambda x, s, t: (n := layer(x)) + n * s[:, None] + t[:, None],
    "RMS": lambda x, s, t: rms(x) * (1 + s[:, None]) + t[:, None],
    "no shift": lambda x, s, t: layer(x) * (1 + s[:, None]),
    "RMS without shift": lambda x, s, t: rms(x) * (1 + s[:, None]),
    "a float32 island": lambda x, s, t: (layer(x.float()) * (1 + s.float()[:, None]) + t.float()[:, None]).type_as(x),
    "no norm": lambda x, s, t: x * (1 + s[:, None]) + t[:, None],
    "a value a token": lambda x, s, t: layer(x) * (1 + s[:, None].expand_as(x)) + t[:, None].expand_as(x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spelling", MODULATIONS)
def test_every_spelling_of_modulation(spelling, dtype):
    generator = torch.Generator().manual_seed(0)
    for batch, tokens, width in ((2, 7, 60), (1, 63, 100), (3, 1, 7)):
        if spelling == "no norm" and tokens == 1:
            # Nothing tells a modulation of one token from any other arithmetic.
            continue
        x, s, t = (
            torch.randn(*shape, generator=generator).to(dtype)
            for shape in ((batch, tokens, width), (batch, width), (batch, width))
        )
        result, sites = recognise(MODULATIONS[spelling], x, s, t)
        assert (sites["adalayernorm"].fused, sites["adalayernorm"].declined) == (1, 0)
        assert sites["mul_add"].recognised == 0
        assert sites["rms_norm"].fused == int("RMS" in spelling)
        with torch.inference_mode():
            exact = MODULATIONS[spelling](x.double(), s.double(), t.double())
            if "island" in spelling:
                exact = layer(x.double()) * (1 + s.double()[:, None]) + t.double()[:, None]
            assert_no_worse(result, MODULATIONS[spelling](x, s, t), exact)


def test_affine_norms_and_dynamic_shapes():
    norm = nn.LayerNorm(16)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    compiled = torch.compile(
        lambda x, s, t: norm(x) * (1 + s) + t, backend=tritium.Backend(EAGER), fullgraph=True, dynamic=True
    )
    with torch.inference_mode():
        for tokens in (3, 7, 63):
            x, s, t = torch.randn(2, tokens, 16), torch.randn(2, 1, 16), torch.randn(2, 1, 16)
            torch.testing.assert_close(compiled(x, s, t), norm(x) * (1 + s) + t)
    report = tritium.explain(compiled)
    assert report.sites["adalayernorm"].fused == len(report.records)


def test_one_norm_two_modulations():
    def function(x, s, t):
        n = layer(x)
        return n * (1 + s) + t, n * (1 + t) + s, n

    x, s, t = torch.randn(2, 7, 16), torch.randn(2, 1, 16), torch.randn(2, 1, 16)
    result, sites = recognise(function, x, s, t)
    assert sites["adalayernorm"].fused == 2
    torch.testing.assert_close(result, function(x, s, t))


class Gemma(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(16))

    def forward(self, x, s, t):
        return rms(x) * (1 + self.w)


NEAR_MISSES = {
    "a weight written as 1 + w": Gemma(),
    "a factor of 2 + s": lambda x, s, t: layer(x) * (2 + s) + t,
    "a plain factor": lambda x, s, t: layer(x) * s + t,
    "a norm over two axes": lambda x, s, t: F.layer_norm(x, tuple(x.shape[1:])) * (2 + s),
    "no norm and no shift": lambda x, s, t: x * (1 + s),
    "no norm and a shift of another shape": lambda x, s, t: x * (1 + s) + x.exp(),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_only_looks_like_modulation(name):
    x, s, t = torch.randn(2, 7, 16), torch.randn(2, 1, 16), torch.randn(2, 1, 16)
    check_no_site("adalayernorm", NEAR_MISSES[name], x, s, t)


def test_a_norm_over_another_axis_is_none():
    x, s = torch.randn(2, 16, 16), torch.randn(2, 1, 16)
    function = lambda x, s: F.layer_norm(x.transpose(1, 2), (16,)).transpose(1, 2) * (1 + s)  # noqa: E731
    check_no_site("adalayernorm", function, x, s)


GATES = {
    "SwiGLU, two projections": lambda a, b: F.silu(a) * b,
    "SwiGLU, halves": lambda a, b: (p := torch.cat([a, b], -1).chunk(2, -1))[1] * F.silu(p[0]),
    "SwiGLU, slices": lambda a, b: F.silu((p := torch.cat([a, b], -1))[..., : a.shape[-1]]) * p[..., a.shape[-1] :],
    "GEGLU": lambda a, b: b * F.gelu(a),
    "GEGLU, tanh": lambda a, b: b * F.gelu(a, approximate="tanh"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spelling", GATES)
def test_gated_activations(spelling, dtype):
    a, b = torch.randn(2, 7, 60).to(dtype), torch.randn(2, 7, 60).to(dtype)
    result, sites = recognise(GATES[spelling], a, b)
    assert (sites["gelu"].fused, sites["gelu"].inductor, sites["gelu"].declined) == (1, 0, 0)
    assert torch.equal(result, GATES[spelling](a, b))


def test_gelu_alone_is_computed_as_written():
    x = torch.randn(2, 7, 60)
    for approximate in ("none", "tanh"):
        result, sites = recognise(lambda x, approximate=approximate: F.gelu(x, approximate=approximate) + 1, x)
        assert sites["gelu"].recognised == 1
        assert torch.equal(result, F.gelu(x, approximate=approximate) + 1)


ACTIVATION_NEAR_MISSES = {
    "a hand-written GELU with other constants": lambda a, b: 0.5 * a * (1 + torch.tanh(0.79 * (a + 0.05 * a**3))),
    "QuickGELU": lambda a, b: a * torch.sigmoid(1.702 * a),
    "a broadcast factor": lambda a, b: b * F.silu(a[:, :1]),
    "in place": lambda a, b: F.silu(a + 0.0, inplace=True) * b,
}


@pytest.mark.parametrize("name", ACTIVATION_NEAR_MISSES)
def test_what_only_looks_like_an_activation(name):
    a, b = torch.randn(2, 7, 60), torch.randn(2, 7, 60)
    check_no_site("gelu", ACTIVATION_NEAR_MISSES[name], a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_group_norm_and_silu(dtype):
    norm = nn.GroupNorm(4, 32).to(dtype)
    x = torch.randn(2, 32, 7, 9).to(dtype)
    result, sites = recognise(lambda x: F.silu(norm(x)), x)
    assert sites["group_norm_silu"].fused == 1
    with torch.inference_mode():
        exact = F.silu(F.group_norm(x.double(), 4, norm.weight.double(), norm.bias.double(), norm.eps))
        assert_no_worse(result, F.silu(norm(x)), exact)
    _, sites = recognise(lambda x: F.relu(norm(x)), x)
    assert "group_norm_silu" not in sites


def test_wan_s_channel_norm():
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanRMS_norm

    norm = WanRMS_norm(16, images=False)
    nn.init.normal_(norm.gamma)
    x = torch.randn(1, 16, 3, 5, 7)
    result, sites = recognise(norm, x)
    assert sites["rms_norm"].fused == 1
    with torch.inference_mode():
        torch.testing.assert_close(result, norm(x))
    # The module's own sqrt(d) is an input then.
    result, sites = recognise(norm, x, dynamic=True)
    assert sites["rms_norm"].fused == 1
    with torch.inference_mode():
        torch.testing.assert_close(result, norm(x))
    _, sites = recognise(lambda x: F.normalize(x, dim=1) * 4.0 * x.sum(), x)
    assert sites["rms_norm"].recognised == 0


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    ("function", "with_silu"),
    [
        (lambda norm, x: F.silu(norm(x)), True),
        (lambda norm, x: F.silu(norm(x).float()).to(x.dtype), True),
        (lambda norm, x: F.silu(y := norm(x)) + y, False),
        (lambda norm, x: F.gelu(norm(x)), False),
    ],
    ids=["alone", "in float32", "the norm is read elsewhere too", "no SiLU"],
)
def test_wan_s_channel_norm_with_the_silu_after_it(function, with_silu, dynamic, monkeypatch):
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanRMS_norm

    calls = []

    def compute(op, *arguments, original=op_module.Op.compute, **named):
        # Fake results are computed by name.
        if arguments:
            calls.append((op.name, arguments[6] if op.name == "channel_norm" else None))
        return original(op, *arguments, **named)

    monkeypatch.setattr(op_module.Op, "compute", compute)
    norm = WanRMS_norm(16, images=False)
    nn.init.normal_(norm.gamma)
    x = torch.randn(1, 16, 3, 5, 7).to(memory_format=torch.channels_last_3d)
    result, sites = recognise(lambda x: function(norm, x), x, dynamic=dynamic)
    assert sites["rms_norm"].recognised == sites["rms_norm"].fused == 1
    assert [call for call in calls if call[0] == "channel_norm"] == [("channel_norm", with_silu)]
    with torch.inference_mode():
        expected = function(norm, x)
    torch.testing.assert_close(result, expected)
    assert result.stride() == expected.stride()


class TestRegions:
    def test_linear_gelu_covers_its_gelu(self):
        linear = nn.Linear(16, 32)
        x = torch.randn(2, 7, 16)
        function = lambda x: F.gelu(linear(x), approximate="tanh") * 2  # noqa: E731
        result, sites = recognise(function, x)
        assert (sites["linear_gelu"].fused, sites["gelu"].recognised) == (1, 1)
        with torch.inference_mode():
            assert torch.equal(result, function(x))

    def test_a_linear_that_is_used_elsewhere_is_declined(self):
        linear = nn.Linear(16, 16)
        x = torch.randn(2, 16)
        _, sites = recognise(lambda x: F.gelu(y := linear(x)) + y, x)
        assert sites["linear_gelu"].reasons == {"the linear's result is used elsewhere too": 1}
        assert sites["gelu"].recognised == 1

    def test_cat_linear(self):
        linear = nn.Linear(24, 5)
        a, b = torch.randn(2, 7, 16), torch.randn(2, 7, 8)
        result, sites = recognise(lambda a, b: linear(torch.cat([a, b], dim=2)), a, b)
        assert sites["cat_linear"].fused == 1
        with torch.inference_mode():
            assert torch.equal(result, linear(torch.cat([a, b], -1)))
        other = nn.Linear(16, 5)
        _, sites = recognise(lambda a: other(torch.cat([a, a], dim=1)), a)
        assert "cat_linear" not in sites


def half_rope(x, s):
    angles = s.expand_as(x)[..., :8].repeat(1, 1, 2)
    return x * angles.cos() + torch.cat([-x[..., 8:], x[..., :8]], -1) * angles.sin()


def attention(x, tables):
    cos, sin = tables

    def turned(x):
        return x * cos + torch.cat([-x[..., 8:], x[..., :8]], -1) * sin

    return F.scaled_dot_product_attention(turned(rms(x)), turned(rms(x.exp())), x)


SWITCHES = {
    "enable_rope": ("rope", half_rope),
    "enable_mul_add": ("mul_add", lambda x, s: x + s * x.exp()),
    "enable_qk_norm_rope": (
        "qk_norm_rope",
        lambda x, s: attention(x[:, None], (s[:, None], s[:, None].exp())),
    ),
    "enable_residual_norm_modulate": ("residual_norm_modulate", lambda x, s: layer(x + s * x.exp()) * (1 + s) + s),
    "enable_adalayernorm": ("adalayernorm", lambda x, s: layer(x) * (1 + s) + s),
    "enable_fast_gelu": ("gelu", lambda x, s: F.silu(x) * x.exp()),
    "enable_group_norm_silu": ("group_norm_silu", lambda x, s: F.silu(F.group_norm(x, 7))),
    "enable_attention": ("attention", lambda x, s: F.scaled_dot_product_attention(*(x[:, None],) * 3)),
    "enable_wide_attention": (
        "wide_attention",
        lambda x, s: F.scaled_dot_product_attention(*(x.repeat(1, 1, 20).unflatten(-1, (1, 320)).transpose(1, 2),) * 3),
    ),
    "enable_linear_gelu": ("linear_gelu", lambda x, s: F.gelu(F.linear(x, s[0, 0].expand(3, 16)))),
    "enable_cat_linear": ("cat_linear", lambda x, s: F.linear(torch.cat([x, x], -1), s[0, 0].repeat(3, 2))),
}


@pytest.mark.parametrize(
    ("after", "free"),
    [
        (lambda x, w: F.conv2d(x, w), True),
        (lambda x, w: F.conv2d(F.dropout(x, 0.0, False), w), True),
        (lambda x, w: F.conv2d(x.contiguous(memory_format=torch.channels_last), w), True),
        (lambda x, w: F.conv2d(F.dropout(x, 0.0, False).contiguous(memory_format=torch.channels_last), w), True),
        (lambda x, w: F.conv2d(x.contiguous(), w), False),
        (lambda x, w: F.conv2d(F.dropout(x, 0.5, True), w), False),
        (lambda x, w: (F.conv2d(x, w), x), False),
        (lambda x, w: x, False),
    ],
)
def test_the_layout_of_what_convolutions_alone_read_is_free(after, free):
    """On a GPU ATen's GroupNorm gives up channels-last, which the op keeps: strides may differ where nobody sees them."""
    graph = fx.symbolic_trace(lambda x, w: after(F.silu(F.group_norm(x, 2)), w)).graph
    (silu,) = [node for node in graph.nodes if node.target is F.silu]
    assert group_norm_silu.feeds_convolutions(silu) is free


@pytest.mark.parametrize("switch", SWITCHES)
def test_each_switch_turns_its_family_off_and_says_so(switch):
    family, function = SWITCHES[switch]
    x, s = torch.randn(2, 7, 16), torch.randn(2, 1, 16)
    _, sites = recognise(function, x, s)
    assert sites[family].recognised == 1
    off = EAGER.with_(fusion_patterns=tritium.FusionPatterns(**{switch: False}))
    result, sites = recognise(function, x, s, config=off)
    assert (sites[family].recognised, sites[family].declined) == (0, 1)
    assert "switched off" in next(iter(sites[family].reasons))
    torch.testing.assert_close(result, function(x, s))


def test_a_switch_also_turns_off_what_covers_its_family():
    x, s = torch.randn(2, 7, 16), torch.randn(2, 1, 16)
    off = EAGER.with_(fusion_patterns=tritium.FusionPatterns(enable_rms_norm=False))
    _, sites = recognise(lambda x, s: rms(x) * (1 + s) + s, x, s, config=off)
    assert sites["adalayernorm"].reasons == {"it covers rms_norm, switched off in fusion_patterns": 1}
    off = EAGER.with_(fusion_patterns=tritium.FusionPatterns(enable_fast_gelu=False))
    _, sites = recognise(lambda x, s: F.gelu(F.linear(x, s[0, 0].expand(3, 16))), x, s, config=off)
    assert sites["linear_gelu"].declined == 1


class TestExact:
    CONFIG = tritium.CompilationConfig(engine="eager", fidelity="exact")

    def test_keeps_what_is_bit_equal_and_declines_the_rest(self):
        def function(x, s):
            return layer(x) * (1 + s) + s, F.silu(x) * x

        for dtype in (torch.float32, torch.bfloat16):
            x, s = torch.randn(2, 7, 60).to(dtype), torch.randn(2, 1, 60).to(dtype)
            result, sites = recognise(function, x, s, config=self.CONFIG)
            expected = function(x, s)
            assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
            assert sites["gelu"].fused == 1
            if dtype is torch.bfloat16:
                assert sites["adalayernorm"].reasons == {NOT_EQUAL: 1}

    def test_a_whole_model_is_bit_equal(self):
        for dtype in (torch.float32, torch.bfloat16):
            torch._dynamo.reset()
            model, inputs = flux().to(dtype), flux_inputs(dtype=dtype)
            with torch.inference_mode():
                compiled = torch.compile(model, backend=tritium.Backend(self.CONFIG))
                assert torch.equal(compiled(**inputs)[0], model(**inputs)[0])
            sites = tritium.explain(compiled).sites
            assert sites["adalayernorm"].fused + sites["adalayernorm"].declined == 6

    def test_the_caller_s_tensors_are_not_written_to(self):
        def function(x):
            x.add_(1)
            return F.silu(x) * x

        x = torch.zeros(3, 4)
        recognise(function, x, config=self.CONFIG)
        assert torch.equal(x, torch.ones(3, 4))


class Kept(tritium.Backend):
    """Tritium's backend, which keeps copies of the graphs that it gets."""

    graphs: ClassVar[list[fx.Graph]] = []

    def __call__(self, gm, example_inputs, **options):
        self.graphs.append(copied(gm.graph))
        return super().__call__(gm, example_inputs, **options)


@pytest.mark.thorough
def test_a_model_of_57_blocks_is_recognised_whole(monkeypatch):
    with torch.inference_mode():
        compiled = torch.compile(flux(19, 38), backend=Kept(EAGER))
        compiled(**flux_inputs())
    (graph,) = Kept.graphs
    tried = Counter()
    monkeypatch.setattr(
        patterns, "_matches", lambda *given, match=patterns._matches: tried.update("p") or match(*given)
    )
    started = time.process_time()
    Recogniser(graph).find(list(fusions.catalog().values()))
    print(f"{time.process_time() - started:.2f} s, {tried['p']} parts of patterns tried on {len(graph.nodes)} nodes")
    # Recognition is linear: about 7 a node.
    assert tried["p"] < 20 * len(graph.nodes)
    report = tritium.explain(compiled)
    assert report.sites["rms_norm"].fused == 152
    assert report.sites["adalayernorm"].fused == 115
    assert report.sites["mul_add"].fused == 114
    assert report.sites["gelu"].recognised == 76
    # Double blocks end in two streams that are joined; single blocks follow each other directly.
    assert report.sites["residual_norm_modulate"].fused == 74 + 37
    assert report.sites["qk_norm_rope"].fused == 57
