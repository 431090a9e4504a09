"""Products of 8-bit matrices: tiles by shape, and the form in which the hardware copies tiles."""

import pytest
import torch

from support.hopper import compile_instead_of_launching
from support.interpreter import interpreted
from tritium import device, envs, ops
from tritium.ops import scaled_linear
from tritium.ops.op import draw_from
from tritium.ops.quantize_rows import FP8, INT8

# Registers the operators.
PROVIDERS = ops.providers(scaled_linear.OP)

needs_triton = pytest.mark.skipif(not device.has_triton(), reason="triton is not installed")


def product(rows, inner, columns, dtype=INT8, where="cpu", **others):
    draw = draw_from(torch.bfloat16, where)
    return scaled_linear.OP.bind(**scaled_linear.arguments(draw, draw(rows, inner), columns, dtype, **others))


@pytest.mark.parametrize(
    ("rows", "columns", "aligned", "programs", "tile"),
    [
        (4608, 12288, True, 264, (128, 128)),
        (4608, 12288, False, 0, (128, 256)),
        (512, 3072, True, 0, (128, 128)),
        (77, 3072, True, 0, (64, 64)),
        (1, 7, False, 0, (64, 64)),
    ],
)
def test_tiles_by_shape(rows, columns, aligned, programs, tile):
    cut, _ = scaled_linear.launch_options(rows, columns, aligned=aligned)
    assert (cut["PROGRAMS"], cut["TMA"]) == (programs, programs > 0)
    assert (cut["BLOCK_M"], cut["BLOCK_N"]) == tile


def test_rows_at_multiples_of_16_bytes():
    whole = torch.zeros(8, 64, dtype=INT8)
    assert scaled_linear.is_aligned(whole, whole[2:], whole[:, :32])
    assert not scaled_linear.is_aligned(whole[:, 8:])
    assert not scaled_linear.is_aligned(whole, torch.zeros(8, 24, dtype=INT8))


def test_float8_is_not_exact_enough_for_float32(monkeypatch):
    monkeypatch.setattr(envs, "triton_interpreted", lambda: True)
    reasons = [
        PROVIDERS["triton"].decline(product(18, 64, 32, dtype, out_dtype=out_dtype))
        for dtype in (FP8, INT8)
        for out_dtype in (torch.float32, torch.bfloat16)
    ]
    assert "14 bits" in reasons[0]
    assert reasons[1:] == [None] * 3


def check_large(device_type: str) -> int:
    """Products that several programs compute tile by tile, with and without whole tiles."""
    kept, scaled_linear.MULTIPROCESSORS = scaled_linear.MULTIPROCESSORS, 1
    checked = 0
    for rows, inner, columns in ((300, 256, 200), (129, 48, 130), (257, 128, 128)):
        for activation in scaled_linear.ACTIVATIONS:
            given = product(rows, inner, columns, where=device_type, activation=activation)
            cut, _ = scaled_linear.launch_options(
                rows, columns, aligned=scaled_linear.is_aligned(given.q, given.weight)
            )
            assert cut["TMA"]
            made, expected = PROVIDERS["triton"].run(given), scaled_linear.reference(**vars(given))
            torch.testing.assert_close(made, expected, rtol=2e-2, atol=2e-2)
            checked += 1
    scaled_linear.MULTIPROCESSORS = kept
    return checked


@needs_triton
def test_large_products_in_the_interpreter():
    assert interpreted("ops.test_scaled_linear", "check_large", "'cpu'") == 6


@pytest.mark.gpu
def test_large_products_on_the_gpu():
    assert check_large("cuda") == 6


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [512, 4608])
def test_large_products_in_generated_code(rows):
    given = product(rows, 3072, 3072, where="cuda")
    call = torch.compile(lambda *sides: scaled_linear.OP.overload(*sides, torch.bfloat16, provider="triton"))
    with torch.inference_mode():
        made = call(given.q, given.scale, given.weight, given.weight_scale, given.bias)
    torch.testing.assert_close(made, scaled_linear.reference(**vars(given)), rtol=2e-2, atol=2e-2)


@needs_triton
@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
def test_large_products_compile_for_hopper(dtype, monkeypatch):
    compiled = compile_instead_of_launching(monkeypatch)
    monkeypatch.setattr(envs, "triton_interpreted", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    PROVIDERS["triton"].run(product(2304, 64, 2048, dtype))
    (code,) = compiled.values()
    assert "cp.async.bulk.tensor" in code["ptx"]
    assert "wgmma.mma_async" in code["ptx"]
