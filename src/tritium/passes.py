"""Passes: named functions of a graph that rewrite it and may request configuration, but never set any."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import fx

from tritium.config import CompilationConfig
from tritium.report.records import Site

if TYPE_CHECKING:
    from tritium.fusions import Fusion


@dataclass(frozen=True)
class ConfigRequest:
    """Inductor settings that a pass requests for lowering its graph, with the reason.

    >>> ConfigRequest({"triton.max_tiles": 3}, because="two dynamic dims are padded")
    ConfigRequest(settings={'triton.max_tiles': 3}, because='two dynamic dims are padded')
    """

    settings: Mapping[str, Any]
    because: str = field(kw_only=True)


@dataclass(frozen=True)
class Decline:
    """A decision not to do something, with its reason."""

    reason: str


@dataclass(frozen=True)
class Applied:
    """The result of a pass for the report: a sentence, and the number of places left unchanged by reason."""

    summary: str
    declined: Mapping[str, int] = field(default_factory=dict)


@dataclass
class PassContext:
    """Input of a pass in addition to the graph."""

    config: CompilationConfig
    device_type: str
    # The reason why no site in this graph may be rewritten, or None.
    read_only: str | None = None
    # Inputs of the current call, for checks on real values.
    example_inputs: Sequence[Any] = ()
    # The fusions to recognise: built-in, plug-ins', the backend's.
    fusions: Sequence[Fusion] = ()
    # Recognised sites, for the report.
    sites: list[Site] = field(default_factory=list)
    # Parts of the running pass that disabled themselves: name and error.
    failed: list[tuple[str, Exception]] = field(default_factory=list)


Outcome = ConfigRequest | Decline | Applied | Iterable[ConfigRequest] | None


@dataclass(frozen=True)
class Pass:
    """One pass. `run` gets the graph from Dynamo and a context; it may change the graph in place.

    A plug-in declares one and names it in the entry point group `tritium.passes`, or passes it to
    `tritium.Backend(passes=[...])`. It runs after the built-in passes, or with `early` before `fuse`, so that fusions
    see what it wrote.
    """

    name: str
    run: Callable[[fx.Graph, PassContext], Outcome]
    early: bool = False

    def within(self, path: str) -> Pass:
        """Return the pass for a module of the model that is compiled by itself, where names begin below its path."""
        narrow = getattr(self.run, "within", None)
        return self if narrow is None else replace(self, run=narrow(path))

    def file(self) -> Path | None:
        """Return the file whose text is part of the cache key."""
        try:
            path = inspect.getsourcefile(inspect.unwrap(self.run))
        except TypeError:
            return None
        return Path(path) if path else None
