"""What a pass is: a function of a graph with a name. It rewrites, and may request configuration; it never sets any."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import fx

from tritium import compat
from tritium.config import CompilationConfig
from tritium.report import Site


@dataclass(frozen=True)
class ConfigRequest:
    """Settings of Inductor that a pass would like to have around the lowering of its graph, and why.

    >>> ConfigRequest({"triton.max_tiles": 3}, because="two dynamic dims are padded")
    ConfigRequest({'triton.max_tiles': 3}, because='two dynamic dims are padded')
    """

    settings: Mapping[str, Any]
    because: str

    def __init__(self, settings: Mapping[str, Any], *, because: str) -> None:
        object.__setattr__(self, "settings", MappingProxyType(dict(settings)))
        object.__setattr__(self, "because", because)

    def __repr__(self) -> str:
        return f"ConfigRequest({dict(self.settings)!r}, because={self.because!r})"


@dataclass(frozen=True)
class Decline:
    """A decision not to do something, with its reason."""

    reason: str


@dataclass(frozen=True)
class Applied:
    """What a pass did, in a sentence for the report, and how many places it left alone for which reasons."""

    summary: str
    declined: Mapping[str, int] = field(default_factory=dict)


@dataclass
class PassContext:
    """What a pass may know beside the graph."""

    config: CompilationConfig
    device_type: str
    torch_version: compat.Version = compat.TORCH
    # Why no site may be rewritten in this graph, or None.
    read_only: str | None = None
    # What the graph is called with right now; a check on real values needs them.
    example_inputs: Sequence[Any] = ()
    # What was recognised, for the report.
    sites: list[Site] = field(default_factory=list)
    # Parts of the running pass that turned themselves off, by name, each with its error.
    failed: list[tuple[str, Exception]] = field(default_factory=list)


Outcome = ConfigRequest | Decline | Applied | Iterable[ConfigRequest] | None


@dataclass(frozen=True)
class Pass:
    """One pass. `run` gets the graph as Dynamo made it and a context; it may change the graph in place.

    A plug-in declares one as a value and names it in the entry point group `tritium.passes`, or hands it to
    `tritium.Backend(passes=[...])`.
    """

    name: str
    run: Callable[[fx.Graph, PassContext], Outcome]

    def file(self) -> Path | None:
        """The file whose text is part of the cache key."""
        try:
            path = inspect.getsourcefile(inspect.unwrap(self.run))
        except TypeError:
            return None
        return Path(path) if path else None
