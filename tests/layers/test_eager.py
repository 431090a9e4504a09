"""Which implementation an eager call of a layer runs, derivatives and batches, and graphs without a break."""

import contextlib
import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import tritium
from tritium import ops
from tritium.errors import ArgumentTypeError
from tritium.layers import eager

NORM, RMS_NORM = (norm.requires_grad_(requires_grad=False) for norm in (nn.LayerNorm(8), tritium.RMSNorm(8)))

# Calls on [B, S, 3, 8].
LAYERS = {
    "rotary": lambda x: tritium.rotary_position_embedding(x, x[0, :, 0], x[1, :, 0]),
    "rms_norm": lambda x: RMS_NORM(x),
    "layer_norm": lambda x: tritium.fast_layernorm(NORM, x),
    "ada_norm": lambda x: tritium.layernorm_scale_shift(NORM, x[:, :, 0], x[:, 0, 0], x[:, :1, 1]),
    "activation": lambda x: tritium.get_activation_layer("gelu-fast")(x),
    "muls_add": lambda x: tritium.muls_add(x, x, 0.5),
    "residual": lambda x: tritium.residual_norm_modulate(x, x.cos(), x[:, :1], x)[1],
    "qk": lambda x: tritium.qk_norm_rope(x, x, cos=x[:, :, 0], sin=x[:, :, 1])[0],
    "group_norm": lambda x: tritium.group_norm_silu(x.flatten(2), 1),
    "attention": lambda x: tritium.attention_forward(x, x, x),
}
SEGMENTS = {
    "varlen": lambda x: tritium.attention_forward_varlen(x[0], x[0], x[0], [0, 1, 4], [0, 2, 4]),
    "causal": lambda x: tritium.attention_forward_varlen(x[0], x[0], x[0], [0, 1, 4], [0, 2, 4], causal=True),
}
by_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)


@pytest.fixture
def compiled(monkeypatch):
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


def test_a_gpu_without_a_provider_runs_the_compiled_reference(compiled, random):
    x, cos, sin = random(2, 7, 3, 8), random(7, 8), random(7, 8)
    for _ in range(2):
        rotated = tritium.rotary_position_embedding(x, cos, sin)
        assert torch.equal(rotated, tritium.rotary_position_embedding(x, cos, sin, fused=False))
        tritium.group_norm_silu(random(2, 8, 3, 3), 4)
        tritium.layernorm_scale_shift(nn.LayerNorm(8), random(2, 7, 8), random(2, 8), random(2, 8))
        tritium.RMSNorm(8)(x)
    assert len(compiled) == 4


def test_a_second_size_compiles_for_all_sizes(compiled, random):
    for tokens in (7, 5, 9, 63, 100):
        x, cos, sin = random(2, tokens, 3, 8), random(tokens, 8), random(tokens, 8)
        tritium.rotary_position_embedding(x, cos, sin)
    assert len(compiled) == 2


def test_every_dtype_and_rank_has_a_recompile_limit_of_its_own(compiled, random):
    """Dynamo compiles one code object at most eight times."""
    kinds = [((4,) * rank, dtype) for rank in (2, 3, 4, 5) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    norm = tritium.RMSNorm(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for shape, dtype in kinds:
            norm(random(*shape, dtype=dtype))
    assert len(compiled) == len(kinds)


def test_an_implementation_is_chosen_once_for_a_form(monkeypatch, random):
    chosen, real = [], eager._choose
    monkeypatch.setattr(eager, "_choose", lambda op, arguments: chosen.append(op.name) or real(op, arguments))
    norm = tritium.RMSNorm(8).requires_grad_(requires_grad=False)
    x = random(2, 7, 8)
    for argument in (x, x.clone(), x[:, :5], x.mT.contiguous().mT, x.clone().requires_grad_()):
        norm(argument)
    norm.eps = 1.0
    torch.testing.assert_close(norm(x), F.rms_norm(x, (8,), norm.weight, 1.0))
    assert chosen == ["rms_norm"] * 5


def test_an_owned_provider_is_called_through_the_dispatcher(monkeypatch, random):
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


@pytest.mark.parametrize("function", [*LAYERS.values(), *SEGMENTS.values()], ids=[*LAYERS, *SEGMENTS])
def test_derivatives_and_batches_after_calls_without(function, random):
    """No tensor says under vmap that it requires gradients, and none of dual numbers does."""
    x, direction = random(2, 4, 3, 8), random(2, 4, 3, 8, seed=3)
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


def test_symbolic_sizes_without_dynamo(random):
    def call(x):
        return tritium.group_norm_silu(x, 1)

    traced = make_fx(call, tracing_mode="symbolic")(random(3, 7))
    torch.testing.assert_close(traced(random(5, 9)), call(random(5, 9)))


@by_layer
def test_one_graph_for_all_lengths(layer, random):
    """Traced whole, and traced once: a length that changes is no reason to compile again."""
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in (7, 12, 33):
            x = random(2, tokens, 3, 8)
            with torch._dynamo.config.patch(error_on_recompile=tokens > 7):
                torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-5)


@by_layer
def test_integers_are_not_truncated(layer):
    with pytest.raises(ArgumentTypeError, match=r"must be float16, bfloat16, float32 or float64, got torch\.int32"):
        layer(torch.ones(2, 7, 3, 8, dtype=torch.int32))
