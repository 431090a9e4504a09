"""Every error Tritium raises on purpose.

TritiumError
├── ConfigError (ValueError)         a field, value or environment variable that means nothing
├── ShapeError (ValueError)          dynamic_dims that name no argument, no tensor or no dimension
├── RequestConflict                  two passes ask Inductor for different things
├── UnrequestedConfig                a pass changed Inductor's configuration instead of asking
├── CatalogError                     two files declare the same op, fusion or pass, or a plug-in is broken
├── CustomOpError (TypeError)        a custom op whose declaration cannot be honoured
├── ProviderError                    a pinned provider that cannot run this op here
├── ReportError                      nothing to explain, or a report that cannot be read
├── MissingExtra (ImportError)       a part of the package needs an optional dependency
└── MissingWeights (FileNotFoundError)  the example pipeline's weights are not where the package keeps them
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TritiumError(Exception):
    """Root of everything Tritium raises on purpose."""


class ConfigError(TritiumError, ValueError):
    """A configuration that cannot be honoured."""


class ShapeError(TritiumError, ValueError):
    """`dynamic_dims` does not describe the arguments of the call."""


class RequestConflict(TritiumError):
    """Two passes request different values for one Inductor setting."""


class UnrequestedConfig(TritiumError):
    """A pass assigned Inductor configuration instead of requesting it."""


class CatalogError(TritiumError):
    """A catalogue entry is duplicated, missing or of the wrong type."""


class CustomOpError(TritiumError, TypeError):
    """A custom op's declaration and its function do not fit together."""


class ProviderError(TritiumError):
    """A provider was pinned that cannot run an op on this device."""


class ReportError(TritiumError):
    """There is nothing to explain, or what is there cannot be read."""


class MissingExtra(TritiumError, ImportError):
    """An optional dependency is needed and absent."""

    def __init__(self, module: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs {module!r}, which is not installed; install it with: pip install 'tritium[{extra}]'"
        )


class MissingWeights(TritiumError, FileNotFoundError):
    """The example pipeline was asked for, and its weights are absent."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint for an unknown name: the nearest valid one, or all of them.

    >>> nearest("enable_freezng", ["engine", "enable_freezing"])
    "did you mean 'enable_freezing'?"
    """
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return "valid: " + ", ".join(repr(candidate) for candidate in names)
