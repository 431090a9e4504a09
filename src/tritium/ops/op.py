"""Define ops: an op has one meaning, written in plain PyTorch, and the providers that can compute it."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import torch

from tritium import compat
from tritium.errors import CatalogError, ProviderError, brief
from tritium.ops import triton_launch
from tritium.report import flops
from tritium.report.ledger import FAILED_PROVIDERS

NAMESPACE = "tritium"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")

# The region stays in the graph unchanged, and Inductor generates its code.
INDUCTOR = "inductor"
# The op's definition runs, as with engine `eager`.
REFERENCE = "reference"


# The result of an op: one tensor, or several.
Result = torch.Tensor | tuple[torch.Tensor, ...]


class Arguments(SimpleNamespace):
    """The arguments of one call of an op: one attribute per parameter of its reference, defaults included."""


@dataclass(frozen=True)
class Provider:
    """One implementation of an op. Its results have the shapes, dtypes and strides of the op's fake results."""

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
    # True if its results are not as exact as the dtype: it is used by name, or where a user allows losses.
    lossy: bool = False


class Sample(NamedTuple):
    """Arguments for a contract test, by parameter name."""

    label: str
    arguments: Mapping[str, Any]


# Returns a tensor of normally distributed values: (*sizes, dtype=None), by default with the dtype that is tested.
Draw = Callable[..., torch.Tensor]

# Pairs of a label and the arguments of a sample.
Samples = Iterator[tuple[str, Mapping[str, Any]]]

# The properties on which the cost of an op depends: sizes, rounded to classes, and named variants.
Shape = Mapping[str, int | str]

# A function with one site of an op, and its inputs.
Block = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]


def draw_from(dtype: torch.dtype, where: str | torch.device) -> Draw:
    """Return a function that draws tensors of a dtype, the same ones in every process."""
    generator = torch.Generator(where).manual_seed(0)

    def draw(*sizes: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=where).to(dtype)

    return draw


@dataclass(frozen=True)
class FirstUse:
    """How the providers of an op are compared at the first call of a shape class: alone, on the machine that calls."""

    # Returns a function that creates arguments like these, which may be fake; None if nothing can be measured now.
    alike: Callable[[Arguments], Callable[[], Mapping[str, Any]] | None]
    # Computes the expected result, and returns a function: why a provider's result is too far from it, or None.
    check: Callable[[Arguments], Callable[[Any], str | None]]
    # Returns the provider of a shape class without a verdict.
    default: Callable[[Arguments], str]
    # Returns the versions of the packages that compute: a verdict is valid for these.
    versions: Callable[[], Mapping[str, str]]
    # Returns why a provider that takes the arguments is not measured, or None; the flag is True while compiling.
    skip: Callable[[str, Arguments, bool], str | None] | None = None
    # The provider that is kept unless another is faster by the margin, or None.
    preferred: str | None = None


@dataclass(frozen=True)
class Trial:
    """The calls with which the providers of an op are compared.

    The op alone measures the kernel's time. The block measures its effect in a model: it contains the op between the
    operations that surround it in models, in their spelling, but narrow so that they do not hide the difference.
    """

    # Returns the shape class of (possibly fake) arguments.
    shape: Callable[[Arguments], Shape]
    # Returns arguments of a shape class, and the block.
    alone: Callable[[Any, Draw], Mapping[str, Any]] | None = None
    block: Callable[[Any, Draw], Block] | None = None
    # The shape classes of known models, which shipped tables cover.
    standard: tuple[Shape, ...] = ()
    # None: a call measures nothing, only `tritium tune` does.
    first_use: FirstUse | None = None
    # The comparison in which lossy providers take part; its check is theirs.
    lossy_use: FirstUse | None = None

    @classmethod
    def in_block(
        cls,
        shape: Callable[[Arguments], Shape],
        alone: Callable[[Any, Draw], Mapping[str, Any]],
        block: Callable[[Any, Draw], Block],
        names: str,
        standard: Iterable[tuple[int | str, ...]],
    ) -> Self:
        """Return the trial of an op that is compared in a block; `names` are those of the sizes in `standard`."""
        return cls(shape, alone, block, tuple(dict(zip(names.split(), row, strict=True)) for row in standard))


# The width of a block's outer projections: they take little time compared to the op between them.
NARROW = 64


def present(size: Any) -> int:
    """Return a size as an int; for a symbolic size, its value in the call that is being compiled."""
    return int(size) if isinstance(size, int) else compat.dynamo.size_hint(size) or 1


def count(sizes: Iterable[Any]) -> int:
    """Return the product of some leading sizes: the number of rows."""
    return math.prod(map(present, sizes))


def octave(size: Any) -> int:
    """Return the power of two nearest to a size.

    >>> octave(4608), octave(333), octave(0)
    (4096, 256, 1)
    """
    return 1 << round(math.log2(max(1, present(size))))


@dataclass(frozen=True)
class Op:
    """One op, declared by its reference.

    `reference(**arguments)` is definition, default and test oracle: it computes float64 inputs in float64. Its annotations
    are the operator's schema. Results are contiguous; with `keeps_strides` they have the reference's strides.
    """

    name: str
    reference: Callable[..., Result]
    draw_samples: Callable[[Draw], Samples]
    providers: tuple[Provider, ...] = ()
    keeps_strides: bool = False
    # Allocates the results, for kernels and as fakes. None: no kernel needs it, and the reference returns the fakes.
    results: Callable[[Arguments], Result] | None = None
    # True if generated code calls the op and every layout is equally fast: Inductor then keeps the inputs' layouts.
    any_layout: bool = False
    # None: owned providers are used only if they are pinned, or by default.
    trial: Trial | None = None
    # The provider where nothing was measured; None: Inductor. Only for ops that a user asked for.
    default: str | None = None

    @property
    def qualified_name(self) -> str:
        return f"{NAMESPACE}::{self.name}"

    @property
    def overload(self) -> Any:
        """The registered operator that a rewritten graph calls."""
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

    def samples(self, dtype: torch.dtype, device_type: str) -> Iterator[Sample]:
        """Return arguments of awkward sizes and layouts for contract tests."""
        return itertools.starmap(Sample, self.draw_samples(draw_from(dtype, device_type)))

    def bind(self, *args: Any, **kwargs: Any) -> Arguments:
        """Return the arguments of a call by parameter name, with defaults."""
        values = {**self.parameters, **dict(zip(self.parameters, args, strict=False)), **kwargs}
        is_missing = any(value is inspect.Parameter.empty for value in values.values())
        if is_missing or max(len(values), len(args)) > len(self.parameters):
            expected = ", ".join(self.parameters)
            raise TypeError(f"op {self.name!r} takes {expected}; got {len(args)} arguments and {', '.join(kwargs)}")
        return Arguments(**values)

    def fake(self, *args: Any, **kwargs: Any) -> Result:
        """Return tensors without storage that have the shapes, dtypes and strides of the results."""

        def allocate(**values: Any) -> Result:
            return self.compute(**values) if self.results is None else self.results(Arguments(**values))

        result: Result = compat.traced.fake_results(allocate, vars(self.bind(*args, **kwargs)))
        return result

    def compute(self, *args: Any, **kwargs: Any) -> Result:
        """Compute the op by its reference and return results with the strides that every provider returns."""
        result = self.reference(*args, **kwargs)
        if self.keeps_strides:
            return result
        return tuple(part.contiguous() for part in result) if isinstance(result, tuple) else result.contiguous()


def failed_providers() -> dict[tuple[str, str], str]:
    """Return the reason for each (op, provider) that failed while running and was turned off."""
    return dict(FAILED_PROVIDERS)


def launch_provider(op: Op, providers: Mapping[str, Provider], *arguments: Any, provider: str, **named: Any) -> Result:
    chosen = providers.get(provider)
    key = (op.name, provider)
    if chosen is None or key in FAILED_PROVIDERS:
        if chosen is None and provider != REFERENCE:
            raise ProviderError(f"op {op.name!r} has no provider {provider!r}; it has {', '.join(providers) or 'none'}")
        return op.compute(*arguments, **named)
    try:
        return chosen.run(op.bind(*arguments, **named))
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        # Running the reference cannot help: a broken device returns wrong results, a full one fails again.
        raise
    except Exception as error:  # noqa: BLE001 - compilers raise many types; the failure is reported and warned about
        FAILED_PROVIDERS[key] = brief(error)
        warnings.warn(
            f"tritium: provider {provider!r} of op {op.name!r} failed and is turned off ({FAILED_PROVIDERS[key]}); "
            "its reference computes instead",
            RuntimeWarning,
            stacklevel=2,
        )
        return op.compute(*arguments, **named)


def register(ops: Mapping[str, Op], providers: Mapping[str, Mapping[str, Provider]]) -> None:
    """Register ops with PyTorch's dispatcher as `tritium::<name>`, with the keyword `provider`."""
    for op in ops.values():
        inputs, _, outputs = op.schema.partition(" -> ")
        # Inductor may choose any layout for its results. Most ops read rows, or the channels of a pixel, and would copy
        # other layouts; with the tag Inductor writes the right layout, often in the kernel before.
        tags = (torch.Tag.flexible_layout if op.any_layout else torch.Tag.needs_fixed_stride_order,)
        _LIBRARY.define(f"{op.name}{inputs[:-1]}, *, str provider) -> {outputs}", tags=tags)
        flops.REFERENCES[op.qualified_name] = op.reference
        _LIBRARY.impl(op.name, functools.partial(launch_provider, op, providers[op.name]), "CompositeExplicitAutograd")
        torch.library.register_fake(op.qualified_name, functools.partial(_fake, op), lib=_LIBRARY)
        compat.traced.take_apart(op.qualified_name, _LIBRARY, functools.partial(_trace, op, providers[op.name]))


def _fake(op: Op, *arguments: Any, provider: str, **named: Any) -> Result:
    del provider
    return op.fake(*arguments, **named)


def _trace(op: Op, providers: Mapping[str, Provider], *arguments: Any, provider: str, **named: Any) -> Any:
    """Trace a call by its provider; return `NotImplemented` to keep the call."""
    chosen = providers.get(provider)
    if chosen is None or not (chosen.traced or chosen.inlined):
        return NotImplemented
    compat.traced.remember_kernel_accesses()
    with triton_launch.tracing(op.name):
        return chosen.run(op.bind(*arguments, **named))
