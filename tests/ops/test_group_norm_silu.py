"""`group_norm_silu` beyond the contract of every op: memory formats, numbers far from zero, launches."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from support.fidelity import assert_no_worse, error
from support.interpreter import interpreted
from tritium import device, ops
from tritium.ops import group_norm_silu as kernels
from tritium.ops.memory_format import channels_last as last

OP = ops.catalog()["group_norm_silu"]


def random(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(provider: str, x: torch.Tensor, groups: int) -> torch.Tensor:
    weight, bias = random(x.shape[1], seed=5).to(x.dtype), random(x.shape[1], seed=6).to(x.dtype)
    return OP.overload(x, groups, weight, bias, 1e-6, provider=provider)


def check(x: torch.Tensor, groups: int) -> float:
    """The kernels' error against float64, which must not be worse than eager's."""
    made, eager, exact = run("triton", x, groups), run("reference", x, groups), run("reference", x.double(), groups)
    assert made.stride() == eager.stride()
    assert not ops.failed_providers()
    assert_no_worse(made, eager, exact, str(tuple(x.shape)))
    return error(made, exact)


FORMATS = {
    "contiguous": (random(2, 6, 3, 4), torch.contiguous_format),
    "channels last": (last(random(2, 6, 3, 4)), torch.channels_last),
    "channels last, one image": (last(random(1, 6, 3, 4)), torch.channels_last),
    "channels last, video": (last(random(2, 6, 2, 3, 4)), torch.channels_last_3d),
    "one channel: both": (last(random(2, 1, 3, 4)), torch.contiguous_format),
    "one pixel: both": (last(random(2, 6, 1, 1)), torch.contiguous_format),
    "neither: a sequence": (last(random(2, 6, 9)), torch.contiguous_format),
    "neither: every second column": (random(2, 6, 3, 8)[..., ::2], torch.contiguous_format),
    "neither: some channels": (last(random(2, 8, 3, 4))[:, :6], torch.contiguous_format),
    "neither: height and width swapped": (random(2, 6, 4, 3).transpose(2, 3), torch.contiguous_format),
}


class TestMemoryFormat:
    @pytest.mark.parametrize("name", FORMATS)
    def test_is_kept(self, name):
        x, memory_format = FORMATS[name]
        made = run("reference", x, 1)
        assert made.stride() == torch.empty(x.shape).contiguous(memory_format=memory_format).stride()
        assert made.stride() == OP.fake(x, 1, None, None, 1e-6, None).stride()
        torch.testing.assert_close(made, run("reference", x.contiguous(), 1))

    @pytest.mark.parametrize("name", [name for name in FORMATS if name != "neither: some channels"])
    def test_is_pytorch_s_on_a_cpu(self, name):
        """Otherwise the compiler would refuse to put the op in place of the two."""
        x, _ = FORMATS[name]
        assert OP.fake(x, 1, None, None, 1e-6, None).stride() == F.silu(F.group_norm(x, 1)).stride()

    @pytest.mark.parametrize("name", ["contiguous", *(name for name in FORMATS if name.startswith("channels last"))])
    def test_of_a_dynamic_shape_costs_no_guard(self, name):
        x, _ = FORMATS[name]
        shapes = ShapeEnv()
        mode = FakeTensorMode(shape_env=shapes)
        sizes = [DimDynamic.STATIC if dim == 1 else DimDynamic.DYNAMIC for dim in range(x.ndim)]
        with mode:
            fake = mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
            made = OP.fake(fake, 1, None, None, 1e-6, None)
        assert not shapes.guards
        assert made.shape == fake.shape
        assert made.stride() == fake.stride()


FAR_FROM_ZERO = {
    "whole groups": (random(1, 12, 9, 16) + 1000, 3),
    "groups over several programs": (random(1, 4, 97, 103) + 1000, 2),
    "each channel elsewhere": (random(1, 12, 65, 53) + torch.linspace(-1000, 1000, 12)[None, :, None, None], 3),
    "each row elsewhere": (random(1, 12, 65, 53) + torch.linspace(-1000, 1000, 65)[None, None, :, None], 3),
}


@pytest.mark.skipif(not device.has_triton(), reason="triton is not installed")
def test_far_from_zero_in_the_interpreter():
    assert interpreted("ops.test_group_norm_silu", "check_triton") == 3 * 2 * len(FAR_FROM_ZERO)


def check_triton() -> int:
    """With a program a tile, with so few that each walks over several, and with partial results combined by twos."""
    checked = 0
    for changes in ({}, {"STATISTICS_PROGRAMS": 5}, {"PARTIALS": 2, "COMBINED": 2}):
        before = {name: getattr(kernels, name) for name in changes}
        vars(kernels).update(changes)
        for x, groups in FAR_FROM_ZERO.values():
            # What rounding the mean to float32 costs, and no more.
            assert check(x, groups) < 1.5e-5
            assert check(last(x), groups) < 1.5e-5
            checked += 2
        vars(kernels).update(before)
    return checked


class TestLaunch:
    @given(tiles=st.integers(1, 10**6), programs=st.integers(1, 10**6))
    def test_statistics_are_shared_without_a_program_too_many(self, tiles, programs):
        parts = kernels.statistics_parts(tiles, programs)
        assert 1 <= parts <= tiles
        assert parts == 1 or parts * programs <= kernels.STATISTICS_PROGRAMS

    @given(tiles=st.integers(1, 10**6), rows=st.integers(1, 10**4))
    def test_shares_hold_all_tiles_and_none_is_empty(self, tiles, rows):
        parts, steps = kernels.shared_tiles(tiles, rows)
        assert (parts - 1) * steps < tiles <= parts * steps

    @given(channels=st.integers(1, 6000))
    def test_few_lanes_have_no_channel(self, channels):
        options, _ = kernels.launch_options_pixels(channels)
        columns = options["COLUMNS"]
        lanes = -(-channels // columns) * columns
        assert lanes - channels < max(64, channels / 8 + 1)
        assert options["ROWS"] * columns <= 4096

    @given(pixels=st.integers(1, 10**7))
    def test_a_channel_fits_its_blocks(self, pixels):
        block = kernels.launch_options_planes(pixels)[0]["BLOCK"]
        assert block.bit_count() == 1
        assert -(-pixels // block) * block < 2 * max(pixels, 64) + 1

    @pytest.mark.parametrize("shape", [(1, 128, 1024, 1024), (1, 256, 512, 512), (1, 512, 256, 256)])
    def test_a_decoder_s_statistics_fill_an_h200(self, shape):
        """Four programs on each of 132 multiprocessors, in either layout."""
        _, channels, height, width = shape
        options, _ = kernels.launch_options_run()
        tiles = channels // 32 * height * width // options["COLUMNS"]
        assert 32 * kernels.statistics_parts(tiles, 32) >= 4 * 132
        options, _ = kernels.launch_options_pixels(channels)
        tiles = height * width // options["ROWS"]
        blocks = channels // options["COLUMNS"]
        assert blocks * kernels.statistics_parts(tiles, blocks) >= 4 * 132

    def test_triton_declines_float64(self):
        provider = ops.providers(OP)["triton"]
        assert provider.decline(OP.bind(random(1, 2, 3).double(), 1, None, None, 1e-6, None)) is not None
