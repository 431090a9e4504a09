"""Programs of this repository that no package holds: benchmarks, examples, the generator of the docs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent.parent


def load(path: str) -> ModuleType:
    """A program as a module, by its path from the root; its dataclasses and pickles find it by name."""
    spec = importlib.util.spec_from_file_location(f"script_{Path(path).stem}", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
