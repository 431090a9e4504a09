"""Kernels that quantize rows store the reference's bits wherever they compute the same numbers."""

import pytest
import torch

from support.interpreter import interpreted
from tritium import device, ops
from tritium.ops import quantize_rows

FP8, INT8 = torch.float8_e4m3fn, torch.int8
# Registers the operators.
CATALOG = ops.catalog()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def steps_apart(q, expected) -> torch.Tensor:
    """The distance of stored values, in representable numbers."""

    def place(values):
        if values.dtype == INT8:
            return values.int()
        bits = values.view(torch.uint8).int()
        return torch.where(bits >= 128, -(bits - 128), bits)

    return (place(q) - place(expected)).abs()


def is_exact(op, sample) -> bool:
    """True if the rows are an argument: no activation, norm or rotation is rounded before."""
    given = sample.arguments
    kinds = str(given.get("kinds", "plain")).split(",")
    return op.name != "norm_quantize" and not given.get("rotate") and {*kinds} <= {"plain", "heads"}


def check_bits(device_type: str, dtypes=DTYPES, interpreted: bool = True) -> int:
    """Triton's interpreter loses a carry when it converts to float8: there only most values are right."""
    checked = 0
    for name in ("quantize_rows", "quantize_parts", "norm_quantize"):
        op = CATALOG[name]
        provider = ops.providers(op)["triton"]
        for dtype in dtypes:
            for sample in op.samples(dtype, device_type):
                given = op.bind(**sample.arguments)
                if provider.decline(given) is not None:
                    continue
                *_, q, scale = provider.run(given)
                *_, expected, expected_scale = op.reference(**vars(given))
                where = f"{name}, {dtype}, {sample.label}"
                checked += 1
                if not q.numel():
                    continue
                apart, same = steps_apart(q, expected), (scale == expected_scale).expand_as(q)
                if q.dtype == FP8 and interpreted:
                    assert (apart[same] <= 1).float().mean() > 0.9, where
                elif is_exact(op, sample):
                    assert apart.max() == 0, where
                else:
                    assert (apart[same] <= 1).all(), where
                if is_exact(op, sample):
                    assert same.all(), where
                else:
                    # A residual that is rounded the other way moves a scale by a step of bfloat16.
                    torch.testing.assert_close(scale, expected_scale, rtol=2**-7 if q.dtype == INT8 else 1, atol=0)
    return checked


@pytest.mark.skipif(not device.has_triton(), reason="triton is not installed")
@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(one, marks=pytest.mark.thorough) for one in (torch.float32, torch.float16))],
)
def test_bits_in_the_interpreter(dtype):
    assert interpreted("ops.test_quantizing_kernels", "check_bits", f"'cpu', [{dtype}]") >= 60


@pytest.mark.gpu
def test_bits_on_the_gpu():
    assert check_bits("cuda", interpreted=False) >= 180


@pytest.mark.parametrize("dtype", [FP8, INT8], ids=str)
@pytest.mark.parametrize("sizes", [(1, 1), (7, 63), (3, 100)])
def test_generated_code_stores_the_same_bits(dtype, sizes):
    x = torch.randn(*sizes) * 3
    run = torch.compile(lambda x: quantize_rows.OP.overload(x, dtype, provider="inlined"), backend="inductor")
    made, scale = run(x)
    expected, expected_scale = quantize_rows.reference(x, dtype)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(made.view(torch.uint8), expected.view(torch.uint8))
