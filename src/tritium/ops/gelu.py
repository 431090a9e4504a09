"""GELU, exact or by its tanh approximation, in float32 (float64 for float64), rounded once."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium.ops.op import Draw, Op, Samples

# The names of F.gelu's two forms.
FORMS = ("none", "tanh")


def reference(x: torch.Tensor, approximate: str, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.gelu(wide, approximate=approximate).to(out_dtype or x.dtype)


def draw_samples(draw: Draw) -> Samples:
    for approximate in FORMS:
        for sizes in ((7, 1), (2, 7, 63), (63, 100), (2, 3072), (1, 5120)):
            yield f"{approximate}, {sizes}", {"x": 3 * draw(*sizes), "approximate": approximate}
        # Tails: where 1 + tanh and 1 + erf cancel, and where the cube leaves the range of half precision.
        tails = torch.linspace(-60, 60, 128).to(draw(0))
        yield f"{approximate}, tails", {"x": tails, "approximate": approximate}
    yield "the last columns of a wider tensor", {"x": 3 * draw(2, 7, 192)[..., 64:], "approximate": "tanh"}
    yield "transposed", {"x": 3 * draw(2, 60, 7).transpose(1, 2), "approximate": "tanh"}
    yield "image", {"x": 3 * draw(2, 5, 7, 60).movedim(-1, 1), "approximate": "none"}
    yield "out in float32", {"x": 3 * draw(3, 60), "approximate": "tanh", "out_dtype": torch.float32}
    yield "no rows", {"x": draw(0, 128), "approximate": "tanh"}


OP = Op("gelu", reference, draw_samples)
