"""Errors that Tritium raises on purpose, from general to specific, and hints for their messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TritiumError(Exception):
    """Base class of all Tritium errors."""


class ConfigError(TritiumError, ValueError):
    """A configuration is invalid."""


class ShapeError(TritiumError, ValueError):
    """`dynamic_dims` does not match the arguments of the call."""


class ShapeViolation(ShapeError):
    """A call is outside of `Plan(shapes=...)` under `on_violation="error"`."""


class CaptureRefused(TritiumError):
    """A call cannot be captured as a static graph. It runs uncaptured, and the report gives the reason."""


class ArgumentError(TritiumError, ValueError):
    """A layer function does not support this value, rank or shape."""


class ArgumentTypeError(ArgumentError, TypeError):
    """A layer function does not support this argument type."""


class RequestConflict(TritiumError):
    """Two passes request different values for one Inductor setting."""


class UnrequestedConfig(TritiumError):
    """A pass assigned Inductor configuration instead of requesting it."""


class CatalogError(TritiumError):
    """A catalogue entry is duplicated, missing or of the wrong type."""


class CustomOpError(TritiumError, TypeError):
    """A custom op's declaration does not match its function."""


class ProviderError(TritiumError):
    """A pinned provider cannot run an op on this device."""


class ReportError(TritiumError):
    """There is nothing to explain, or a report cannot be read."""


class PipelineError(TritiumError):
    """A pipeline is already optimized, has an unknown class, or carries hooks that prevent optimizing."""


class RankError(PipelineError):
    """Another rank has failed, or the ranks differ: raised on all of them."""


class MemoryShortage(TritiumError, MemoryError):
    """A decode needs more memory than is free on the device."""


class RecipeError(TritiumError, ValueError):
    """A recipe cannot be read, or is invalid in this version."""


class RecipeMismatch(RecipeError):
    """A recipe's fingerprint differs from that of this machine, these versions or this model."""


class FingerprintError(TritiumError, ValueError):
    """A stored fingerprint cannot be read."""


class ArtifactError(TritiumError):
    """Compile artifacts cannot be written or read. Compiling still works."""


class ArtifactMismatch(ArtifactError):
    """Compile artifacts do not match; `differences` has one line per ingredient that differs."""

    def __init__(self, path: object, differences: Iterable[str]) -> None:
        self.differences = list(differences)
        listed = "".join(f"\n  {line}" for line in self.differences)
        super().__init__(f"{path} was made elsewhere and is not used:{listed}")


class SharingError(TritiumError):
    """Weights cannot be shared: no such keeper, a refused message, or a pipeline that cannot be rebuilt."""


class KeeperLost(SharingError):
    """The process that keeps the weights has ended, so the pipelines attached to it have stopped."""


class CheckpointError(TritiumError, ValueError):
    """A quantized checkpoint cannot be read, or does not fit the model."""


class MissingExtra(TritiumError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, module: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs {module!r}, which is not installed; install it with: pip install 'tritium[{extra}]'"
        )


class MissingWeights(TritiumError, FileNotFoundError):
    """The example pipeline's weights are missing."""


def brief(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return a hint for an unknown name: the nearest valid one, or all of them.

    >>> nearest("enable_freezng", ["engine", "enable_freezing"])
    "did you mean 'enable_freezing'?"
    """
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return "valid: " + ", ".join(repr(candidate) for candidate in names)
