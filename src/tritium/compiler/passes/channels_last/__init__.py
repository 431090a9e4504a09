"""Run convolutions channels-last, and keep that memory format between them.

Before:  conv2d(x, w) -> group_norm -> silu -> conv2d(., v) -> out
After:   x.contiguous(channels_last) -> conv2d(., w') -> group_norm -> silu -> conv2d(., v') -> clone(contiguous) -> out
         with w' and v' converted once, by freezing, and not on every call

1. `region`   find the convolutions to convert: those connected by operations that keep a memory format
2. `border`   convert values that enter a region, and restore strides and shared memory where values leave it
3. `convert`  convert the nodes in between, in one walk from the inputs to the outputs

Inside a region, operations whose values do not depend on strides read inputs of any format. PyTorch computes the format
of their results on fake tensors; it is never assumed. A value that leaves the region (it is returned, or read by another
kind of operation) gets back its original strides. A tensor that is written to in place is never converted.
"""

from __future__ import annotations

from collections import Counter

from torch import fx

from tritium.compiler.passes.channels_last.border import make_known_to_inductor
from tritium.compiler.passes.channels_last.convert import Converter
from tritium.graph import spatial_convolutions
from tritium.passes import Applied, Decline, Pass, PassContext

# A 3-D convolution of 96 channels, 3x3x3, on one core: 111 ms and 110 ms in float32, 15.2 ms and 14.9 ms in bfloat16.
ON_A_CPU = "on a CPU Inductor lays out 2-D convolutions itself, and 3-D ones take as long in either layout"
NOT_EXACT = "fidelity 'exact': a channels-last convolution adds in another order"
NO_CONVOLUTIONS = "no 2-D or 3-D convolution"


def decline(device_type: str, fidelity: str) -> str | None:
    """Return why no graph is converted, or None.

    >>> decline("cuda", "close")
    >>> decline("cuda", "exact")
    "fidelity 'exact': a channels-last convolution adds in another order"
    """
    if fidelity == "exact":
        return NOT_EXACT
    if device_type == "cpu":
        return ON_A_CPU
    return None if device_type == "cuda" else f"not measured on {device_type!r}"


def run(graph: fx.Graph, context: PassContext) -> Applied | Decline:
    convolutions = spatial_convolutions(graph)
    reason = context.read_only or decline(context.device_type, context.config.fidelity)
    if reason is not None or not convolutions:
        return Decline(reason or NO_CONVOLUTIONS)
    if context.config.engine == "inductor":
        make_known_to_inductor()
    converter = Converter(graph)
    reasons = Counter(converter.run(convolutions))
    converted = len(convolutions) - reasons.total()
    if not converted:
        return Decline("; ".join(f"{count} convolutions: {reason}" for reason, count in reasons.items()))
    border = converter.border
    summary = f"{converted} of {len(convolutions)} convolutions channels-last; activations converted "
    summary += f"{len(border.entries)}x in, {len(border.exits)}x out"
    if border.stops:
        summary += " (for " + ", ".join(f"{count}x {name}" for name, count in border.stops.items()) + ")"
    return Applied(summary, reasons)


PASS = Pass("channels_last", run)
