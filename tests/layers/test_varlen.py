"""`attention_forward_varlen`: every segment by itself, against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tritium
from support.fidelity import assert_no_worse
from tritium.compat import attention as compat_attention
from tritium.errors import ArgumentError, ArgumentTypeError
from tritium.layers.attention import varlen


def stream(tokens, heads, width, seed, dtype=torch.float32):
    return torch.randn(tokens, heads, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def boundaries(lengths):
    return [sum(lengths[:count]) for count in range(len(lengths) + 1)]


def exact_of(q, k, v, cu_q, cu_k, *, scale=None, causal=False):
    """Token by token, in float64, from the definition."""
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    for segment in range(len(cu_q) - 1):
        own_k, own_v = (t[cu_k[segment] : cu_k[segment + 1]].double() for t in (k, v))
        for row in range(cu_q[segment], cu_q[segment + 1]):
            # The last query sees all keys, the one before it all but one.
            seen = own_k.shape[0] - (cu_q[segment + 1] - 1 - row) if causal else own_k.shape[0]
            for head in range(q.shape[1]):
                if seen > 0:
                    weights = (own_k[:seen, head // group] @ q[row, head].double() * scale).softmax(0)
                    out[row, head] = weights @ own_v[:seen, head // group]
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_unequal_segments(dtype, causal):
    q, k, v = stream(24, 3, 128, 0, dtype), stream(72, 3, 128, 1, dtype), stream(72, 3, 128, 2, dtype)
    cu_q, cu_k = [0, 7, 24], [0, 64, 72]
    exact = exact_of(q, k, v, cu_q, cu_k, causal=causal)
    for places in ((cu_q, cu_k), (torch.tensor(cu_q), torch.tensor(cu_k, dtype=torch.int32))):
        out = tritium.attention_forward_varlen(q, k, v, *places, causal=causal)
        assert_no_worse(out, exact.to(dtype), exact)
    # flash-attn's callers give the longest segments, by position.
    given = tritium.attention_forward_varlen(q, k, v, cu_q, cu_k, 17, 64, 0.0, None, causal)
    assert torch.equal(given, out)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    st.sampled_from([None, 0.5, 0.0, -0.5]),
)
def test_any_segments_of_any_heads(lengths, causal, heads, scale):
    cu_q, cu_k = (boundaries([pair[side] for pair in lengths]) for side in (0, 1))
    q, k, v = stream(cu_q[-1], heads[0], 8, 0), stream(cu_k[-1], heads[1], 8, 1), stream(cu_k[-1], heads[1], 4, 2)
    out = tritium.attention_forward_varlen(q, k, v, cu_q, cu_k, softmax_scale=scale, causal=causal)
    exact = exact_of(q, k, v, cu_q, cu_k, scale=scale, causal=causal)
    assert_no_worse(out, exact.float(), exact)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"window_size": (3, 0)}, ArgumentError, r"does not support window_size=\(3, 0\)"),
        ({"softcap": 1.0}, ArgumentError, "softcap=1.0"),
        ({"softcap": torch.ones(2)}, ArgumentError, "softcap=tensor"),
        ({"block_table": 1}, ArgumentError, "block_table=1"),
        ({"alibi_slopes": 1}, ArgumentError, "alibi_slopes=1"),
        ({"return_attn_probs": True}, ArgumentError, "return_attn_probs=True"),
        ({"dropout_p": 0.1}, ArgumentError, "dropout_p=0.1"),
        ({"softmax_scale": float("nan")}, ArgumentError, "scale must be a number, got nan"),
        ({"q": torch.ones(1, 7, 2, 8)}, ArgumentError, "q must have rank 3"),
        ({"q": torch.ones(7, 2, 8).half()}, ArgumentTypeError, "one dtype"),
        ({"k": torch.ones(7, 3, 8), "v": torch.ones(7, 3, 8)}, ArgumentError, "a multiple of the heads"),
        ({"k": torch.ones(7, 0, 8), "v": torch.ones(7, 0, 8)}, ArgumentError, "a multiple of the heads"),
        ({"cu_seqlens_q": [0, 6]}, ArgumentError, "end with the number of tokens, 7"),
        ({"cu_seqlens_q": [0, 5, 3, 7]}, ArgumentError, "not decrease"),
        ({"cu_seqlens_k": torch.tensor([1, 7])}, ArgumentError, "cu_seqlens_k must begin with 0"),
        ({"cu_seqlens_q": torch.tensor([0, 7 + 2**32])}, ArgumentError, "end with the number of tokens, 7"),
        ({"cu_seqlens_k": torch.tensor([0.0, 7.0])}, ArgumentError, "integers"),
        ({"cu_seqlens_k": [0, 3, 7]}, ArgumentError, "as many segments, got 1 and 2"),
        ({"max_seqlen_q": 6}, ArgumentError, "longer than max_seqlen_q=6"),
        ({"cu_seqlens_k": torch.tensor([0, 7]), "max_seqlen_k": 6}, ArgumentError, "longer than max_seqlen_k=6"),
    ],
)
def test_errors(changes, error, words):
    given = {name: torch.ones(7, 2, 8) for name in "qkv"} | {"cu_seqlens_q": [0, 7], "cu_seqlens_k": [0, 7]}
    with pytest.raises(error, match=words):
        tritium.attention_forward_varlen(**{**given, **changes})


def test_gradients_of_queries_that_see_nothing():
    q, k, v = (stream(tokens, 2, 8, seed).requires_grad_() for seed, tokens in enumerate((7, 3, 3)))
    out = tritium.attention_forward_varlen(q, k, v, [0, 7], [0, 3], causal=True)
    assert (out[:4] == 0).all()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert gradient.isfinite().all()


def test_streams_are_mapped_over():
    streams, cu = torch.randn(3, 7, 2, 8), torch.tensor([0, 3, 7])
    mapped = torch.vmap(lambda q: tritium.attention_forward_varlen(q, q, q, cu, cu, causal=True))(streams)
    for one, expected in zip(mapped, streams, strict=True):
        alone = tritium.attention_forward_varlen(expected, expected, expected, cu, cu, causal=True)
        torch.testing.assert_close(one, alone)


def test_parameters_without_an_effect_are_accepted():
    q = stream(7, 2, 8, 0)
    out = tritium.attention_forward_varlen(
        q, q, q, [0, 7], [0, 7], window_size=(-1, -1), softcap=0.0, deterministic=True, return_attn_probs=False
    )
    assert torch.equal(out, tritium.attention_forward_varlen(q, q, q, [0, 7], [0, 7]))


def test_boundaries_in_lists_that_vary():
    compiled = torch.compile(
        lambda q, ends: tritium.attention_forward_varlen(q, q, q, ends, ends), backend="aot_eager", fullgraph=True
    )
    for ends in ([0, 3, 7], [0, 4, 9], [0, 1, 8]):
        q = stream(ends[-1], 2, 8, 0)
        exact = exact_of(q, q, q, ends, ends)
        assert_no_worse(compiled(q, ends), exact.float(), exact)


def test_gradients_are_right_or_refused(recwarn):
    """As one operator of a graph it would lose them without a word."""

    def function(q):
        return tritium.attention_forward_varlen(q, q, q, [0, 3, 7], [0, 3, 7])

    q = stream(7, 2, 8, 0).double().requires_grad_()
    torch.autograd.gradcheck(function, (q,))
    assert not [warning for warning in recwarn if "autograd" in str(warning.message)]
    with pytest.raises(torch._dynamo.exc.Unsupported, match="computes no gradients inside of a compiled graph"):
        torch.compile(function, backend="aot_eager", fullgraph=True)(q)
    torch._dynamo.reset()
    # Without that promise the call is left out of the graph.
    torch.compile(function, backend="aot_eager")(q).sum().backward()
    assert q.grad is not None
    with torch.no_grad():
        assert torch.equal(torch.compile(function, backend="aot_eager", fullgraph=True)(q), function(q))


def test_one_graph_without_a_break():
    def function(q, k, cu):
        return tritium.attention_forward_varlen(q * 2, k, k, cu, cu, causal=True) + 1

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for ends in ([0, 3, 9], [0, 5, 11]):
        q, k = stream(ends[-1], 2, 8, 0), stream(ends[-1], 2, 8, 1)
        with torch.inference_mode(), torch._dynamo.config.patch(error_on_recompile=ends[-1] != 9):
            torch.testing.assert_close(compiled(q, k, torch.tensor(ends)), function(q, k, torch.tensor(ends)))
    operator = torch.ops.tritium.varlen_attention.default
    cu = torch.tensor([0, 4, 4, 11], dtype=torch.int32)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, (q, k, k, cu, cu, None, None, 0.5, True), test_utils=tests)


class TestKernels:
    """The choice on a GPU, with kernels that are replaced by PyTorch's attention."""

    @pytest.fixture
    def kernels(self, monkeypatch):
        names = []

        def by(name):
            def kernel(q, k, v, cu_q, cu_k, longest, scale, causal):
                assert cu_q.dtype == cu_k.dtype == torch.int32
                assert cu_q.is_contiguous()
                assert cu_k.is_contiguous()
                names.append((name, longest))
                return alone(q, k, v, cu_q, cu_k, scale, causal)

            return kernel

        alone = varlen.by_segment
        monkeypatch.setattr(varlen.device, "capability", lambda where: (9, 0))
        monkeypatch.setattr(compat_attention, "varlen_attention", by("flash"))
        monkeypatch.setattr(compat_attention, "nested_attention", by("nested"))
        return names

    @pytest.mark.parametrize(
        ("dtype", "width", "value_width", "who"),
        [
            (torch.bfloat16, 64, 64, "flash"),
            (torch.float16, 256, 256, "flash"),
            (torch.bfloat16, 64, 32, "nested"),
            (torch.float16, 512, 512, "nested"),
            (torch.float32, 64, 64, "nested"),
            (torch.float32, 36, 12, "nested"),
            (torch.bfloat16, 36, 36, None),
            (torch.float32, 63, 63, None),
            (torch.float64, 64, 64, None),
        ],
    )
    @pytest.mark.parametrize("causal", [False, True])
    def test_by_dtype_and_width(self, kernels, dtype, width, value_width, who, causal):
        q, k, v = stream(9, 4, width, 0, dtype), stream(12, 2, width, 1, dtype), stream(12, 2, value_width, 2, dtype)
        exact = exact_of(q, k, v, [0, 4, 4, 9], [0, 4, 6, 12], causal=causal)
        out = tritium.attention_forward_varlen(q, k, v, [0, 4, 4, 9], [0, 4, 6, 12], causal=causal)
        assert_no_worse(out, exact.to(dtype), exact)
        assert kernels == ([] if who is None else [(who, (5, 6))])

    @pytest.mark.parametrize(
        ("queries", "keys", "causal", "together"),
        [
            ([3, 2], [1, 5], False, True),
            ([3, 2], [1, 5], True, False),
            ([3, 2], [0, 5], False, False),
            ([0, 2], [0, 5], True, True),
        ],
    )
    def test_rows_without_keys_are_not_left_to_the_nested_kernel(self, kernels, queries, keys, causal, together):
        q, k = stream(sum(queries), 2, 8, 0), stream(sum(keys), 2, 8, 1)
        cu = boundaries(queries), boundaries(keys)
        exact = exact_of(q, k, k, *cu, causal=causal)
        assert_no_worse(tritium.attention_forward_varlen(q, k, k, *cu, causal=causal), exact.float(), exact)
        assert [name for name, _ in kernels] == ["nested"] * together

    def test_only_what_lies_at_multiples_of_16_bytes(self, kernels):
        wide = stream(8, 2, 16, 0)
        for q in (
            wide[..., 1:9],
            stream(8, 2, 9, 0)[..., :8],
            wide[..., ::2],
            wide.transpose(0, 2).contiguous().transpose(0, 2),
        ):
            tritium.attention_forward_varlen(q, q, q, [0, 8], [0, 8])
        assert not kernels
        tritium.attention_forward_varlen(*(wide[..., 4:12] for _ in range(3)), [0, 8], [0, 8])
        assert [name for name, _ in kernels] == ["nested"]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_boundaries_that_lie_apart(self, kernels, dtype):
        q = stream(8, 2, 8, 0, dtype)
        cu = torch.tensor([[0, 1], [5, 1], [8, 1]], dtype=torch.int32)[:, 0]
        exact = exact_of(q, q, q, [0, 5, 8], [0, 5, 8])
        assert_no_worse(tritium.attention_forward_varlen(q, q, q, cu, cu), exact.to(dtype), exact)
        assert len(kernels) == 1

    def test_more_segments_than_a_launch_takes(self, kernels, monkeypatch):
        monkeypatch.setattr(varlen, "MOST_NESTED", 2)
        q = stream(8, 2, 8, 0)
        for cu, together in (([0, 5, 8], 1), ([0, 5, 6, 8], 0)):
            kernels.clear()
            exact = exact_of(q, q, q, cu, cu)
            assert_no_worse(tritium.attention_forward_varlen(q, q, q, cu, cu), exact.float(), exact)
            assert len(kernels) == together

    def test_no_gradients_are_lost(self, kernels):
        q = stream(8, 2, 8, 0).requires_grad_()
        tritium.attention_forward_varlen(q, q, q, [0, 8], [0, 8]).sum().backward()
        assert not kernels
        assert q.grad is not None
        torch.vmap(lambda q: tritium.attention_forward_varlen(q, q, q, [0, 8], [0, 8]))(torch.randn(3, 8, 2, 8))
        assert not kernels

    def test_a_segment_that_is_longer_than_said_is_told(self, kernels):
        q = stream(8, 2, 8, 0)
        cu = torch.tensor([0, 8])
        with pytest.raises(ArgumentError, match="longer than max_seqlen_q=5"):
            tritium.attention_forward_varlen(q, q, q, cu, cu, 5, 8)

    def test_a_version_without_a_kernel_is_not_asked(self, kernels, monkeypatch):
        monkeypatch.setattr(compat_attention, "nested_attention", lambda *arguments: None)
        q, k = stream(5, 2, 8, 0), stream(6, 2, 8, 1)
        exact = exact_of(q, k, k, [0, 5], [0, 6])
        assert_no_worse(tritium.attention_forward_varlen(q, k, k, [0, 5], [0, 6]), exact.float(), exact)
        assert not kernels


class TestVersionsOfPytorch:
    """The kernels are called with the parameters that this version of PyTorch has."""

    def streams(self, heads=(2, 2), *, grad=False):
        q, k = stream(5, heads[0], 8, 0).requires_grad_(grad), stream(6, heads[1], 8, 1)
        return q, k, k, torch.tensor([0, 5]), torch.tensor([0, 6]), (5, 6), 0.5

    def flash(self, monkeypatch, function, *, heads=(2, 2), causal=False, grad=False):
        monkeypatch.setattr(compat_attention, "_varlen", lambda: function)
        return compat_attention.varlen_attention(*self.streams(heads, grad=grad), causal)

    def test_flash_without_grouped_heads(self, monkeypatch):
        def function(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
            assert (max_q, max_k, scale) == (5, 6, 0.5)
            windows.append(window_size)
            return q

        windows = []
        for causal in (False, True):
            assert self.flash(monkeypatch, function, heads=(4, 2), causal=causal) is not None
        assert windows == [(-1, -1), (-1, 0)]
        # Their gradients are not known to be right.
        assert self.flash(monkeypatch, function, heads=(4, 2), grad=True) is None
        assert self.flash(monkeypatch, function, heads=(2, 2), grad=True) is not None

    def test_flash_with_grouped_heads(self, monkeypatch):
        def function(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
            grouped.append(enable_gqa)
            return q, None

        grouped = []
        for heads, grad in (((4, 2), True), ((2, 2), False)):
            assert isinstance(self.flash(monkeypatch, function, heads=heads, grad=grad), torch.Tensor)
        assert grouped == [True, False]

    def test_without_flash(self, monkeypatch):
        assert self.flash(monkeypatch, None) is None

    @pytest.mark.parametrize(("heads", "expanded"), [((2, 2), False), ((4, 2), False), ((4, 4), True)])
    def test_nested_attention(self, monkeypatch, heads, expanded):
        def operator(q, k, v, bias, cu_q, cu_k, max_q, max_k, dropout, kind, wants_sums, *, scale):
            assert (bias, max_q, max_k, dropout, kind, wants_sums, scale) == (None, 5, 6, 0.0, 2, False, 0.5)
            assert q.shape[:3] == (1, 5, heads[0])
            assert k.shape[:3] == v.shape[:3] == (1, 6, heads[0])
            assert k.stride(2) == v.stride(2) == 8
            return q, None

        monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", operator, raising=False)
        q, k, _, *rest = self.streams((heads[0], 1 if expanded else heads[1]))
        k = k.expand(-1, heads[1], -1)
        assert compat_attention.nested_attention(q, k, k, *rest, True).shape == (5, heads[0], 8)

    @pytest.mark.parametrize(
        ("words", "is_raised"),
        [
            ("cutlassF: no kernel found to launch!", False),
            ("USE_MEM_EFF_ATTENTION was not enabled for build.", False),
            ("CUDA error: misaligned address", True),
        ],
    )
    def test_nested_attention_without_a_kernel(self, monkeypatch, words, is_raised):
        def operator(*arguments, scale):
            raise RuntimeError(words)

        monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", operator, raising=False)
        if is_raised:
            with pytest.raises(RuntimeError, match=words):
                compat_attention.nested_attention(*self.streams(), True)
        else:
            assert compat_attention.nested_attention(*self.streams(), True) is None
