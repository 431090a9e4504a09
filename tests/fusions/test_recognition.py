"""Norms and gated residuals: spellings, near misses, hazards, guards, and the catalogue."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tritium
from support.fidelity import assert_no_worse
from support.recognition import EAGER, Counting, Plain, check_declined, check_no_site, compiles, recognise
from support.small_models import flux, flux_inputs


def diffusers_norm(width: int, **kwargs) -> nn.Module:
    from diffusers.models.normalization import RMSNorm

    norm = RMSNorm(width, eps=1e-6, **kwargs)
    if norm.weight is not None:
        nn.init.normal_(norm.weight)
    return norm


def torch_norm(width: int, **kwargs) -> nn.Module:
    norm = nn.RMSNorm(width, eps=1e-5, **kwargs)
    if norm.weight is not None:
        nn.init.normal_(norm.weight)
    return norm


class HandWritten(nn.Module):
    def __init__(self, width: int, function) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.function = function

    def forward(self, x):
        return self.function(x, self.weight)


SPELLINGS = {
    "torch.nn.RMSNorm": torch_norm,
    "torch.nn.RMSNorm without weight": lambda width: torch_norm(width, elementwise_affine=False),
    "torch.nn.RMSNorm with its default eps": lambda width: nn.RMSNorm(width),
    "diffusers RMSNorm": diffusers_norm,
    "diffusers RMSNorm without weight": lambda width: diffusers_norm(width, elementwise_affine=False),
    "F.rms_norm": lambda width: HandWritten(width, lambda x, w: F.rms_norm(x, (x.shape[-1],), w, 1e-3)),
    "division by a root": lambda width: HandWritten(
        width, lambda x, w: x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w
    ),
    "a power of minus one half": lambda width: HandWritten(
        width, lambda x, w: w * (x * ((x * x).mean(dim=-1, keepdim=True) + 1e-6) ** -0.5)
    ),
    "methods, in float32, rounded before the weight": lambda width: HandWritten(
        width, lambda x, w: w * x.float().mul(x.float().square().mean((-1,), True).add(1e-6).rsqrt()).to(x.dtype)
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_rms_norm(spelling, dtype):
    torch.manual_seed(0)
    model = SPELLINGS[spelling](63).to(dtype)
    for shape in ((63,), (7, 63), (2, 100, 63), (2, 3, 1, 63)):
        x = torch.randn(*shape).to(dtype)
        result, sites = recognise(model, x)
        assert (sites["rms_norm"].fused, sites["rms_norm"].declined) == (1, 0), shape
        with torch.inference_mode():
            eager = model(x)
            exact = SPELLINGS[spelling](63).double()
            exact.load_state_dict(model.state_dict())
            if getattr(exact, "eps", 0) is None:
                # Its default is the eps of the dtype: the exact value is that of the narrow model.
                exact.eps = torch.finfo(torch.float32).eps
            assert_no_worse(result, eager, exact(x.double()))


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 0.1, 1])
def test_any_eps(eps):
    model, x = nn.RMSNorm(8, eps=eps), torch.randn(3, 8)
    result, sites = recognise(model, x)
    assert sites["rms_norm"].fused == 1
    torch.testing.assert_close(result, model(x).detach())


def test_an_eps_that_became_an_input():
    """`dynamic=True` turns a float attribute into a graph input."""
    model = diffusers_norm(8)
    compiled = torch.compile(model, backend=tritium.Backend(EAGER), dynamic=True)
    with torch.inference_mode():
        for tokens in (3, 5, 7):
            x = torch.randn(2, tokens, 8)
            torch.testing.assert_close(compiled(x), model(x))
    report = tritium.explain(compiled)
    assert report.sites["rms_norm"].fused == len(report.records)


GATES = {
    "x + g * y": lambda x, g, y: x + g * y,
    "g * y + x": lambda x, g, y: g * y + x,
    "y * g + x": lambda x, g, y: y * g + x,
    "methods": lambda x, g, y: y.mul(g).add(x),
    "functions": lambda x, g, y: torch.add(x, torch.mul(g, y)),
    "in float32, rounded back": lambda x, g, y: (x.float() + y.float() * g).type_as(x),
    "with dropout in eval": lambda x, g, y: x + g * F.dropout(y, 0.5, training=False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spelling", GATES)
def test_every_spelling_of_the_gated_residual(spelling, dtype):
    generator = torch.Generator().manual_seed(0)
    for shape, gate in (
        ((2, 7, 60), (2, 1, 60)),
        ((1, 63, 8), (8,)),
        ((2, 3, 5, 7), (2, 3, 1, 1)),
        ((2, 7, 60), (2, 7, 60)),
        ((2, 100, 3), (2, 100, 1)),
    ):
        x, y = (torch.randn(*shape, generator=generator).to(dtype) for _ in range(2))
        g = torch.randn(*gate, generator=generator).to(dtype)
        result, sites = recognise(GATES[spelling], x, g, y)
        assert (sites["mul_add"].fused, sites["mul_add"].declined) == (1, 0), shape
        assert_no_worse(result, GATES[spelling](x, g, y), GATES["x + g * y"](x.double(), g.double(), y.double()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.5, -0.25, 3])
def test_a_number_times_a_tensor_plus_a_tensor(scale, dtype):
    x, y = torch.randn(2, 7, 63).to(dtype), torch.randn(2, 7, 63).to(dtype)
    for function in (lambda x, y: x * scale + y, lambda x, y: y + scale * x):
        result, sites = recognise(function, x, y)
        assert sites["mul_add"].fused == 1
        assert_no_worse(result, function(x, y), x.double() * scale + y.double())


def test_addcmul_and_tanh_gates():
    x, g, y = torch.randn(2, 7, 8), torch.randn(2, 1, 8), torch.randn(2, 7, 8)
    for function in (lambda x, g, y: torch.addcmul(x, g, y), lambda x, g, y: x + torch.tanh(g) * y):
        result, sites = recognise(function, x, g, y)
        assert sites["mul_add"].fused == 1
        torch.testing.assert_close(result, function(x, g, y))


NEAR_MISSES = {
    "a mean over another axis": lambda x, w: x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6),
    "a mean that drops its axis": lambda x, w: x * torch.rsqrt(x.square().mean(-1) + 1e-6)[..., None],
    "a sum": lambda x, w: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6),
    "the mean of another tensor": lambda x, w: x * torch.rsqrt((x + 1).square().mean(-1, keepdim=True) + 1e-6),
    "a cube": lambda x, w: x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 100.0),
    "rsqrt of something else": lambda x, w: x * torch.rsqrt(w.square() + 1e-6),
    "a norm over two axes": lambda x, w: F.rms_norm(x, tuple(x.shape[-2:])),
    "a rounded copy under the mean": lambda x, w: (
        x * torch.rsqrt(x.to(torch.float16).float().square().mean(-1, keepdim=True) + 1e-6)
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_only_looks_like_rms_norm(name):
    x, w = torch.randn(2, 8, 8), torch.randn(8)
    check_no_site("rms_norm", NEAR_MISSES[name], x, w)


@pytest.mark.parametrize("weight", [(2, 1, 8), (2, 7, 8), (7, 1), (1,)])
def test_a_factor_that_is_no_weight_stays_outside(weight):
    x, w = torch.randn(2, 7, 8), torch.randn(*weight)
    function = lambda x, w: F.rms_norm(x, (8,)) * w  # noqa: E731
    result, sites = recognise(function, x, w)
    assert sites["rms_norm"].fused == 1
    torch.testing.assert_close(result, function(x, w))


def rope(x, cos, sin):
    rotated = torch.cat([-x[..., 4:], x[..., :4]], -1)
    return x * cos + rotated * sin


def gated():
    return torch.randn(2, 7, 8), torch.randn(2, 1, 8), torch.randn(2, 7, 8)


GATE_NEAR_MISSES = {
    "a modulation": (lambda x, g, y: x * (1 + g) + g, (2, 1, 8)),
    "a gate that widens the result": (lambda x, g, y: x[:, :1] + g * y[:, :1], (2, 7, 8)),
    "a gate without dims": (lambda x, g, y: x + g.sum() * y, (1,)),
    "a RoPE": (lambda x, g, y: rope(x, g, g + 1), (1, 7, 8)),
    "a RoPE with tables that are broadcast": (lambda x, g, y: rope(x, g, g + 1), (7, 8)),
    "a difference": (lambda x, g, y: x - g * y, (2, 1, 8)),
    "integers": (lambda x, g, y: (x * 9).long() + (g * 9).long() * (y * 9).long(), (2, 1, 8)),
}


@pytest.mark.parametrize("name", GATE_NEAR_MISSES)
def test_what_only_looks_like_a_gated_residual(name):
    function, gate = GATE_NEAR_MISSES[name]
    x, g, y = torch.randn(2, 7, 8), torch.randn(*gate), torch.randn(2, 7, 8)
    check_no_site("mul_add", function, x, g, y)


def written_between(x, g, y):
    product = g * y
    x.add_(1)
    y.mul_(2)
    return x + product


def written_through_a_view(x, g, y):
    product = g * y
    y.view(-1)[0] = 100.0
    return x + product


def autocast_boundary(x, g, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = g * y
    return x + product


def written_before_and_after(x, g, y):
    y.mul_(2)
    out = x + g * y
    x.add_(1)
    return out


def written_in_place(x, g, y):
    z = x.clone()
    z.add_(g * y)
    return z


class TestHazards:
    @pytest.mark.parametrize(
        ("function", "reason"),
        [
            (written_between, "a value is written in place between the matched operations"),
            (written_through_a_view, "a value is written in place between the matched operations"),
            (autocast_boundary, "the region crosses an autocast boundary"),
        ],
    )
    def test_are_declined_with_a_reason(self, function, reason):
        check_declined("mul_add", reason, function, *gated())

    @pytest.mark.parametrize(("function", "count"), [(written_before_and_after, 1), (written_in_place, 0)])
    def test_other_writes_are_none(self, function, count):
        x, g, y = gated()
        expected = function(x.clone(), g, y.clone())
        result, sites = recognise(function, x, g, y)
        assert (sites["mul_add"].fused, sites["mul_add"].declined) == (count, 0)
        torch.testing.assert_close(result, expected)

    def test_a_shared_scale_that_is_written_after_it_was_read(self):
        """Both modulations read `1 + s` from before the write."""

        def function(x, s):
            factor = 1 + s
            s.mul_(2)
            return F.layer_norm(x, (8,)) * factor, F.layer_norm(x.exp(), (8,)) * factor

        x, s = torch.randn(2, 7, 8), torch.randn(2, 1, 8)
        expected = function(x, s.clone())
        result, sites = recognise(function, x, s)
        assert sites["adalayernorm"].reasons == {"a value is written in place between the matched operations": 2}
        for made, wanted in zip(result, expected, strict=True):
            torch.testing.assert_close(made, wanted)

    def test_a_matched_value_used_elsewhere_is_still_provided(self):
        def function(x, g, y):
            product = g * y
            return x + product, product.sum(), product

        x, g, y = torch.randn(2, 7, 8), torch.randn(2, 1, 8), torch.randn(2, 7, 8)
        result, sites = recognise(function, x, g, y)
        assert sites["mul_add"].fused == 1
        torch.testing.assert_close(result, function(x, g, y))

    def test_dead_code_is_no_site(self):
        def function(x, g, y):
            F.rms_norm(x, (8,))
            return x + g * y

        _, sites = recognise(function, torch.randn(2, 7, 8), torch.randn(2, 1, 8), torch.randn(2, 7, 8))
        assert (sites["rms_norm"].fused, sites["mul_add"].fused) == (0, 1)

    def test_a_value_that_is_not_contiguous_keeps_its_strides(self):
        x = torch.randn(2, 8, 7).transpose(1, 2)
        result, sites = recognise(lambda x: F.rms_norm(x * 2, (8,)), x)
        expected = F.rms_norm(x * 2, (8,))
        assert result.stride() == expected.stride()
        torch.testing.assert_close(result, expected)
        assert sites["rms_norm"].recognised + sites["rms_norm"].declined == 1


def test_sites_in_a_row_feed_each_other():
    """A norm of a gated residual of a norm: each reads what another replaced."""

    def function(x, g):
        for _ in range(3):
            x = F.rms_norm(x + g * F.rms_norm(x, (8,), eps=1e-6), (8,), eps=1e-6)
        return x

    x, g = torch.randn(2, 7, 8), torch.randn(2, 1, 8)
    result, sites = recognise(function, x, g)
    assert (sites["rms_norm"].fused, sites["mul_add"].fused) == (6, 3)
    torch.testing.assert_close(result, function(x, g))


@settings(max_examples=25)
@given(
    batch=st.integers(1, 3),
    tokens=st.integers(1, 9),
    width=st.integers(1, 33),
    order=st.sampled_from(list(GATES)),
    gate_dims=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_whatever_the_shapes_the_numbers_are_eager_s(batch, tokens, width, order, gate_dims):
    shape = (batch, tokens, width)
    gate = tuple(size if keep else 1 for size, keep in zip(shape, gate_dims, strict=True))
    x, g, y = torch.randn(*shape), torch.randn(*gate), torch.randn(*shape)
    result, sites = recognise(GATES[order], x, g, y)
    torch.testing.assert_close(result, GATES[order](x, g, y))
    assert sites["mul_add"].fused == 1


class TestGuards:
    """Recognition asks about symbolic sizes without adding guards: the same shapes compile as often as without it."""

    def test_sizes_that_happen_to_be_equal_stay_apart(self):
        """x and g have a batch of their own; the first call gives both the same number."""

        def function(x, y, g):
            return x + torch.nn.functional.silu(y) * x, g.sum(), torch.nn.functional.rms_norm(g, (8,)) * (1 + g[:1])

        def call(one, two):
            return torch.randn(one, 7, 8), torch.randn(one, 7, 8), torch.randn(two, 8)

        calls = [call(4, 4), call(5, 6), call(9, 3)]
        assert compiles(function, calls, Counting(), dynamic=True) == compiles(function, calls, Plain(), dynamic=True)

    def test_a_stock_model_over_sizes(self):
        model = flux()
        calls = [flux_inputs(tokens) for tokens in (16, 24, 40, 9)]
        run = lambda *values: model(**dict(zip(calls[0], values, strict=True)))[0]  # noqa: E731
        tuples = [tuple(call.values()) for call in calls]
        assert compiles(run, tuples, Counting(), dynamic=True) == compiles(run, tuples, Plain(), dynamic=True)
