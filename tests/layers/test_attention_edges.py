"""Attention where it is easily wrong: masks wider than queries, rows that see no key, autocast, empty sizes, threads."""

import math
import threading

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import tritium
from support.fidelity import assert_no_worse
from tritium import ops
from tritium.ops.attention import OP, rule, trial
from tritium.ops.attention.providers import tile_for_a_wide_mask

HALF = [torch.bfloat16, torch.float16]
WAYS = [
    {},
    {"fused": False},
    *({"opt_mode": "manual", "op_type": name} for name in ("sdpa", "math", "chunked")),
]


def qkv(dtype=torch.float32, queries=7, keys=63):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, tokens, 2, 16, generator=generator).to(dtype) for tokens in (queries, keys, keys)]


def exact_of(q, k, v, mask=None):
    wide = [t.double().transpose(1, 2) for t in (q, k, v)]
    mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    return F.scaled_dot_product_attention(*wide, mask).transpose(1, 2)


class TestWideMasks:
    """Rounded to the dtype of the query, a mask is another one."""

    @pytest.mark.parametrize("options", WAYS, ids=str)
    @pytest.mark.parametrize("dtype", HALF)
    @pytest.mark.parametrize("wide", [torch.float32, torch.float64])
    @pytest.mark.parametrize("mask", ["large", "far away", "the least number"])
    def test_against_float64(self, dtype, wide, mask, options):
        q, k, v = qkv(dtype)
        bias = torch.randn(7, 63, generator=torch.Generator().manual_seed(2)) * 30
        if mask == "far away":
            bias = torch.full((7, 63), -1e5)
        if mask == "the least number":
            # Of finite numbers: every key is seen alike, where minus infinity would hide them all.
            bias[3] = torch.finfo(wide if wide == torch.float32 else torch.float32).min
        exact = exact_of(q, k, v, bias)
        assert_no_worse(tritium.attention_forward(q, k, v, bias.to(wide), **options), exact.to(dtype), exact)

    def test_a_float64_mask_that_hides(self):
        q, k, v = qkv()
        mask = torch.zeros(7, 63, dtype=torch.float64)
        mask[:, 5:] = -math.inf
        mask[3] = torch.finfo(torch.float64).min
        exact = exact_of(q, k, v, mask.clamp(min=-1e30).masked_fill(mask == -math.inf, -math.inf))
        assert_no_worse(tritium.attention_forward(q, k, v, mask), exact.float(), exact)

    def test_a_verdict_for_one_is_not_the_other_s(self):
        q, k, v = (t.transpose(1, 2) for t in qkv(torch.bfloat16))
        mask = torch.zeros(1, 1, 7, 63)
        wide, narrow = (OP.trial.shape(OP.bind(q, k, v, m, 1.0, False)) for m in (mask, mask.bfloat16()))
        assert wide != narrow

    def test_on_a_gpu_kernels_decline_it_and_others_do_not(self, monkeypatch):
        monkeypatch.setattr(trial.device, "capability", lambda where: (9, 0))
        with FakeTensorMode():
            q = torch.empty(1, 64, 2, 16, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            given = OP.bind(q, q, q, torch.zeros(1, 1, 1, 64, device="cuda"), 0.25, False)
        able = {name for name, provider in ops.providers(OP).items() if provider.decline(given) is None}
        assert able == {"math", "chunked", "flex"}
        assert rule(given) == "flex"
        q.requires_grad_()
        assert rule(given) == "chunked"

    @pytest.mark.parametrize("room", [101_376, 166_912, 232_448])
    @pytest.mark.parametrize("width", [16, 64, 100, 128, 256])
    def test_tiles_leave_room_for_it(self, width, room):
        """Of GPUs with the least, a usual and the most shared memory."""
        queries, keys, stages, _ = tile_for_a_wide_mask(width, width, 2, room)
        held = 1 << (width - 1).bit_length()
        assert queries * held * 2 + stages * (keys * 2 * held * 2 + queries * keys * 4) <= room
        # FlexAttention has blocks of 128.
        assert 128 % queries == 128 % keys == 0


@pytest.mark.parametrize("apart", [False, True])
def test_kernels_take_heads_with_contiguous_elements(apart):
    with FakeTensorMode():
        q = torch.empty(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
        given = OP.bind(*[q.transpose(2, 3) if apart else q] * 3, None, 0.25, False)
    declined = {name for name in ("cudnn", "flash", "efficient", "sdpa") if ops.providers(OP)[name].decline(given)}
    assert declined == ({"cudnn", "flash", "efficient"} if apart else set())


@pytest.mark.parametrize("shape", [(7, 1), (1, 2, 7, 1)])
def test_a_mask_of_one_value_per_query(shape):
    q, k, v = qkv()
    mask = torch.randn(shape)
    exact = exact_of(q, k, v, mask.expand(*shape[:-1], 63))
    assert_no_worse(tritium.attention_forward(q, k, v, mask), exact.float(), exact)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_a_mask_in_one_graph(dtype):
    q, k, v = qkv(torch.bfloat16)
    mask = (torch.arange(63) < 40).expand(7, 63)
    mask = mask if dtype == torch.bool else torch.where(mask, 0.0, -math.inf).to(dtype)
    compiled = torch.compile(tritium.attention_forward, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(q, k, v, mask), tritium.attention_forward(q, k, v, mask))


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("empty", ["batch", "queries", "keys", "heads", "width", "value width"])
def test_a_size_of_zero(empty, options):
    sizes = {"batch": 2, "queries": 5, "keys": 6, "heads": 3, "width": 8, "value width": 4} | {empty: 0}
    q = torch.randn(sizes["batch"], sizes["queries"], sizes["heads"], sizes["width"])
    k = torch.randn(sizes["batch"], sizes["keys"], sizes["heads"], sizes["width"])
    v = torch.randn(sizes["batch"], sizes["keys"], sizes["heads"], sizes["value width"])
    out = tritium.attention_forward(q, k, v, **options)
    assert out.shape == (sizes["batch"], sizes["queries"], sizes["heads"], sizes["value width"])


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_gradients_of_rows_that_see_nothing(options):
    q, k, v = (t.requires_grad_() for t in qkv())
    mask = torch.zeros(7, 63)
    mask[3] = -math.inf
    out = tritium.attention_forward(q, k, v, mask, **options)
    gradients = torch.autograd.grad(out[:, [0, 1, 2, 4, 5, 6]].sum(), (q, k, v))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][:, 3] == 0).all()


class TestAutocast:
    """As PyTorch's own attention has it: in autocast's dtype, whoever computes; and float32 inside is float32."""

    @pytest.mark.parametrize("options", WAYS, ids=str)
    @pytest.mark.parametrize("masked", [False, True])
    def test_dtype_and_error(self, options, masked):
        q, k, v = qkv()
        mask = torch.randn(7, 63, generator=torch.Generator().manual_seed(3)) if masked else None
        q = q * 5
        with torch.autocast("cpu", torch.bfloat16):
            out = tritium.attention_forward(q, k, v, mask, **options)
            own = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), mask).transpose(1, 2)
        assert out.dtype == own.dtype == torch.bfloat16
        exact = exact_of(*(t.bfloat16() for t in (q, k, v)), None if mask is None else mask.bfloat16())
        assert_no_worse(out, exact.bfloat16(), exact)

    def test_segments_and_blocks(self):
        q, k, v = (5 * t for t in qkv(queries=64, keys=64))
        exact = exact_of(*(t.bfloat16() for t in (q, k, v)))
        options = {"input_layout": "BSND", "sparse_type": "radial", "latent_shape_q": (1, 8, 8), "block_size": 16}
        narrow = [t.bfloat16() for t in (q, k, v)]
        plain = tritium.sparse_attention(*narrow, **options, sparsity=0.5)
        with torch.autocast("cpu", torch.bfloat16):
            segments = tritium.attention_forward_varlen(q[0], k[0], v[0], [0, 64], [0, 64])
            assert_no_worse(segments, exact[0].bfloat16(), exact[0])
            assert torch.equal(tritium.sparse_attention(q, k, v, **options, sparsity=0.5), plain)
            assert tritium.sparse_attention(q, k, v, **options).dtype == torch.bfloat16
            layout = tritium.SparseLayout((1, 8, 8), 0, 16)
            scheduled = tritium.SparseAttention(layout, sparse_type="radial", sparsity=0.5)
            assert torch.equal(scheduled(q, k, v, step=0, layer=0), plain)

    def test_float64_stays_and_a_graph_has_it_too(self):
        q, k, v = qkv()
        compiled = torch.compile(tritium.attention_forward, backend="aot_eager", fullgraph=True)
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            assert tritium.attention_forward(q.double(), k.double(), v.double()).dtype == torch.float64
            out = compiled(q, k, v)
            assert out.dtype == torch.bfloat16
            torch.testing.assert_close(out, tritium.attention_forward(q, k, v))

    def test_what_was_chosen_without_is_not_taken_with(self):
        q, k, v = qkv()
        before = tritium.attention_forward(q, k, v)
        with torch.autocast("cpu", torch.bfloat16):
            assert tritium.attention_forward(q, k, v).dtype == torch.bfloat16
        assert torch.equal(tritium.attention_forward(q, k, v), before)


def test_threads_leave_the_switches_of_pytorch_as_they_were():
    def switches():
        cuda = torch.backends.cuda
        asked = cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled, cuda.cudnn_sdp_enabled
        return [switch() for switch in asked]

    def work():
        for _ in range(200):
            tritium.attention_forward(q, k, v, opt_mode="manual", op_type="math")

    q, k, v = qkv()
    before = switches()
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert switches() == before
