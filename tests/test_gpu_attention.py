"""Attention in 8 bits on a Hopper GPU: its kernels against their definition and float64. Run with -m gpu."""

import functools
import itertools
import threading

import pytest
import torch

import tritium
from support.attention_streams import exact, sqnr, streams
from tritium import device, ops
from tritium.ops import block_sparse_attention
from tritium.ops.attention import OP, eight_bits, trial
from tritium.ops.attention.rounded import rounded_attention
from tritium.ops.block_sparse_attention import eight_bits as sparse_eight_bits

pytestmark = pytest.mark.gpu

SCALE = 128**-0.5

# In dB. Tensor cores keep about 14 bits of the sums of 8 tiles, the definition keeps all of them.
AS_DEFINED = 42

# Batch, heads, queries, keys. The last has more tiles of queries than the GPU has multiprocessors, and all sums are flushed.
SHAPES = [(1, 2, 192, 128), (1, 3, 63, 100), (2, 2, 1, 7), (2, 5, 130, 385), (1, 24, 1000, 1000), (1, 140, 257, 2300)]


@pytest.fixture(autouse=True)
def _nothing_fails():
    """A provider that fails is replaced by the definition: no test may pass by that."""
    capability = device.capability(torch.device("cuda", 0))
    if capability is None or capability[0] != eight_bits.HOPPER:
        pytest.skip("needs a Hopper GPU")
    ops.catalog()
    before = ops.failed_providers()
    with torch.inference_mode():
        yield
    assert ops.failed_providers() == before


def inputs(shape=(2, 5, 130, 385), **options):
    batch, heads, queries, keys = shape
    return streams(queries, keys, batch=batch, heads=heads, where="cuda", **options)


def attend(q, k, v):
    """Compute by the provider in memory that was NaN before, in every dtype."""
    poison = [torch.full((1 << size,), 255, dtype=torch.uint8, device="cuda") for size in range(9, 24)]
    del poison
    return OP.overload(q, k, v, None, SCALE, False, provider="int8")


@pytest.mark.parametrize("kind", ["normal", "outliers"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_compute_their_definition(shape, dtype, kind):
    q, k, v = inputs(shape, dtype=dtype, kind=kind)
    assert eight_bits.decline(OP.bind(q, k, v, None, SCALE, False)) is None
    out = attend(q, k, v)
    assert out.stride() == OP.fake(q, k, v, None, SCALE, False).stride()
    assert sqnr(out, rounded_attention(q, k, v, SCALE)) >= AS_DEFINED
    assert sqnr(out, exact(q, k, v, SCALE)) >= 25
    for _ in range(5):
        assert torch.equal(attend(q, k, v), out)


@pytest.mark.parametrize("offset", [8, 3])
def test_heads_that_are_not_contiguous(offset):
    wide = [torch.nn.functional.pad(side, (offset, 5)) for side in inputs()]
    q, k, v = (side[..., offset : offset + 128] for side in wide)
    assert torch.equal(attend(q, k, v), attend(*(side.contiguous() for side in (q, k, v))))
    # Tokens that are every second one of a longer sequence, and one head for all.
    k, v = (side.repeat_interleave(2, dim=2)[:, :, ::2] for side in (k, v))
    assert torch.equal(attend(q, k, v), attend(*inputs()))
    k = k[:, :1].expand(-1, 5, -1, -1)
    assert torch.equal(attend(q, k, v), attend(q, k.contiguous(), v))


def test_nan_in_a_query_stays_in_its_row():
    q, k, v = inputs()
    expected = attend(q, k, v)
    q[1, 2, 77, 5] = torch.nan
    out = attend(q, k, v)
    assert out[1, 2, 77].isnan().all()
    out[1, 2, 77] = expected[1, 2, 77]
    assert torch.equal(out, expected)


def test_nan_in_a_key_or_a_value_is_seen():
    q, k, v = inputs()
    for side in (k, v):
        kept = side[0, 1, 9, 3].clone()
        side[0, 1, 9, 3] = torch.nan
        out = attend(q, k, v)
        assert out[0, 1, :, 3].isnan().all()
        assert not out[1].isnan().any()
        side[0, 1, 9, 3] = kept


def test_channels_of_zeros_and_of_very_different_size():
    q, k, v = inputs()
    v[..., 0] = 0
    v[..., 1] *= 1e4
    q[:, :, 3] = 0
    out = attend(q, k, v)
    assert not out[..., 0].any()
    assert sqnr(out, rounded_attention(q, k, v, SCALE)) >= AS_DEFINED
    assert sqnr(out[:, :, 3:4, 2:], v[..., 2:].double().mean(2, keepdim=True)) >= 25


def test_a_captured_call_is_replayed():
    q, k, v = inputs()
    graph = torch.cuda.CUDAGraph()
    attend(q, k, v)
    with torch.cuda.graph(graph):
        out = OP.overload(q, k, v, None, SCALE, False, provider="int8")
    for _ in range(3):
        for side in (q, k, v):
            side.copy_(side.roll(1, 2))
        expected = attend(q, k, v)
        graph.replay()
        assert torch.equal(out, expected)


def test_other_streams_and_threads():
    q, k, v = inputs()
    expected, found = attend(q, k, v), []

    def work():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(side):
            found.append(attend(q, k, v))
        torch.cuda.current_stream().wait_stream(side)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected)


def test_inside_compiled_graphs():
    q, k, v = inputs()

    def model(q, k, v):
        # Tokens before heads.
        q, k, v = (side.transpose(1, 2) for side in (q, k, v))
        return tritium.attention_forward(q * 2, k, v, scale=SCALE / 2, opt_mode="manual", op_type="int8") + 1

    compiled = torch.compile(model, backend=tritium.Backend())
    for _ in range(2):
        out = compiled(q, k, v)
        torch.testing.assert_close(out, model(q, k, v), rtol=0, atol=0)
    assert sqnr((out - 1).transpose(1, 2), exact(q, k, v, SCALE)) >= 25


def test_the_automatic_choice_may_take_it():
    """It passes the check of lossy providers."""
    q, k, v = inputs((1, 24, 1024, 1024))
    create = trial.with_outliers(OP.bind(q, k, v, None, SCALE, False))
    given = OP.bind(**create())
    assert trial.check_lossy(given)(eight_bits.run(given)) is None


def sparse_given(heads=3, queries=(1000, 77), keys=(1000, 77), density=0.5, dtype=torch.bfloat16):
    """Blocks of 128 of two segments; a block of queries sees nothing, and another one block, the last of a segment."""

    def edges(segments):
        starts = itertools.accumulate(segments, initial=0)
        places = [range(start, start + size, 128) for start, size in zip(starts, segments, strict=False)]
        return torch.tensor([*itertools.chain(*places), sum(segments)], dtype=torch.int32, device="cuda")

    q_edges, k_edges = edges(queries), edges(keys)
    generator = torch.Generator("cuda").manual_seed(0)
    mask = torch.rand(2, heads, len(q_edges) - 1, len(k_edges) - 1, generator=generator, device="cuda") < density
    mask[0, 1, 1] = False
    mask[1, 0, 0] = False
    mask[1, 0, 0, -2] = True
    counts, indices = block_sparse_attention.block_lists(mask, q_edges, k_edges, 128, causal=False)
    q, k, v = streams(sum(queries), sum(keys), batch=2, heads=heads, where="cuda", dtype=dtype)
    sides = (side.transpose(1, 2) for side in (q, k, v))
    return block_sparse_attention.OP.bind(*sides, counts, indices, q_edges, k_edges, 128, SCALE, False), mask


def sparse_truth(given, mask):
    """Dense attention in float64 with the mask of the blocks; zero where nothing is seen."""
    rows, columns = (edges.long().diff() for edges in (given.q_edges, given.k_edges))
    seen = mask.repeat_interleave(rows, 2).repeat_interleave(columns, 3)
    q, k, v = (side.transpose(1, 2).double() for side in (given.q, given.k, given.v))
    scores = (q @ k.mT * SCALE).masked_fill(~seen, -torch.inf)
    return (torch.softmax(scores, -1).nan_to_num() @ v).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("segments", [(1000, 77), (128, 128), (5, 300), (2560,)])
@pytest.mark.parametrize("density", [0.2, 0.6, 1.0])
def test_sparse_kernels_compute_their_definition(segments, density, dtype):
    given, mask = sparse_given(queries=segments, keys=segments, density=density, dtype=dtype)
    assert sparse_eight_bits.decline_int8(given) is None
    poison = [torch.full((1 << size,), 255, dtype=torch.uint8, device="cuda") for size in range(9, 24)]
    del poison
    out = block_sparse_attention.OP.overload(*vars(given).values(), provider="int8")
    defined, truth = sparse_eight_bits.rounded_sparse_attention(given), sparse_truth(given, mask)
    assert torch.equal(out.any(-1), truth.any(-1))
    for values, least in ((defined, AS_DEFINED), (truth, 25)):
        error = (out.double() - values.double()).square().sum()
        assert 10 * torch.log10(values.double().square().sum() / error) >= least
    for _ in range(5):
        assert torch.equal(block_sparse_attention.OP.overload(*vars(given).values(), provider="int8"), out)


def test_other_lists_than_queries_in_a_graph():
    """A captured graph reads the lists anew."""
    given, _ = sparse_given()
    by = functools.partial(block_sparse_attention.OP.overload, provider="int8")
    by(*vars(given).values())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = by(*vars(given).values())
    given.counts[..., 0].zero_()
    given.counts[..., 1].fill_(1)
    graph.replay()
    assert torch.equal(out, by(*vars(given).values()))
