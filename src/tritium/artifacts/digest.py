"""What decides compiled code: participating files, configuration and versions, but no paths."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path

from torch import fx

import tritium
from tritium import compat, disk, fusions, ops
from tritium.config import CompilationConfig
from tritium.fusions import Fusion
from tritium.fusions.patterns import Pattern
from tritium.ops import bridge
from tritium.passes import Pass

ROOT = Path(tritium.__file__).parent

# The parts of the package whose code decides how a graph is compiled. A change elsewhere leaves compiled code valid.
CODE = ("compat", "compiler", "fusions", "graph.py", "ops", "tiling", "tuning")


def package_files() -> list[Path]:
    """Return the package's files that decide how a graph is compiled."""
    parts = (ROOT / name for name in CODE)
    return sorted(file for part in parts for file in ([part] if part.suffix else ops.code_in(part)))


@functools.cache
def package_digest() -> str:
    """Return a digest of these files that does not depend on the package's location."""
    files = package_files()
    return disk.digest(*(file.relative_to(ROOT).as_posix() for file in files), *files)


def identity(
    graph: fx.Graph, config: CompilationConfig, passes: Iterable[Pass], extra_fusions: Iterable[Fusion]
) -> bytes:
    """Return a key of everything in Tritium that can change code and is not in Inductor's key."""
    files = {*ops.files(), *fusions.files()}
    files.update(file for entry in passes if (file := entry.file()) is not None)
    given = list(extra_fusions)
    files.update(file for fusion in given for file in fusion.files())
    files.update(file for op in bridge.in_graph(graph) for file in op.files())
    plugged_in = sorted(disk.digest(file) for file in files.difference(package_files()))
    patterns = [repr(one) for fusion in given for one in fusion.spellings if isinstance(one, Pattern)]
    return bytes.fromhex(disk.digest(tritium.__version__, config.identity(), package_digest(), *plugged_in, *patterns))


def settings_digest() -> str:
    """Return a digest of Inductor's current settings in this thread."""
    # Exclude objects: their repr contains an address, and the content of relevant ones is in `identity`.
    plain = (str, int, float, bool, type(None))
    settings = {name: value for name, value in compat.inductor.inductor_settings().items() if isinstance(value, plain)}
    return disk.digest(json.dumps(settings, sort_keys=True))
