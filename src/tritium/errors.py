"""Every error Tritium raises on purpose.

TritiumError
├── ConfigError (ValueError)         a field, value or environment variable that means nothing
├── ShapeError (ValueError)          dynamic_dims that name no argument, no tensor or no dimension
│   └── ShapeViolation               a call outside of the shapes that were promised, where that is an error
├── CaptureRefused                   a call that cannot be recorded as a static graph, and why
├── ArgumentError (ValueError)       a layer function was given a value, rank or shape that it cannot honour
│   └── ArgumentTypeError (TypeError)  or something of another type
├── RequestConflict                  two passes ask Inductor for different things
├── UnrequestedConfig                a pass changed Inductor's configuration instead of asking
├── CatalogError                     two files declare the same op, fusion or pass, or a plug-in is broken
├── CustomOpError (TypeError)        a custom op whose declaration cannot be honoured
├── ProviderError                    a pinned provider that cannot run this op here
├── ReportError                      nothing to explain, or a report that cannot be read
├── PipelineError                    a pipeline that cannot be optimized as it is
├── MemoryShortage (MemoryError)     a decode that does not fit the device, refused before it starts
├── RecipeError (ValueError)         a recipe that cannot be read
│   └── RecipeMismatch               a recipe that was measured on another machine, version or model
├── FingerprintError (ValueError)    a fingerprint whose ingredients are missing, unknown or of the wrong type
├── ArtifactError                    compile artifacts that cannot be saved or read
│   └── ArtifactMismatch             they were made on another device, with other versions or for another model
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


class ShapeViolation(ShapeError):
    """A call outside of `Plan(shapes=...)` under `on_violation="error"`."""


class CaptureRefused(TritiumError):
    """A call cannot be recorded as a static graph; it runs without one, and the report has the reason."""


class ArgumentError(TritiumError, ValueError):
    """A layer function was given a value, a rank or a shape that it cannot honour."""


class ArgumentTypeError(ArgumentError, TypeError):
    """A layer function was given something of another type than it takes."""


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


class PipelineError(TritiumError):
    """A pipeline that is optimized already, is unknown, or has something on it that stands in the way."""


class MemoryShortage(TritiumError, MemoryError):
    """A decode needs more memory than the device has free."""


class RecipeError(TritiumError, ValueError):
    """A recipe that cannot be read, or means nothing to this version."""


class RecipeMismatch(RecipeError):
    """A recipe whose fingerprint is not this machine's, versions' or model's."""


class FingerprintError(TritiumError, ValueError):
    """A stored fingerprint cannot be read."""


class ArtifactError(TritiumError):
    """A file of compile artifacts cannot be written or read; compiling as usual still works."""


class ArtifactMismatch(ArtifactError):
    """Compile artifacts that do not fit here; `differences` has one line for each ingredient that differs."""

    def __init__(self, path: object, differences: Iterable[str]) -> None:
        self.differences = list(differences)
        listed = "".join(f"\n  {line}" for line in self.differences)
        super().__init__(f"{path} was made elsewhere and is not used:{listed}")


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
