"""Activations by name, and `muls_add`."""

import math

import pytest
import torch
import torch.nn.functional as F

import tritium
from support.fidelity import assert_no_worse
from tritium.errors import ArgumentError
from tritium.layers.pointwise import ACTIVATIONS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("swish", F.silu),
        ("SiLU", F.silu),
        ("mish", F.mish),
        ("GELU", F.gelu),
        ("relu", F.relu),
        ("gelu-tanh", lambda x: F.gelu(x, approximate="tanh")),
        ("Gelu-Fast", lambda x: x * torch.sigmoid(1.702 * x)),
    ],
)
def test_activations_in_any_case(name, function, random):
    x = random(1000) * 3
    torch.testing.assert_close(tritium.get_activation_layer(name)(x), function(x))
    assert tritium.get_activation_layer(name) is not tritium.get_activation_layer(name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fast_gelu_rounds_once(dtype, random):
    x = (random(1000) * 3).to(dtype)
    expected = (x.float() * torch.sigmoid(1.702 * x.float())).to(dtype)
    assert torch.equal(tritium.get_activation_layer("gelu-fast")(x), expected)


def test_one_activation_is_lossy_and_says_so():
    layers = {name: tritium.get_activation_layer(name) for name in ACTIVATIONS}
    assert {name for name, layer in layers.items() if getattr(layer, "lossy", False)} == {"gelu-fast"}
    assert "lossy" in repr(layers["gelu-fast"])
    x = torch.linspace(-6, 6, 10_001)
    assert (layers["gelu-fast"](x) - F.gelu(x)).abs().max() > 0.02


def test_an_unknown_activation():
    with pytest.raises(ArgumentError, match="did you mean 'gelu-tanh'"):
        tritium.get_activation_layer("gelu_tanh")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0, 0.5, -1.0, 2, 0.3, 1.7])
def test_muls_add_against_float64_and_nothing_in_place(dtype, scale, random):
    x, y = random(7, 100, dtype=dtype), random(7, 100, dtype=dtype, seed=1)
    before = x.clone(), y.clone()
    exact = x.double() * scale + y.double()
    out = tritium.muls_add(x, y, scale)
    assert_no_worse(out, exact.to(dtype), exact)
    if dtype != torch.float32:
        # No scale is rounded before it is used.
        assert torch.equal(out, (x.float() * scale + y.float()).to(dtype))
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])
    assert out.data_ptr() not in (x.data_ptr(), y.data_ptr())


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_past_the_largest_number(dtype):
    x = torch.tensor([1.0, -1.0], dtype=dtype)
    for scale in (1e300, math.inf):
        assert tritium.muls_add(x, x, scale).tolist() == [math.inf, -math.inf]


@pytest.mark.parametrize("shape", [(7, 100), (100,), ()])
def test_dtypes_that_differ(shape, random):
    x, y = random(7, 100, dtype=torch.bfloat16), random(*shape, seed=1)
    out = tritium.muls_add(x, y, 0.3)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, x.float() * 0.3 + y)
