"""GELU, exact or by its tanh approximation, in float32 (float64 for float64), rounded once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium.ops import rows
from tritium.ops.op import Op, Sample

# The names of F.gelu's two forms.
FORMS = ("none", "tanh")


def reference(x: torch.Tensor, approximate: str, out_dtype: torch.dtype | None) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.gelu(wide, approximate=approximate).to(out_dtype or x.dtype)


def samples(dtype: torch.dtype, device_type: str) -> Iterator[Sample]:
    generator = torch.Generator(device_type).manual_seed(31)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device_type, dtype=torch.float32).to(dtype) * 3

    def arguments(x: torch.Tensor, approximate: str, out_dtype: torch.dtype | None = None) -> dict[str, Any]:
        return {"x": x, "approximate": approximate, "out_dtype": out_dtype}

    for approximate in FORMS:
        for shape in ((7, 1), (2, 7, 63), (63, 100), (2, 3072), (1, 5120)):
            yield Sample(f"{approximate}, {shape}", arguments(random(*shape), approximate))
        # Tails: where 1 + tanh and 1 + erf cancel, and where the cube leaves the range of half precision.
        tails = torch.linspace(-60, 60, 128, device=device_type).to(dtype)
        yield Sample(f"{approximate}, tails", arguments(tails, approximate))
        wide = arguments(random(2, rows.WHOLE_ROW + 7), approximate)
        yield Sample(f"{approximate}, wider than one program", wide)
    yield Sample("the last columns of a wider tensor", arguments(random(2, 7, 192)[..., 64:], "tanh"))
    yield Sample("transposed", arguments(random(2, 60, 7).transpose(1, 2), "tanh"))
    yield Sample("image", arguments(random(2, 5, 7, 60).movedim(-1, 1), "none"))
    yield Sample("out in float32", arguments(random(3, 60), "tanh", torch.float32))
    yield Sample("no rows", arguments(random(0, 128), "tanh"))


OP = Op(
    name="gelu",
    reference=reference,
    samples=samples,
)
