"""`sparse_attention`, against attention with a mask over tokens."""

import functools
import math

import pytest
import torch

import tritium
from support.attention import qkv
from support.fidelity import assert_no_worse
from tritium import ops
from tritium.errors import ArgumentError, ArgumentTypeError
from tritium.layers.sparse import masks
from tritium.layers.sparse.forward import attend, lists_of
from tritium.layers.sparse.layout import SparseLayout
from tritium.layers.sparse.masks import Method

TYPES = ["rf_v2", "rf_v3", "ada_bsa", "radial"]


def streams(tokens, keys=None, **options):
    return qkv(tokens, keys or tokens, **{"heads": 2, "width": 16, "batch": 1, **options})


def sparse(q, k, v, **options):
    given = {"input_layout": "BSND", "sparse_type": "rf_v2", "block_size": 16, "sparsity": 0.5, **options}
    return tritium.sparse_attention(q, k, v, **given)


def masked_attention(q, k, v, mask, q_layout, k_layout=None, *, causal=False, scale=None):
    """The same by a mask over tokens, in float64: streams [B, S, N, D] in the order of blocks."""
    q_sizes, k_sizes = (layout.edges().diff() for layout in (q_layout, k_layout or q_layout))
    tokens = mask.repeat_interleave(q_sizes, -2).repeat_interleave(k_sizes, -1)
    if causal:
        tokens = tokens & torch.ones(tokens.shape[-2:], dtype=torch.bool).tril()
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = scores.masked_fill(~tokens, -math.inf).softmax(-1).nan_to_num(0.0)
    return (weights @ v.repeat_interleave(group, 1)).transpose(1, 2)


class TestMeaning:
    @pytest.mark.parametrize("layout", ["BNSD", "BSND"])
    @pytest.mark.parametrize("sparse_type", [None, *TYPES])
    def test_sparsity_0_is_dense(self, sparse_type, layout):
        q, k, v = streams(3 * 16 * 24 + 20, heads=3)
        everything = SparseLayout.plain(q.shape[1])
        mask = torch.ones(1, 3, everything.blocks, everything.blocks, dtype=torch.bool)
        exact = masked_attention(q, k, v, mask, everything)
        if layout == "BNSD":
            q, k, v, exact = (t.transpose(1, 2) for t in (q, k, v, exact))
        options = {"input_layout": layout, "sparse_type": sparse_type, "sparsity": 0.0, "txt_len": 20}
        out, share = sparse(q, k, v, latent_shape_q=(3, 16, 24), return_density=True, **options)
        assert_no_worse(out, exact.float(), exact)
        assert share == 1.0

    @pytest.mark.parametrize(
        ("text", "dtype"),
        [
            pytest.param(
                text, dtype, marks=() if text == 33 or (text, dtype) == (0, torch.float32) else pytest.mark.thorough
            )
            for text in (0, 7, 33)
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        ],
    )
    @pytest.mark.parametrize("latent", [(1, 16, 16), (3, 16, 24), (3, 10, 13), (1, 9, 21)])
    @pytest.mark.parametrize("sparse_type", ["rf_v2", "radial"])
    def test_any_latent_and_text(self, sparse_type, latent, text, dtype):
        method = Method(sparse_type, 0.6)
        layout = SparseLayout(latent, text, 32, tile=method.tile)
        q, k, v = streams(layout.tokens, heads=4, kv_heads=2, batch=2, dtype=dtype)
        options = {"sparse_type": sparse_type, "latent_shape_q": latent, "txt_len": text, "block_size": 32}
        out, share = sparse(q, k, v, sparsity=0.6, return_density=True, **options)
        ordered = [layout.permute(t) for t in (q, k, v)]
        mask = method.mask(*ordered[:2], layout, layout, 0.25)
        assert not mask.all()
        exact = layout.unpermute(masked_attention(*ordered, mask.expand(2, -1, -1, -1), layout))
        assert_no_worse(out, exact.to(dtype), exact)
        assert share == masks.density(mask, layout, layout) < 1

    @pytest.mark.parametrize("causal", [False, True])
    def test_the_estimate(self, causal):
        q, k, v = streams(100, batch=2)
        options = {"sparsity": 0.3, "cdf_threshold": 0.6}
        out = sparse(q, k, v, sparse_type="ada_bsa", is_causal=causal, head_num=2, **options)
        layout = SparseLayout.plain(100, 16)
        mask = Method("ada_bsa", causal=causal, **options).mask(q, k, layout, layout, 0.25)
        exact = masked_attention(q, k, v, mask, layout, causal=causal)
        assert_no_worse(out, exact.float(), exact)
        # It needs no shape.
        given = sparse(q, k, v, sparse_type="ada_bsa", is_causal=causal, latent_shape_q=(1, 10, 10), **options)
        assert torch.equal(out, given)

    def test_keys_of_another_latent(self):
        q, k, v = streams(16 * 16 + 5, keys=3 * 9 * 10 + 5)
        shapes = {"latent_shape_q": (1, 16, 16), "latent_shape_k": (3, 9, 10), "txt_len": 5}
        out = sparse(q, k, v, sparse_type="rf_v3", sparsity=0.7, **shapes)
        q_layout, k_layout = SparseLayout((1, 16, 16), 5, 16), SparseLayout((3, 9, 10), 5, 16)
        ordered = [q_layout.permute(q), k_layout.permute(k), k_layout.permute(v)]
        mask = Method("rf_v3", 0.7).mask(*ordered[:2], q_layout, k_layout, 0.25)
        exact = q_layout.unpermute(masked_attention(*ordered, mask, q_layout, k_layout))
        assert_no_worse(out, exact.float(), exact)

    @pytest.mark.parametrize("sparse_type", TYPES)
    def test_sparsity_1_keeps_something(self, sparse_type):
        options = {"sparse_type": sparse_type, "latent_shape_q": (2, 16, 16), "block_size": 32, "sparsity": 1.0}
        out, share = sparse(*streams(2 * 16 * 16), return_density=True, **options)
        assert out.isfinite().all()
        assert 0 < share < 0.9

    def test_queries_that_see_nothing_give_zeros(self):
        layout = SparseLayout.plain(40, 16)
        q, k, v = streams(40)
        mask = torch.ones(1, 2, 3, 3, dtype=torch.bool)
        mask[:, :, 1] = False
        out = attend(q, k, v, lists_of(mask, layout, layout, 1), layout, layout, 0.25)
        assert torch.equal(out[:, 16:32], torch.zeros(1, 16, 2, 16))
        exact = masked_attention(q, k, v, mask, layout)
        assert_no_worse(out, exact.float(), exact)

    @pytest.mark.parametrize("sparse_type", ["rf_v2", "ada_bsa"])
    def test_nan_reaches_the_result(self, sparse_type):
        q, k, _ = streams(128, heads=1)
        k[0, 77] = math.nan
        assert sparse(q, k, q, sparse_type=sparse_type, latent_shape_q=(2, 8, 8)).isnan().all()

    @pytest.mark.parametrize("scale", [0.7, -0.3])
    def test_scales(self, scale):
        layout = SparseLayout((2, 8, 8), 0, 16, tile=1)
        q, k, v = streams(128)
        mask = Method("radial", 0.5).mask(q, k, layout, layout, scale)
        exact = masked_attention(q, k, v, mask, layout, scale=scale)
        assert_no_worse(
            sparse(q, k, v, sparse_type="radial", latent_shape_q=(2, 8, 8), scale=scale), exact.float(), exact
        )

    @pytest.mark.parametrize("scale", [-0.4, 0.0])
    def test_causality_with_scales_not_above_zero(self, scale):
        q, _, _ = streams(128)
        options = {"sparse_type": "ada_bsa", "is_causal": True, "scale": scale}
        expected = tritium.attention_forward(q, q, q, scale=scale, is_causal=True, fused=False)
        torch.testing.assert_close(sparse(q, q, q, **options, sparsity=0.0), expected)
        assert sparse(q, q, q, **options).isfinite().all()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"sparsity": 1.5}, ArgumentError, "sparsity must be from 0 to 1, got 1.5"),
        ({"cdf_threshold": -0.1}, ArgumentError, "cdf_threshold must be from 0 to 1"),
        ({"latent_shape_q": None}, ArgumentTypeError, "needs latent_shape_q"),
        ({"latent_shape_q": (1, 8, 9)}, ArgumentError, "q has 64 tokens; txt_len=0 and latent_shape_q"),
        ({"latent_shape_k": ()}, ArgumentTypeError, "latent_shape must be"),
        ({"txt_len": 3}, ArgumentError, "make 67"),
        ({"is_causal": True}, ArgumentError, "sparse_type 'rf_v2' reorders tokens"),
        ({"attn_mask": torch.ones(64, 64)}, ArgumentError, "applies no attn_mask"),
        ({"sparse_type": None}, ArgumentError, "needs a sparse_type"),
        ({"sparse_type": "rf_v4"}, ArgumentError, "there is no sparse_type 'rf_v4'"),
        ({"sparse_type": "ada_bsa", "block_size": 20}, ArgumentError, "a multiple of 8 tokens"),
        ({"sparse_type": "ada_bsa", "latent_shape_q": (9, 9, 9)}, ArgumentError, "q has 64 tokens"),
        ({name: torch.ones(1, 0, 2, 16) for name in "qkv"}, ArgumentError, "q has no tokens"),
        ({"head_num": 5}, ArgumentError, "head_num=5, and q has 2 heads"),
        ({"k": torch.ones(1, 64, 3, 16)}, ArgumentError, "one batch, and the last two"),
        ({"q": torch.ones(1, 64, 32)}, ArgumentError, "q must have rank 4"),
        ({"by": "tritn", "sparsity": 0.0}, ArgumentError, "did you mean 'triton'"),
        ({"by": "triton"}, ArgumentError, "provider 'triton' cannot compute"),
        ({"scale": math.nan}, ArgumentError, "scale must be a number, got nan"),
        ({"block_size": 0}, ArgumentError, "block_size must be an integer, 1 or more"),
    ],
)
def test_errors(changes, error, words):
    given = dict(zip("qkv", streams(64), strict=True)) | {"latent_shape_q": (1, 8, 8)}
    with pytest.raises(error, match=words):
        sparse(**{**given, **changes})


class TestTransforms:
    def call(self, q, **options):
        return sparse(q, q, q, **{"latent_shape_q": (2, 8, 8), "input_layout": "BNSD", **options})

    def test_gradients_are_right_or_refused(self, recwarn):
        q = torch.randn(1, 1, 128, 4, dtype=torch.float64, requires_grad=True)
        self.call(q).sum().backward()
        assert q.grad.abs().sum() > 0
        assert not [warning for warning in recwarn if "autograd" in str(warning.message)]
        for causal in (False, True):
            call = functools.partial(
                self.call, sparse_type="ada_bsa", latent_shape_q=None, block_size=8, is_causal=causal
            )
            torch.autograd.gradcheck(call, torch.randn(1, 1, 24, 2, dtype=torch.float64, requires_grad=True))
        with pytest.raises(torch._dynamo.exc.Unsupported, match="computes no gradients inside of a compiled graph"):
            torch.compile(self.call, backend="aot_eager", fullgraph=True)(q)
        with pytest.raises(ArgumentError, match="by 'flex' computes no gradients"):
            self.call(q, by="flex")

    @pytest.mark.parametrize("sparse_type", ["rf_v2", "ada_bsa"])
    def test_vmap_without_gradients(self, sparse_type):
        q, call = torch.randn(3, 1, 2, 128, 4), functools.partial(self.call, sparse_type=sparse_type)
        with torch.no_grad():
            torch.testing.assert_close(torch.vmap(call)(q), torch.stack([call(one) for one in q]))
        with pytest.raises(ArgumentError, match=r"under torch\.no_grad\(\)"):
            torch.vmap(call)(q)

    @pytest.mark.parametrize("sparse_type", TYPES)
    def test_one_graph_without_a_break(self, sparse_type):
        def function(q, k, v):
            options = {"sparse_type": sparse_type, "latent_shape_q": (2, 10, 9), "txt_len": 5, "cdf_threshold": 0.8}
            return sparse(q * 2, k, v, return_density=True, **options)

        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        with torch.inference_mode():
            for batch in (2, 3):
                q, k, v = streams(185, batch=batch)
                torch.testing.assert_close(compiled(q, k, v), function(q, k, v))

    @pytest.mark.thorough
    def test_one_graph_for_sides_shorter_than_a_tile(self):
        def function(q, frames, height, width):
            return self.call(q, latent_shape_q=(frames, height, width))

        compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
        q = torch.randn(1, 2, 2 * 9 * 7, 16)
        torch.testing.assert_close(compiled(q, 2, 9, 7), function(q, 2, 9, 7))


@pytest.mark.thorough
@pytest.mark.codegen
def test_flex_computes_the_same():
    layout = SparseLayout((1, 15, 20), 40, 64)
    q, k, v = streams(340, width=32, heads=4, kv_heads=2, batch=2)
    mask = masks.rainfusion(q, k, layout, layout, 0.2, 0.5)
    mask[0, 0, 1] = False
    lists, edges = lists_of(mask, layout, layout, 2), layout.edges()
    operator = ops.catalog()["block_sparse_attention"].overload
    with torch.inference_mode():
        out = operator(q, k, v, *lists, edges, edges, 64, 32**-0.5, False, provider="flex")
    assert not ops.failed_providers()
    exact = masked_attention(q, k, v, mask, layout)
    assert_no_worse(out, exact.float(), exact)
