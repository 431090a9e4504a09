"""`channel_norm` beyond the contract of every op: layouts, and how pixels are cut."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.fidelity import assert_no_worse
from support.interpreter import interpreted
from tritium import device, ops
from tritium.ops import channel_norm
from tritium.ops.memory_format import channels_last as last

OP = ops.catalog()["channel_norm"]


def random(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


LAYOUTS = {
    "contiguous": random(2, 6, 3, 4),
    "channels last": last(random(2, 6, 3, 4)),
    "channels last, video": last(random(1, 96, 2, 3, 4)),
    "one channel: both": last(random(2, 1, 3, 4)),
    "neither: some channels": last(random(2, 8, 3, 4))[:, :6],
}


def arguments(x: torch.Tensor, *, silu: bool) -> tuple:
    return x, random(x.shape[1], *[1] * (x.dim() - 2), seed=5), x.shape[1] ** 0.5, 0.25, 1, 1e-12, silu, None


def check_every_layout(provider: str) -> int:
    """A kernel is chosen by the layout it was compiled for, and Inductor may hand it another."""
    for x in LAYOUTS.values():
        for silu in (False, True):
            given = arguments(x, silu=silu)
            made = OP.overload(*given, provider=provider)
            exact = channel_norm.reference(x.double(), given[1].double(), *given[2:7], torch.float64)
            assert made.stride() == channel_norm.OP.fake(*given).stride()
            assert not ops.failed_providers()
            assert_no_worse(made, channel_norm.reference(*given), exact)
    return len(LAYOUTS)


def test_every_layout_by_the_reference():
    assert check_every_layout("reference") == len(LAYOUTS)


@pytest.mark.skipif(not device.has_triton(), reason="triton is not installed")
def test_every_layout_by_the_kernel():
    assert interpreted("ops.test_channel_norm", "check_every_layout", "'triton'") == len(LAYOUTS)


@given(channels=st.integers(1, 20_000))
def test_pixels_are_cut_so_that_they_fit(channels):
    options, _ = channel_norm.launch_options(channels)
    held = options["TILE"] * options["PIECES"]
    assert channels <= held < 2 * channels
    assert options["TILE"].bit_count() == options["PIXELS"].bit_count() == 1
    assert options["PIXELS"] == 1 or options["PIXELS"] * held <= channel_norm.HELD


@pytest.mark.parametrize("channels", [96, 192, 384, 128, 512])
def test_no_lane_is_idle_for_the_channels_of_video_vaes(channels):
    options, _ = channel_norm.launch_options(channels)
    assert options["TILE"] * options["PIECES"] == channels


def test_triton_declines_what_lies_otherwise():
    decline = ops.providers(OP)["triton"].decline
    assert "channels of a pixel together" in decline(OP.bind(*arguments(LAYOUTS["contiguous"], silu=True)))
    turned = last(random(2, 6, 3, 4))
    assert "channels of a pixel together" in decline(
        OP.bind(turned, random(1, 1, 3, 1), 2.0, 0.0, 2, 1e-12, False, None)
    )
    wide = arguments(last(random(2, 6, 3, 4)).double(), silu=True)
    assert decline(OP.bind(*wide)) is not None
