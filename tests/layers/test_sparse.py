"""Sparse attention: the order of tokens, the masks over blocks, and attention under them."""

import fractions
import functools
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import tritium
from support.fidelity import assert_no_worse
from tritium import ops
from tritium.errors import ArgumentError, ArgumentTypeError
from tritium.layers.sparse import masks
from tritium.layers.sparse.choose import attend
from tritium.layers.sparse.forward import Method, lists_of
from tritium.layers.sparse.layout import SparseLayout

TYPES = ["rf_v2", "rf_v3", "ada_bsa", "radial"]
sizes = st.tuples(st.integers(1, 4), st.integers(1, 20), st.integers(1, 20))


def streams(tokens, heads=2, width=16, batch=1, keys=None, kv_heads=None, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens)

    def random(count, heads):
        return torch.randn(batch, count, heads, width, generator=generator).to(dtype)

    return random(tokens, heads), *(random(keys or tokens, kv_heads or heads) for _ in range(2))


def masked_attention(q, k, v, mask, q_layout, k_layout, *, causal=False, scale=None):
    """The same by a mask over tokens, in float64: streams [B, S, N, D] in the order of blocks."""
    q_sizes, k_sizes = (layout.edges().diff() for layout in (q_layout, k_layout))
    tokens = mask.repeat_interleave(q_sizes, -2).repeat_interleave(k_sizes, -1)
    if causal:
        tokens = tokens & torch.ones(tokens.shape[-2:], dtype=torch.bool).tril()
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = scores.masked_fill(~tokens, -math.inf).softmax(-1).nan_to_num(0.0)
    return (weights @ v.repeat_interleave(group, 1)).transpose(1, 2)


class TestLayout:
    def test_what_is_kept_is_nobody_s(self):
        """Calls in inference mode or with fake tensors leave nothing behind for others."""
        layout = SparseLayout((2, 9, 9), 5, 32)
        with torch.inference_mode():
            layout.permute(torch.randn(1, layout.tokens, 4))
        layout.permute(torch.randn(1, layout.tokens, 4, requires_grad=True)).sum().backward()
        layout = SparseLayout((2, 9, 11), 5, 32)
        with FakeTensorMode():
            layout.permute(torch.randn(1, layout.tokens, 4))
            layout.edges()
        layout.unpermute(layout.permute(torch.randn(1, layout.tokens, 4)))
        assert type(layout.edges()) is torch.Tensor

    @settings(max_examples=60)
    @given(sizes, st.integers(0, 40), st.sampled_from([1, 7, 16, 128]), st.sampled_from([1, 3, 8]), st.booleans())
    def test_a_permutation_and_its_inverse(self, latent, text, block, tile, text_first):
        layout = SparseLayout(latent, text, block, tile, text_first)
        index = layout.index()
        assert torch.equal(index.sort().values, torch.arange(layout.tokens))
        x = torch.arange(2 * layout.tokens * 3).view(2, layout.tokens, 3)
        assert torch.equal(layout.unpermute(layout.permute(x)), x)
        assert torch.equal(layout.permute(layout.unpermute(x)), x)
        table = torch.arange(layout.tokens)
        assert torch.equal(layout.permute(table, dim=0), index)
        # Text goes to the end, in its order.
        assert torch.equal(index[layout.video :], torch.arange(text) + (0 if text_first else layout.video))

    @settings(max_examples=60)
    @given(sizes, st.integers(0, 300), st.sampled_from([1, 7, 16, 128]))
    def test_blocks_cover_every_token_once_and_never_both_video_and_text(self, latent, text, block):
        layout = SparseLayout(latent, text, block)
        edges = layout.edges()
        assert edges[0] == 0
        assert edges[-1] == layout.tokens
        assert edges.shape[0] == layout.blocks + 1
        sizes = edges.diff()
        assert ((sizes >= 1) & (sizes <= block)).all()
        assert layout.video in edges
        # Only the last block of each segment may be short.
        assert (sizes < block).sum() <= 2

    @pytest.mark.parametrize("latent", [(3, 40, 80), (3, 30, 52), (3, 21, 32), (3, 24, 45), (1, 13, 21)])
    def test_tiles_are_neighbours_in_the_picture(self, latent):
        frames, height, width = latent
        index = SparseLayout(latent).index()
        aligned = height % 8 == 0 and width % 8 == 0
        start = 0 if aligned or frames == 1 else height * width
        if start:
            assert torch.equal(index[:start], torch.arange(start))
        tile = index[start : start + 64] % (height * width)
        rows, columns = tile // width, tile % width
        assert torch.equal(rows, torch.arange(8).repeat_interleave(8))
        assert torch.equal(columns, torch.arange(8).repeat(8))
        # Frames are not mixed.
        assert torch.equal(index // (height * width), torch.arange(frames).repeat_interleave(height * width))

    def test_the_strips_come_after_the_tiles(self):
        index = SparseLayout((1, 9, 10)).index().tolist()
        assert index[64:74] == list(range(80, 90))
        assert index[74:] == [row * 10 + column for row in range(8) for column in (8, 9)]

    @pytest.mark.parametrize(
        ("given", "error"),
        [
            (((3, 4),), ArgumentTypeError),
            (((0, 4, 4),), ArgumentTypeError),
            (((1, 4, 4), -1), ArgumentError),
            (((1, 4, 4), 0, 0), ArgumentError),
            (((1, 4, 4), True), ArgumentError),
        ],
    )
    def test_errors(self, given, error):
        with pytest.raises(error):
            SparseLayout(*given)
        with pytest.raises(ArgumentError, match="3 \\+ 1x4x4 = 19 tokens, got 18"):
            SparseLayout((1, 4, 4), 3).permute(torch.ones(1, 18, 2))
        with pytest.raises(ArgumentError, match="has no dim 9"):
            SparseLayout((1, 4, 4)).permute(torch.ones(1, 16, 2), dim=9)

    def test_nothing_is_kept_of_what_is_captured(self, monkeypatch):
        """A graph's memory holds something when the graph is replayed."""
        from tritium.layers.sparse import layout as module

        layout = SparseLayout((3, 7, 5), 1, 16)
        monkeypatch.setattr(module.device, "is_capturing", lambda: True)
        assert layout.index() is not layout.index()
        monkeypatch.undo()
        assert layout.index() is layout.index()


class TestMasks:
    @settings(max_examples=40)
    @given(sizes, st.integers(0, 40), st.sampled_from([7, 16]))
    def test_means_are_of_the_very_tokens_of_a_block(self, latent, text, block):
        layout = SparseLayout(latent, text, block)
        x = torch.randn(2, layout.tokens, 3, 4)
        found = masks.pooled(x, layout)
        edges = layout.edges().tolist()
        for number, (first, last) in enumerate(itertools.pairwise(edges)):
            torch.testing.assert_close(found[:, :, number], x[:, first:last].mean(1))
        assert found.shape[2] == layout.blocks

    @settings(max_examples=40)
    @given(sizes, st.integers(0, 40), st.sampled_from([0.0, 0.3, 0.8, 0.9, 1.0]))
    def test_rainfusion_keeps_the_most_alike_and_what_is_always_seen(self, latent, text, sparsity):
        layout = SparseLayout(latent, text, 16)
        q, k, _ = streams(layout.tokens, batch=2)
        mask = masks.rainfusion(q, k, layout, layout, 0.25, sparsity)
        assert mask.shape == (2, 2, layout.blocks, layout.blocks)
        first = math.ceil(latent[1] * latent[2] / 16) if latent[0] > 1 else 0
        always = [number < first or number >= layout.video_blocks for number in range(layout.blocks)]
        scores = masks.pooled(q, layout) @ masks.pooled(k, layout).transpose(-1, -2)
        keep = max(1, math.ceil(layout.blocks * (1 - sparsity) - 1e-9))
        for b in range(2):
            for h in range(2):
                for row in range(layout.blocks):
                    best = set(scores[b, h, row].topk(keep).indices.tolist())
                    expected = {c for c in range(layout.blocks) if c in best or always[row] or always[c]}
                    assert set(mask[b, h, row].nonzero().flatten().tolist()) == expected

    def test_ties_keep_no_more_than_asked(self):
        layout = SparseLayout((1, 16, 16), 0, 16)
        same = torch.ones(1, 256, 1, 8)
        mask = masks.rainfusion(same, same, layout, layout, 1.0, 0.75)
        assert (mask.sum(-1) == 4).all()

    def test_each_sample_has_its_own_mask(self):
        layout = SparseLayout((1, 16, 16), 0, 16)
        q, k, _ = streams(256, batch=2)
        mask = masks.rainfusion(q, k, layout, layout, 0.25, 0.8)
        assert not torch.equal(mask[0], mask[1])
        assert torch.equal(mask[1:], masks.rainfusion(q[1:], k[1:], layout, layout, 0.25, 0.8))

    def test_a_picture_is_sparse_too(self):
        for latent in ((1, 64, 64), (1, 61, 67)):
            layout = SparseLayout(latent, 100)
            q, k, _ = streams(layout.tokens, heads=1)
            mask = masks.rainfusion(q, k, layout, layout, 0.25, 0.8)
            assert masks.density(mask, layout, layout) < 0.35

    def test_first_frame_and_text_rows_and_columns_of_an_unaligned_video(self):
        layout = SparseLayout((3, 20, 20), 50)
        q, k, _ = streams(layout.tokens, heads=1)
        mask = masks.rainfusion(q, k, layout, layout, 0.25, 0.9)
        assert mask.shape[-2:] == (layout.blocks, layout.blocks) == (11, 11)
        for part in (slice(0, 4), slice(10, 11)):
            assert mask[..., part, :].all()
            assert mask[..., part].all()
        assert not mask.all()

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("keep", [(True, True), (False, False), (True, False)])
    @pytest.mark.parametrize(("threshold", "sparsity"), [(0.9, 0.0), (0.5, 0.5), (1.0, 0.7), (0.0, 0.0)])
    @pytest.mark.parametrize(("queries", "keys"), [(64, 64), (100, 100), (61, 90)])
    def test_the_estimate_against_loops(self, causal, keep, threshold, sparsity, queries, keys):
        q, k, _ = streams(queries, keys=keys, heads=1)
        layouts = SparseLayout.plain(queries, 16), SparseLayout.plain(keys, 16)
        found = masks.estimated(
            q, k, *layouts, 0.25, sparsity,
            threshold=threshold, keep_sink=keep[0], keep_recent=keep[1], causal=causal,
        )  # fmt: skip
        expected = estimate_by_loops(q[0, :, 0], k[0, :, 0], 16, 0.25, sparsity, threshold, *keep, causal)
        assert found[0, 0].tolist() == expected

    def test_the_estimate_of_every_sample_and_head(self):
        q, k, _ = streams(90, heads=4, kv_heads=2, batch=2)
        layout = SparseLayout.plain(90, 16)
        words = {"threshold": 0.6, "keep_sink": False, "keep_recent": True, "causal": False}
        found = masks.estimated(q, k, layout, layout, 0.25, 0.3, **words)
        for sample, head in itertools.product(range(2), range(4)):
            own_q, own_k = q[sample, :, head], k[sample, :, head // 2]
            expected = estimate_by_loops(own_q, own_k, 16, 0.25, 0.3, 0.6, False, True, False)
            assert found[sample, head].tolist() == expected

    @pytest.mark.parametrize(("sparsity", "blocks"), [(0.16, 75), (0.41, 100), (0.22, 150), (0.3, 10), (0.9, 10)])
    def test_the_estimate_keeps_as_many_as_it_may(self, sparsity, blocks):
        """Where it is a whole number, it is that one: 75 blocks less 16 % are 63."""
        q, k, _ = streams(8 * blocks, heads=1, width=4)
        layout = SparseLayout.plain(8 * blocks, 8)
        words = {"threshold": 1.0, "keep_sink": False, "keep_recent": False, "causal": False}
        found = masks.estimated(q, k, layout, layout, 0.5, sparsity, **words)
        allowed = int(fractions.Fraction(str(1 - sparsity)).limit_denominator(1000) * blocks)
        assert (found.sum(-1) == allowed).all()

    def test_likeness_of_heads_that_share_keys(self):
        layout = SparseLayout((2, 8, 16), 5, 16)
        q, k, _ = streams(layout.tokens, heads=6, kv_heads=2)
        whole = k.repeat_interleave(3, dim=2)
        found = masks.rainfusion(q, k, layout, layout, 0.25, 0.7)
        assert torch.equal(found, masks.rainfusion(q, whole, layout, layout, 0.25, 0.7))

    def test_blocks_much_less_alike_are_told_apart(self):
        """Their softmax is 0, and so would the order of all of them be anybody's."""
        layout = SparseLayout((1, 8, 40), 0, 64)
        q, k = torch.zeros(2, 1, 320, 1, 8)
        q[..., 0] = 1
        for number, likeness in enumerate((0.0, -400.0, -300.0, -200.0, -500.0)):
            k[:, 64 * number : 64 * (number + 1), :, 0] = likeness
        mask = masks.rainfusion(q, k, layout, layout, 1.0, 0.6)
        assert mask[0, 0, 0].nonzero().flatten().tolist() == [0, 3]

    @pytest.mark.parametrize(("latent", "block"), [((16, 8, 16), 128), ((8, 8, 8), 64), ((12, 16, 16), 128)])
    def test_radial_sees_less_where_a_frame_is_a_block_or_two(self, latent, block):
        """All frames have the same place there, and none is nearer in space than another."""
        layout = SparseLayout(latent, 0, block, tile=1)
        shares = [
            float(masks.density(masks.radial(layout, layout, sparsity, torch.device("cpu")), layout, layout))
            for sparsity in (0.0, 0.25, 0.5, 0.9)
        ]
        assert shares == sorted(shares, reverse=True)
        assert shares[0] == 1
        assert shares[1] < 0.9
        assert shares[2] < 0.65
        assert shares[3] < 0.4

    @pytest.mark.parametrize("sparsity", [0.5, 0.9, 0.95, 1.0])
    def test_radial_shows_every_query_a_key_on_another_grid(self, sparsity):
        rows, columns = SparseLayout((1, 16, 16), 0, 16, tile=1), SparseLayout((1, 12, 12), 0, 16, tile=1)
        assert masks.radial(rows, columns, sparsity, torch.device("cpu")).any(-1).all()

    def test_radial_windows_narrow_with_time(self):
        layout = SparseLayout((8, 16, 16), 20, 16, tile=1)
        mask = masks.radial(layout, layout, 0.4, torch.device("cpu"))[0, 0]
        assert 0.6 <= mask.float().mean() < 0.65
        # Blocks of frame 4 seen in frames 4, 5 and 7: no fewer the nearer.
        per_frame = mask[64 : 64 + 16].view(16, -1)[:, : 8 * 16].view(16, 8, 16).sum((0, 2)).tolist()
        assert per_frame[4] >= per_frame[5] >= per_frame[6] >= per_frame[7] > 0
        assert per_frame[4] > per_frame[7]
        assert mask.diagonal().all()
        assert mask[:, :16].all()
        assert mask[-2:].all()
        assert masks.radial(layout, layout, 0.0, torch.device("cpu")).all()

    def test_density_counts_tokens_not_blocks(self):
        layout = SparseLayout.plain(33, 16)
        mask = torch.zeros(1, 1, 3, 3, dtype=torch.bool)
        mask[..., 0, 0] = mask[..., 2, 2] = True
        assert float(masks.density(mask, layout, layout)) == pytest.approx((256 + 1) / 33**2)
        assert float(masks.density(mask[:0], layout, layout)) == 0


def estimate_by_loops(q, k, block, scale, sparsity, threshold, keep_sink, keep_recent, causal):
    """The estimate as it is described, one number after the other."""
    stride = 8
    q, k = (F.pad(t.double(), (0, 0, 0, -t.shape[0] % stride)) for t in (q, k))
    groups_q, groups_k = q.shape[0] // stride, k.shape[0] // stride
    scores = torch.full((groups_q, groups_k), -math.inf, dtype=torch.float64)
    for i in range(groups_q):
        for j in range(groups_k):
            if not causal or j <= i:
                pairs = ((q[i * stride + stride - 1 - s] @ k[j * stride + s]) for s in range(stride))
                scores[i, j] = sum(pairs) * scale / stride
    weights = scores.softmax(-1)
    cell = block // stride
    rows, columns = -(-groups_q // cell), -(-groups_k // cell)
    result = []
    for r in range(rows):
        last = min(r, columns - 1) if causal else columns - 1
        share = [float(weights[r * cell : (r + 1) * cell, c * cell : (c + 1) * cell].sum()) for c in range(last + 1)]
        if keep_recent:
            share[last] = 0.0
        order = sorted(range(last + 1), key=lambda c: (-share[c], c))
        count, held = 1, 0.0
        for c in order:
            held += share[c]
            count += held < threshold * sum(share)
        if threshold >= 1:
            count = columns
        kept = set(order[: min(count, max(1, int((last + 1) * (1 - sparsity) + 1e-6)))])
        kept |= {last} if keep_recent else set()
        kept |= {0} if keep_sink else set()
        kept |= set(range(last + 1)) if causal and r < 2 else set()
        result.append([c in kept for c in range(columns)])
    return result


LATENTS = [(1, 16, 16), (3, 16, 24), (3, 10, 13), (1, 9, 21)]


class TestAttention:
    @pytest.mark.parametrize("layout", ["BNSD", "BSND"])
    @pytest.mark.parametrize("sparse_type", [None, *TYPES])
    def test_sparsity_0_is_dense(self, sparse_type, layout):
        q, k, v = streams(3 * 16 * 24 + 20, heads=3)
        exact = masked_attention(q, k, v, *everything(q.shape[1], k.shape[1], 1, 3))
        if layout == "BNSD":
            q, k, v, exact = (t.transpose(1, 2) for t in (q, k, v, exact))
        out, share = tritium.sparse_attention(
            q, k, v, input_layout=layout, sparse_type=sparse_type, latent_shape_q=(3, 16, 24), txt_len=20,
            return_density=True,
        )  # fmt: skip
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
    @pytest.mark.parametrize("latent", LATENTS)
    @pytest.mark.parametrize("sparse_type", ["rf_v2", "radial"])
    def test_any_shape_with_text_against_a_mask_over_tokens(self, sparse_type, latent, text, dtype):
        method = Method(sparse_type, 0.6)
        layout = SparseLayout(latent, text, 32, tile=method.tile)
        q, k, v = streams(layout.tokens, heads=4, kv_heads=2, batch=2, dtype=dtype)
        out, share = tritium.sparse_attention(
            q, k, v, input_layout="BSND", sparse_type=sparse_type, latent_shape_q=latent, txt_len=text, block_size=32,
            sparsity=0.6, return_density=True,
        )  # fmt: skip
        ordered = [layout.permute(t) for t in (q, k, v)]
        mask = method.mask(*ordered[:2], layout, layout, 0.25)
        assert not mask.all()
        exact = layout.unpermute(masked_attention(*ordered, mask.expand(2, -1, -1, -1), layout, layout))
        assert_no_worse(out, exact.to(dtype), exact)
        assert share == masks.density(mask, layout, layout) < 1

    @pytest.mark.parametrize("causal", [False, True])
    def test_the_estimate_with_and_without_causality(self, causal):
        q, k, v = streams(100, batch=2)
        out = tritium.sparse_attention(
            q, k, v, input_layout="BSND", sparse_type="ada_bsa", block_size=16, cdf_threshold=0.6, sparsity=0.3,
            is_causal=causal, head_num=2,
        )  # fmt: skip
        layout = SparseLayout.plain(100, 16)
        mask = Method("ada_bsa", 0.3, cdf_threshold=0.6, causal=causal).mask(q, k, layout, layout, 0.25)
        exact = masked_attention(q, k, v, mask, layout, layout, causal=causal)
        assert_no_worse(out, exact.float(), exact)

    def test_an_estimate_of_keys_of_another_length(self):
        q, k, v = streams(64, keys=40)
        options = {"input_layout": "BSND", "sparse_type": "ada_bsa", "block_size": 16, "sparsity": 0.5}
        out = tritium.sparse_attention(q, k, v, **options, latent_shape_q=(1, 8, 8), head_num=np.int64(2))
        assert torch.equal(out, tritium.sparse_attention(q, k, v, **options))

    def test_keys_of_another_latent(self):
        q, k, v = streams(16 * 16 + 5, keys=3 * 9 * 10 + 5)
        out = tritium.sparse_attention(
            q, k, v, input_layout="BSND", sparse_type="rf_v3", latent_shape_q=(1, 16, 16), latent_shape_k=(3, 9, 10),
            txt_len=5, block_size=16, sparsity=0.7,
        )  # fmt: skip
        layouts = SparseLayout((1, 16, 16), 5, 16), SparseLayout((3, 9, 10), 5, 16)
        ordered = [layout.permute(t) for layout, t in zip((layouts[0], layouts[1], layouts[1]), (q, k, v), strict=True)]
        mask = Method("rf_v3", 0.7).mask(*ordered[:2], *layouts, 0.25)
        exact = layouts[0].unpermute(masked_attention(*ordered, mask, *layouts))
        assert_no_worse(out, exact.float(), exact)

    @pytest.mark.parametrize("sparse_type", TYPES)
    def test_sparsity_1_is_the_least_there_is(self, sparse_type):
        q, k, v = streams(2 * 16 * 16)
        out, share = tritium.sparse_attention(
            q, k, v, input_layout="BSND", sparse_type=sparse_type, latent_shape_q=(2, 16, 16), block_size=32,
            sparsity=1.0, return_density=True,
        )  # fmt: skip
        assert out.isfinite().all()
        assert 0 < share < 0.9

    def test_queries_that_see_nothing_give_zeros(self):
        layout = SparseLayout.plain(40, 16)
        q, k, v = streams(40)
        mask = torch.ones(1, 2, 3, 3, dtype=torch.bool)
        mask[:, :, 1] = False
        edges = layout.edges()
        lists = lists_of(mask, edges, edges, 16, 1, causal=False)
        out = attend(q, k, v, lists, edges, edges, 16, 0.25)
        assert torch.equal(out[:, 16:32], torch.zeros(1, 16, 2, 16))
        exact = masked_attention(q, k, v, mask, layout, layout)
        assert_no_worse(out, exact.float(), exact)

    @pytest.mark.parametrize(
        ("changes", "error", "words"),
        [
            ({"sparse_type": "rf_v4"}, ArgumentError, "there is no sparse_type 'rf_v4'"),
            ({"input_layout": "BSH"}, ArgumentError, "there is no input_layout 'BSH'"),
            ({"sparsity": 1.5}, ArgumentError, "sparsity must be from 0 to 1, got 1.5"),
            ({"sparsity": "0.5"}, ArgumentTypeError, "sparsity must be a number"),
            ({"cdf_threshold": -0.1}, ArgumentError, "cdf_threshold must be from 0 to 1"),
            ({"latent_shape_q": None}, ArgumentTypeError, "needs latent_shape_q"),
            ({"latent_shape_q": (1, 8, 9)}, ArgumentError, "q has 64 tokens; txt_len=0 and latent_shape_q"),
            ({"txt_len": 3}, ArgumentError, "make 67"),
            ({"is_causal": True}, ArgumentError, "sparse_type 'rf_v2' reorders tokens"),
            ({"attn_mask": torch.ones(64, 64)}, ArgumentError, "applies no attn_mask"),
            ({"sparse_type": None, "sparsity": 0.5}, ArgumentError, "needs a sparse_type"),
            ({"sparse_type": "ada_bsa", "block_size": 20}, ArgumentError, "a multiple of 8 tokens"),
            ({"head_num": 5}, ArgumentError, "head_num=5, and q has 2 heads"),
            ({"k": torch.ones(1, 64, 3, 16)}, ArgumentError, "one batch, and k and v"),
            ({"q": torch.ones(1, 64, 32)}, ArgumentError, "q must have rank 4"),
            ({"by": "tritn"}, ArgumentError, "did you mean 'triton'"),
            ({"by": "triton"}, ArgumentError, "provider 'triton' cannot compute"),
            ({"keep_sink": 1}, ArgumentTypeError, "keep_sink must be True or False"),
            ({"latent_shape_k": ()}, ArgumentTypeError, "latent_shape must be"),
            ({"latent_shape_k": 0}, ArgumentTypeError, "latent_shape_k must be a list or None"),
            ({"head_num": 2.0}, ArgumentTypeError, "head_num must be an integer"),
            ({"block_size": None, "sparse_type": "ada_bsa"}, ArgumentTypeError, "block_size must be an integer"),
            ({"by": "nonsense", "sparsity": 0.0}, ArgumentError, "is called 'nonsense'"),
            ({"scale": float("nan")}, ArgumentError, "scale must be a number, got nan"),
            ({"block_size": 0}, ArgumentError, "block_size must be an integer, 1 or more"),
            ({"sparse_type": "ada_bsa", "txt_len": -1}, ArgumentError, "txt_len must be an integer, 0 or more"),
            ({"sparse_type": "ada_bsa", "latent_shape_q": (9, 9, 9)}, ArgumentError, "q has 64 tokens"),
            (
                {name: torch.ones(1, 0, 2, 16) for name in "qkv"} | {"sparse_type": "ada_bsa", "latent_shape_q": None},
                ArgumentError,
                "q has no tokens",
            ),
        ],
    )
    def test_errors(self, changes, error, words):
        given = dict(zip("qkv", streams(64), strict=True)) | {
            "input_layout": "BSND", "sparse_type": "rf_v2", "latent_shape_q": (1, 8, 8), "sparsity": 0.5,
            "block_size": 16,
        }  # fmt: skip
        with pytest.raises(error, match=words):
            tritium.sparse_attention(**{**given, **changes})

    @pytest.mark.parametrize("sparse_type", TYPES)
    def test_one_graph_without_a_break(self, sparse_type):
        def function(q, k, v):
            return tritium.sparse_attention(
                q * 2, k, v, input_layout="BSND", sparse_type=sparse_type, latent_shape_q=(2, 10, 9), txt_len=5,
                block_size=16, sparsity=0.5, cdf_threshold=0.8, return_density=True,
            )  # fmt: skip

        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        with torch.inference_mode():
            for batch in (2, 3):
                q, k, v = streams(185, batch=batch)
                torch.testing.assert_close(compiled(q, k, v), function(q, k, v))

    @pytest.mark.thorough
    @pytest.mark.codegen
    def test_flex_computes_the_same(self):
        layout = SparseLayout((1, 15, 20), 40, 64)
        q, k, v = streams(340, width=32, heads=4, kv_heads=2, batch=2)
        edges = layout.edges()
        mask = masks.rainfusion(q, k, layout, layout, 0.2, 0.5)
        mask[0, 0, 1] = False
        lists = lists_of(mask, edges, edges, 64, 2, causal=False)
        with torch.inference_mode():
            out = ops.catalog()["block_sparse_attention"].overload(
                q, k, v, *lists, edges, edges, 64, 32**-0.5, False, provider="flex"
            )
        assert not ops.failed_providers()
        exact = masked_attention(q, k, v, mask, layout, layout)
        assert_no_worse(out, exact.float(), exact)


def everything(queries, keys, batch, heads):
    layouts = SparseLayout.plain(queries), SparseLayout.plain(keys)
    return torch.ones(batch, heads, *(layout.blocks for layout in layouts), dtype=torch.bool), *layouts


class TestWhatIsAsked:
    def call(self, q, **options):
        given = {"sparse_type": "rf_v2", "latent_shape_q": (2, 8, 8), "block_size": 16, "sparsity": 0.5}
        return tritium.sparse_attention(q, q, q, **(given | options))

    def test_gradients_are_right_or_refused(self, recwarn):
        q = torch.randn(1, 1, 128, 4, dtype=torch.float64, requires_grad=True)
        self.call(q).sum().backward()
        assert q.grad.abs().sum() > 0
        assert not [warning for warning in recwarn if "autograd" in str(warning.message)]
        for causal in (False, True):
            torch.autograd.gradcheck(
                lambda x, causal=causal: self.call(
                    x, sparse_type="ada_bsa", latent_shape_q=None, block_size=8, is_causal=causal
                ),
                torch.randn(1, 1, 24, 2, dtype=torch.float64, requires_grad=True),
            )
        with pytest.raises(torch._dynamo.exc.Unsupported, match="computes no gradients inside of a compiled graph"):
            torch.compile(self.call, backend="aot_eager", fullgraph=True)(q)
        with pytest.raises(ArgumentError, match="by 'flex' computes no gradients"):
            self.call(q, by="flex")

    def test_mapped_over_without_gradients_alone(self):
        q = torch.randn(3, 1, 2, 128, 4)
        for sparse_type in ("rf_v2", "ada_bsa"):
            call = functools.partial(self.call, sparse_type=sparse_type)
            with torch.no_grad():
                torch.testing.assert_close(torch.vmap(call)(q), torch.stack([call(one) for one in q]))
            with pytest.raises(ArgumentError, match=r"under torch\.no_grad\(\)"):
                torch.vmap(call)(q)

    @pytest.mark.parametrize("sparse_type", ["rf_v2", "ada_bsa"])
    def test_what_is_no_number_shows(self, sparse_type):
        q, k = torch.randn(1, 1, 128, 16), torch.randn(1, 1, 128, 16)
        k[0, 0, 77] = math.nan
        out = tritium.sparse_attention(
            q, k, q, sparse_type=sparse_type, latent_shape_q=(2, 8, 8), block_size=16, sparsity=0.5
        )
        assert out.isnan().all()

    @pytest.mark.parametrize("scale", [0.7, -0.3])
    def test_a_scale_of_its_own(self, scale):
        layout = SparseLayout((2, 8, 8), 0, 16, tile=1)
        q, k, v = streams(128)
        mask = Method("radial", 0.5).mask(q, k, layout, layout, scale)
        exact = masked_attention(q, k, v, mask, layout, layout, scale=scale)
        out = tritium.sparse_attention(
            q, k, v, input_layout="BSND", sparse_type="radial", latent_shape_q=(2, 8, 8), block_size=16, sparsity=0.5,
            scale=scale,
        )  # fmt: skip
        assert_no_worse(out, exact.float(), exact)

    @pytest.mark.parametrize("scale", [-0.4, 0.0])
    def test_scales_that_turn_the_order_round(self, scale):
        q = torch.randn(1, 128, 2, 16)
        options = {"sparse_type": "ada_bsa", "is_causal": True, "scale": scale, "input_layout": "BSND"}
        whole = self.call(q, **options, sparsity=0.0)
        expected = tritium.attention_forward(q, q, q, scale=scale, is_causal=True, fused=False)
        torch.testing.assert_close(whole, expected)
        assert self.call(q, **options).isfinite().all()

    @pytest.mark.thorough
    def test_sides_shorter_than_a_tile_in_a_graph_for_all_sizes(self):
        def function(q, frames, height, width):
            return self.call(q, latent_shape_q=(frames, height, width))

        compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
        q = torch.randn(1, 2, 2 * 9 * 7, 16)
        torch.testing.assert_close(compiled(q, 2, 9, 7), function(q, 2, 9, 7))
