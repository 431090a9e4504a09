"""Tritium: fusion for diffusion.

`import tritium` is cheap: it does not start CUDA, and loads each public name on first use, torch included.
`optimize` imports torch's compiler, which takes a second or more.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from typing import TYPE_CHECKING, Any

from tritium.collector import collector_paused

# The public names. Type checkers follow these imports; `__getattr__` runs one of them when its name is first used.
if TYPE_CHECKING:
    from tritium import autofuse as autofuse
    from tritium import errors as errors
    from tritium import layers as layers
    from tritium import plugins as plugins
    from tritium.api import Handle as Handle
    from tritium.api import optimize as optimize
    from tritium.budget import Budget as Budget
    from tritium.compiler.backend import Backend as Backend
    from tritium.compiler.compile import compile as compile
    from tritium.compiler.pad import pad_to as pad_to
    from tritium.config import CompilationConfig as CompilationConfig
    from tritium.config import FusionPatterns as FusionPatterns
    from tritium.config import PassConfig as PassConfig
    from tritium.example import load_example as load_example
    from tritium.layers.attention.diffusers import register_attention_backend as register_attention_backend
    from tritium.layers.attention.diffusers import set_attention as set_attention
    from tritium.layers.attention.forward import attention_forward as attention_forward
    from tritium.layers.attention.varlen import attention_forward_varlen as attention_forward_varlen
    from tritium.layers.norms import RMSNorm as RMSNorm
    from tritium.layers.norms import fast_layernorm as fast_layernorm
    from tritium.layers.norms import group_norm_silu as group_norm_silu
    from tritium.layers.norms import layernorm_scale_shift as layernorm_scale_shift
    from tritium.layers.norms import residual_norm_modulate as residual_norm_modulate
    from tritium.layers.pointwise import get_activation_layer as get_activation_layer
    from tritium.layers.pointwise import muls_add as muls_add
    from tritium.layers.rotary import qk_norm_rope as qk_norm_rope
    from tritium.layers.rotary import rotary_position_embedding as rotary_position_embedding
    from tritium.layers.sparse.diffusers import set_sparse_attention as set_sparse_attention
    from tritium.layers.sparse.forward import sparse_attention as sparse_attention
    from tritium.layers.sparse.layout import SparseLayout as SparseLayout
    from tritium.layers.sparse.schedule import SparseAttention as SparseAttention
    from tritium.pipelines.plan import Plan as Plan
    from tritium.pipelines.shapes import Shapes as Shapes
    from tritium.pipelines.sharing import attach as attach
    from tritium.report import Report as Report
    from tritium.report.explain import explain as explain
    from tritium.techniques.choice import Choice as Choice
    from tritium.techniques.memory.config import Memory as Memory
    from tritium.techniques.parallel.config import Parallel as Parallel
    from tritium.techniques.parallel.placement import plan_placement as plan_placement
    from tritium.techniques.quantize import Quantize as Quantize
    from tritium.techniques.quantize import Steps as Steps
    from tritium.techniques.quantize.files import quantize as quantize
    from tritium.techniques.quantize.files.loading import QuantizationConfig as QuantizationConfig
    from tritium.techniques.skip.config import Skip as Skip

__version__ = "0.2.0"


_IMPORTS = next(node for node in ast.parse(inspect.getsource(sys.modules[__name__])).body if isinstance(node, ast.If))
# Each public name with its module, as the imports above give it.
_HOME = {line.names[0].name: str(line.module) for line in _IMPORTS.body if isinstance(line, ast.ImportFrom)}

if not TYPE_CHECKING:
    __all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'tritium' has no attribute {name!r}")
    with collector_paused():
        if home == "tritium":
            return importlib.import_module(f"tritium.{name}")
        value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
