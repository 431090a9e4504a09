"""Tritium: fusion for diffusion.

`import tritium` is cheap: it imports torch, does not start CUDA, and loads each name below on first use.
`optimize` imports torch's compiler, which takes a second or more.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tritium import autofuse, errors
    from tritium.api import Handle, optimize
    from tritium.compiler.backend import Backend
    from tritium.compiler.compile import compile
    from tritium.compiler.explain import explain
    from tritium.compiler.pad import pad_to
    from tritium.config import CompilationConfig, FusionPatterns, PassConfig
    from tritium.example import load_example
    from tritium.fusions.fusion import Fusion, Match
    from tritium.layers.activation import get_activation_layer
    from tritium.layers.attention.forward import attention_forward
    from tritium.layers.attention.stock import register_attention_backend, set_attention
    from tritium.layers.attention.varlen import attention_forward_varlen
    from tritium.layers.group_norm import group_norm_silu
    from tritium.layers.layer_norm import fast_layernorm, layernorm_scale_shift
    from tritium.layers.query_key import qk_norm_rope
    from tritium.layers.residual import residual_norm_modulate
    from tritium.layers.rms_norm import RMSNorm
    from tritium.layers.rotary import rotary_position_embedding
    from tritium.layers.scaled_add import muls_add
    from tritium.layers.sparse.forward import sparse_attention
    from tritium.layers.sparse.layout import SparseLayout
    from tritium.layers.sparse.schedule import SparseAttention
    from tritium.layers.sparse.stock import set_sparse_attention
    from tritium.ops.bridge import custom_op
    from tritium.ops.op import Op, Provider
    from tritium.passes import ConfigRequest, Decline, Pass, PassContext
    from tritium.pipelines.plan import Choice, Plan
    from tritium.pipelines.shapes import Shapes
    from tritium.report import Report

__version__ = "0.1.0"

_HOME = {
    "Backend": "tritium.compiler.backend",
    "Choice": "tritium.pipelines.plan",
    "CompilationConfig": "tritium.config",
    "ConfigRequest": "tritium.passes",
    "Decline": "tritium.passes",
    "Fusion": "tritium.fusions.fusion",
    "FusionPatterns": "tritium.config",
    "Handle": "tritium.api",
    "Match": "tritium.fusions.fusion",
    "Op": "tritium.ops.op",
    "Pass": "tritium.passes",
    "PassConfig": "tritium.config",
    "PassContext": "tritium.passes",
    "Plan": "tritium.pipelines.plan",
    "Provider": "tritium.ops.op",
    "RMSNorm": "tritium.layers.rms_norm",
    "Report": "tritium.report",
    "Shapes": "tritium.pipelines.shapes",
    "SparseAttention": "tritium.layers.sparse.schedule",
    "SparseLayout": "tritium.layers.sparse.layout",
    "attention_forward": "tritium.layers.attention.forward",
    "attention_forward_varlen": "tritium.layers.attention.varlen",
    "autofuse": "tritium",
    "compile": "tritium.compiler.compile",
    "custom_op": "tritium.ops.bridge",
    "errors": "tritium",
    "explain": "tritium.compiler.explain",
    "fast_layernorm": "tritium.layers.layer_norm",
    "get_activation_layer": "tritium.layers.activation",
    "group_norm_silu": "tritium.layers.group_norm",
    "layernorm_scale_shift": "tritium.layers.layer_norm",
    "load_example": "tritium.example",
    "muls_add": "tritium.layers.scaled_add",
    "optimize": "tritium.api",
    "pad_to": "tritium.compiler.pad",
    "qk_norm_rope": "tritium.layers.query_key",
    "register_attention_backend": "tritium.layers.attention.stock",
    "residual_norm_modulate": "tritium.layers.residual",
    "rotary_position_embedding": "tritium.layers.rotary",
    "set_attention": "tritium.layers.attention.stock",
    "set_sparse_attention": "tritium.layers.sparse.stock",
    "sparse_attention": "tritium.layers.sparse.forward",
}

__all__ = [
    "Backend",
    "Choice",
    "CompilationConfig",
    "ConfigRequest",
    "Decline",
    "Fusion",
    "FusionPatterns",
    "Handle",
    "Match",
    "Op",
    "Pass",
    "PassConfig",
    "PassContext",
    "Plan",
    "Provider",
    "RMSNorm",
    "Report",
    "Shapes",
    "SparseAttention",
    "SparseLayout",
    "attention_forward",
    "attention_forward_varlen",
    "autofuse",
    "compile",
    "custom_op",
    "errors",
    "explain",
    "fast_layernorm",
    "get_activation_layer",
    "group_norm_silu",
    "layernorm_scale_shift",
    "load_example",
    "muls_add",
    "optimize",
    "pad_to",
    "qk_norm_rope",
    "register_attention_backend",
    "residual_norm_modulate",
    "rotary_position_embedding",
    "set_attention",
    "set_sparse_attention",
    "sparse_attention",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'tritium' has no attribute {name!r}")
    if home == "tritium":
        return importlib.import_module(f"tritium.{name}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
