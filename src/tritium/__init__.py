"""Tritium: fusion for diffusion.

`import tritium` is light: torch is imported, CUDA is not touched, and each name below is loaded when it is first used.
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
    "Report": "tritium.report",
    "Shapes": "tritium.pipelines.shapes",
    "autofuse": "tritium",
    "compile": "tritium.compiler.compile",
    "custom_op": "tritium.ops.bridge",
    "errors": "tritium",
    "explain": "tritium.compiler.explain",
    "load_example": "tritium.example",
    "optimize": "tritium.api",
    "pad_to": "tritium.compiler.pad",
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
    "Report",
    "Shapes",
    "autofuse",
    "compile",
    "custom_op",
    "errors",
    "explain",
    "load_example",
    "optimize",
    "pad_to",
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
