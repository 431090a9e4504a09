"""`activation(gate) * value`, as in GEGLU and SwiGLU, computed as written.

The result of the activation is rounded, as in eager.

`activation` is "silu", "gelu" or "gelu_tanh".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium.ops.op import Op, Sample


def reference(gate: torch.Tensor, value: torch.Tensor, activation: str, out_dtype: torch.dtype | None) -> torch.Tensor:
    if activation == "silu":
        activated = F.silu(gate)
    else:
        activated = F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return (activated * value).to(out_dtype or torch.promote_types(gate.dtype, value.dtype))


def samples(dtype: torch.dtype, device_type: str) -> Iterator[Sample]:
    generator = torch.Generator(device_type).manual_seed(17)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device_type, dtype=torch.float32).to(dtype)

    def arguments(gate: torch.Tensor, value: torch.Tensor, activation: str) -> dict[str, Any]:
        return {"gate": gate, "value": value, "activation": activation, "out_dtype": None}

    for activation in ("silu", "gelu", "gelu_tanh"):
        for tokens, width in ((1, 7), (63, 100), (2, 3072), (3, 5120)):
            yield Sample(
                f"{activation}, {tokens} of {width}",
                arguments(random(tokens, width), random(tokens, width), activation),
            )
        value, gate = random(2, 7, 120).chunk(2, -1)
        yield Sample(f"{activation}, two halves of one tensor", arguments(gate, value, activation))
    yield Sample("channels", arguments(random(2, 60, 5, 7), random(2, 60, 5, 7), "silu"))
    yield Sample("nothing", arguments(random(0, 128), random(0, 128), "silu"))


OP = Op(
    name="gated_activation",
    reference=reference,
    samples=samples,
)
