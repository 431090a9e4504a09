"""The layer functions over the core's ops: values against float64, errors, and no break of a graph."""

import contextlib
import fractions
import functools
import itertools
import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import tritium
from support.fidelity import assert_no_worse
from tritium import ops
from tritium.errors import ArgumentError, ArgumentTypeError
from tritium.layers import eager

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rotated_by(x, cos, sin, mode):
    """The rotation as the textbook has it, in the dtype it is given."""
    if mode == "rotated_half":
        first, second = x.chunk(2, -1)
        rotated = torch.cat([-second, first], -1)
    else:
        rotated = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos + rotated * sin


class TestEager:
    """Which implementation an eager call runs."""

    @pytest.fixture
    def compiled(self, monkeypatch):
        """As on a GPU for which no provider is owned, with a compiler that keeps the graphs as they are."""

        def keep(gm, _):
            graphs.append(gm)
            return gm.forward

        graphs, real = [], torch.compile
        monkeypatch.setattr(eager.ops, "providers", lambda op: {})
        monkeypatch.setattr(eager.device, "has_triton", lambda: True)
        monkeypatch.setattr(eager, "_is_on_gpu", lambda tensors: True)
        monkeypatch.setattr(torch, "compile", lambda function: real(function, backend=keep))
        eager._compiled.cache_clear()
        yield graphs
        eager._compiled.cache_clear()

    def test_a_gpu_without_a_provider_runs_the_compiled_reference(self, compiled):
        x, cos, sin = random(2, 7, 3, 8), random(7, 8), random(7, 8)
        for _ in range(2):
            rotated = tritium.rotary_position_embedding(x, cos, sin)
            assert torch.equal(rotated, tritium.rotary_position_embedding(x, cos, sin, fused=False))
            tritium.group_norm_silu(random(2, 8, 3, 3), 4)
            tritium.layernorm_scale_shift(nn.LayerNorm(8), random(2, 7, 8), random(2, 8), random(2, 8))
            tritium.RMSNorm(8)(x)
        assert len(compiled) == 4

    def test_a_second_size_compiles_for_all_sizes(self, compiled):
        for tokens in (7, 5, 9, 63, 100):
            x, cos, sin = random(2, tokens, 3, 8), random(tokens, 8), random(tokens, 8)
            tritium.rotary_position_embedding(x, cos, sin)
        assert len(compiled) == 2

    def test_every_dtype_and_rank_has_a_recompile_limit_of_its_own(self, compiled):
        """Dynamo compiles one code object at most eight times."""
        kinds = [((4,) * rank, dtype) for rank in (2, 3, 4, 5) for dtype in DTYPES]
        norm = tritium.RMSNorm(4)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for shape, dtype in kinds:
                norm(random(*shape, dtype=dtype))
        assert len(compiled) == len(kinds)

    def test_an_implementation_is_chosen_once_for_a_form(self, monkeypatch):
        chosen, real = [], eager._choose
        monkeypatch.setattr(eager, "_choose", lambda op, arguments: chosen.append(op.name) or real(op, arguments))
        norm = tritium.RMSNorm(8).requires_grad_(requires_grad=False)
        x = random(2, 7, 8)
        for argument in (x, x.clone(), x[:, :5], x.mT.contiguous().mT, x.clone().requires_grad_()):
            norm(argument)
        norm.eps = 1.0
        torch.testing.assert_close(norm(x), F.rms_norm(x, (8,), norm.weight, 1.0))
        assert chosen == ["rms_norm"] * 5

    def test_an_owned_provider_is_called_through_the_dispatcher(self, monkeypatch):
        """And not by gradients, modes and transforms, for which operators of PyTorch have rules."""
        owned = ops.Provider(ops.REFERENCE, "residual_norm_modulate", lambda given: None, lambda given: None)
        monkeypatch.setattr(ops, "providers", lambda op: {ops.REFERENCE: owned})
        x, y = random(4, 7, 64), random(4, 7, 64, seed=1)

        def calls_operator(x, context=contextlib.nullcontext):
            with torch.profiler.profile() as profiler, context():
                tritium.residual_norm_modulate(x, y)
            return any("tritium::residual_norm_modulate" in event.name for event in profiler.events())

        assert [calls_operator(x) for _ in range(2)] == [True, True]
        assert not calls_operator(x.clone().requires_grad_())
        assert not calls_operator(x, functools.partial(FlopCounterMode, display=False))
        assert not calls_operator(x, torch.autograd.forward_ad.dual_level)

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: tritium.residual_norm_modulate(x, x.cos())[1],
            lambda x: tritium.group_norm_silu(x, 7),
            lambda x: tritium.qk_norm_rope(x[None], x[None], rope="none")[0][0],
            lambda x: FROZEN_RMS(x),
            lambda x: tritium.muls_add(x, x, 0.3),
            lambda x: tritium.layernorm_scale_shift(FROZEN_LAYER, x, x[:, 0], x[:, 0]),
            lambda x: tritium.rotary_position_embedding(x[None], torch.ones(4, 64), torch.ones(4, 64)),
            lambda x: tritium.attention_forward(x[None], x[None], x[None]),
            lambda x: tritium.attention_forward_varlen(x, x, x, [0, 1, 4], [0, 2, 4]),
            lambda x: tritium.attention_forward_varlen(x, x, x, [0, 1, 4], [0, 2, 4], causal=True),
        ],
        ids=["residual", "group norm", "qk", "rms", "add", "layer norm", "rotary", "attention", "varlen", "causal"],
    )
    def test_derivatives_and_batches_after_calls_without(self, function):
        """No tensor says under vmap that it requires gradients, and none of dual numbers does."""
        x, direction = random(4, 7, 64), random(4, 7, 64, seed=3)
        function(x)
        little = 1e-3 * direction.double()
        expected = (function(x.double() + little) - function(x.double() - little)) / 2e-3
        along = torch.func.jvp(function, (x,), (direction,))[1]
        torch.testing.assert_close(along.double(), expected, rtol=1e-3, atol=1e-3)
        with torch.autograd.forward_ad.dual_level():
            dual = function(torch.autograd.forward_ad.make_dual(x, direction))
            torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, along)
        several = torch.stack([x, 2 * x]).requires_grad_()
        mapped = torch.vmap(function)(several)
        mapped.square().sum().backward()
        alone = several.detach().clone().requires_grad_()
        each = torch.stack([function(one) for one in alone])
        torch.testing.assert_close(mapped, each)
        each.square().sum().backward()
        torch.testing.assert_close(several.grad, alone.grad, rtol=1e-3, atol=1e-3)

    def test_gradients_flow_after_calls_without(self):
        x, y = random(4, 7, 64), random(4, 7, 64, seed=1)
        tritium.residual_norm_modulate(x, y)
        leaf = x.clone().requires_grad_()
        tritium.residual_norm_modulate(leaf, y)[1].square().sum().backward()
        expected = x.clone().requires_grad_()
        F.layer_norm(expected + y, (64,), eps=1e-6).square().sum().backward()
        torch.testing.assert_close(leaf.grad, expected.grad, rtol=1e-3, atol=1e-4)

    def test_symbolic_sizes_without_dynamo(self):
        def call(x):
            return tritium.group_norm_silu(x, 1)

        traced = make_fx(call, tracing_mode="symbolic")(random(3, 7))
        torch.testing.assert_close(traced(random(5, 9)), call(random(5, 9)))


FROZEN_RMS, FROZEN_LAYER = (
    norm.requires_grad_(requires_grad=False) for norm in (tritium.RMSNorm(64), nn.LayerNorm(64))
)


class TestRotary:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("mode", ["rotated_half", "rotated_interleaved"])
    @pytest.mark.parametrize("head_first", [False, True])
    @pytest.mark.parametrize(("batch", "heads", "width"), [(2, 16, 88), (1, 24, 128), (4, 8, 64)])
    def test_against_float64(self, dtype, mode, head_first, batch, heads, width):
        tokens = 60
        x = random(batch, tokens, heads, width, dtype=dtype)
        cos, sin = random(tokens, width, seed=1), random(tokens, width, seed=2)
        wide = [t[None, :, None] for t in (cos, sin)]
        exact = rotated_by(x.double(), *(t.double() for t in wide), mode)
        eager = rotated_by(x.float(), *wide, mode).to(dtype)
        if head_first:
            x, exact, eager = (t.transpose(1, 2) for t in (x, exact, eager))
            wide = [t.transpose(1, 2) for t in wide]
        for tables, fused in itertools.product(((cos, sin), wide), (True, False)):
            out = tritium.rotary_position_embedding(x, *tables, mode, head_first, fused)
            assert_no_worse(out, eager, exact)

    def test_tokens_first_of_all_with_tables_of_rank_4(self):
        x, cos, sin = random(7, 2, 3, 8), random(7, 1, 1, 8, seed=1), random(7, 1, 1, 8, seed=2)
        out = tritium.rotary_position_embedding(x, cos, sin)
        torch.testing.assert_close(out, rotated_by(x, cos, sin, "rotated_half"))

    @pytest.mark.parametrize(
        ("changes", "error", "words"),
        [
            ({"x": [1.0]}, ArgumentTypeError, "x must be a tensor, got list"),
            ({"cos": None}, ArgumentTypeError, "cos must be a tensor, got NoneType"),
            ({"sin": 1.0}, ArgumentTypeError, "sin must be a tensor, got 1.0"),
            ({"x": torch.ones(2, 7, 8)}, ArgumentError, "x must have rank 4, got 3"),
            ({"cos": torch.ones(1, 7, 8)}, ArgumentError, "cos must have rank 2 or 4, got 3"),
            ({"sin": torch.ones(1, 7, 1, 8)}, ArgumentError, "one shape"),
            ({"rotated_mode": 1}, ArgumentTypeError, "rotated_mode must be one of"),
            ({"rotated_mode": "rotated_halt"}, ArgumentError, "did you mean 'rotated_half'"),
            ({"head_first": 1}, ArgumentTypeError, "head_first must be True or False"),
            ({"fused": None}, ArgumentTypeError, "fused must be True or False"),
            ({"cos": torch.ones(6, 8), "sin": torch.ones(6, 8)}, ArgumentError, "6 rows for 7 tokens"),
            ({"cos": torch.ones(7, 6), "sin": torch.ones(7, 6)}, ArgumentError, "got 6"),
            ({"head_first": True}, ArgumentError, "7 rows for 3 tokens"),
            (
                {"cos": torch.ones(7, 4, dtype=torch.complex64), "sin": torch.ones(7, 4)},
                ArgumentTypeError,
                "cos must be",
            ),
        ],
    )
    def test_errors(self, changes, error, words):
        given = {"x": torch.ones(2, 7, 3, 8), "cos": torch.ones(7, 8), "sin": torch.ones(7, 8)}
        with pytest.raises(error, match=words):
            tritium.rotary_position_embedding(**{**given, **changes})


class TestRMSNorm:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("fused", [True, False])
    def test_against_float64(self, dtype, fused):
        norm = tritium.RMSNorm(100)
        assert norm.eps == 1e-6
        nn.init.normal_(norm.weight)
        x = random(2, 5, 100, dtype=dtype)
        with torch.no_grad():
            exact = F.rms_norm(x.double(), (100,), norm.weight.double(), 1e-6)
            assert_no_worse(norm(x, fused), exact.to(dtype), exact)

    def test_the_case_of_the_seed(self):
        x = random(2, 5, 4)
        torch.testing.assert_close(tritium.RMSNorm(4)(x), F.rms_norm(x, (4,), eps=1e-6), atol=1e-6, rtol=0)

    def test_ranks(self):
        for rank in range(1, 9):
            x = random(*[2] * (rank - 1), 4)
            torch.testing.assert_close(tritium.RMSNorm(4)(x), F.rms_norm(x, (4,), eps=1e-6))

    def test_errors(self):
        with pytest.raises(ArgumentTypeError, match="x must be a tensor, got 'x'"):
            tritium.RMSNorm(4)("x")
        for x in (torch.ones(2, 5), torch.ones(())):
            with pytest.raises(ArgumentError, match="rows of 4 numbers, got shape"):
                tritium.RMSNorm(4)(x)
        with pytest.raises(ArgumentTypeError, match="hidden_size must be an integer"):
            tritium.RMSNorm((4, 4))
        with pytest.raises(ArgumentTypeError, match="eps must be a number"):
            tritium.RMSNorm(4, None)
        norm = tritium.RMSNorm(4)
        norm.weight = nn.Parameter(random(4, 4))
        with pytest.raises(ArgumentError, match="weight must have rank 1, got 2"):
            norm(torch.ones(2, 4))

    def test_numbers_of_other_libraries(self):
        norm, x = tritium.RMSNorm(np.int64(4), fractions.Fraction(1, 10)), random(2, 4)
        torch.testing.assert_close(norm(x), F.rms_norm(x, (4,), eps=0.1))

    def test_gradients_are_kept(self):
        norm, x = tritium.RMSNorm(8), random(2, 8).requires_grad_()
        norm(x).sum().backward()
        assert norm.weight.grad is not None
        assert x.grad.abs().max() > 0


class TestLayerNorm:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("weights", DTYPES)
    def test_fast_layernorm(self, dtype, weights):
        norm = nn.LayerNorm(100, eps=1e-5).to(weights)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        x = random(2, 7, 100, dtype=dtype)
        with torch.no_grad():
            exact = F.layer_norm(x.double(), (100,), norm.weight.double(), norm.bias.double(), 1e-5)
            for mode in (0, 1):
                assert_no_worse(tritium.fast_layernorm(norm, x, mode), exact.to(dtype), exact)
            if dtype == weights == torch.float16:
                assert_no_worse(tritium.fast_layernorm(norm, x, 2), exact.to(dtype), exact)
            else:
                with pytest.raises(ArgumentError, match="impl_mode 2 takes x and weights in float16"):
                    tritium.fast_layernorm(norm, x, 2)

    @pytest.mark.parametrize(
        ("given", "error"),
        [
            ({"norm": nn.RMSNorm(8)}, ArgumentTypeError),
            ({"x": 1}, ArgumentTypeError),
            ({"impl_mode": 3}, ArgumentError),
            ({"impl_mode": "0"}, ArgumentTypeError),
            ({"fused": 1}, ArgumentTypeError),
            ({"x": torch.ones(2, 7)}, ArgumentError),
            ({"x": torch.ones(2, 8).int()}, ArgumentTypeError),
        ],
    )
    def test_errors_of_fast_layernorm(self, given, error):
        with pytest.raises(error):
            tritium.fast_layernorm(**{"norm": nn.LayerNorm(8), "x": torch.ones(2, 8), **given})

    @pytest.mark.parametrize("options", [{"elementwise_affine": False}, {"bias": False}, {}], ids=str)
    @pytest.mark.parametrize("shape", [8, (7, 8)])
    def test_layers_of_every_make(self, options, shape):
        norm, x = nn.LayerNorm(shape, **options), random(2, 7, 8)
        for fused in (True, False):
            assert torch.equal(tritium.fast_layernorm(norm, x, fused=fused), norm(x))

    @pytest.mark.parametrize("name", ["weight", "bias"])
    def test_weights_of_another_shape(self, name):
        norm, x = nn.LayerNorm(8), random(2, 7, 8)
        setattr(norm, name, nn.Parameter(random(2, 7, 8)))
        with pytest.raises(ArgumentError, match=rf"{name} must have shape \(8,\), got \(2, 7, 8\)"):
            tritium.layernorm_scale_shift(norm, x, x[:, 0], x[:, 0])
        with pytest.raises(RuntimeError, match=f"Expected {name} to be of same shape as normalized_shape"):
            tritium.fast_layernorm(norm, x)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("affine", [True, False])
    @pytest.mark.parametrize("fused", [True, False])
    def test_scale_shift_of_every_shape(self, dtype, affine, fused):
        norm = nn.LayerNorm(128, eps=1e-5, elementwise_affine=affine)
        if affine:
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
        x = random(2, 63, 128, dtype=dtype)
        shapes = ((2, 128), (2, 1, 128), (2, 63, 128))
        for scale_shape, shift_shape in itertools.product(shapes, shapes):
            scale, shift = random(*scale_shape, dtype=dtype, seed=1), random(*shift_shape, dtype=dtype, seed=2)
            wide = [t.double() if t.dim() == 3 else t.double()[:, None] for t in (scale, shift)]
            with torch.no_grad():
                normed = F.layer_norm(
                    x.double(), (128,), *(p.double() if p is not None else None for p in (norm.weight, norm.bias)), 1e-5
                )
                exact = normed * (1 + wide[0]) + wide[1]
                out = tritium.layernorm_scale_shift(norm, x, scale, shift, fused)
            assert_no_worse(out, exact.to(dtype), exact)

    @pytest.mark.parametrize(
        ("changes", "error", "words"),
        [
            ({"layernorm": nn.Identity()}, ArgumentTypeError, "layernorm must be a LayerNorm, got Identity"),
            ({"x": None}, ArgumentTypeError, "x must be a tensor"),
            ({"scale": 1.0}, ArgumentTypeError, "scale must be a tensor"),
            ({"shift": None}, ArgumentTypeError, "shift must be a tensor"),
            ({"fused": "yes"}, ArgumentTypeError, "fused"),
            ({"x": torch.ones(2, 8)}, ArgumentError, "x must have rank 3"),
            ({"scale": torch.ones(8)}, ArgumentError, "scale must have rank 2 or 3"),
            ({"shift": torch.ones(2, 1, 1, 8)}, ArgumentError, "shift must have rank 2 or 3"),
            *(
                ({name: torch.ones(shape)}, ArgumentError, rf"{name} must be \[B, H\].* got \({shape[0]}")
                for name in ("scale", "shift")
                for shape in ((3, 8), (3, 1, 8), (2, 4, 8), (2, 7))
            ),
            ({"scale": torch.ones(2, 8, dtype=torch.complex64)}, ArgumentTypeError, "scale must be float16"),
            ({"layernorm": nn.LayerNorm(9)}, ArgumentError, "must norm the last dim"),
        ],
    )
    def test_errors_of_scale_shift(self, changes, error, words):
        given = {
            "layernorm": nn.LayerNorm(8),
            "x": torch.ones(2, 7, 8),
            "scale": torch.ones(2, 8),
            "shift": torch.ones(2, 8),
        }
        with pytest.raises(error, match=words):
            tritium.layernorm_scale_shift(**{**given, **changes})


class TestActivation:
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
    def test_names_in_any_case(self, name, function):
        x = random(1000) * 3
        torch.testing.assert_close(tritium.get_activation_layer(name)(x), function(x))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_the_fast_one_is_rounded_once(self, dtype):
        x = (random(1000) * 3).to(dtype)
        wide = x.float()
        expected = (wide * torch.sigmoid(1.702 * wide)).to(dtype)
        assert torch.equal(tritium.get_activation_layer("gelu-fast")(x), expected)

    def test_the_fast_one_takes_no_whole_numbers(self):
        with pytest.raises(ArgumentTypeError, match=r"x must be float16.* got torch\.int64"):
            tritium.get_activation_layer("gelu-fast")(torch.tensor([1, 2, 3]))

    def test_each_call_has_a_module_of_its_own(self):
        assert tritium.get_activation_layer("silu") is not tritium.get_activation_layer("silu")

    def test_the_lossy_one_says_so_and_is_the_only_one(self):
        from tritium.layers.activation import ACTIVATIONS

        lossy = {name for name in ACTIVATIONS if getattr(tritium.get_activation_layer(name), "lossy", False)}
        assert lossy == {"gelu-fast"}
        assert "lossy" in repr(tritium.get_activation_layer("gelu-fast"))
        x = torch.linspace(-6, 6, 10_001)
        assert (tritium.get_activation_layer("gelu-fast")(x) - F.gelu(x)).abs().max() > 0.02

    def test_unknown_names(self):
        with pytest.raises(ArgumentError, match="did you mean 'gelu-tanh'"):
            tritium.get_activation_layer("gelu_tanh")
        with pytest.raises(ArgumentTypeError):
            tritium.get_activation_layer(None)


class TestMulsAdd:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("scale", [0, 0.5, -0.5, 1.0, 1.5, 2, -1.0, 0.3, 1.7])
    def test_against_float64_and_nothing_in_place(self, dtype, scale):
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

    def test_errors(self):
        with pytest.raises(ArgumentError, match="cannot be broadcast"):
            tritium.muls_add(torch.ones(2, 3), torch.ones(2, 4), 1.0)
        with pytest.raises(ArgumentTypeError, match="scale must be a number"):
            tritium.muls_add(torch.ones(2), torch.ones(2), "1")

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_scales_past_the_largest_number(self, dtype):
        x = torch.tensor([1.0, -1.0], dtype=dtype)
        for scale in (1e300, math.inf):
            assert tritium.muls_add(x, x, scale).tolist() == [math.inf, -math.inf]

    @pytest.mark.parametrize("y", [random(7, 100), random(100), torch.tensor(0.7)], ids=["one", "row", "number"])
    def test_dtypes_that_differ(self, y):
        x = random(7, 100, dtype=torch.bfloat16)
        out = tritium.muls_add(x, y, 0.3)
        assert out.dtype == torch.float32
        torch.testing.assert_close(out, x.float() * 0.3 + y)

    def test_gradients_are_kept(self):
        x, y = (random(7, seed=seed).requires_grad_() for seed in (0, 1))
        tritium.muls_add(x, y, 0.5).sum().backward()
        assert torch.equal(x.grad, torch.full((7,), 0.5))
        assert torch.equal(y.grad, torch.ones(7))


class TestRegions:
    @pytest.mark.parametrize("norm", ["layer", "rms"])
    def test_residual_norm_modulate(self, norm):
        x, y = random(2, 7, 60), random(2, 7, 60, seed=1)
        gate, scale, shift = (random(2, 60, seed=seed) for seed in (2, 3, 4))
        residual, out = tritium.residual_norm_modulate(x, y, gate, scale, shift, norm=norm)
        expected = x + gate[:, None] * y
        torch.testing.assert_close(residual, expected)
        function = F.layer_norm if norm == "layer" else F.rms_norm
        torch.testing.assert_close(
            out, function(expected, (60,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None], rtol=1e-4, atol=1e-5
        )
        plain = tritium.residual_norm_modulate(x, y, fused=False)
        torch.testing.assert_close(plain[0], x + y)
        with pytest.raises(ArgumentError, match="did you mean 'layer'"):
            tritium.residual_norm_modulate(x, y, norm="layr")
        with pytest.raises(ArgumentError, match="gate of shape"):
            tritium.residual_norm_modulate(x, y, random(3, 1, 60))
        with pytest.raises(ArgumentError, match="one shape"):
            tritium.residual_norm_modulate(x, y[:1])

    @pytest.mark.parametrize("fused", [True, False])
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            # A kernel would read past the end of what is too short.
            ({"cos": (1, 5, 8), "sin": (1, 5, 8)}, "S = 7, a row for each token"),
            ({"cos": (1, 9, 8), "sin": (1, 9, 8)}, "S = 7, a row for each token"),
            ({"cos": (3, 7, 8), "sin": (3, 7, 8)}, "B = 2"),
            ({"cos": (1, 7, 6), "sin": (1, 7, 6)}, r"\(1, 7, 6\)"),
            ({"cos": (7, 8), "sin": (7, 8)}, r"\(7, 8\)"),
            ({"cos": (1, 7, 8), "sin": (1, 7, 4)}, "the same shapes"),
            ({"q_weight": (5,)}, r"q_weight must have shape \(8,\)"),
            ({"k_weight": (24,)}, r"k_weight must have shape \(8,\)"),
            ({"q_weight": (8,), "norm": "row"}, r"q_weight must have shape \(24,\)"),
        ],
    )
    def test_qk_norm_rope_reads_no_more_than_there_is(self, changes, words, fused):
        x = random(2, 7, 3, 8)
        given = {name: torch.ones(value) if isinstance(value, tuple) else value for name, value in changes.items()}
        with pytest.raises(ArgumentError, match=words):
            tritium.qk_norm_rope(x, x, **given, fused=fused)

    @pytest.mark.parametrize("fused", [True, False])
    def test_tables_of_numbers_and_of_complex_numbers_are_told_apart(self, fused):
        """A table of half as many numbers would be read past its end."""
        q = random(1, 7, 3, 8)
        table = torch.polar(torch.ones(1, 7, 4), random(1, 7, 4))
        expected = tritium.qk_norm_rope(q, q, cos=table, rope="complex", fused=fused)
        pairs = tritium.qk_norm_rope(q, q, cos=torch.view_as_real(table), rope="complex", fused=fused)
        torch.testing.assert_close(pairs, expected)
        with pytest.raises(ArgumentError, match=r"4, 2\] with B = 1 and S = 7"):
            tritium.qk_norm_rope(q, q, cos=table.real, rope="complex", fused=fused)
        for rope in ("interleaved", "half"):
            with pytest.raises(ArgumentTypeError, match=r"cos must be real.* got torch\.complex64"):
                tritium.qk_norm_rope(q, q, cos=table, sin=table, rope=rope, fused=fused)
        odd = random(1, 7, 3, 5)
        with pytest.raises(ArgumentError, match="even width"):
            tritium.qk_norm_rope(odd, odd, cos=odd[:, :, 0], sin=odd[:, :, 0], fused=fused)
        with pytest.raises(ArgumentTypeError, match=r"one dtype, got torch\.float32 and torch\.float64"):
            tritium.qk_norm_rope([q, q.double()], [q, q], rope="none", fused=fused)

    def test_wrong_arguments_turn_no_provider_off(self):
        """A provider that fails is turned off for good."""
        x = random(2, 7, 8)
        wrong = {
            "y": x.to(torch.float8_e4m3fn),
            "gate": torch.ones(2, 8, dtype=torch.complex64),
            "weight": torch.ones(8).int(),
            "fused": [],
        }
        for name, value in wrong.items():
            with pytest.raises(ArgumentError, match=f"{name} must"):
                tritium.residual_norm_modulate(**{"x": x, "y": x, name: value})
        assert not ops.failed_providers()

    def test_qk_norm_rope_joins_what_fits(self):
        x = random(2, 7, 3, 8)
        table = torch.ones(1, 7, 8)
        with pytest.raises(ArgumentError, match="S = 14"):
            tritium.qk_norm_rope([x, x], [x, x], cos=table, sin=table)
        for other in (x[:, :, :2], x[:1]):
            with pytest.raises(ArgumentError, match="one batch, as many heads"):
                tritium.qk_norm_rope([x, other], [x, other])

    def test_qk_norm_rope(self):
        text, image = random(2, 3, 4, 8), random(2, 5, 4, 8, seed=1)
        weight, cos, sin = random(8, seed=2), random(1, 8, 8, seed=3), random(1, 8, 8, seed=4)
        q, k = tritium.qk_norm_rope([text, image], [text, image], [weight] * 2, [weight] * 2, cos, sin)
        normed = F.rms_norm(torch.cat([text, image], 1), (8,), weight, 1e-6)
        expected = rotated_by(normed, cos[:, :, None], sin[:, :, None], "rotated_interleaved")
        torch.testing.assert_close(q, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(k, expected, rtol=1e-4, atol=1e-5)
        first = tritium.qk_norm_rope(text, text, weight, weight, rope="none", head_first=True)[0]
        torch.testing.assert_close(first, F.rms_norm(text, (8,), weight, 1e-6).transpose(1, 2), rtol=1e-4, atol=1e-5)
        with pytest.raises(ArgumentError, match="cosines and sines must have"):
            tritium.qk_norm_rope(text, text, cos=cos)
        with pytest.raises(ArgumentError, match="one entry for each of 2 parts"):
            tritium.qk_norm_rope([text, image], [text, image], [weight])
        with pytest.raises(ArgumentError, match="same batch and tokens"):
            tritium.qk_norm_rope(text, image)

    def test_group_norm_silu(self):
        x, weight, bias = random(2, 12, 5, 7), random(12, seed=1), random(12, seed=2)
        expected = F.silu(F.group_norm(x, 4, weight, bias, 1e-5))
        torch.testing.assert_close(tritium.group_norm_silu(x, 4, weight, bias), expected, rtol=1e-4, atol=1e-5)
        with pytest.raises(ArgumentError, match="divisible by groups=5"):
            tritium.group_norm_silu(x, 5)
        with pytest.raises(ArgumentError, match=r"weight must have shape \(12,\)"):
            tritium.group_norm_silu(x, 4, torch.ones(4))

    @pytest.mark.parametrize("fused", [True, False])
    def test_one_number_has_no_norm(self, fused):
        with pytest.raises(
            ArgumentError, match=r"the norm of one number is not defined: got groups=3 of x \(1, 3, 1\)"
        ):
            tritium.group_norm_silu(random(1, 3, 1), 3, fused=fused)
        # As in PyTorch, which asks of a whole batch.
        assert tritium.group_norm_silu(random(2, 3, 1), 3, fused=fused).shape == (2, 3, 1)


NORM, SMALL_NORM = nn.LayerNorm(8), tritium.RMSNorm(8)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: tritium.rotary_position_embedding(x, x[0, :, 0], x[1, :, 0]),
        lambda x: SMALL_NORM(x),
        lambda x: tritium.fast_layernorm(NORM, x),
        lambda x: tritium.layernorm_scale_shift(NORM, x[:, :, 0], x[:, 0, 0], x[:, :1, 1]),
        lambda x: tritium.get_activation_layer("gelu-fast")(x),
        lambda x: tritium.muls_add(x, x, 0.5),
        lambda x: tritium.residual_norm_modulate(x, x, x, x)[1],
        lambda x: tritium.qk_norm_rope(x, x, cos=x[:, :, 0], sin=x[:, :, 1])[0],
        lambda x: tritium.group_norm_silu(x.flatten(2), 1),
    ],
    ids=["rotary", "rms", "layer", "ada", "activation", "muls_add", "residual", "qk", "group"],
)
def test_one_graph_for_all_lengths(function):
    """Traced whole, and traced once: a length that changes is no reason to compile again."""
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in (7, 12, 33):
            x = random(2, tokens, 3, 8)
            with torch._dynamo.config.patch(error_on_recompile=tokens > 7):
                torch.testing.assert_close(compiled(x), function(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: tritium.RMSNorm(8)(x),
        lambda x: tritium.fast_layernorm(nn.LayerNorm(8), x),
        lambda x: tritium.layernorm_scale_shift(nn.LayerNorm(8), x, x[:, 0], x[:, 0]),
        lambda x: tritium.group_norm_silu(x, 1),
        lambda x: tritium.muls_add(x, x, 0.5),
        lambda x: tritium.residual_norm_modulate(x, x),
        lambda x: tritium.rotary_position_embedding(x[None], x[0].float(), x[0].float()),
        lambda x: tritium.qk_norm_rope(x[None], x[None], rope="none"),
    ],
)
def test_whole_numbers_are_not_cut_off(call):
    with pytest.raises(ArgumentTypeError, match=r"must be float16, bfloat16, float32 or float64, got torch\.int32"):
        call(torch.ones(2, 7, 8, dtype=torch.int32))


def test_a_norm_of_another_device():
    with pytest.raises(ArgumentError, match="one device, got x on meta, weight on cpu"):
        tritium.RMSNorm(8)(torch.ones(2, 8, device="meta"))
