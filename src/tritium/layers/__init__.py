"""Functions for models that are written or ported by hand; those for quantized values are public here, others in `tritium`."""

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
    "quantize_blocks",
    "quantize_rows",
    "quantize_weight",
    "scaled_linear",
    "weight_only_linear",
]
