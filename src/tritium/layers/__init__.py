"""Functions for models that are written or ported by hand; those for quantized values and experts are public here."""

from tritium.layers.experts import combine_rows, group_rows, grouped_linear, route, routed_swiglu
from tritium.layers.quantized import (
    quantize_blocks,
    quantize_rows,
    quantize_weight,
    scaled_linear,
    weight_only_linear,
)
from tritium.layers.steps import TimestepManager, TimestepPolicyConfig

__all__ = [
    "TimestepManager",
    "TimestepPolicyConfig",
    "combine_rows",
    "group_rows",
    "grouped_linear",
    "quantize_blocks",
    "quantize_rows",
    "quantize_weight",
    "route",
    "routed_swiglu",
    "scaled_linear",
    "weight_only_linear",
]
