"""Attention over tokens that are split between ranks, for any lengths and heads, on the axes of a mesh."""

import pytest
import torch
import torch.nn.functional as F

from support.fidelity import assert_no_worse
from tritium import Parallel
from tritium.techniques.parallel import mesh
from tritium.techniques.parallel.exchange import Grid, Segment, join, split
from tritium.techniques.parallel.exchange_attention import Call, attention

WIDTH = 8
EXCHANGES = ("split", "packed", "chunks 2", "chunks 5")


def plain(q, k, v, mask, is_causal):
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1])


def masks(kind, heads, queries, keys):
    generator = torch.Generator().manual_seed(1)
    seen = torch.rand(2, 1, 1, keys, generator=generator) > 0.3
    seen[..., 0] = True
    if kind == "keys":
        return seen
    if kind == "all":
        return torch.randn(2, heads, queries, keys, generator=generator)
    if kind == "half":
        # No query sees the last half.
        return (torch.arange(keys) <= keys // 2)[None, None]
    return None


def one(grid, queries, keys, heads, groups, kind, is_causal, exchange, how):
    """Return the result on this rank, joined, and the expected one in the dtype and in float64."""
    generator = torch.Generator().manual_seed(0)
    lengths = [sum(segment.length for segment in segments) for segments in (queries, keys)]
    full = [
        torch.randn(2, number, length, WIDTH, generator=generator)
        for number, length in zip((heads, groups, groups), (lengths[0], lengths[1], lengths[1]), strict=True)
    ]
    mask = masks(kind, heads, *lengths)
    expected = plain(*full, mask, is_causal)
    wide = None if mask is None else mask if mask.dtype == torch.bool else mask.double()
    exact = plain(*(x.double() for x in full), wide, is_causal)
    local = [split(x, 2, segments, grid) for x, segments in zip(full, (queries, keys, keys), strict=True)]
    # Tokens that are on every rank are exchanged only beside others that are split.
    sides = [side if any(segment.is_split for segment in side) else None for side in (queries, keys)]
    call = Call(plain, *sides, is_causal=is_causal)

    def run(q, k, v, mask):
        return join(attention(q, k, v, mask, call, grid, exchange), 2, queries, grid)

    if how == "aot_eager":
        torch._dynamo.reset()
        run = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=False)
    return run(*local, mask), expected, exact


def check(degrees, cases, how="eager", exchanges=EXCHANGES):
    grid = Grid.of(mesh.mesh_of(Parallel(**degrees, vae=None), torch.device("cpu")))
    for case in cases:
        outputs = []
        for exchange in exchanges if grid.ulysses.size > 1 else ("split",):
            found, expected, exact = one(grid, *case, exchange, how)
            assert_no_worse(found, expected, exact, f"{degrees} {case} {exchange}")
            outputs.append(found)
        # Parts are merged by exponentials, which CPUs round by the place of a value in memory.
        assert grid.ring.size > 1 or all(torch.equal(outputs[0], other) for other in outputs), case


def tokens(*lengths):
    return tuple(Segment(length) for length in lengths)


# Segments of queries and keys, heads of queries and of keys, mask, causality.
CASES = [
    (tokens(7, 15), tokens(7, 15), 3, 3, None, False),
    (tokens(8, 16), tokens(8, 16), 4, 4, "all", False),
    (tokens(1, 5), tokens(1, 5), 5, 5, "keys", False),
    (tokens(63), tokens(63), 30, 30, None, True),
    (tokens(77, 23), tokens(77, 23), 6, 2, "half", False),
    # Text is on every rank, in front or behind.
    ((Segment(6, False), Segment(13)), (Segment(6, False), Segment(13)), 5, 5, "all", False),
    ((Segment(13), Segment(3, False)), (Segment(13), Segment(3, False)), 4, 4, None, True),
    # Queries of one stream over keys of two.
    (tokens(9), tokens(9, 4), 4, 4, "all", False),
    # Keys or queries that every rank has, as of cross-attention, with a mask for each head.
    (tokens(7, 15), (Segment(6, False),), 3, 3, "all", False),
    (tokens(9), (Segment(5, False),), 4, 2, None, True),
    ((Segment(6, False),), tokens(7, 15), 3, 3, "all", False),
]
MORE = [
    (tokens(1), tokens(1), 1, 1, None, False),
    (tokens(7, 15, 1), tokens(7, 15, 1), 18, 3, "all", False),
    (tokens(77, 1023), tokens(77, 1023), 30, 30, None, False),
    (tokens(2, 9), (Segment(4, False), Segment(5)), 20, 10, "keys", False),
]


@pytest.mark.parametrize(
    "degrees",
    [
        {"ulysses": 2},
        {"gather": 2},
        {"ring": 2},
        {"ulysses": 3},
        {"ring": 3},
        {"ring": 2, "ulysses": 2},
        {"gather": 2, "ulysses": 2},
    ],
    ids=str,
)
def test_attention_over_split_tokens(ranks, degrees):
    ranks(Parallel(**degrees).size)(check, degrees, CASES)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "degrees", [{"ulysses": 4}, {"gather": 4}, {"ring": 4}, {"ring": 2, "gather": 2}, {"gather": 3}], ids=str
)
def test_attention_on_more_meshes(ranks, degrees, how):
    ranks(Parallel(**degrees).size)(check, degrees, [*CASES, *MORE], how, timeout=300)


@pytest.mark.parametrize("degrees", [{"ulysses": 2}, {"ring": 2}], ids=str)
def test_attention_in_one_graph(ranks, degrees):
    ranks(2)(check, degrees, [CASES[0], CASES[5]], "aot_eager", ("split", "chunks 2"))
