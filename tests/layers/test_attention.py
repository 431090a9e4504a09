"""`attention_forward`: what it computes, also where that is easily wrong, and errors."""

import math
import threading

import pytest
import torch
import torch.nn.functional as F

import tritium
from support.attention import exact_of, qkv
from support.fidelity import assert_no_worse
from tritium.errors import ArgumentError, ArgumentTypeError
from tritium.ops.attention.reference import chunked

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WAYS = [
    {},
    {"opt_mode": "static"},
    {"fused": False},
    *({"opt_mode": "manual", "op_type": name} for name in ("sdpa", "math", "chunked")),
]
by_every_way = pytest.mark.parametrize("options", WAYS, ids=str)


def masks():
    generator = torch.Generator().manual_seed(5)
    shapes = {"2-D": (63, 100), "3-D": (4, 63, 100), "4-D": (2, 4, 63, 100), "a row": (2, 1, 1, 100), "one": (1, 100)}
    for name, shape in shapes.items():
        keep = torch.rand(shape, generator=generator) < 0.6
        keep[..., 0] = True
        yield pytest.param(keep, id=f"keep {name}")
        yield pytest.param(torch.zeros(shape).masked_fill(~keep, -math.inf), id=f"add {name}")
    yield pytest.param(torch.randn(2, 4, 63, 100, generator=generator), id="any numbers")
    yield pytest.param(torch.randn(63, 1, generator=generator), id="one number per query")
    yield pytest.param(torch.randn(1, 4, 63, 1, generator=generator), id="one number per query and head")


class TestMeaning:
    @by_every_way
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("head_first", [False, True])
    def test_against_float64(self, dtype, head_first, options):
        q, k, v = qkv(dtype=dtype, head_first=head_first)
        out = tritium.attention_forward(q, k, v, head_first=head_first, **options)
        exact = exact_of(q, k, v, head_first=head_first)
        assert_no_worse(out, exact.to(dtype), exact)

    @pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH"])
    @pytest.mark.parametrize("head_first", [False, True])
    @pytest.mark.parametrize("op_type", ["sdpa", "math", "chunked"])
    def test_every_provider_in_every_layout(self, op_type, layout, head_first):
        q, k, v = qkv(head_first=head_first)
        options = {"opt_mode": "manual", "op_type": op_type, "layout": layout}
        out = tritium.attention_forward(q, k, v, head_first=head_first, **options)
        exact = exact_of(q, k, v, head_first=head_first)
        assert_no_worse(out, exact.float(), exact)

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("mask", masks())
    def test_no_mask_is_dropped_or_inverted(self, mask, causal):
        q, k, v = qkv()
        exact = exact_of(q, k, v, mask, causal=causal)
        for options in ({}, {"fused": False}, {"opt_mode": "manual", "op_type": "chunked"}):
            out = tritium.attention_forward(q, k, v, mask, is_causal=causal, **options)
            assert_no_worse(out, exact.float(), exact)

    @by_every_way
    @pytest.mark.parametrize(("queries", "keys"), [(7, 7), (63, 100), (100, 63), (1, 7)])
    def test_causality_is_aligned_to_the_first_key(self, queries, keys, options):
        q, k, v = qkv(queries, keys)
        exact = exact_of(q, k, v, causal=True)
        assert_no_worse(tritium.attention_forward(q, k, v, is_causal=True, **options), exact.float(), exact)

    @by_every_way
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("scale", [0.5, 1, 0.0, -0.4])
    def test_scales(self, scale, causal, options):
        """Kernels hide keys before they multiply: with a negative scale a hidden key would be the only visible one."""
        q, k, v = qkv(33, 33)
        out = tritium.attention_forward(q, k, v, scale=scale, is_causal=causal, **options)
        exact = exact_of(q, k, v, scale=scale, causal=causal)
        assert_no_worse(out, exact.float(), exact)

    @by_every_way
    def test_grouped_heads_and_values_of_another_width(self, options):
        q, k, v = qkv(heads=6, kv_heads=2)
        v = torch.cat([v, v.cos()], -1)
        exact = exact_of(q, k, v)
        assert_no_worse(tritium.attention_forward(q, k, v, enable_gqa=True, **options), exact.float(), exact)

    def test_masked_and_not_with_the_same_shapes(self):
        q, k, v = qkv()
        hidden = torch.ones(63, 100, dtype=torch.bool).tril()
        for mask in (None, hidden, None):
            exact = exact_of(q, k, v, mask)
            assert_no_worse(tritium.attention_forward(q, k, v, mask), exact.float(), exact)

    @pytest.mark.parametrize("options", [{"fused": False}, {"opt_mode": "manual", "op_type": "chunked"}], ids=str)
    def test_a_row_without_a_key_gives_zeros(self, options):
        q, k, v = qkv()
        mask = torch.ones(63, 100, dtype=torch.bool)
        mask[5] = False
        out = tritium.attention_forward(q, k, v, mask, **options)
        assert torch.equal(out[:, 5], torch.zeros_like(out[:, 5]))
        assert out.isfinite().all()

    def test_chunks_are_cut_as_small_as_necessary(self, monkeypatch):
        q, k, v = qkv()
        options = {"is_causal": True, "opt_mode": "manual", "op_type": "chunked"}
        whole = tritium.attention_forward(q, k, v, **options)
        monkeypatch.setitem(chunked.__globals__, "CHUNK_BYTES", 4 * 2 * 4 * 100 * 10)
        torch.testing.assert_close(tritium.attention_forward(q, k, v, **options), whole)

    @by_every_way
    @pytest.mark.parametrize("empty", ["batch", "queries", "keys", "heads", "width", "value width"])
    def test_a_size_of_zero(self, empty, options):
        sizes = {"batch": 2, "queries": 5, "keys": 6, "heads": 3, "width": 8, "value width": 4} | {empty: 0}
        batch, queries, keys, heads, width, value_width = sizes.values()
        q, k = torch.randn(batch, queries, heads, width), torch.randn(batch, keys, heads, width)
        out = tritium.attention_forward(q, k, torch.randn(batch, keys, heads, value_width), **options)
        assert out.shape == (batch, queries, heads, value_width)

    @by_every_way
    def test_gradients_of_rows_that_see_nothing(self, options):
        q, k, v = (t.requires_grad_() for t in qkv(7, 63))
        mask = torch.zeros(7, 63)
        mask[3] = -math.inf
        out = tritium.attention_forward(q, k, v, mask, **options)
        gradients = torch.autograd.grad(out[:, [0, 1, 2, 4, 5, 6]].sum(), (q, k, v))
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert (gradients[0][:, 3] == 0).all()
        assert gradients[0].abs().sum() > 0


class TestWideMasks:
    """Rounding would change a mask in float32 for a query in half precision."""

    @by_every_way
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("wide", [torch.float32, torch.float64])
    @pytest.mark.parametrize("mask", ["large", "far away", "the least number"])
    def test_against_float64(self, dtype, wide, mask, options):
        q, k, v = qkv(7, 63, dtype=dtype)
        bias = torch.randn(7, 63, generator=torch.Generator().manual_seed(2)) * 30
        if mask == "far away":
            bias = torch.full((7, 63), -1e5)
        if mask == "the least number":
            # A finite number: every key is seen alike, while minus infinity would hide them all.
            bias[3] = torch.finfo(torch.float32).min
        exact = exact_of(q, k, v, bias)
        assert_no_worse(tritium.attention_forward(q, k, v, bias.to(wide), **options), exact.to(dtype), exact)

    def test_a_float64_mask_that_hides(self):
        q, k, v = qkv(7, 63)
        mask = torch.zeros(7, 63, dtype=torch.float64)
        mask[:, 5:] = -math.inf
        mask[3] = torch.finfo(torch.float64).min
        exact = exact_of(q, k, v, mask.clamp(min=-1e30).masked_fill(mask == -math.inf, -math.inf))
        assert_no_worse(tritium.attention_forward(q, k, v, mask), exact.float(), exact)


class TestAutocast:
    """As PyTorch's attention: in autocast's dtype for every provider, with float32 inside."""

    @by_every_way
    @pytest.mark.parametrize("masked", [False, True])
    def test_dtype_and_error(self, options, masked):
        q, k, v = qkv(7, 63)
        mask = torch.randn(7, 63, generator=torch.Generator().manual_seed(3)) if masked else None
        q = q * 5
        with torch.autocast("cpu", torch.bfloat16):
            out = tritium.attention_forward(q, k, v, mask, **options)
            own = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), mask)
        assert out.dtype == own.dtype == torch.bfloat16
        exact = exact_of(*(t.bfloat16() for t in (q, k, v)), None if mask is None else mask.bfloat16())
        assert_no_worse(out, exact.bfloat16(), exact)

    def test_segments_and_blocks(self):
        q, k, v = (5 * t for t in qkv(64, 64, batch=1))
        exact = exact_of(*(t.bfloat16() for t in (q, k, v)))
        options = {"input_layout": "BSND", "sparse_type": "radial", "latent_shape_q": (1, 8, 8), "block_size": 16}
        plain = tritium.sparse_attention(*(t.bfloat16() for t in (q, k, v)), **options, sparsity=0.5)
        with torch.autocast("cpu", torch.bfloat16):
            segments = tritium.attention_forward_varlen(q[0], k[0], v[0], [0, 64], [0, 64])
            assert_no_worse(segments, exact[0].bfloat16(), exact[0])
            assert torch.equal(tritium.sparse_attention(q, k, v, **options, sparsity=0.5), plain)
            assert tritium.sparse_attention(q, k, v, **options).dtype == torch.bfloat16
            layout = tritium.SparseLayout((1, 8, 8), 0, 16)
            scheduled = tritium.SparseAttention(layout, sparse_type="radial", sparsity=0.5)
            assert torch.equal(scheduled(q, k, v, step=0, layer=0), plain)

    def test_float64_stays_and_a_graph_casts_too(self):
        q, k, v = qkv(7, 63)
        compiled = torch.compile(tritium.attention_forward, backend="aot_eager", fullgraph=True)
        before = tritium.attention_forward(q, k, v)
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            assert tritium.attention_forward(q.double(), k.double(), v.double()).dtype == torch.float64
            out = compiled(q, k, v)
            assert out.dtype == torch.bfloat16
            torch.testing.assert_close(out, tritium.attention_forward(q, k, v))
        assert torch.equal(tritium.attention_forward(q, k, v), before)


def test_threads_leave_pytorchs_switches_as_they_were():
    def switches():
        cuda = torch.backends.cuda
        enabled = cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled, cuda.cudnn_sdp_enabled
        return [switch() for switch in enabled]

    def work():
        for _ in range(200):
            tritium.attention_forward(q, k, v, opt_mode="manual", op_type="math")

    q, k, v = qkv(7, 63)
    before = switches()
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert switches() == before


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"value": torch.ones(2, 7, 8)}, ArgumentError, "value must have rank 4, got 3"),
        ({"attn_mask": torch.ones(7, 7, dtype=torch.int64)}, ArgumentTypeError, "boolean, where True keeps"),
        ({"attn_mask": torch.zeros(7, 7).to(torch.float8_e4m3fn)}, ArgumentTypeError, "attn_mask must be boolean"),
        ({"attn_mask": torch.ones(7)}, ArgumentError, "rank 2 or 3 or 4, got 1"),
        ({"attn_mask": torch.ones(7, 6)}, ArgumentError, "cannot be broadcast"),
        ({"scale": math.nan}, ArgumentError, "scale must be a number, got nan"),
        ({"key": torch.ones(3, 7, 4, 8)}, ArgumentError, "one batch"),
        ({"key": torch.ones(2, 6, 4, 8)}, ArgumentError, "same tokens and heads"),
        ({"query": torch.ones(2, 7, 4, 6)}, ArgumentError, "heads of one width"),
        ({"query": torch.ones(2, 7, 8, 8)}, ArgumentError, "unless enable_gqa=True"),
        ({"query": torch.ones(2, 7, 6, 8), "enable_gqa": True}, ArgumentError, "a multiple of the heads"),
        ({name: torch.ones(2, 7, 0, 8) for name in ("key", "value")} | {"enable_gqa": True}, ArgumentError, "multiple"),
        ({"query": torch.ones(2, 7, 4, 8).half()}, ArgumentTypeError, "must have one dtype"),
        ({"op_type": "math"}, ArgumentError, "for opt_mode 'manual'"),
        ({"opt_mode": "manual", "op_type": "flahs"}, ArgumentError, "did you mean 'flash'"),
        ({"opt_mode": "manual", "op_type": "flash"}, ArgumentError, "those that can: sdpa, math, chunked"),
    ],
)
def test_errors(changes, error, words):
    given = {name: torch.ones(2, 7, 4, 8) for name in ("query", "key", "value")}
    with pytest.raises(error, match=words):
        tritium.attention_forward(**{**given, **changes})
