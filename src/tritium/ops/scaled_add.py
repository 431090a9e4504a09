"""`x * scale + y` with a number as scale, computed in float32 (float64 for float64) and rounded once."""

from __future__ import annotations

import torch

from tritium.ops.op import Draw, Op, Samples


def reference(x: torch.Tensor, scale: float, y: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    narrow = torch.promote_types(x.dtype, y.dtype)
    wide = torch.promote_types(narrow, torch.float32)
    return (x.to(wide) * scale + y.to(wide)).to(out_dtype or narrow)


def draw_samples(draw: Draw) -> Samples:
    for scale, *sizes in ((1.0, 1, 7), (0.5, 63, 100), (-3.0, 2, 3072), (1.5, 2, 5120)):
        yield f"scale {scale}", {"x": draw(*sizes), "scale": scale, "y": draw(*sizes)}
    yield "transposed", {"x": draw(60, 7).t(), "scale": 0.25, "y": draw(7, 60)}
    yield "nothing", {"x": draw(0, 7), "scale": 2.0, "y": draw(0, 7)}


OP = Op("scaled_add", reference, draw_samples)
