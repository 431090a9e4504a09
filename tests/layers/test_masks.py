"""The order of tokens in blocks, and the masks over blocks."""

import fractions
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from support.attention import qkv
from tritium.errors import ArgumentError, ArgumentTypeError
from tritium.layers.sparse import layout as layout_module
from tritium.layers.sparse import masks
from tritium.layers.sparse.layout import SparseLayout
from tritium.layers.sparse.masks import Method

CPU = torch.device("cpu")

sizes = st.tuples(st.integers(1, 4), st.integers(1, 20), st.integers(1, 20))


def queries_and_keys(tokens, keys=None, **options):
    return qkv(tokens, keys or tokens, **{"heads": 2, "width": 16, "batch": 1, **options})[:2]


class TestLayout:
    @settings(max_examples=60)
    @given(sizes, st.integers(0, 40), st.sampled_from([1, 7, 16, 128]), st.sampled_from([1, 3, 8]), st.booleans())
    def test_a_permutation_and_its_inverse(self, latent, text, block, tile, text_first):
        layout = SparseLayout(latent, text, block, tile, text_first)
        index = layout.index()
        assert torch.equal(index.sort().values, torch.arange(layout.tokens))
        x = torch.arange(2 * layout.tokens * 3).view(2, layout.tokens, 3)
        assert torch.equal(layout.unpermute(layout.permute(x)), x)
        assert torch.equal(layout.permute(layout.unpermute(x)), x)
        assert torch.equal(layout.permute(torch.arange(layout.tokens), dim=0), index)
        assert not layout.keeps_order or torch.equal(index, torch.arange(layout.tokens))
        # Text goes to the end, in its order.
        assert torch.equal(index[layout.video :], torch.arange(text) + (0 if text_first else layout.video))

    @settings(max_examples=60)
    @given(sizes, st.integers(0, 300), st.sampled_from([1, 7, 16, 128]))
    def test_every_token_is_in_one_block_of_video_or_text(self, latent, text, block):
        layout = SparseLayout(latent, text, block)
        edges = layout.edges()
        assert edges.shape[0] == layout.blocks + 1
        assert (edges[0], edges[-1]) == (0, layout.tokens)
        lengths = edges.diff()
        assert ((lengths >= 1) & (lengths <= block)).all()
        assert layout.video in edges
        # Only the last block of each segment may be short.
        assert (lengths < block).sum() <= 2

    @pytest.mark.parametrize("latent", [(3, 40, 80), (3, 30, 52), (3, 21, 32), (3, 24, 45), (1, 13, 21)])
    def test_tiles_are_neighbours_in_the_image(self, latent):
        frames, height, width = latent
        index = SparseLayout(latent).index()
        aligned = height % 8 == 0 and width % 8 == 0
        start = 0 if aligned or frames == 1 else height * width
        assert torch.equal(index[:start], torch.arange(start))
        tile = index[start : start + 64] % (height * width)
        assert torch.equal(tile // width, torch.arange(8).repeat_interleave(8))
        assert torch.equal(tile % width, torch.arange(8).repeat(8))
        # Frames are not mixed.
        assert torch.equal(index // (height * width), torch.arange(frames).repeat_interleave(height * width))

    def test_strips_come_after_tiles(self):
        index = SparseLayout((1, 9, 10)).index().tolist()
        assert index[64:74] == list(range(80, 90))
        assert index[74:] == [row * 10 + column for row in range(8) for column in (8, 9)]

    def test_kept_tensors_are_valid_for_later_calls(self, monkeypatch):
        """Calls in inference mode, with fake tensors or in a capture keep nothing that others cannot use."""
        layout = SparseLayout((2, 9, 9), 5, 32)
        with torch.inference_mode():
            layout.permute(torch.randn(1, layout.tokens, 4))
        layout.permute(torch.randn(1, layout.tokens, 4, requires_grad=True)).sum().backward()
        layout = SparseLayout((2, 9, 11), 5, 32)
        with FakeTensorMode():
            layout.permute(torch.randn(1, layout.tokens, 4))
        layout.unpermute(layout.permute(torch.randn(1, layout.tokens, 4)))
        assert layout.index() is layout.index()
        monkeypatch.setattr(layout_module.device, "is_capturing", lambda: True)
        assert layout.index() is not layout.index()

    def test_errors(self):
        for given_shape in ((3, 4), (0, 4, 4)):
            with pytest.raises(ArgumentTypeError, match="latent_shape must be"):
                SparseLayout(given_shape)
        for rest, words in (((-1,), "txt_len must be an integer, 0 or more"), ((0, 0), "block_size must be .*1 or")):
            with pytest.raises(ArgumentError, match=words):
                SparseLayout((1, 4, 4), *rest)
        with pytest.raises(ArgumentError, match="3 \\+ 1x4x4 = 19 tokens, got 18"):
            SparseLayout((1, 4, 4), 3).permute(torch.ones(1, 18, 2))


class TestRainfusion:
    @settings(max_examples=40)
    @given(sizes, st.integers(0, 40), st.sampled_from([7, 16]))
    def test_means_are_of_the_tokens_of_a_block(self, latent, text, block):
        layout = SparseLayout(latent, text, block)
        x = torch.randn(2, layout.tokens, 3, 4)
        means = masks.pooled(x, layout)
        assert means.shape[2] == layout.blocks
        for number, (first, last) in enumerate(itertools.pairwise(layout.edges().tolist())):
            torch.testing.assert_close(means[:, :, number], x[:, first:last].mean(1))

    @settings(max_examples=40)
    @given(sizes, st.integers(0, 40), st.sampled_from([0.0, 0.3, 0.8, 0.9, 1.0]))
    def test_the_most_similar_and_text_and_the_first_frame_are_kept(self, latent, text, sparsity):
        layout = SparseLayout(latent, text, 16)
        q, k = queries_and_keys(layout.tokens, batch=2)
        mask = masks.rainfusion(q, k, layout, layout, 0.25, sparsity)
        assert mask.shape == (2, 2, layout.blocks, layout.blocks)
        first = math.ceil(latent[1] * latent[2] / 16) if latent[0] > 1 else 0
        always = [number < first or number >= layout.video_blocks for number in range(layout.blocks)]
        scores = masks.pooled(q, layout) @ masks.pooled(k, layout).transpose(-1, -2)
        keep = max(1, math.ceil(layout.blocks * (1 - sparsity) - 1e-9))
        for sample, head, row in itertools.product(range(2), range(2), range(layout.blocks)):
            best = set(scores[sample, head, row].topk(keep).indices.tolist())
            expected = {c for c in range(layout.blocks) if c in best or always[row] or always[c]}
            assert set(mask[sample, head, row].nonzero().flatten().tolist()) == expected

    def test_ties_keep_no_more_than_wanted(self):
        layout = SparseLayout((1, 16, 16), 0, 16)
        same = torch.ones(1, 256, 1, 8)
        assert (masks.rainfusion(same, same, layout, layout, 1.0, 0.75).sum(-1) == 4).all()

    def test_heads_that_share_keys(self):
        layout = SparseLayout((2, 8, 16), 5, 16)
        q, k = queries_and_keys(layout.tokens, heads=6, kv_heads=2)
        whole = k.repeat_interleave(3, dim=2)
        mask = masks.rainfusion(q, k, layout, layout, 0.25, 0.7)
        assert torch.equal(mask, masks.rainfusion(q, whole, layout, layout, 0.25, 0.7))

    @pytest.mark.parametrize("latent", [(1, 64, 64), (1, 61, 67)])
    def test_an_image_is_sparse_too(self, latent):
        layout = SparseLayout(latent, 100)
        mask = masks.rainfusion(*queries_and_keys(layout.tokens, heads=1), layout, layout, 0.25, 0.8)
        assert masks.density(mask, layout, layout) < 0.35

    def test_blocks_of_very_low_similarity_have_an_order(self):
        """The softmax of all of them is 0."""
        layout = SparseLayout((1, 8, 40), 0, 64)
        q, k = torch.zeros(2, 1, 320, 1, 8)
        q[..., 0] = 1
        for number, likeness in enumerate((0.0, -400.0, -300.0, -200.0, -500.0)):
            k[:, 64 * number : 64 * (number + 1), :, 0] = likeness
        mask = masks.rainfusion(q, k, layout, layout, 1.0, 0.6)
        assert mask[0, 0, 0].nonzero().flatten().tolist() == [0, 3]


class TestRadial:
    @pytest.mark.parametrize(("latent", "block"), [((16, 8, 16), 128), ((8, 8, 8), 64), ((12, 16, 16), 128)])
    def test_sparsity_counts_where_a_frame_is_a_block_or_two(self, latent, block):
        """All frames have the same place there, and none is nearer in space than another."""
        layout = SparseLayout(latent, 0, block, tile=1)
        shares = [
            float(masks.density(masks.radial(layout, layout, sparsity, CPU), layout, layout))
            for sparsity in (0.0, 0.25, 0.5, 0.9)
        ]
        assert shares[0] == 1
        assert all(share < most for share, most in zip(shares[1:], (0.9, 0.65, 0.4), strict=True))

    @pytest.mark.parametrize("sparsity", [0.5, 0.95, 1.0])
    def test_every_query_sees_a_key_on_another_grid(self, sparsity):
        rows, columns = SparseLayout((1, 16, 16), 0, 16, tile=1), SparseLayout((1, 12, 12), 0, 16, tile=1)
        assert masks.radial(rows, columns, sparsity, CPU).any(-1).all()

    def test_windows_narrow_with_time(self):
        layout = SparseLayout((8, 16, 16), 20, 16, tile=1)
        mask = masks.radial(layout, layout, 0.4, CPU)[0, 0]
        assert 0.6 <= mask.float().mean() < 0.65
        # Blocks of frame 4 seen in frames 4 to 7: no fewer the nearer.
        per_frame = mask[64 : 64 + 16].view(16, -1)[:, : 8 * 16].view(16, 8, 16).sum((0, 2)).tolist()
        assert per_frame[4] >= per_frame[5] >= per_frame[6] >= per_frame[7] > 0
        assert per_frame[4] > per_frame[7]
        assert mask.diagonal().all()
        assert mask[:, :16].all()
        assert mask[-2:].all()


class TestEstimate:
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("keep", [(True, True), (False, False), (True, False)])
    @pytest.mark.parametrize(("threshold", "sparsity"), [(0.9, 0.0), (0.5, 0.5), (1.0, 0.7), (0.0, 0.0)])
    @pytest.mark.parametrize(("queries", "keys"), [(64, 64), (61, 90)])
    def test_against_loops(self, causal, keep, threshold, sparsity, queries, keys):
        method = Method("ada_bsa", sparsity, *keep, threshold, causal)
        q, k = queries_and_keys(queries, keys, heads=4, kv_heads=2, batch=2)
        mask = method.mask(q, k, SparseLayout.plain(queries, 16), SparseLayout.plain(keys, 16), 0.25)
        for sample, head in ((0, 0), (1, 3)):
            expected = estimate_by_loops(q[sample, :, head], k[sample, :, head // 2], method)
            assert mask[sample, head].tolist() == expected

    @pytest.mark.parametrize(("sparsity", "blocks"), [(0.16, 75), (0.41, 100), (0.22, 150), (0.3, 10), (0.9, 10)])
    def test_as_many_blocks_as_allowed_are_kept(self, sparsity, blocks):
        """Where it is an integer, it is that one: 75 blocks less 16 % are 63."""
        q, k = queries_and_keys(8 * blocks, heads=1, width=4)
        layout = SparseLayout.plain(8 * blocks, 8)
        mask = Method("ada_bsa", sparsity, keep_sink=False, keep_recent=False).mask(q, k, layout, layout, 0.5)
        allowed = int(fractions.Fraction(str(1 - sparsity)).limit_denominator(1000) * blocks)
        assert (mask.sum(-1) == allowed).all()


def estimate_by_loops(q, k, method, block=16, scale=0.25):
    """The estimate as it is described, one number after the other."""
    stride, causal = 8, method.causal
    q, k = (F.pad(t.double(), (0, 0, 0, -t.shape[0] % stride)) for t in (q, k))
    groups_q, groups_k = q.shape[0] // stride, k.shape[0] // stride
    scores = torch.full((groups_q, groups_k), -math.inf, dtype=torch.float64)
    for i, j in itertools.product(range(groups_q), range(groups_k)):
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
        if method.keep_recent:
            share[last] = 0.0
        order = sorted(range(last + 1), key=lambda c: (-share[c], c))
        count, held = 1, 0.0
        for c in order:
            held += share[c]
            count += held < method.cdf_threshold * sum(share)
        if method.cdf_threshold >= 1:
            count = columns
        kept = set(order[: min(count, max(1, int((last + 1) * (1 - method.sparsity) + 1e-6)))])
        kept |= {last} if method.keep_recent else set()
        kept |= {0} if method.keep_sink else set()
        kept |= set(range(last + 1)) if causal and r < 2 else set()
        result.append([c in kept for c in range(columns)])
    return result


def test_density_counts_tokens():
    layout = SparseLayout.plain(33, 16)
    mask = torch.zeros(1, 1, 3, 3, dtype=torch.bool)
    mask[..., 0, 0] = mask[..., 2, 2] = True
    assert float(masks.density(mask, layout, layout)) == pytest.approx((256 + 1) / 33**2)
    assert float(masks.density(mask[:0], layout, layout)) == 0
