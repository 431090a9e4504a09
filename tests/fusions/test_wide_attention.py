"""Attention with wide heads: where it is recognised, what only looks like it, what is left alone and why."""

import diffusers
import pytest
import torch
import torch.nn.functional as F

import tritium
from support.fidelity import assert_no_worse
from support.recognition import EAGER, recognise
from support.zoo import ZOO


def heads(batch: int = 2, tokens: int = 9, count: int = 1, width: int = 320, seed: int = 0) -> torch.Tensor:
    made = torch.randn(batch, tokens, count * width, generator=torch.Generator().manual_seed(seed))
    return made.view(batch, tokens, count, width).transpose(1, 2)


def decoder(**changes) -> torch.nn.Module:
    torch.manual_seed(0)
    options = {"block_out_channels": (320,), "layers_per_block": 1, "norm_num_groups": 4, **changes}
    return diffusers.AutoencoderKL(**options).decoder.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_middle_of_an_autoencoder(dtype):
    model, z = decoder().to(dtype), torch.randn(1, 4, 6, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    result, sites = recognise(model, z)
    assert (sites["wide_attention"].fused, sites["wide_attention"].declined) == (1, 0), sites["wide_attention"].reasons
    with torch.inference_mode():
        assert_no_worse(result, model(z), decoder().to(dtype).double()(z.double()))


def test_any_size_of_image_without_a_new_graph():
    model = decoder()
    compiled = torch.compile(model, backend=tritium.Backend(EAGER), dynamic=True, fullgraph=True)
    with torch.inference_mode():
        for height, width in ((6, 7), (8, 5), (9, 11)):
            z = torch.randn(2, 4, height, width)
            torch.testing.assert_close(compiled(z), model(z), rtol=1e-4, atol=1e-4)
    report = tritium.explain(compiled)
    assert len(report.records) == 1
    assert report.sites["wide_attention"].fused == 1


def test_a_small_decoder_has_narrow_heads():
    model = ZOO["kl_decoder"]
    inputs = model.inputs(torch.float32)
    compiled = torch.compile(model.build(torch.float32), backend=tritium.Backend(EAGER))
    with torch.inference_mode():
        compiled(**inputs)
    report = tritium.explain(compiled)
    assert report.sites["group_norm_silu"].fused > 0
    assert "wide_attention" not in report.sites


SPELLINGS = {
    "by position": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "all by position": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, 0.0, False),
    "diffusers' processor": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False
    ),
    "diffusers' dispatcher": lambda q, k, v: F.scaled_dot_product_attention(
        query=q, key=k, value=v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ),
    "a scale": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3),
    "a scale of zero": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.0),
    "fewer keys": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :, :5], v[:, :, :5]),
}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling(spelling, count):
    sides = [heads(count=count, seed=seed) for seed in range(3)]
    result, sites = recognise(SPELLINGS[spelling], *sides)
    assert (sites["wide_attention"].fused, sites["wide_attention"].declined) == (1, 0), sites["wide_attention"].reasons
    expected = SPELLINGS[spelling](*sides)
    assert result.stride() == expected.stride()
    torch.testing.assert_close(result, expected)


DECLINED = {
    "a mask": (lambda q: F.scaled_dot_product_attention(q, q, q, q[:1, :1, :1, :9] > 0), "mask"),
    "causal": (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), "causal"),
    "groups": (lambda q: F.scaled_dot_product_attention(q, q[:, :1], q[:, :1], enable_gqa=True), "share keys"),
    # On a CPU the result lies as the query does, on a GPU as the op's.
    "heads first in memory": (lambda q: F.scaled_dot_product_attention(*(q.contiguous(),) * 3), "another order"),
    "another width of values": (lambda q: F.scaled_dot_product_attention(q, q, q[..., :63]), "another order"),
    "broadcast": (lambda q: F.scaled_dot_product_attention(q, q[:1], q[:1]), "broadcast"),
}


@pytest.mark.parametrize("name", DECLINED)
def test_is_left_alone_with_a_reason(name):
    function, reason = DECLINED[name]
    q = heads(count=2)
    result, sites = recognise(function, q)
    assert (sites["wide_attention"].recognised, sites["wide_attention"].declined) == (0, 1)
    assert reason in next(iter(sites["wide_attention"].reasons))
    torch.testing.assert_close(result, function(q))


def test_dropout_is_left_alone():
    _, sites = recognise(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), heads())
    assert "at random" in next(iter(sites["wide_attention"].reasons))


@pytest.mark.parametrize("width", [16, 256])
def test_narrower_heads_are_none_of_its_business(width):
    _, sites = recognise(lambda q: F.scaled_dot_product_attention(q, q, q), heads(width=width))
    assert "wide_attention" not in sites


def test_nothing_is_rewritten_before_it_was_measured():
    """The default engine, on a CPU: left to Inductor, and the report says why."""
    config = EAGER.with_(engine="inductor")
    function = SPELLINGS["by position"]
    sides = [heads(seed=seed) for seed in range(3)]
    result, sites = recognise(function, *sides, config=config)
    assert sites["wide_attention"].inductor == 1
    assert "products:" in next(iter(sites["wide_attention"].reasons))
    torch.testing.assert_close(result, function(*sides))
