"""`x + gate * y` with a gate that is broadcast over tokens.

It is computed in float32 (float64 for float64) and rounded once.
"""

from __future__ import annotations

import torch

from tritium.ops.op import Draw, Op, Samples


def reference(
    x: torch.Tensor, gate: torch.Tensor, y: torch.Tensor, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    narrow = torch.promote_types(torch.promote_types(x.dtype, gate.dtype), y.dtype)
    wide = torch.promote_types(narrow, torch.float32)
    return (x.to(wide) + gate.to(wide) * y.to(wide)).to(out_dtype or narrow)


def draw_samples(draw: Draw) -> Samples:
    for label, sizes, of_gate in (
        ("one token", (2, 1, 1), (2, 1, 1)),
        ("7 tokens of 60", (2, 7, 60), (2, 1, 60)),
        ("63 tokens of 100", (2, 63, 100), (2, 1, 100)),
        ("2 tokens of 3072", (2, 2, 3072), (2, 1, 3072)),
        ("3 tokens of 5120", (2, 3, 5120), (2, 1, 5120)),
        ("one gate for the batch", (2, 7, 128), (1, 1, 128)),
        ("a gate of rank 1", (2, 7, 128), (128,)),
        ("a gate a token", (2, 7, 128), (2, 7, 1)),
        ("image", (2, 8, 5, 7), (2, 8, 1, 1)),
        ("nothing", (2, 0, 128), (2, 1, 128)),
    ):
        yield label, {"x": draw(*sizes), "gate": draw(*of_gate), "y": draw(*sizes)}
    yield "transposed y", {"x": draw(2, 63, 60), "gate": draw(2, 1, 60), "y": draw(2, 60, 63).transpose(1, 2)}


OP = Op("gated_residual", reference, draw_samples)
