"""What an op is: one meaning, written as plain PyTorch, and the providers that can compute it."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from tritium import compat
from tritium.errors import CatalogError, ProviderError
from tritium.ops import triton_launch

NAMESPACE = "tritium"

# Left to Inductor: the region stays in the graph as it was written.
INDUCTOR = "inductor"
# The op's own definition runs; what engine `eager` uses.
REFERENCE = "reference"


# What an op gives: one tensor, or several.
Result = torch.Tensor | tuple[torch.Tensor, ...]


class Arguments(SimpleNamespace):
    """The arguments of one call of an op: an attribute for each parameter of its reference, defaults included."""


@dataclass(frozen=True)
class Provider:
    """One implementation of an op. It returns tensors with the shapes, dtypes and strides of the op's fake results."""

    name: str
    op: str
    run: Callable[[Arguments], Result]
    # Return why it cannot take these (possibly fake) arguments on this device, or None.
    decline: Callable[[Arguments], str | None]
    # True if `run` consists of PyTorch operators and of Triton kernels started by `ops.triton_launch.launch`: a compiled
    # graph then contains those. Otherwise generated code calls the op through PyTorch's dispatcher, and `run` in every call.
    traced: bool = False
    # True if `run` is made of PyTorch operators alone, and Inductor generates the code for all of them.
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
    shape: Callable[[Arguments], Shape]
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
    """One op, declared by its reference.

    `reference(**arguments)` is definition, default and test oracle: given float64 it computes in float64. Its annotations
    are the operator's schema. Results are contiguous, unless `keeps_strides`: they then have the reference's strides.
    """

    name: str
    reference: Callable[..., Result]
    samples: Callable[[torch.dtype, str], Iterator[Sample]]
    providers: tuple[Provider, ...] = ()
    keeps_strides: bool = False
    # Allocate the results, for kernels and as fakes. None: only fakes are needed, and the reference on fake tensors gives them.
    results: Callable[[Arguments], Result] | None = None
    # True if generated code calls the op and it is as fast on any layout: Inductor then keeps the one its inputs have.
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

    @functools.cached_property
    def parameters(self) -> Mapping[str, Any]:
        """The names of the reference's parameters, in order, with their defaults."""
        return {name: parameter.default for name, parameter in inspect.signature(self.reference).parameters.items()}

    @functools.cached_property
    def schema(self) -> str:
        """The operator's signature in PyTorch's notation, without its name and without `provider`."""
        try:
            return torch.library.infer_schema(self.reference, mutates_args=())
        except ValueError as error:
            raise CatalogError(f"op {self.name!r}: its reference gives no schema: {error}") from error

    def bind(self, *args: Any, **kwargs: Any) -> Arguments:
        """The arguments of a call, by parameter name."""
        values = {**self.parameters, **dict(zip(self.parameters, args, strict=False)), **kwargs}
        missing = [name for name, value in values.items() if value is inspect.Parameter.empty]
        if missing or len(values) > len(self.parameters) or len(args) > len(self.parameters):
            expected = ", ".join(self.parameters)
            raise TypeError(f"op {self.name!r} takes {expected}; got {len(args)} arguments and {', '.join(kwargs)}")
        return Arguments(**values)

    def fake(self, *args: Any, **kwargs: Any) -> Result:
        """Return tensors without storage that have the shapes, dtypes and strides of the results."""
        result: Result = compat.fake_results(self._compute_fake, vars(self.bind(*args, **kwargs)))
        return result

    def _compute_fake(self, **given: Any) -> Result:
        return self.compute(**given) if self.results is None else self.results(Arguments(**given))

    def compute(self, *args: Any, **kwargs: Any) -> Result:
        """Compute the op by its reference, with the strides that every provider gives."""
        result = self.reference(*args, **kwargs)
        if self.keeps_strides:
            return result
        return tuple(part.contiguous() for part in result) if isinstance(result, tuple) else result.contiguous()


# Providers that failed while running, with the reason; the op's reference computes in their place.
_FAILED: dict[tuple[str, str], str] = {}


def failed_providers() -> dict[tuple[str, str], str]:
    """(op, provider) -> why it was turned off while running."""
    return dict(_FAILED)


def launch_provider(op: Op, providers: Mapping[str, Provider], *arguments: Any, provider: str, **named: Any) -> Result:
    chosen = providers.get(provider)
    key = (op.name, provider)
    if chosen is None or key in _FAILED:
        if chosen is None and provider != REFERENCE:
            raise ProviderError(f"op {op.name!r} has no provider {provider!r}; it has {', '.join(providers) or 'none'}")
        return op.compute(*arguments, **named)
    try:
        return chosen.run(op.bind(*arguments, **named))
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
        return op.compute(*arguments, **named)


class Registration:
    """The ops of one catalogue, registered with PyTorch's dispatcher for as long as this lives."""

    def __init__(self, ops: Mapping[str, Op], providers: Mapping[str, Mapping[str, Provider]]) -> None:
        # FRAGMENT: a second registration (tests make one) may add to the namespace.
        self._library = torch.library.Library(NAMESPACE, "FRAGMENT")
        for op in ops.values():
            inputs, _, outputs = op.schema.partition(" -> ")
            # Inductor lays out what it computes as it likes. Most ops read rows, or the channels of a pixel: another layout
            # would cost them a copy, which Inductor can fuse into what it computes before.
            tags = (torch.Tag.flexible_layout if op.any_layout else torch.Tag.needs_fixed_stride_order,)
            self._library.define(f"{op.name}{inputs[:-1]}, *, str provider) -> {outputs}", tags=tags)
            launch = functools.partial(launch_provider, op, providers[op.name])
            self._library.impl(op.name, launch, "CompositeExplicitAutograd")
            torch.library.register_fake(op.qualified_name, _fake_of(op), lib=self._library)
            compat.take_apart(op.qualified_name, self._library, _traced(op, providers[op.name]))


def _fake_of(op: Op) -> Callable[..., Result]:
    def fake(*arguments: Any, provider: str, **named: Any) -> Result:
        del provider
        return op.fake(*arguments, **named)

    return fake


def _traced(op: Op, providers: Mapping[str, Provider]) -> Callable[..., Any]:
    """Return a function that traces a call of the op by its provider, or returns `NotImplemented` to keep the call."""

    def traced(*arguments: Any, provider: str, **named: Any) -> Any:
        chosen = providers.get(provider)
        if chosen is None or not (chosen.traced or chosen.inlined):
            return NotImplemented
        compat.remember_kernel_accesses()
        with triton_launch.tracing(op.name):
            return chosen.run(op.bind(*arguments, **named))

    return traced
