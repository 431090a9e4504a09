"""Layer functions on a real GPU. Run with -m gpu."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import tritium
from support.fidelity import assert_no_worse
from support.small_models import flux, flux_inputs
from tritium import ops, tuning
from tritium.layers import eager
from tritium.layers.attention import varlen
from tritium.layers.attention.varlen import by_segment
from tritium.layers.sparse import masks
from tritium.layers.sparse.forward import attend, lists_of
from tritium.layers.sparse.layout import SparseLayout
from tritium.ops.attention import OP, attention_math

pytestmark = pytest.mark.gpu

HALF = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, tmp_path):
    monkeypatch.setattr(tuning.tables, "user_folder", lambda: tmp_path)
    monkeypatch.setattr(eager, "_CHOSEN", {})
    tuning.forget()


def qkv(queries=300, keys=300, heads=4, kv_heads=None, width=64, batch=2, dtype=torch.bfloat16):
    """Tokens before heads."""
    generator = torch.Generator("cuda").manual_seed(1)

    def random(tokens, heads):
        return torch.randn(batch, tokens, heads, width, generator=generator, device="cuda").to(dtype)

    return random(queries, heads), *(random(keys, kv_heads or heads) for _ in range(2))


def heads_first(*tensors):
    return [tensor.transpose(1, 2) for tensor in tensors]


def compare(out, q, k, v, mask=None, *, causal=False, where=""):
    """Against float64, with the definition in the tensors' own dtype as the yardstick; heads first."""
    scale = q.shape[-1] ** -0.5
    wide = [t.double() if t is not None and t.is_floating_point() else t for t in (q, k, v, mask)]
    exact = attention_math(*wide, scale, causal)
    assert_no_worse(out, attention_math(q, k, v, mask, scale, causal), exact, where)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("form", ["plain", "causal", "keep", "keep rows", "add", "grouped", "across", "wide"])
def test_every_provider_computes_what_it_does_not_decline(dtype, form):
    sizes = {"across": {"keys": 77}, "grouped": {"kv_heads": 2}, "wide": {"width": 512, "heads": 1}}.get(form, {})
    q, k, v = heads_first(*qkv(dtype=dtype, **sizes))
    keep = torch.rand(2, 4, 300, 300, device="cuda") < 0.7
    keep[..., 0] = True
    mask = {"keep": keep, "keep rows": keep[:, :1, :1], "add": torch.randn(1, 4, 300, 300, device="cuda").to(dtype)}
    mask, causal = mask.get(form), form == "causal"
    given = OP.bind(q, k, v, mask, q.shape[-1] ** -0.5, causal)
    exact = {name: provider for name, provider in ops.providers(OP).items() if not provider.lossy}
    ran, able = [], {name for name, provider in exact.items() if provider.decline(given) is None}
    for name in able:
        try:
            out = ops.providers(OP)[name].run(given)
        except (RuntimeError, torch.OutOfMemoryError):
            # A kernel may have more reasons: a measurement drops it.
            continue
        assert out.stride() == OP.fake(**vars(given)).stride(), name
        compare(out, q, k, v, mask, causal=causal, where=name)
        ran.append(name)
    assert {"sdpa", "math", "chunked", *({"flex"} & able)} <= set(ran)


@torch.inference_mode()
def test_the_choice_is_the_fastest_that_was_measured():
    q, k, v = qkv(4096, 4096, 8, width=128)
    out = tritium.attention_forward(q, k, v)
    compare(*heads_first(out, q, k, v))
    (verdict,) = tuning.verdicts()
    assert {"sdpa", "cudnn", "flash", "efficient"} <= set(verdict.ms)
    assert verdict.ms[verdict.provider] <= 1.02 * min(verdict.ms.values())
    assert verdict.ms[verdict.provider] <= verdict.ms["sdpa"]


@torch.inference_mode()
@pytest.mark.parametrize("op_type", [None, "sdpa", "cudnn", "flash", "efficient", "math", "flex"])
def test_compiled_by_inductor_without_a_break(op_type):
    def function(q, k, v):
        options = {} if op_type is None else {"opt_mode": "manual", "op_type": op_type}
        return tritium.attention_forward(q * 2, k, v, **options) + 1

    compiled = torch.compile(function, fullgraph=True)
    for tokens in (300, 400):
        q, k, v = qkv(tokens)
        torch.testing.assert_close(compiled(q, k, v), function(q, k, v), rtol=2e-2, atol=2e-2)


@torch.inference_mode()
def test_a_captured_graph_measures_nothing():
    q, k, v = qkv()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    tritium.attention_forward(q, k, v, opt_mode="static")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tritium.attention_forward(q, k, v, opt_mode="static")
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        out = tritium.attention_forward(q, k, v)
    graph.replay()
    assert not tuning.verdicts()
    compare(*heads_first(out, q, k, v))


@torch.inference_mode()
def test_a_stock_model_is_served_and_compiled():
    model = flux().to("cuda", torch.bfloat16)
    inputs = {
        name: value.to("cuda", torch.bfloat16)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in flux_inputs().items()
    }
    inputs = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    plain = model(**inputs)[0]
    with tritium.set_attention(model):
        torch.testing.assert_close(model(**inputs)[0], plain, rtol=5e-2, atol=5e-2)
        compiled = torch.compile(model, fullgraph=True)
        torch.testing.assert_close(compiled(**inputs)[0], plain, rtol=5e-2, atol=5e-2)


# Where segments of queries and of keys begin and end.
SEGMENTS = {
    "more keys": ([0, 76, 76, 124], [0, 164, 200, 300]),
    "no keys for some": ([0, 50, 60, 124], [0, 164, 164, 300]),
    "more queries": ([0, 20, 123, 124], [0, 250, 299, 300]),
}


def segments_as_by_one(q, k, v, cu_q, cu_k, causal):
    """`attention_forward_varlen` against float64, with the boundaries given in every way."""
    places = [torch.tensor(cu, dtype=torch.int32, device="cuda") for cu in (cu_q, cu_k)]
    longest = [max(end - start for start, end in itertools.pairwise(cu)) for cu in (cu_q, cu_k)]
    exact = by_segment(*(t.double() for t in (q, k, v)), *places, q.shape[-1] ** -0.5, causal)
    eager = by_segment(q, k, v, *places, q.shape[-1] ** -0.5, causal)
    for given in ((cu_q, cu_k), places, (*places, *longest)):
        assert_no_worse(tritium.attention_forward_varlen(q, k, v, *given, causal=causal), eager, exact)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("segments", SEGMENTS)
def test_segments(dtype, causal, kv_heads, segments):
    for width, value_width in ((64, 64), (36, 36), (60, 12), (512, 512), (63, 63), (128, 64)):
        q, k, v = (t[0] for t in qkv(124, 300, kv_heads=kv_heads, batch=1, width=width, dtype=dtype))
        segments_as_by_one(q, k, v[..., :value_width], *SEGMENTS[segments], causal)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_segments_that_begin_anywhere_in_memory(dtype):
    q, k, v = (t[0, ..., 1:65] for t in qkv(124, 300, batch=1, width=72, dtype=dtype))
    segments_as_by_one(q, k, v, *SEGMENTS["more keys"], causal=True)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_segments_are_computed_together(monkeypatch, dtype, causal, kv_heads):
    def never(*arguments):
        raise AssertionError("one segment after the other")

    monkeypatch.setattr(varlen, "by_segment", never)
    for width in (64, 128, 512):
        q, k, v = (t[0] for t in qkv(124, 300, kv_heads=kv_heads, batch=1, width=width, dtype=dtype))
        tritium.attention_forward_varlen(q, k, v, *SEGMENTS["more keys"], causal=causal)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("block", [64, 128])
def test_sparse_kernels(dtype, width, block):
    layout = SparseLayout((3, 20, 22), 77, block)
    q, k, v = qkv(layout.tokens, layout.tokens, kv_heads=2, width=width, dtype=dtype)
    mask = masks.rainfusion(q, k, layout, layout, width**-0.5, 0.7)
    mask[0, 0, 5] = False
    given = (lists_of(mask, layout, layout, 2), layout, layout, width**-0.5)
    exact = attend(*(t.double() for t in (q, k, v)), *given, by="reference")
    eager = attend(q, k, v, *given, by="reference")
    for by in ("triton", "flex", None):
        assert_no_worse(attend(q, k, v, *given, by=by), eager, exact, str(by))


@torch.inference_mode()
@pytest.mark.parametrize("sparse_type", ["rf_v2", "rf_v3", "ada_bsa", "radial"])
@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
def test_sparsity_0_is_dense_at_full_size(sparse_type, layout):
    q, k, v = qkv(9600, 9600, 3, width=128, batch=1, dtype=torch.float16)
    exact, eager = (
        F.scaled_dot_product_attention(*heads_first(*(t.to(dtype) for t in (q, k, v)))).transpose(1, 2)
        for dtype in (torch.float64, torch.float16)
    )
    if layout == "BNSD":
        q, k, v, exact, eager = heads_first(q, k, v, exact, eager)
    out = tritium.sparse_attention(
        q, k, v, input_layout=layout, sparse_type=sparse_type, latent_shape_q=(3, 40, 80), sparsity=0.0
    )
    assert_no_worse(out, eager, exact)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("mode", ["runtime", "static"])
@pytest.mark.parametrize(("width", "queries"), [(64, 300), (100, 7), (128, 300), (256, 300)])
def test_a_mask_in_float32_is_not_rounded(dtype, mode, width, queries):
    q, k, v = qkv(queries, width=width, dtype=dtype)
    mask = 30 * torch.randn(queries, 300, device="cuda")
    out = tritium.attention_forward(q, k, v, mask, opt_mode=mode)
    compare(*heads_first(out, q, k, v), mask[None, None])
    if mode == "runtime":
        # Whichever is fastest, FlexAttention did not fail.
        (verdict,) = tuning.verdicts()
        assert "flex" in verdict.ms


@torch.inference_mode()
def test_under_autocast_as_pytorch():
    q, k, v = qkv(dtype=torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        out = tritium.attention_forward(q, k, v)
    assert out.dtype == torch.bfloat16
    compare(*heads_first(out, *(t.bfloat16() for t in (q, k, v))))


@torch.inference_mode()
def test_heads_that_lie_apart():
    q, k, v = (t.transpose(1, 3).contiguous().transpose(1, 3) for t in qkv())
    for mode in ("static", "runtime"):
        compare(*heads_first(tritium.attention_forward(q, k, v, opt_mode=mode), q, k, v))


@torch.inference_mode()
def test_sparse_attention_compiled_by_inductor():
    def function(q, k, v):
        return tritium.sparse_attention(
            q, k, v, input_layout="BSND", sparse_type="rf_v2", latent_shape_q=(5, 16, 24), txt_len=100, sparsity=0.6
        )

    q, k, v = qkv(5 * 16 * 24 + 100, 5 * 16 * 24 + 100)
    out = torch.compile(function, fullgraph=True)(q, k, v)
    torch.testing.assert_close(out, function(q, k, v), rtol=2e-2, atol=2e-2)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_layer_functions(dtype):
    generator = torch.Generator("cuda").manual_seed(2)

    def random(*shape):
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    x, scale, shift = random(2, 63, 100), random(2, 100), random(2, 1, 100)
    norm = torch.nn.LayerNorm(100).to("cuda", dtype)
    exact = F.layer_norm(x.double(), (100,)) * (1 + scale.double()[:, None]) + shift.double()
    assert_no_worse(tritium.layernorm_scale_shift(norm, x, scale, shift), exact.to(dtype), exact)
    q, cos, sin = random(2, 63, 3, 64), random(63, 64), random(63, 64)
    first, second = q.double().chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    exact = q.double() * cos.double()[None, :, None] + turned * sin.double()[None, :, None]
    assert_no_worse(tritium.rotary_position_embedding(q, cos, sin), exact.to(dtype), exact)
    exact = F.rms_norm(q.double(), (64,), eps=1e-6)
    assert_no_worse(tritium.RMSNorm(64).to("cuda", dtype)(q), exact.to(dtype), exact)
    exact = q.double() * 0.5 + q.double()
    assert_no_worse(tritium.muls_add(q, q, 0.5), exact.to(dtype), exact)
    image = random(2, 32, 9, 16)
    exact = F.silu(F.group_norm(image.double(), 8))
    assert_no_worse(tritium.group_norm_silu(image, 8), exact.to(dtype), exact)
