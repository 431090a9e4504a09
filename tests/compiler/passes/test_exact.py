"""Fidelity 'exact' where values lie in memory in unusual ways: eager's bits and eager's strides."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tritium
from tritium import compat
from tritium.compiler.passes.exact import NOT_EQUAL, _copy

EXACT = tritium.CompilationConfig(engine="eager", fidelity="exact")


def compiled(module, dynamic=None):
    return torch.compile(module, backend=tritium.Backend(EXACT), dynamic=dynamic)


def assert_same(made, expected):
    assert made.stride() == expected.stride()
    assert torch.equal(made, expected)


def norm_and_convolution():
    return nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 3, 3, padding=1)).eval().requires_grad_(False)


def image(height, width):
    return torch.randn(1, 8, height, width, generator=torch.Generator().manual_seed(height))


def from_pixels(x):
    """As an image of height x width x channels becomes a batch of one: only the batch's stride is not channels-last's."""
    return x[0].permute(1, 2, 0).contiguous().permute(2, 0, 1)[None]


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_batch_s_stride_that_pytorch_takes_for_contiguous(dynamic):
    module, x = norm_and_convolution(), from_pixels(image(6, 6))
    assert x.stride() == (8, 1, 48, 8)
    fast = compiled(module, dynamic)
    assert_same(fast(x), module(x))
    assert tritium.explain(fast).sites["group_norm_silu"].reasons == {NOT_EQUAL: 1}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_what_lies_as_usual_is_still_fused(layout):
    module, x = norm_and_convolution(), image(6, 6).contiguous(memory_format=layout)
    fast = compiled(module)
    assert_same(fast(x), module(x))
    assert tritium.explain(fast).sites["group_norm_silu"].fused == 1


def test_strides_must_be_equal_at_every_size_of_a_graph():
    """Before torch 2.14, those of a norm over any number of channels are not provably the op's, though they are in this call."""

    def function(x, weight):
        return F.conv2d(F.silu(F.group_norm(x, 4)), weight)

    x, weight = image(6, 5), torch.randn(3, 8, 1, 1)
    for dynamic in (True, False):
        torch._dynamo.reset()
        fast = compiled(function, dynamic)
        assert_same(fast(x, weight), function(x, weight))
        assert tritium.explain(fast).sites["group_norm_silu"].declined == (dynamic and compat.versions.TORCH < (2, 14))
        x_12, weight_12 = torch.randn(2, 12, 7, 9), torch.randn(3, 12, 1, 1)
        assert_same(fast(x_12, weight_12), function(x_12, weight_12))


@pytest.mark.parametrize(
    "x",
    [
        image(6, 6),
        from_pixels(image(6, 6)),
        image(6, 8)[..., ::2],
        image(6, 6)[:, 2:5],
        torch.randn(1, 8, 1, 1).expand(2, 8, 3, 3),
        image(6, 6)[:, :, :0],
        image(6, 8)[:0, ..., ::2],
    ],
)
def test_inputs_are_copied_as_they_lie(x):
    copy = _copy(x)
    assert_same(copy, x)
    assert copy.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() or not x.numel()
