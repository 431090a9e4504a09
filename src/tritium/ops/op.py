"""What an op is: one meaning, written as plain PyTorch, and the providers that can compute it."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tritium import compat
from tritium.errors import CatalogError, ProviderError

NAMESPACE = "tritium"

# Left to Inductor: the region stays in the graph as it was written.
INDUCTOR = "inductor"
# The op's own definition runs; what engine `eager` uses.
REFERENCE = "reference"


# What an op gives: one tensor, or several.
Result = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Provider:
    """One implementation of an op. It returns tensors with the shapes, dtypes and strides that the op's fake gives."""

    name: str
    op: str
    run: Callable[..., Result]
    # Why it cannot take these (possibly fake) arguments on this device, or None.
    decline: Callable[..., str | None]
    # Whether `run` is made of PyTorch operators alone: it is then put into the graph as such, for Inductor to compile.
    inlined: bool = False


@dataclass(frozen=True)
class Sample:
    """Arguments for a contract test or a benchmark, by parameter name, and where the shape comes from."""

    label: str
    arguments: Mapping[str, Any]


# What the cost of an op depends on: sizes, rounded to classes, and forms by name.
Shape = Mapping[str, int | str]

# Draws a tensor of normal numbers, of the dtype and on the device that are being measured.
Draw = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Trial:
    """How the providers of an op are compared.

    The op alone says what a kernel takes. The block says what it gives: it is what the op stands between in a model,
    spelled as models spell it, with its neighbours cut narrow so that they do not hide the difference.
    """

    # The class of some (possibly fake) arguments.
    shape: Callable[..., Shape]
    # Arguments of a class.
    alone: Callable[[Any, Draw], Mapping[str, Any]]
    # A function with one site of the op, and its inputs.
    block: Callable[[Any, Draw], tuple[Callable[..., Any], tuple[torch.Tensor, ...]]]
    # The classes that known models have: what a shipped table covers.
    standard: tuple[Shape, ...]


# The width of a block's outer projections: what they take is small beside the op between them.
NARROW = 64


def present(size: Any) -> int:
    """A size; of a symbolic one, the size it has in the call that is being compiled."""
    return int(size) if isinstance(size, int) else compat.size_hint(size) or 1


def count(sizes: Iterable[Any]) -> int:
    """How many rows there are over some leading dims."""
    return math.prod(map(present, sizes))


def octave(size: Any) -> int:
    """The power of two nearest to a size.

    >>> octave(4608), octave(333), octave(0)
    (4096, 256, 1)
    """
    return 1 << round(math.log2(max(1, present(size))))


@dataclass(frozen=True)
class Op:
    """One op. `schema` is the operator's signature in PyTorch's notation, without name and without `provider`.

    `reference(**arguments)` is definition, default and test oracle: given float64 it computes in float64.
    `fake(**arguments)` returns empty tensors of the right shapes, dtypes and strides. Results are contiguous, unless
    `keeps_strides` says that the reference gives them strides of its own; `fake` must say the same.
    """

    name: str
    schema: str
    reference: Callable[..., Result]
    fake: Callable[..., Result]
    samples: Callable[[torch.dtype, str], Iterator[Sample]]
    providers: tuple[Provider, ...] = ()
    keeps_strides: bool = False
    # Whether the providers are as fast on whatever layout Inductor gives their inputs: it is then asked for none.
    any_layout: bool = False
    # None: owned providers are used where they are pinned, never by themselves.
    trial: Trial | None = None

    @property
    def qualified_name(self) -> str:
        return f"{NAMESPACE}::{self.name}"

    @property
    def overload(self) -> Any:
        """The registered operator: what a rewritten graph calls."""
        return getattr(torch.ops.tritium, self.name).default


# Providers that failed while running, with the reason; the op's reference computes in their place.
_FAILED: dict[tuple[str, str], str] = {}


def failed_providers() -> dict[tuple[str, str], str]:
    """(op, provider) -> why it was turned off while running."""
    return dict(_FAILED)


def launch_provider(op: Op, providers: Mapping[str, Provider], *arguments: Any, provider: str) -> Result:
    chosen = providers.get(provider)
    key = (op.name, provider)
    if chosen is None or key in _FAILED:
        if chosen is None and provider != REFERENCE:
            raise ProviderError(f"op {op.name!r} has no provider {provider!r}; it has {', '.join(providers) or 'none'}")
        return _by_reference(op, arguments)
    try:
        return chosen.run(*arguments)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        # Nothing that runs afterwards on a broken or full device could be trusted or would help.
        raise
    except Exception as error:  # noqa: BLE001 - whatever a kernel compiler raises: local, reported, and warned about
        _FAILED[key] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        warnings.warn(
            f"tritium: provider {provider!r} of op {op.name!r} failed and is turned off ({_FAILED[key]}); "
            "its reference computes instead",
            RuntimeWarning,
            stacklevel=2,
        )
        return _by_reference(op, arguments)


def _by_reference(op: Op, arguments: tuple[Any, ...]) -> Result:
    result = op.reference(*arguments)
    if op.keeps_strides:
        return result
    return tuple(part.contiguous() for part in result) if isinstance(result, tuple) else result.contiguous()


def inlined_name(op: str, provider: str) -> str:
    """The operator that stands for an inlined provider until the graph is traced."""
    return f"{op}_by_{provider}"


class Registration:
    """The ops of one catalogue, registered with PyTorch's dispatcher for as long as this lives."""

    def __init__(self, ops: Mapping[str, Op], providers: Mapping[str, Mapping[str, Provider]]) -> None:
        # FRAGMENT: a second registration (tests make one) may add to the namespace.
        self._library = torch.library.Library(NAMESPACE, "FRAGMENT")
        for op in ops.values():
            inputs, arrow, outputs = op.schema.partition(" -> ")
            if not arrow or not inputs.endswith(")"):
                raise CatalogError(f"op {op.name!r}: schema {op.schema!r} must look like '(Tensor x) -> Tensor'")
            # Inductor lays out what it computes as it likes. Most ops read rows, or the channels of a pixel: another layout
            # would cost them a copy, which Inductor can fuse into what it computes before.
            tags = (torch.Tag.flexible_layout if op.any_layout else torch.Tag.needs_fixed_stride_order,)
            self._library.define(f"{op.name}{inputs[:-1]}, *, str provider) -> {outputs}", tags=tags)
            launch = functools.partial(launch_provider, op, providers[op.name])
            self._library.impl(op.name, launch, "CompositeExplicitAutograd")
            torch.library.register_fake(op.qualified_name, _fake_of(op), lib=self._library)
            for provider in providers[op.name].values():
                if provider.inlined:
                    # Composite: whoever traces it sees the operators it is made of, and not this one.
                    name = inlined_name(op.name, provider.name)
                    self._library.define(f"{name}{inputs} -> {outputs}")
                    self._library.impl(name, provider.run, "CompositeImplicitAutograd")


def _fake_of(op: Op) -> Callable[..., Result]:
    def fake(*arguments: Any, provider: str) -> Result:
        del provider
        return op.fake(*arguments)

    return fake
