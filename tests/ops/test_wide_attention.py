"""`wide_attention` beyond the contract of every op: memory layout, pieces of any size, its softmax."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ops.test_contract import exact
from support.fidelity import assert_no_worse
from support.interpreter import interpreted
from tritium import device, ops
from tritium.ops import wide_attention as products
from tritium.ops.attention import attention_math

OP = ops.catalog()["wide_attention"]


def tokens_first(
    batch: int, tokens: int, heads: int, width: int, dtype=torch.bfloat16, where="cpu", seed: int = 0
) -> torch.Tensor:
    made = torch.randn(batch, tokens, heads * width, generator=torch.Generator().manual_seed(seed))
    return made.to(where, dtype).view(batch, tokens, heads, width).transpose(1, 2)


class TestLayout:
    @pytest.mark.parametrize("heads", [1, 3])
    def test_is_that_of_the_kernel_in_its_place(self, heads):
        """PyTorch's memory-efficient kernel, whatever its query's layout; on a CPU that of a query with tokens first."""
        q = tokens_first(2, 7, heads, 320, torch.float32)
        promised = OP.fake(q, q, q, 1.0).stride()
        assert F.scaled_dot_product_attention(q, q, q).stride() == promised
        with FakeTensorMode():
            empty = torch.empty(2, heads, 7, 320, device="meta", dtype=torch.bfloat16)
            made, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(empty, empty, empty, None, False)
        assert made.stride() == promised

    def test_of_a_dynamic_shape_costs_no_guard(self):
        shapes = ShapeEnv()
        mode = FakeTensorMode(shape_env=shapes)
        sizes = [DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.STATIC]
        with mode:
            given = mode.from_tensor(
                tokens_first(2, 7, 1, 320), symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes)
            )
            made = OP.fake(given, given, given, 1.0)
        assert not shapes.guards
        assert made.shape == given.shape


class TestPieces:
    @given(matrices=st.integers(1, 9), queries=st.integers(1, 5000), room=st.integers(1, 9000))
    def test_every_row_once_and_never_too_many(self, matrices, queries, room):
        seen = torch.zeros(matrices, queries, dtype=torch.int32)
        taken = list(products.pieces(matrices, queries, room))
        for one, some in taken:
            part = seen[one, some]
            # One buffer serves all of them.
            assert part.numel() <= seen[taken[0]].numel()
            assert 0 < part.numel() <= max(room, 1)
            # A buffer is read as if it were of this piece alone.
            assert one.stop - one.start == 1 or part.shape[1] == queries
            part += 1
        assert (seen == 1).all()

    def test_an_image_of_1024_pixels_takes_four_equal_pieces(self):
        room = products.SCORES_BYTES // (4 * 16_384)
        sizes = [some.stop - some.start for _, some in products.pieces(1, 16_384, room)]
        assert sizes == [4096] * 4

    @given(padded=st.integers(1, 1 << 17))
    def test_a_row_fits_its_program(self, padded):
        options, triton_options = products.launch_options(padded)
        assert options["TILE"].bit_count() == 1
        assert options["TILE"] >= padded or not options["WHOLE"]
        assert options["TILE"] <= padded or options["WHOLE"]
        assert options["TILE"] <= 32 * 32 * triton_options["num_warps"]


def test_declines(monkeypatch):
    def decline(dtype=torch.bfloat16, width=512):
        q = tokens_first(1, 7, 1, width, dtype)
        return ops.providers(OP)["products"].decline(OP.bind(q, q, q, 1.0))

    assert "float32" in decline(torch.float32)
    assert "up to 256" in decline(width=256)
    if device.has_triton():
        assert "runs on cpu" in decline()
    monkeypatch.setattr(products, "decline_tensors", lambda *tensors: None)
    assert decline() is None


@pytest.mark.skipif(not device.has_triton(), reason="triton is not installed")
@pytest.mark.parametrize("check", ["check_softmax", "check_pieces", "check_candidate"])
def test_in_the_interpreter(check):
    assert interpreted("ops.test_wide_attention", check) > 0


def check_softmax() -> int:
    """Rows that one program holds and rows that it reads twice, with garbage behind their end."""
    checked = 0
    for whole_row, part in ((32_768, 8_192), (16, 16), (32, 16)):
        products.WHOLE_ROW, products.PART_OF_ROW = whole_row, part
        for keys in (1, 16, 17, 100, 160):
            padded = -(-keys // products.ALIGNED) * products.ALIGNED
            for scale in (3.0, -1.0, 0.0):
                scores = torch.randn(2, 3, padded, generator=torch.Generator().manual_seed(keys)) * 10
                # The largest last: what was summed before is corrected.
                scores[0, 0] = torch.linspace(-50, 50, padded)
                scores[..., keys:] = math.nan
                before = scores.clone()
                for dtype in (torch.bfloat16, torch.float16, torch.float32):
                    out = torch.full_like(scores, math.nan, dtype=dtype)
                    products.softmax_rows(scores, out, keys, scale)
                    truth = torch.softmax(scores[..., :keys].double() * scale, -1)
                    torch.testing.assert_close(
                        out[..., :keys].double(), truth, rtol=2 * torch.finfo(dtype).eps + 1e-5, atol=1e-7
                    )
                    assert (out[..., keys:] == 0).all()
                    checked += 1
                assert torch.equal(scores, before) or torch.equal(scores.isnan(), before.isnan())
    return checked


def check_pieces() -> int:
    """Every sample again with room for few scores: several pieces, the last of them smaller, buffers used again."""
    checked = 0
    for room in (16 * 4, 1 << 12, 1 << 14):
        products.SCORES_BYTES = room
        for sample in OP.samples(torch.bfloat16, "cpu"):
            if OP.providers[0].decline(OP.bind(**sample.arguments)) is not None or sample.label.startswith("many"):
                continue
            result = OP.overload(*sample.arguments.values(), provider="products")
            eager = OP.reference(**sample.arguments)
            assert_no_worse(result, eager, exact(OP, sample.arguments)[0], sample.label)
            checked += 1
    assert not ops.failed_providers()
    q, none = tokens_first(1, 7, 1, 320), tokens_first(1, 0, 1, 320)
    assert (OP.overload(q, none, none, 1.0, provider="products") == 0).all()
    return checked


def check_candidate() -> int:
    """The same function as a candidate, for heads of any width."""
    for width, heads in ((64, 3), (512, 1), (7, 2)):
        q, k, v = (tokens_first(2, tokens, heads, width, seed=seed) for seed, tokens in enumerate((63, 100, 100)))
        attention = ops.catalog()["attention"]
        out = ops.providers(attention)["products"].run(attention.bind(q, k, v, None, width**-0.5, False))
        truth = attention_math(q.double(), k.double(), v.double(), None, width**-0.5, False)
        assert out.transpose(1, 2).is_contiguous()
        assert_no_worse(out, attention_math(q, k, v, None, width**-0.5, False), truth, f"width {width}")
    return 3


@pytest.mark.gpu
class TestOnTheGpu:
    def test_rows_longer_than_a_program_holds(self):
        sides = ((5, 0), (40_000, 1), (40_000, 2))
        q, k, v = (tokens_first(1, tokens, 1, 512, where="cuda", seed=seed) for tokens, seed in sides)
        arguments = {"q": q, "k": k, "v": v, "scale": 512**-0.5}
        result = OP.overload(*arguments.values(), provider="products")
        assert not ops.failed_providers()
        assert_no_worse(result, OP.reference(**arguments), exact(OP, arguments)[0])

    def test_the_layout_is_the_kernel_s(self):
        for made in (
            torch.randn(2, 3, 64, 512),
            torch.randn(2, 64, 3, 512).transpose(1, 2),
            torch.randn(1, 1, 64, 512),
        ):
            q = made.to("cuda", torch.bfloat16)
            assert F.scaled_dot_product_attention(q, q, q).stride() == OP.fake(q, q, q, 1.0).stride()

    def test_inside_a_compiled_decoder(self):
        import diffusers

        import tritium

        torch.manual_seed(0)
        vae = diffusers.AutoencoderKL(block_out_channels=(320,), layers_per_block=1, norm_num_groups=4)
        decoder = vae.decoder.to("cuda", torch.bfloat16)
        config = tritium.CompilationConfig(force_provider={"wide_attention": "products"})
        with torch.inference_mode():
            z = torch.randn(1, 4, 16, 24, device="cuda", dtype=torch.bfloat16)
            eager = decoder(z)
            compiled = torch.compile(decoder, backend=tritium.Backend(config))
            actual = compiled(z)
            report = tritium.explain(compiled)
            truth = decoder.double()(z.double())
        assert report.sites["wide_attention"].fused == 1, report.sites["wide_attention"].reasons
        assert_no_worse(actual, eager, truth)
