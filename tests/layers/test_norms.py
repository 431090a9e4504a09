"""Norms against float64, and their errors."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tritium
from support.fidelity import assert_no_worse
from tritium import ops
from tritium.errors import ArgumentError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def layer_norm(width, dtype=torch.float32, **options):
    """A layer norm with weights that are not its first ones."""
    norm = nn.LayerNorm(width, eps=1e-5, **options).to(dtype)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm.requires_grad_(requires_grad=False)


class TestRMSNorm:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("fused", [True, False])
    def test_against_float64(self, dtype, fused, random):
        norm = tritium.RMSNorm(100)
        assert norm.eps == 1e-6
        nn.init.normal_(norm.weight)
        with torch.no_grad():
            for shape in ((100,), (2, 5, 100), (1, 2, 1, 2, 100)):
                x = random(*shape, dtype=dtype)
                exact = F.rms_norm(x.double(), (100,), norm.weight.double(), 1e-6)
                assert_no_worse(norm(x, fused), exact.to(dtype), exact)

    def test_gradients_are_kept(self, random):
        norm, x = tritium.RMSNorm(8), random(2, 8).requires_grad_()
        norm(x).sum().backward()
        assert norm.weight.grad is not None
        assert x.grad.abs().max() > 0

    def test_errors(self):
        for x in (torch.ones(2, 5), torch.ones(())):
            with pytest.raises(ArgumentError, match="rows of 4 numbers, got shape"):
                tritium.RMSNorm(4)(x)


class TestLayerNorm:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("weights", DTYPES)
    def test_fast_layernorm(self, dtype, weights, random):
        norm, x = layer_norm(100, weights), random(2, 7, 100, dtype=dtype)
        exact = F.layer_norm(x.double(), (100,), norm.weight.double(), norm.bias.double(), 1e-5)
        for mode in (0, 1):
            assert_no_worse(tritium.fast_layernorm(norm, x, mode), exact.to(dtype), exact)
        if dtype == weights == torch.float16:
            assert_no_worse(tritium.fast_layernorm(norm, x, 2), exact.to(dtype), exact)
        else:
            with pytest.raises(ArgumentError, match="impl_mode 2 takes x and weights in float16"):
                tritium.fast_layernorm(norm, x, 2)
        with pytest.raises(ArgumentError, match="impl_mode must be 0, 1 or 2, got 3"):
            tritium.fast_layernorm(norm, x, 3)

    @pytest.mark.parametrize("options", [{"elementwise_affine": False}, {"bias": False}, {}], ids=str)
    @pytest.mark.parametrize("shape", [8, (7, 8)])
    def test_layers_of_every_kind(self, options, shape, random):
        norm, x = nn.LayerNorm(shape, **options), random(2, 7, 8)
        for fused in (True, False):
            assert torch.equal(tritium.fast_layernorm(norm, x, fused=fused), norm(x))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("affine", [True, False])
    @pytest.mark.parametrize("fused", [True, False])
    def test_scale_shift_of_every_shape(self, dtype, affine, fused, random):
        norm, x = layer_norm(128, elementwise_affine=affine), random(2, 63, 128, dtype=dtype)
        parts = [None if part is None else part.double() for part in (norm.weight, norm.bias)]
        normed = F.layer_norm(x.double(), (128,), *parts, 1e-5)
        shapes = ((2, 128), (2, 1, 128), (2, 63, 128))
        for scale_shape, shift_shape in itertools.product(shapes, shapes):
            scale, shift = random(*scale_shape, dtype=dtype, seed=1), random(*shift_shape, dtype=dtype, seed=2)
            wide = [t.double() if t.dim() == 3 else t.double()[:, None] for t in (scale, shift)]
            exact = normed * (1 + wide[0]) + wide[1]
            out = tritium.layernorm_scale_shift(norm, x, scale, shift, fused)
            assert_no_worse(out, exact.to(dtype), exact)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"x": torch.ones(2, 8)}, "x must have rank 3"),
            ({"scale": torch.ones(3, 8)}, r"scale of shape \(3, 1, 8\) cannot be broadcast"),
            ({"shift": torch.ones(2, 4, 8)}, r"shift of shape \(2, 4, 8\) cannot be broadcast"),
            ({"layernorm": nn.LayerNorm(9)}, "must norm the last dim"),
        ],
    )
    def test_errors_of_scale_shift(self, changes, words):
        given = {"layernorm": nn.LayerNorm(8), "x": torch.ones(2, 7, 8)}
        given |= {"scale": torch.ones(2, 8), "shift": torch.ones(2, 8)}
        with pytest.raises(ArgumentError, match=words):
            tritium.layernorm_scale_shift(**{**given, **changes})


class TestResidual:
    @pytest.mark.parametrize("norm", ["layer", "rms"])
    def test_against_the_definition(self, norm, random):
        x, y = random(2, 7, 60), random(2, 7, 60, seed=1)
        gate, scale, shift = (random(2, 60, seed=seed) for seed in (2, 3, 4))
        stream, out = tritium.residual_norm_modulate(x, y, gate, scale, shift, norm=norm)
        expected = x + gate[:, None] * y
        torch.testing.assert_close(stream, expected)
        normed = (F.layer_norm if norm == "layer" else F.rms_norm)(expected, (60,), eps=1e-6)
        torch.testing.assert_close(out, normed * (1 + scale[:, None]) + shift[:, None], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(tritium.residual_norm_modulate(x, y, fused=False)[0], x + y)

    def test_errors_turn_no_provider_off(self):
        """A provider that fails is turned off for good."""
        x = torch.ones(2, 7, 8)
        for name, value, words in (
            ("norm", "layr", "did you mean 'layer'"),
            ("gate", torch.ones(3, 1, 8), r"gate of shape \(3, 1, 8\) cannot be broadcast"),
            ("gate", torch.ones(2, 8, dtype=torch.complex64), "gate must"),
            ("y", x[:1], "one shape"),
            ("y", x.to(torch.float8_e4m3fn), "y must"),
            ("weight", torch.ones(7), r"weight must have shape \(8,\)"),
        ):
            with pytest.raises(ArgumentError, match=words):
                tritium.residual_norm_modulate(**{"x": x, "y": x, name: value})
        assert not ops.failed_providers()


class TestGroupNorm:
    def test_against_the_definition(self, random):
        x, weight, bias = random(2, 12, 5, 7), random(12, seed=1), random(12, seed=2)
        expected = F.silu(F.group_norm(x, 4, weight, bias, 1e-5))
        torch.testing.assert_close(tritium.group_norm_silu(x, 4, weight, bias), expected, rtol=1e-4, atol=1e-5)
        with pytest.raises(ArgumentError, match="divisible by groups=5"):
            tritium.group_norm_silu(x, 5)
        with pytest.raises(ArgumentError, match=r"weight must have shape \(12,\)"):
            tritium.group_norm_silu(x, 4, torch.ones(4))

    @pytest.mark.parametrize("fused", [True, False])
    def test_one_number_has_no_norm(self, fused):
        with pytest.raises(ArgumentError, match="the norm of one number is not defined: got groups=3"):
            tritium.group_norm_silu(torch.ones(1, 3, 1), 3, fused=fused)
        # As in PyTorch, which counts the whole batch.
        assert tritium.group_norm_silu(torch.ones(2, 3, 1), 3, fused=fused).shape == (2, 3, 1)
