"""Cache identity from content: participating files, configuration and versions, but no paths."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from torch import fx

import tritium
from tritium import fusions, ops
from tritium.config import CompilationConfig
from tritium.fusions import Fusion
from tritium.ops import bridge
from tritium.passes import Pass


def package_files() -> list[Path]:
    """Return the package's files that decide how a graph is compiled, for any set of fusions and passes."""
    package = Path(__file__).parents[1]
    folders = [package / name for name in ("compiler", "tiling", "tuning", "compat")]
    return [package / "graph.py", *(file for folder in folders for file in sorted(folder.rglob("*.py")))]


def identity(
    graph: fx.Graph, config: CompilationConfig, passes: Iterable[Pass], extra_fusions: Iterable[Fusion]
) -> bytes:
    """Return a key of everything in Tritium that can change code and is not in Inductor's key."""
    files = {*package_files(), *ops.files(), *fusions.files()}
    files.update(file for entry in passes if (file := entry.file()) is not None)
    files.update(file for fusion in extra_fusions if (file := _file_of(fusion)) is not None)
    files.update(file for op in bridge.in_graph(graph) for file in op.files())
    digest = hashlib.sha256()
    digest.update(tritium.__version__.encode())
    digest.update(config.identity().encode())
    # Hash file contents and not paths, so that the package can be moved.
    for text in sorted(_digest_of(file) for file in files):
        digest.update(text)
    return digest.digest()


def _digest_of(file: Path) -> bytes:
    return hashlib.sha256(file.read_bytes()).digest()


def _file_of(fusion: Fusion) -> Path | None:
    function = next(iter(fusion.spellings), fusion.find)
    code = getattr(function, "__code__", None)
    return Path(code.co_filename) if code is not None and Path(code.co_filename).exists() else None
