"""The trial that compares the providers of `residual_norm_modulate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium.ops.op import NARROW, Arguments, Draw, Shape, Trial, count, octave, present


def shape(given: Arguments) -> Shape:
    x = given.x
    return {"tokens": octave(count(x.shape[:-1])), "width": present(x.shape[-1]), "norm": given.norm}


def alone(shape: Any, draw: Draw) -> dict[str, Any]:
    x, y = (draw(1, shape["tokens"], shape["width"]) for _ in "xy")
    gate, scale, shift = draw(1, 1, 3 * shape["width"]).chunk(3, -1)
    return {
        "x": x,
        "y": y,
        "gate": gate,
        "weight": None,
        "bias": None,
        "scale": scale,
        "shift": shift,
        "eps": 1e-6,
        "norm": shape["norm"],
        "residual_dtype": None,
        "out_dtype": None,
    }


def block(shape: Any, draw: Draw) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    """Return the op between two projections of a transformer block, which are narrow here."""
    given = alone(shape, draw)
    width = shape["width"]
    inner, outer = draw(width, NARROW) / NARROW**0.5, draw(NARROW, width) / width**0.5
    inputs = (given["x"], draw(1, shape["tokens"], NARROW), inner, outer)

    def between(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y, inner, outer, gate, scale, shift = inputs
        x = x + gate * F.linear(y, inner)
        normed = (
            F.layer_norm(x, (width,), eps=1e-6) if shape["norm"] == "layer" else F.rms_norm(x, (width,), None, 1e-6)
        )
        return x, F.linear(normed * (1 + scale) + shift, outer)

    return between, (*inputs, given["gate"], given["scale"], given["shift"])


TRIAL = Trial(
    shape,
    alone,
    block,
    standard=tuple(
        {"tokens": tokens, "width": width, "norm": norm}
        for tokens, width, norm in (
            # Wan 1.3B, SD3.5, FLUX and Qwen-Image, Wan 14B: text and image or video.
            (32768, 1536, "layer"),
            (256, 2432, "layer"),
            (4096, 2432, "layer"),
            (256, 3072, "layer"),
            (512, 3072, "layer"),
            (4096, 3072, "layer"),
            (16384, 3072, "layer"),
            (32768, 5120, "layer"),
            # A FLUX with three heads, which the demo and CPU benchmarks run.
            (256, 384, "layer"),
            # LTX, Z-Image.
            (4096, 2048, "rms"),
            (4096, 3840, "rms"),
        )
    ),
)
