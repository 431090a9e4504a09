"""Attention in 8 bits: the errors of its definition on inputs like those of trained models, and what it declines."""

import pytest
import torch

from support.attention_streams import exact, sqnr, streams
from tritium import ops
from tritium.artifacts import digest
from tritium.errors import ProviderError
from tritium.layers import choose
from tritium.ops import block_sparse_attention, cuda_launch
from tritium.ops.attention import OP, eight_bits, trial
from tritium.ops.attention.rounded import LINES, TILE, by_lines, edges_of, has_lines, rounded_attention, rounded_tiles
from tritium.ops.block_sparse_attention import eight_bits as sparse_eight_bits
from tritium.ops.quantize_rows import FP8

# Registers the operators.
PROVIDERS = ops.providers(ops.catalog()["attention"])

SIZES = [(1, 1), (7, 63), (63, 7), (100, 129), (129, 100), (63, 2 * TILE)]


@pytest.mark.parametrize("kind", ["normal", "outliers", "heavy tails"])
@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_it_holds_25_db(kind, queries, keys):
    q, k, v = streams(queries, keys, kind=kind)
    assert sqnr(rounded_attention(q, k, v, 128**-0.5), exact(q, k, v, 128**-0.5)) > 25


@pytest.mark.parametrize("kind", ["outliers", "heavy tails"])
def test_rotated_heads_lose_less(kind):
    q, k, v = streams(256, 512, kind=kind)
    truth = exact(q, k, v, 128**-0.5)
    plain, rotated = (sqnr(rounded_attention(q, k, v, 128**-0.5, rotate=group), truth) for group in (0, 64))
    assert rotated > plain + 1


def test_long_sequences_lose_nothing():
    q, k, v = streams(16, 40_000, 64, heads=1)
    assert sqnr(rounded_attention(q, k, v, 0.125), exact(q, k, v, 0.125)) > 27


def test_channels_of_very_different_size():
    """A channel of zeros, and one whose values differ by 10^4 from key to key."""
    q, k, v = streams(63, 333)
    v[..., 0] = 0
    v[..., 1] *= 1e4
    v[:, :, ::2, 2] *= 1e4
    out = rounded_attention(q, k, v, 128**-0.5)
    assert not out[..., 0].any()
    truth = exact(q, k, v, 128**-0.5)
    for channel in (slice(1, 2), slice(2, 3), slice(3, None)):
        assert sqnr(out[..., channel], truth[..., channel]) > 20


def test_nan_in_a_query_stays_in_its_row():
    q, k, v = streams(63, 333)
    expected = rounded_attention(q, k, v, 0.1)
    q[0, 1, 7, 3] = torch.nan
    out = rounded_attention(q, k, v, 0.1)
    assert out[0, 1, 7].isnan().all()
    out[0, 1, 7] = expected[0, 1, 7]
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@pytest.mark.parametrize("width", [128, 64, 40, 63])
def test_on_a_cpu_the_definition_computes(width):
    q, k, v = streams(63, 100, width, dtype=torch.float32)
    out = OP.overload(q, k, v, None, width**-0.5, False, provider="int8")
    assert out.stride() == OP.reference(q, k, v, None, width**-0.5, False).stride()
    torch.testing.assert_close(out, rounded_attention(q, k, v, width**-0.5), rtol=0, atol=0)
    assert sqnr(out, exact(q, k, v, width**-0.5)) > 27


def test_lossy_providers():
    assert {name for name, provider in PROVIDERS.items() if provider.lossy} == {"sage", "int8"}
    q = streams(63, 63, 64)[0]
    given = OP.bind(q, q, q, None, 0.125, False)
    assert ops.declines(OP, given)["int8"] == ops.LOSSY
    assert ops.declines(OP, given, lossy=True)["int8"] is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mask": torch.ones(1, 1, 1, 63, dtype=torch.bool)}, "no mask"),
        ({"causal": True}, "no causality"),
        ({"k": streams(63, 63, 64, heads=1)[1], "v": streams(63, 63, 64, heads=1)[2]}, "as many heads"),
        ({"scale": -1.0}, "scale above 0"),
        ({"q": streams(0, 63, 64)[0]}, "nothing to compute"),
        ({"q": streams(63, 63, 64)[0].requires_grad_()}, "no gradients"),
        ({side: streams(63, 63, 64)[0].to(FP8) for side in "qkv"}, "float8"),
        ({"k": streams(63, 63, 64)[1].float()}, "one dtype"),
    ],
)
def test_declines(changes, reason):
    q, k, v = streams(63, 63, 64)
    given = OP.bind(**{"q": q, "k": k, "v": v, "mask": None, "scale": 0.125, "causal": False} | changes)
    assert reason in eight_bits.decline(given)


def test_measured_inputs_have_the_dtypes_of_the_call():
    given = OP.bind(*streams(8, 16), None, 0.1, False)
    made = trial.with_outliers(given)()
    assert {made[name].dtype for name in "qkv"} == {torch.bfloat16}
    assert made["k"][..., 5].mean() > 25


def test_kernels_decline(monkeypatch):
    def reason(*, width=128, dtype=torch.bfloat16, heads=2, capability=(9, 0)):
        monkeypatch.setattr(eight_bits.device, "capability", lambda where: capability)
        q = torch.empty(1, heads, 1, width, dtype=dtype)
        return eight_bits.decline_on_a_gpu(OP.bind(q, q, q, None, 0.1, False))

    assert "128 wide" in reason(width=64)
    assert "float16 and bfloat16" in reason(dtype=torch.float32)
    assert "65,535" in reason(heads=65_536)
    assert reason(capability=(8, 9)) == "it needs a Hopper GPU, this one has capability 8.9"
    assert reason(capability=(10, 0)) == "it needs a Hopper GPU, this one has capability 10.0"
    monkeypatch.setattr(eight_bits.nvrtc, "library", lambda: None)
    assert "NVRTC" in reason()
    monkeypatch.setattr(eight_bits.nvrtc, "library", object)

    def fail(*arguments, **options):
        raise ProviderError("NVRTC cannot compile it")

    monkeypatch.setattr(eight_bits, "loaded", fail)
    assert reason() == "NVRTC cannot compile it"


def test_heads_that_kernels_cannot_read_are_copied():
    whole = torch.randn(2, 100, 3, 136, dtype=torch.bfloat16).transpose(1, 2)
    taken = whole[..., 8:]
    assert eight_bits.aligned(taken) is taken
    for other in (whole[..., 4:132], torch.randn(1, 1, 128, 7).mT, torch.randn(1, 2, 9, 129)[..., :128]):
        copy = eight_bits.aligned(other)
        assert copy.is_contiguous()
        assert torch.equal(copy, other)
    # The strides of dims of one element are not read.
    one = torch.randn(256).as_strided((1, 1, 2, 128), (3, 5, 128, 1))
    assert eight_bits.aligned(one) is one


def test_the_kernels_text_is_part_of_every_cache_key():
    assert eight_bits.SOURCE in digest.package_files()
    assert eight_bits.SOURCE in ops.files()


def test_consecutive_tiles_are_the_dense_definition():
    q, k, v = streams(300, 333)
    tiles = [list(range(3))] * 3
    out = rounded_tiles(q, k, v, 0.1, edges=(edges_of(300), edges_of(333)), visits=[[tiles] * 2] * 2)
    torch.testing.assert_close(out, rounded_attention(q, k, v, 0.1), rtol=0, atol=0)


def sparse_samples(dtype):
    for sample in block_sparse_attention.OP.samples(dtype, "cpu"):
        given = block_sparse_attention.OP.bind(**sample.arguments)
        if sparse_eight_bits.decline_int8(given) is None:
            yield sample.label, given


def test_sparse_attention_holds_25_db():
    labels = set()
    for label, given in sparse_samples(torch.float32):
        labels.add(label)
        out, truth = sparse_eight_bits.run_int8(given), block_sparse_attention.reference(**vars(given))
        # Rows that see nothing are zero, and no other is.
        assert torch.equal(out.any(-1), truth.any(-1)), label
        if truth.any():
            error = (out - truth).double().square().sum()
            assert 10 * torch.log10(truth.double().square().sum() / error) > 25, label
    assert {"blocks of 128", "some queries see nothing", "nobody sees anything", "heads first in memory"} <= labels


def test_sparse_attention_by_int8_is_used_by_name():
    given = next(given for label, given in sparse_samples(torch.float32) if label == "blocks of 128")
    op = block_sparse_attention.OP
    assert ops.declines(op, given)["int8"] == ops.LOSSY
    assert choose.choose(op, given, "int8") == choose.choose(op, given, "lossy:int8") == "int8"
    assert choose.choose(op, given, "runtime") != "int8"


@pytest.mark.parametrize(
    ("label", "changes", "reason"),
    [
        ("causal", {}, "no causality"),
        ("fewer heads of keys", {}, "as many heads"),
        ("no queries", {}, "nothing to compute"),
        ("blocks of 128", {"block": 256}, "up to 128 tokens, got 256"),
        ("blocks of 128", {"scale": 0.0}, "scale above 0"),
        ("blocks of 128", {"counts": torch.zeros(1, 2, 3, 2, dtype=torch.int64)}, "int32"),
    ],
)
def test_sparse_declines(label, changes, reason):
    samples = {sample.label: sample.arguments for sample in block_sparse_attention.OP.samples(torch.float32, "cpu")}
    given = block_sparse_attention.OP.bind(**{**samples[label], **changes})
    assert reason in sparse_eight_bits.decline_int8(given)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_launches_have_the_arguments_of_their_signatures(monkeypatch, is_sparse):
    launched = []

    class Recorded:
        def __init__(self, kernel):
            self.kernel = kernel

        def launch(self, grid, *arguments):
            cuda_launch.packed(self.kernel.signature, arguments)
            launched.append((self.kernel.name, grid))

    kernels = {kernel.name: Recorded(kernel) for kernel in eight_bits.LISTED_KERNELS if is_sparse}
    kernels |= {kernel.name: Recorded(kernel) for kernel in eight_bits.KERNELS if not is_sparse}
    monkeypatch.setattr(eight_bits, "loaded", lambda *arguments, **options: kernels)
    if is_sparse:
        given = next(given for label, given in sparse_samples(torch.float32) if label == "blocks of 128")
        assert sparse_eight_bits.launch(given).shape == given.q.shape
        blocks = 2 * 3
    else:
        assert eight_bits.attend(*streams(300, 400), 0.1).shape == (2, 2, 300, 128)
        blocks = 4 * 3
    assert [name for name, _ in launched] == [*(kernel.name for kernel in eight_bits.STORING), "attend"]
    assert launched[-1] == ("attend", (blocks, 1, 1))


def test_exponentials_from_lines():
    exponents = torch.linspace(-9, 8.8, 20_001)
    errors = by_lines(exponents, torch.zeros(())).float() / exponents.exp2() - 1
    assert errors.abs().max() < 0.017
    assert not by_lines(torch.tensor([-torch.inf, -1e6, -11.5]), torch.zeros(())).to(FP8).float().any()
    assert has_lines(16, 128, torch.device("cpu")).float().mean() == LINES / 16
