"""Attention in 8 bits: kernels against their definition, and its errors on inputs like those of trained models."""

import math

import pytest
import torch

from support.interpreter import interpreted
from tritium import device, ops
from tritium.ops.attention import OP, cudnn8, eight_bits
from tritium.ops.attention.rounded import TILE, rounded_attention
from tritium.ops.quantize_rows import FP8, INT8

# Registers the operators.
PROVIDERS = ops.providers(ops.catalog()["attention"])

SIZES = [(1, 1), (7, 63), (63, 7), (100, 333), (333, 100), (63, 2 * TILE)]


def streams(queries, keys, width, *, kind="normal", dtype=torch.bfloat16, heads=2, where="cpu"):
    """Heads-first streams with tokens first in memory; keys have a mean, and `outliers` some large channels."""
    generator = torch.Generator().manual_seed(queries * keys)

    def draw(tokens):
        return torch.randn(2, tokens, heads, width, generator=generator).transpose(1, 2)

    q, k, v = draw(queries), draw(keys), draw(keys)
    k = k + 3 * torch.randn(2, heads, 1, width, generator=generator)
    if kind == "outliers":
        k[..., ::32] *= 10
        q[..., ::64] *= 3
    if kind == "heavy tails":
        q, k = (side / torch.randn(3, *side.shape, generator=generator).square().mean(0).sqrt() for side in (q, k))
    return tuple(side.to(where, dtype) for side in (q, k, v))


def exact(q, k, v, scale):
    return torch.softmax(q.double() @ k.double().mT * scale, -1) @ v.double()


def sqnr(out, truth):
    """The ratio of signal to error of the worst head, in dB."""
    error = (out.double() - truth).square().sum((0, 2, 3))
    return float((10 * torch.log10(truth.square().sum((0, 2, 3)) / error)).min())


def rounds_to_nearest():
    """Let Triton's interpreter round as GPUs do: it cuts mantissas off."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    truncated = interpreter._convert_float
    targets = {tl.float8e4nv: (FP8, torch.uint8), tl.bfloat16: (torch.bfloat16, torch.uint16)}

    def converted(data, source, target, mode):
        if source != tl.float32 or target not in targets:
            return truncated(data, source, target, mode)
        kind, bits = targets[target]
        values = torch.from_numpy(np.ascontiguousarray(data))
        return (values.clamp(-448, 448) if kind == FP8 else values).to(kind).view(bits).numpy()

    interpreter._convert_float = converted


def check_kernels(device_type: str, interpreted: bool = True) -> int:
    """A kernel adds as many keys at a time as the definition: both differ by the rounding of sums."""
    if interpreted:
        rounds_to_nearest()
    checked = 0
    for dtype in (INT8, FP8):
        for width in eight_bits.WIDTHS:
            for queries, keys in SIZES:
                q, k, v = streams(queries, keys, width, where=device_type)
                given = OP.bind(q, k, v, None, width**-0.5, False)
                assert eight_bits.decline(given) is None
                out = eight_bits.run_triton(given, dtype)
                expected = rounded_attention(q, k, v, width**-0.5, dtype, rotate=64)
                where = f"{dtype}, {width} wide, {queries} queries, {keys} keys"
                assert out.stride() == OP.fake(*vars(given).values()).stride(), where
                # GPUs compute exponentials approximately, and another sum rounds some scores to another integer.
                assert sqnr(out, expected.double()) > (60 if interpreted else 33), where
                checked += 1
    return checked


def check_options() -> int:
    """Other tiles and 16-bit values; a row of zeros, whose scale is the smallest number."""
    rounds_to_nearest()
    q, k, v = streams(100, 333, 64)
    q[:, :, 3] = 0
    truth = exact(q, k, v, 0.125)
    given = OP.bind(q, k, v, None, 0.125, False)
    for changes in ({"STEP": 64}, {"BLOCK": 64, "num_warps": 4}, {"VALUES8": False}):
        out = eight_bits.run_triton(given, INT8, {**eight_bits.launch_options(64), **changes})
        assert sqnr(out, truth) > (36 if "VALUES8" in changes else 28), changes
        torch.testing.assert_close(out[:, :, 3].double(), v.double().mean(2), atol=0.03, rtol=0.05)
    # Values of very different size from tile to tile, one of them zeros.
    v[:, :, :TILE] = 0
    v[:, :, TILE : 2 * TILE] *= 1e4
    out = eight_bits.run_triton(given, INT8)
    assert sqnr(out, exact(q, k, v, 0.125)) > 25
    return 4


@pytest.mark.skipif(not device.has_triton(), reason="triton is not installed")
@pytest.mark.parametrize(("check", "arguments"), [("check_kernels", "'cpu'"), ("check_options", "")])
def test_in_the_interpreter(check, arguments):
    assert interpreted("ops.test_quantized_attention", check, arguments) >= 4


@pytest.mark.parametrize("kind", ["normal", "outliers", "heavy tails"])
def test_int8_holds_25_db_where_float8_does_not(kind):
    """Why `auto` never chooses float8 scores: the choice measures on inputs with outliers."""
    q, k, v = streams(256, 512, 128, kind=kind)
    truth = exact(q, k, v, 128**-0.5)
    rounded = {dtype: sqnr(rounded_attention(q, k, v, 128**-0.5, dtype, rotate=64), truth) for dtype in (INT8, FP8)}
    assert rounded[INT8] > 27
    assert rounded[FP8] < rounded[INT8]
    if kind != "normal":
        assert sqnr(rounded_attention(q, k, v, 128**-0.5, INT8), truth) < rounded[INT8] - 1
        assert rounded[FP8] < 25


def test_long_sequences_lose_nothing():
    q, k, v = streams(16, 40_000, 64, heads=1)
    truth = exact(q, k, v, 0.125)
    assert sqnr(rounded_attention(q, k, v, 0.125, INT8, rotate=64), truth) > 27


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("width", [64, 40, 63])
def test_on_a_cpu_the_definition_computes(name, width):
    q, k, v = streams(63, 100, width, dtype=torch.float32)
    out = OP.overload(q, k, v, None, width**-0.5, False, provider=name)
    assert out.stride() == OP.reference(q, k, v, None, width**-0.5, False).stride()
    assert sqnr(out, exact(q, k, v, width**-0.5)) > (27 if name == "int8" else 22)


def test_lossy_providers():
    assert {name for name, provider in PROVIDERS.items() if provider.lossy} == {"sage", "int8", "fp8", "cudnn8"}
    q = streams(63, 63, 64)[0]
    reasons = ops.declines(OP, OP.bind(q, q, q, None, 0.125, False))
    assert all(reasons[name] == ops.LOSSY for name in ("sage", "int8", "fp8", "cudnn8"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mask": torch.ones(1, 1, 1, 63, dtype=torch.bool)}, "no mask"),
        ({"causal": True}, "no causality"),
        ({"k": streams(63, 63, 64, heads=1)[1], "v": streams(63, 63, 64, heads=1)[2]}, "as many heads"),
        ({"scale": -1.0}, "scale above 0"),
        ({"q": streams(0, 63, 64)[0]}, "nothing to compute"),
    ],
)
def test_declines(changes, reason, monkeypatch):
    q, k, v = streams(63, 63, 64)
    given = OP.bind(**{"q": q, "k": k, "v": v, "mask": None, "scale": 0.125, "causal": False} | changes)
    assert reason in eight_bits.decline(given)
    monkeypatch.setattr(cudnn8.compat_attention, "installed", lambda module: True)
    assert "on cpu" in cudnn8.decline(given)


def test_kernels_decline_other_heads(monkeypatch):
    monkeypatch.setattr(eight_bits.envs, "triton_interpreted", lambda: True)
    q, k, v = streams(63, 63, 40)
    assert "64 or 128 wide" in eight_bits.decline(OP.bind(q, k, v, None, 0.125, False))
    q, k, v = streams(63, 63, 64, dtype=torch.float32)
    assert "float16 and bfloat16" in eight_bits.decline(OP.bind(q, k, v, None, 0.125, False))
    q, k, v = streams(63, 63, 64)
    monkeypatch.setattr(eight_bits.device, "capability", lambda where: (8, 0))
    assert "8.9" in eight_bits.decline(OP.bind(q, k, v, None, 0.125, False))


@pytest.mark.gpu
class TestOnTheGpu:
    def test_kernels(self):
        assert check_kernels("cuda", interpreted=False) == 4 * len(SIZES)

    @pytest.mark.parametrize("name", ["int8", "fp8", "cudnn8"])
    @pytest.mark.parametrize(("queries", "keys"), [(1000, 1000), (333, 512)])
    def test_providers(self, name, queries, keys):
        for width in (64, 128):
            q, k, v = streams(queries, keys, width, where="cuda")
            given = OP.bind(q, k, v, None, width**-0.5, False)
            if (reason := PROVIDERS[name].decline(given)) is not None:
                pytest.skip(reason)
            out = OP.overload(*vars(given).values(), provider=name)
            assert not ops.failed_providers()
            assert sqnr(out, exact(q, k, v, width**-0.5)) > (27 if name == "int8" else 22)

    def test_inside_a_compiled_graph(self):
        q, k, v = streams(1000, 1000, 128, where="cuda")

        def attend(q, k, v):
            return OP.overload(q * 2, k, v, None, 0.5 * 128**-0.5, False, provider="int8") + 1

        out = torch.compile(attend)(q, k, v)
        assert sqnr(out - 1, exact(q, k, v, 128**-0.5)) > 20
        assert math.isfinite(float(out.float().sum()))
