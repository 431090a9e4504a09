"""`residual_norm_modulate` and `gelu` beyond the contract of every op: meaning, rounding, launches."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from support.fidelity import assert_no_worse
from support.interpreter import interpreted
from tritium import device, ops
from tritium.ops import gelu, residual_norm_modulate
from tritium.ops.residual_norm_modulate import arguments
from tritium.ops.triton_launch import with_dense_rows

needs_triton = pytest.mark.skipif(not device.has_triton(), reason="triton is not installed")
OPS = ops.catalog()


def declined(**given):
    return residual_norm_modulate.decline_triton(OPS["residual_norm_modulate"].bind(**given))


def computed(provider="reference", **given):
    return OPS["residual_norm_modulate"].overload(**arguments(**{"norm": "layer", **given}), provider=provider)


@settings(max_examples=60)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(2, 33)),
    rank=st.integers(1, 3),
    norm=st.sampled_from(["layer", "rms"]),
    present=st.sets(st.sampled_from(["gate", "weight", "bias", "scale", "shift"])),
    per_token=st.booleans(),
)
def test_it_is_pytorch_s_norm_of_the_sum(shape, rank, norm, present, per_token):
    generator = torch.Generator().manual_seed(3)

    def random(*sizes):
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    shape = shape[-rank:]
    width = shape[-1]
    modulation = shape if per_token else (*(1 for _ in shape[:-1]), width)
    x, y = random(*shape), random(*shape)
    parts = {name: random(*modulation) for name in ("gate", "scale", "shift")}
    parts |= {name: random(width) for name in ("weight", "bias")}
    parts = {name: value for name, value in parts.items() if name in present}
    residual, out = computed(x=x, y=y, norm=norm, **parts)
    weight, bias = parts.get("weight"), parts.get("bias")
    summed = x + parts.get("gate", 1) * y
    if norm == "layer":
        ones = torch.ones(width, dtype=torch.float64)
        normed = F.layer_norm(summed, (width,), ones if weight is None else weight, bias, 1e-6)
    else:
        normed = F.rms_norm(summed, (width,), weight, 1e-6) + (0 if bias is None else bias)
    torch.testing.assert_close(residual, summed, rtol=1e-12, atol=1e-12)
    expected = normed * (1 + parts.get("scale", 0)) + parts.get("shift", 0)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


def assert_normed_after_rounding(provider, width):
    """Above 1000 bfloat16 has steps of 4: the residual is constant, and only an unrounded one has a variance."""
    x = torch.full((2, width), 1000.0, dtype=torch.bfloat16)
    # Never below 1000: Triton's interpreter cuts where a GPU rounds.
    y = torch.rand(2, width, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    shift = torch.linspace(-1, 1, width).to(torch.bfloat16)
    residual, out = computed(provider, x=x, y=y, shift=shift)
    assert torch.equal(residual, x)
    assert torch.equal(out, shift.expand_as(out))
    kept, out = computed(provider, x=x, y=y, shift=shift, residual_dtype=torch.float32, out_dtype=torch.bfloat16)
    assert torch.equal(kept, x.float() + y.float())
    assert not torch.equal(out, shift.expand_as(out))


def assert_exact_around_a_large_mean(provider, width):
    """One pass over sums and squares in float32 would lose the variance, a millionth of the mean of squares."""
    generator = torch.Generator().manual_seed(7)
    given = {"x": 1000 + torch.randn(2, width, generator=generator), "y": torch.randn(2, width, generator=generator)}
    _, out = computed(provider, **given)
    _, eager = computed("reference", **given)
    _, exact = computed("reference", **{name: value.double() for name, value in given.items()})
    assert_no_worse(out, eager, exact, f"{provider}, {width}")


def test_the_norm_sees_the_rounded_residual():
    assert_normed_after_rounding("reference", 60)


def check_kernels() -> int:
    widths = (60, 3072, residual_norm_modulate.WHOLE_ROW + 7)
    for width in widths:
        assert_normed_after_rounding("triton", width)
        assert_exact_around_a_large_mean("triton", width)
    assert not ops.failed_providers(), ops.failed_providers()
    return len(widths)


@needs_triton
def test_the_kernels_round_and_centre():
    assert interpreted("ops.test_residual_norm_modulate", "check_kernels") == 3


def test_only_x_and_y_decide_the_dtype():
    x, wide = torch.randn(2, 7, 60), torch.randn(2, 1, 60)
    for dtype in (torch.bfloat16, torch.float16):
        residual, out = computed(x=x.to(dtype), y=x.to(dtype), gate=wide, scale=wide, shift=wide)
        assert (residual.dtype, out.dtype) == (dtype, dtype)
    residual, out = computed(x=x.bfloat16(), y=x, gate=wide.bfloat16(), out_dtype=torch.float16)
    assert (residual.dtype, out.dtype) == (torch.float32, torch.float16)


def test_an_unknown_norm_is_refused_and_a_wide_result_declined():
    x = torch.randn(2, 60)
    assert "cannot write torch.float64" in declined(**arguments(x, x, "layer", out_dtype=torch.float64))
    assert "'group'" in declined(**arguments(x, x, "group"))
    with pytest.raises(ValueError, match="'group' is none of layer, rms"):
        computed(x=x, y=x, norm="group")


class TestRows:
    @given(width=st.integers(1, 2 * residual_norm_modulate.WHOLE_ROW))
    def test_the_pieces_hold_a_row_and_none_is_empty(self, width):
        cut, options = residual_norm_modulate.launch_options(width)
        if width > residual_norm_modulate.WHOLE_ROW:
            assert cut["PIECES"] == 0
        else:
            assert (cut["PIECES"] - 1) * cut["TILE"] < width <= cut["PIECES"] * cut["TILE"]
        for number in (cut["ROWS"], cut["TILE"], options["num_warps"]):
            assert number.bit_count() == 1

    @pytest.mark.parametrize("width", [1536, 2048, 3072, 5120, 6144, 12288])
    def test_no_lane_idles_at_the_widths_of_models(self, width):
        cut, options = residual_norm_modulate.launch_options(width)
        assert cut["PIECES"] * cut["TILE"] == width
        # 16-byte accesses: a tile has 8 elements for each thread.
        assert cut["ROWS"] * cut["TILE"] == options["num_warps"] * 32 * 8

    @pytest.mark.parametrize(
        ("shape", "modulation"),
        [
            *(((2, 7, 60), modulation) for modulation in ((2, 1, 60), (1, 1, 60), (60,), (2, 7, 1))),
            *(((7, 60), (60,)), ((60,), (60,)), ((2, 3, 7, 60), (2, 1, 1, 60))),
        ],
    )
    def test_modulation_is_read_where_it_lies(self, shape, modulation):
        part = torch.randn(*modulation)
        seen = residual_norm_modulate.as_rows(part, torch.Size(shape))
        assert seen.data_ptr() == part.data_ptr()
        assert torch.equal(seen.reshape(shape), part.expand(shape))

    def test_tokens_of_a_longer_sequence_are_not_copied(self):
        sequence = torch.randn(2, 12, 128)
        for part in (sequence[:, 5:], sequence[..., 64:], sequence.transpose(0, 1)):
            assert with_dense_rows(residual_norm_modulate.as_rows(part, part.shape)).data_ptr() == part.data_ptr()
        apart = sequence.transpose(1, 2)
        dense = with_dense_rows(residual_norm_modulate.as_rows(apart, apart.shape))
        assert dense.stride(-1) == 1
        assert torch.equal(dense, apart)


@pytest.mark.parametrize("approximate", gelu.FORMS)
def test_gelu_is_pytorch_s_rounded_once(approximate):
    x = torch.linspace(-8, 8, 1001)
    for narrow, wide in ((x.bfloat16(), torch.float32), (x.double(), torch.float64)):
        exact = F.gelu(narrow.to(wide), approximate=approximate)
        for dtype in (None, torch.float32):
            out = OPS["gelu"].overload(narrow, approximate, dtype, provider="reference")
            assert torch.equal(out, exact.to(dtype or narrow.dtype))
