"""Attention where it is easily wrong: masks wider than queries, rows that see nothing, autocast, nothing at all, threads."""

import math
import threading

import pytest
import torch
import torch.nn.functional as F

import tritium
from fidelity import assert_no_worse
from tritium import envs, tuning
from tritium.errors import ArgumentError, ArgumentTypeError
from tritium.layers.attention import choice, table
from tritium.layers.attention.candidates import able, tile_for_a_wide_mask
from tritium.layers.attention.request import Request

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

    def test_no_choice_for_one_is_the_other_s(self):
        q, k, v = qkv(torch.bfloat16)
        mask = torch.zeros(1, 1, 7, 63)
        keys = {Request.of(*(t.transpose(1, 2) for t in (q, k, v)), m, False).key() for m in (mask, mask.bfloat16())}
        assert len(keys) == 2

    def test_on_a_gpu_kernels_decline_it_and_others_do_not(self):
        q, k, v = (t.transpose(1, 2) for t in qkv(torch.bfloat16, 64, 64))
        request = Request.of(q, k, v, torch.zeros(1, 1, 1, 64), False)
        request = Request(**{**vars(request), "device": "cuda"})
        assert set(able(request)) == {"math", "chunked", "flex"}
        assert choice.rule(request, (9, 0)) == "flex"
        assert choice.rule(Request(**{**vars(request), "grad": True}), (9, 0)) == "chunked"
        assert choice.rule(Request(**{**vars(request), "grad": True, "symbolic": True}), (9, 0)) == "math"

    @pytest.mark.parametrize("room", [101_376, 166_912, 232_448])
    @pytest.mark.parametrize("width", [16, 64, 100, 128, 256])
    def test_tiles_leave_room_for_it(self, width, room):
        """Of GPUs with the least, a usual and the most shared memory."""
        queries, keys, stages, _ = tile_for_a_wide_mask(width, width, 2, room)
        held = 1 << (width - 1).bit_length()
        assert queries * held * 2 + stages * (keys * 2 * held * 2 + queries * keys * 4) <= room
        # FlexAttention has blocks of 128.
        assert 128 % queries == 128 % keys == 0

    def test_masks_of_other_dtypes(self):
        q, k, v = qkv()
        with pytest.raises(ArgumentTypeError, match="attn_mask must be boolean"):
            tritium.attention_forward(q, k, v, torch.zeros(7, 63).to(torch.float8_e4m3fn))


class TestWhatKernelsAsk:
    @pytest.mark.parametrize(
        ("changes", "declined"),
        [
            ({"packed": False}, {"cudnn", "flash", "efficient"}),
            ({}, set()),
        ],
    )
    def test_numbers_of_a_head_side_by_side(self, changes, declined):
        from tritium.layers.attention.candidates import candidates

        q, k, v = (t.transpose(1, 2) for t in qkv(torch.bfloat16, 64, 64))
        request = Request(**{**vars(Request.of(q, k, v, None, False)), "device": "cuda", **changes})
        kernels = ("cudnn", "flash", "efficient", "sdpa")
        assert {name for name in kernels if candidates()[name].decline(request) is not None} == declined

    def test_heads_that_lie_apart_have_a_key_of_their_own_and_are_drawn_so(self):
        from tritium.layers.attention.request import draw

        apart = [t.transpose(1, 3).contiguous().transpose(1, 3).transpose(1, 2) for t in qkv()]
        together = [t.transpose(1, 2) for t in qkv()]
        first, second = (Request.of(*tensors, None, False) for tensors in (apart, together))
        assert (first.packed, second.packed) == (False, True)
        assert first.key() != second.key()
        assert not Request.of(*draw(first, torch.device("cpu")), False).packed

    @pytest.mark.parametrize("shape", [(7, 1), (1, 2, 7, 1)])
    def test_a_mask_of_one_number_a_query(self, shape, monkeypatch):
        from tritium.layers.attention import forward

        seen = []
        real = forward.ATTENTION
        monkeypatch.setattr(forward, "ATTENTION", lambda *given: seen.append(given[3]) or real(*given))
        q, k, v = qkv()
        mask = torch.randn(shape)
        exact = exact_of(q, k, v, mask.expand(*shape[:-1], 63))
        assert_no_worse(tritium.attention_forward(q, k, v, mask), exact.float(), exact)
        assert seen[0].stride(-1) == 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_a_mask_in_one_graph(dtype):
    q, k, v = qkv(torch.bfloat16)
    mask = (torch.arange(63) < 40).expand(7, 63)
    mask = mask if dtype == torch.bool else torch.where(mask, 0.0, -math.inf).to(dtype)
    compiled = torch.compile(tritium.attention_forward, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(q, k, v, mask), tritium.attention_forward(q, k, v, mask))


class TestNothing:
    @pytest.mark.parametrize("options", WAYS, ids=str)
    @pytest.mark.parametrize("empty", ["batch", "queries", "keys", "heads", "width", "value width"])
    def test_a_size_of_zero(self, empty, options):
        sizes = {"batch": 2, "queries": 5, "keys": 6, "heads": 3, "width": 8, "value width": 4} | {empty: 0}
        q = torch.randn(sizes["batch"], sizes["queries"], sizes["heads"], sizes["width"])
        k = torch.randn(sizes["batch"], sizes["keys"], sizes["heads"], sizes["width"])
        v = torch.randn(sizes["batch"], sizes["keys"], sizes["heads"], sizes["value width"])
        out = tritium.attention_forward(q, k, v, **options)
        assert out.shape == (sizes["batch"], sizes["queries"], sizes["heads"], sizes["value width"])

    def test_cudnn_is_not_taken_for_nothing(self):
        q, k, v = (t.transpose(1, 2) for t in qkv(torch.bfloat16, 64, 64))
        request = Request(**{**vars(Request.of(q, k, v, None, False)), "device": "cuda"})
        assert choice.rule(request, (9, 0)) == "cudnn"
        assert choice.rule(Request(**{**vars(request), "batch": 0}), (9, 0)) == "sdpa"


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_gradients_of_rows_that_see_nothing(options):
    q, k, v = (t.requires_grad_() for t in qkv())
    mask = torch.zeros(7, 63)
    mask[3] = -math.inf
    out = tritium.attention_forward(q, k, v, mask, **options)
    gradients = torch.autograd.grad(out[:, [0, 1, 2, 4, 5, 6]].sum(), (q, k, v))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][:, 3] == 0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_a_scale_that_is_no_number(causal):
    q, k, v = qkv()
    with pytest.raises(ArgumentError, match="scale must be a number, got nan"):
        tritium.attention_forward(q, k, v, scale=math.nan, is_causal=causal)
    with pytest.raises(ArgumentError, match="scale must be a number, got nan"):
        tritium.attention_forward_varlen(q[0], q[0], q[0], [0, 7], [0, 7], softmax_scale=math.nan)


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


class TestRemembered:
    def test_an_eager_call_measures_those_that_a_graph_left_out(self):
        q, k, v = qkv()
        compiled = torch.compile(tritium.attention_forward, backend="aot_eager", dynamic=True, fullgraph=True)
        with torch.inference_mode():
            compiled(q, k, v)
            (row,) = choice.choices()
            assert "chunked" in row.dropped
            tritium.attention_forward(q, k, v)
        (_, eager) = choice.choices()
        assert "chunked" in eager.ms
        assert eager.key != row.key
        # And a graph takes what was measured so.
        torch.compiler.reset()
        with torch.inference_mode():
            compiled(q, k, v)
        assert len(choice.choices()) == 2

    def test_what_is_chosen_while_capturing_is_chosen_again(self, monkeypatch):
        monkeypatch.setattr(choice.device, "is_capturing", lambda: True)
        made = []
        for _ in range(2):
            choice.choose_again("call", lambda: made.append(1) or "sdpa")
        assert len(made) == 2
        monkeypatch.undo()
        for _ in range(2):
            choice.choose_again("call", lambda: made.append(1) or "sdpa")
        assert len(made) == 3

    def test_files_that_are_too_much(self, monkeypatch, tmp_path):
        (tmp_path / "deep.json").write_text("[" * 100_000)
        assert table.read(tmp_path / "deep.json") == {}
        monkeypatch.setattr(tuning.tables, "user_folder", lambda: tmp_path / ("x" * 5000))
        assert table.contents() == []

    def test_somebody_without_a_home(self, monkeypatch):
        def nobody():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(envs.Path, "home", nobody)
        assert envs.cache_home().is_dir()
