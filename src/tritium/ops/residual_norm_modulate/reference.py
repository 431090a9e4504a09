"""The reference and samples of `residual_norm_modulate`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium.ops import rows
from tritium.ops.op import Sample

NORMS = ("layer", "rms")


def reference(
    x: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    eps: float,
    norm: str,
    residual_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    narrow = torch.promote_types(x.dtype, y.dtype)
    wide = torch.promote_types(narrow, torch.float32)
    added = y.to(wide) if gate is None else gate.to(wide) * y.to(wide)
    residual = (x.to(wide) + added).to(residual_dtype or narrow)
    value = _normed(residual.to(wide), eps, norm)
    if weight is not None:
        value = value * weight.to(wide)
    if bias is not None:
        value = value + bias.to(wide)
    if scale is not None:
        value = value * (1 + scale.to(wide))
    if shift is not None:
        value = value + shift.to(wide)
    return residual, value.to(out_dtype or residual.dtype)


def _normed(value: torch.Tensor, eps: float, norm: str) -> torch.Tensor:
    if norm == "layer":
        return F.layer_norm(value, (value.shape[-1],), None, None, eps)
    if norm == "rms":
        return value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    raise ValueError(f"norm {norm!r} is none of {', '.join(NORMS)}")


def samples(dtype: torch.dtype, device_type: str) -> Iterator[Sample]:
    generator = torch.Generator(device_type).manual_seed(29)

    def wide(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device_type, dtype=torch.float32)

    def random(*shape: int) -> torch.Tensor:
        return wide(*shape).to(dtype)

    def arguments(x: torch.Tensor, modulation: tuple[int, ...], norm: str, **others: Any) -> dict[str, Any]:
        """Return arguments without weight and bias, unless `others` contains them."""
        own: dict[str, Any] = {"x": x, "y": random(*x.shape), "gate": random(*modulation), "weight": None, "bias": None}
        own |= {"scale": random(*modulation), "shift": random(*modulation), "eps": 1e-6, "norm": norm}
        return {**own, "residual_dtype": None, "out_dtype": None, **others}

    for norm, batch, tokens, width in (
        ("layer", 2, 1, 1),
        ("rms", 2, 7, 7),
        ("layer", 1, 63, 100),
        ("rms", 1, 100, 63),
        ("layer", 2, 2, 3072),
        ("rms", 1, 3, 3072),
        ("layer", 1, 2, 5120),
        ("rms", 1, 1, 5120),
    ):
        modulation = (batch, 1, width)
        label = f"{norm}, {tokens} tokens of {width}"
        yield Sample(label, arguments(random(batch, tokens, width), modulation, norm))
    none = {"gate": None, "scale": None, "shift": None}
    affine = {"weight": random(100), "bias": random(100)}
    yield Sample("a plain residual and norm", arguments(random(2, 7, 100), (100,), "layer", **none, **affine))
    yield Sample("everything", arguments(random(2, 7, 100), (2, 1, 100), "layer", **affine))
    yield Sample("one gate for all, no shift", arguments(random(2, 7, 60), (1, 1, 60), "rms", shift=None))
    yield Sample("modulation of rank 1, no scale", arguments(random(2, 7, 60), (60,), "layer", scale=None))
    yield Sample("modulation a token", arguments(random(2, 7, 60), (2, 7, 60), "rms", weight=random(60)))
    yield Sample("one value a token", arguments(random(2, 7, 60), (2, 7, 1), "layer"))
    yield Sample("two batches in one program", arguments(random(5, 3, 60), (5, 1, 60), "layer"))
    floats = {"gate": wide(2, 1, 1536), "scale": wide(2, 1, 1536), "shift": wide(2, 1, 1536)}
    yield Sample("Wan: modulation in float32", arguments(random(2, 3, 1536), (1536,), "layer", **floats))
    chunks = random(2, 6 * 128)[:, None].chunk(6, -1)
    parts = {"shift": chunks[0], "scale": chunks[1], "gate": chunks[2]}
    yield Sample("chunks of one modulation", arguments(random(2, 7, 128), (128,), "layer", **parts))
    sliced = random(2, 12, 64)[:, 5:]
    yield Sample("tokens of a longer sequence", arguments(random(2, 7, 128)[..., 64:], (2, 1, 64), "rms", y=sliced))
    heads = random(2, 3, 7, 64).transpose(1, 2)
    yield Sample("heads", arguments(random(2, 7, 3, 64), (2, 7, 1, 64), "layer", y=heads))
    transposed = random(2, 60, 7).transpose(1, 2)
    yield Sample("transposed", arguments(transposed, (2, 1, 60), "layer", gate=random(60, 2, 1).permute(1, 2, 0)))
    yield Sample("one row", arguments(random(128), (128,), "rms"))
    yield Sample("residual in float32", arguments(random(3, 60), (60,), "rms", residual_dtype=torch.float32))
    yield Sample("out in bfloat16", arguments(random(3, 60), (3, 60), "layer", out_dtype=torch.bfloat16))
    yield Sample("no tokens", arguments(random(2, 0, 128), (2, 1, 128), "layer"))
    for norm in NORMS:
        wider = arguments(random(2, rows.WHOLE_ROW + 7), (rows.WHOLE_ROW + 7,), norm)
        yield Sample(f"{norm}, wider than one program", wider)
