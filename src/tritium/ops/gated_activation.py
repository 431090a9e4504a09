"""`activation(gate) * value`, as in GEGLU and SwiGLU, computed as written.

The result of the activation is rounded, as in eager. `activation` is "silu", "gelu" or "gelu_tanh".
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium.ops.op import Draw, Op, Samples


def reference(
    gate: torch.Tensor, value: torch.Tensor, activation: str, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    if activation == "silu":
        activated = F.silu(gate)
    else:
        activated = F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return (activated * value).to(out_dtype or torch.promote_types(gate.dtype, value.dtype))


def draw_samples(draw: Draw) -> Samples:
    for activation in ("silu", "gelu", "gelu_tanh"):
        for sizes in ((1, 7), (63, 100), (2, 3072), (3, 5120)):
            yield f"{activation}, {sizes}", {"gate": draw(*sizes), "value": draw(*sizes), "activation": activation}
        value, gate = draw(2, 7, 120).chunk(2, -1)
        yield f"{activation}, two halves of one tensor", {"gate": gate, "value": value, "activation": activation}
    yield "channels", {"gate": draw(2, 60, 5, 7), "value": draw(2, 60, 5, 7), "activation": "silu"}
    yield "nothing", {"gate": draw(0, 128), "value": draw(0, 128), "activation": "silu"}


OP = Op("gated_activation", reference, draw_samples)
