"""Quantized rows, blocks and weights, their products, and their errors."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tritium
from tritium import layers
from tritium.errors import ArgumentError, ArgumentTypeError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def decibels(found, exact):
    """The ratio of the signal to the error."""
    return float(10 * torch.log10(exact.double().square().sum() / (found.double() - exact.double()).square().sum()))


def product(x, weight, format_, bias=None, **options):
    q, scale = layers.quantize_rows(x, format_)
    return layers.scaled_linear(q, scale, *layers.quantize_weight(weight, format_), bias, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fused", [True, False])
def test_int8_rows_as_numpy_rounds_them(dtype, fused, random):
    x = random(7, 100, dtype=dtype)
    q, scale = layers.quantize_rows(x, "int8", fused=fused)
    wide = x.float().numpy()
    expected = np.abs(wide).max(1, keepdims=True) / np.float32(127)
    np.testing.assert_allclose(scale.numpy(), expected, rtol=1e-6)
    assert np.abs(q.numpy() * scale.numpy() - wide).max() <= 0.501 * expected.max()
    assert q.abs().max() == 127


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_scales_are_powers_of_two(dtype, random):
    x = random(7, 100, dtype=dtype) * 1e3
    q, scale = layers.quantize_rows(x)
    exponent = torch.log2(scale)
    assert torch.equal(exponent, exponent.round())
    largest = x.float().abs().amax(1, keepdim=True)
    assert ((largest / scale <= 448) & (largest / scale > 224)).all()
    # 3 bits of mantissa: half a step is 1/16 of a number.
    error = (q.float() * scale - x.float()).abs()
    assert (error <= x.float().abs() / 16 + scale * 2**-10).all()


def test_a_static_scale_is_used_as_it_is(random):
    x, scale = random(7, 64), torch.tensor([0.25])
    q, rows = layers.quantize_rows(x, "int8", scale=scale)
    assert torch.equal(q, (x * 4).round().clamp(-127, 127).to(torch.int8))
    assert rows.shape == (7, 1)
    assert rows.unique().tolist() == [0.25]


@pytest.mark.parametrize(("format_", "least"), [("fp8", 27), ("int8", 36)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_against_float64(format_, least, dtype, random):
    x, weight, bias = random(2, 33, 256, dtype=dtype), random(80, 256, dtype=dtype, seed=1), random(80, seed=2)
    exact = F.gelu(F.linear(x.double(), weight.double(), bias.double()), approximate="tanh")
    options = {"out_dtype": dtype, "activation": "gelu_tanh"}
    found = [product(x, weight, format_, bias, fused=fused, **options) for fused in (True, False)]
    assert [out.dtype for out in found] == [dtype, dtype]
    assert min(decibels(out, exact) for out in found) > least


def test_a_rotation_repairs_outliers(random):
    x, weight = random(64, 256), random(80, 256, seed=1)
    x[:, ::64] *= 60
    exact = F.linear(x.double(), weight.double())
    found = []
    for rotate in (0, 64):
        q, scale = layers.quantize_rows(x, "int8", rotate=rotate)
        stored = layers.quantize_weight(weight, "int8", rotate=rotate)
        found.append(decibels(layers.scaled_linear(q, scale, *stored, out_dtype=torch.float32), exact))
    assert found[1] > found[0] + 6


@pytest.mark.parametrize(("format_", "least"), [("int8-weights", 38), ("int4-weights", 17)])
@pytest.mark.parametrize("fused", [True, False])
def test_stored_weights_against_float64(format_, least, fused, random):
    x, weight, bias = random(2, 7, 128), random(80, 128, seed=1), random(80, seed=2)
    stored = layers.quantize_weight(weight, format_, group=32)
    assert stored[0].numel() == weight.numel() // (2 if format_ == "int4-weights" else 1)
    out = layers.weight_only_linear(x, *stored, bias, fused=fused)
    assert decibels(out, F.linear(x.double(), weight.double(), bias.double())) > least


@pytest.mark.parametrize("shape", [(2, 3, 300, 128), (1, 2, 7, 64), (2, 1, 130, 160), (1, 1, 128, 1)])
def test_blocks_against_numpy(shape, random):
    x = random(*shape) * 5
    q, scale = layers.quantize_blocks(x, 128)
    assert q.shape == x.shape
    wide, blocks = x.numpy(), scale.numpy()
    assert blocks.shape == (*shape[:2], -(-shape[2] // 128), -(-shape[3] // 128))
    for place in np.ndindex(blocks.shape):
        rows, columns = (slice(128 * part, 128 * part + 128) for part in place[2:])
        tile = wide[(*place[:2], rows, columns)]
        assert 224 < np.abs(tile).max() / blocks[place] <= 448
        back = q.float().numpy()[(*place[:2], rows, columns)] * blocks[place]
        assert np.abs(back - tile).max() <= np.abs(tile).max() / 16


def test_blocks_of_the_other_layout(random):
    x = random(2, 130, 3, 64)
    q, scale = layers.quantize_blocks(x, 64, layout="BSND")
    expected = layers.quantize_blocks(x.transpose(1, 2), 64)
    assert torch.equal(q.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(scale, expected[1])


def test_zeros_and_no_rows():
    for format_ in ("fp8", "int8"):
        q, scale = layers.quantize_rows(torch.zeros(2, 16), format_)
        assert q.float().abs().max() == 0
        assert (scale > 0).all()
        assert layers.quantize_rows(torch.zeros(0, 16), format_)[1].shape == (0, 1)
    assert layers.quantize_blocks(torch.zeros(1, 1, 4, 8))[0].float().abs().max() == 0


def test_a_compiled_call_is_the_eager_one(random):
    x, weight = random(33, 64), random(48, 64, seed=1)

    def call(x, weight):
        return product(x, weight, "int8", out_dtype=torch.float32)

    torch.testing.assert_close(torch.compile(call, backend="eager", fullgraph=True)(x, weight), call(x, weight))


ROWS = torch.ones(2, 64)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: layers.quantize_rows(ROWS, "fp4"), ArgumentError, "there is no format 'fp4'; did you mean 'fp8'"),
        (lambda: layers.quantize_rows(ROWS.int()), ArgumentTypeError, "x must be float16, .*, got torch.int32"),
        (lambda: layers.quantize_rows(ROWS, rotate=3), ArgumentError, "a group of 4, 16, 64, 256 columns"),
        (lambda: layers.quantize_rows(ROWS, rotate=256), ArgumentError, "groups of 256 columns do not divide"),
        (lambda: layers.quantize_rows(ROWS, scale=ROWS), ArgumentError, "scale must be one float32 number"),
        (lambda: layers.quantize_weight(ROWS, "int4-weights", group=48), ArgumentError, "group must be one of 32"),
        (lambda: layers.quantize_weight(ROWS, "int8-weights", rotate=16), ArgumentError, "int8-weights stores weights"),
        (lambda: layers.quantize_weight(ROWS[0]), ArgumentError, "weight must have rank 2"),
        (lambda: scaled(q=ROWS), ArgumentTypeError, "q must be int8 or float8_e4m3fn, got torch.float32"),
        (lambda: scaled(weight=ROWS.to(torch.float8_e4m3fn)), ArgumentError, "q and weight must have one dtype"),
        (lambda: scaled(weight=ROWS[:, :5].to(torch.int8)), ArgumentError, r"q must be \[..., 5\] as weight is"),
        (lambda: scaled(scale=torch.ones(2)), ArgumentError, r"scale must have shape \(2, 1\), got \(2,\)"),
        (lambda: scaled(weight_scale=torch.ones(2)), ArgumentError, r"weight_scale must have shape \(2, 1\)"),
        (lambda: scaled(scale=torch.ones(2, 1).half()), ArgumentTypeError, "scale must be float32, got torch.float16"),
        (lambda: scaled(bias=torch.ones(3)), ArgumentError, r"bias must have shape \(2,\)"),
        (lambda: scaled(activation="relu"), ArgumentError, "there is no activation 'relu'"),
        (lambda: scaled(out_dtype=torch.int8), ArgumentError, "out_dtype must be float16, .*, got torch.int8"),
        (lambda: layers.weight_only_linear(ROWS, ROWS, ROWS), ArgumentError, "a stored weight is int8"),
        (lambda: stored(bias=torch.ones(3)), ArgumentError, r"bias must have shape \(2,\)"),
        (lambda: layers.quantize_blocks(ROWS), ArgumentError, "x must have rank 4"),
        (lambda: layers.quantize_blocks(ROWS[None, None], 0), ArgumentError, "block_size must be 1 or more, got 0"),
    ],
)
def test_errors(call, error, words):
    with pytest.raises(error, match=words):
        call()


def scaled(**changes):
    given = {"q": ROWS.to(torch.int8), "scale": torch.ones(2, 1)}
    given |= {"weight": ROWS.to(torch.int8), "weight_scale": torch.ones(2, 1), **changes}
    return layers.scaled_linear(**given)


def stored(**changes):
    return layers.weight_only_linear(ROWS, ROWS.to(torch.int8), torch.ones(2, 1), **changes)


def test_they_are_public_by_their_module():
    assert tritium.layers is layers
    assert all(callable(getattr(layers, name)) for name in layers.__all__)
