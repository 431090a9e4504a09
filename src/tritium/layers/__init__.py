"""Layer functions for people who write or port models by hand.

All are importable from `tritium`; `PUBLIC` maps each name to its file.
"""

from __future__ import annotations

import importlib
from typing import Any

PUBLIC = {
    "RMSNorm": "rms_norm",
    "SparseAttention": "sparse.schedule",
    "SparseLayout": "sparse.layout",
    "attention_forward": "attention.forward",
    "attention_forward_varlen": "attention.varlen",
    "fast_layernorm": "layer_norm",
    "get_activation_layer": "activation",
    "group_norm_silu": "group_norm",
    "layernorm_scale_shift": "layer_norm",
    "muls_add": "scaled_add",
    "qk_norm_rope": "query_key",
    "register_attention_backend": "attention.stock",
    "residual_norm_modulate": "residual",
    "rotary_position_embedding": "rotary",
    "set_attention": "attention.stock",
    "set_sparse_attention": "sparse.stock",
    "sparse_attention": "sparse.forward",
}


def __getattr__(name: str) -> Any:
    home = PUBLIC.get(name)
    if home is None:
        raise AttributeError(f"module 'tritium.layers' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tritium.layers.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *PUBLIC])
