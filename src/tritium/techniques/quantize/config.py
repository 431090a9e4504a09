"""What a user asks of quantization: formats, layers, scales, steps, and where the weights are kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from tritium.budget import Budget
from tritium.compiler.passes.quantize import PRODUCTS, Format, Precision
from tritium.errors import ConfigError, nearest
from tritium.ops.quantize_rows import ROTATIONS
from tritium.ops.weight_only_linear import GROUPS

# "int8-rotated" is "int8" whose rows and weights are rotated first, in the groups that `rotate` says.
ROTATED = "int8-rotated"
FORMATS: tuple[str, ...] = (*get_args(Format), ROTATED)

# The formats, and the search for the fastest within a budget.
AUTO = "auto"

# The sizes of groups that are rotated unless `rotate` says another: larger ones cost more and gain under 1 dB.
GROUPS_TO_ROTATE = (64, 16, 4)

# Lossy providers of attention.
ATTENTIONS = ("int8",)

# The start of a pattern in `layers`.
PATTERN = "re:"

Keep = Literal["device", "cpu"]
Scales = Literal["row", "static", "step"]
Instead = Literal["none", "row"]


@dataclass(frozen=True)
class Steps:
    """The steps of an image that run otherwise: the first ones decide the composition, the last ones the details.

    Args:
        first: The number of steps at the start of an image.
        last: The number of steps at its end.
        instead: What these steps run: "none" is the unquantized model, and "row" is 8 bits with a scale for every row, where
            the other steps have static scales.

    >>> Steps(first=2, last=1).names(1, 8), Steps(first=2, last=1).names(4, 8)
    (True, False)
    """

    first: int = 0
    last: int = 0
    instead: Instead = "none"

    def __post_init__(self) -> None:
        if self.instead not in get_args(Instead):
            raise ConfigError(
                f"Steps.instead cannot be {self.instead!r}; {nearest(str(self.instead), get_args(Instead))}"
            )
        for name in ("first", "last"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ConfigError(f"Steps.{name} is a number of steps, 0 or more, got {value!r}")

    def names(self, step: int, steps: int) -> bool:
        """Return True if a step of an image of so many steps runs otherwise."""
        return step < self.first or step >= steps - self.last


@dataclass(frozen=True)
class Quantize:
    """Quantize the linear layers of a part.

    Args:
        linear: The format of the layers that are quantized by default: "fp8", "int8", "int8-rotated", "int8-weights",
            "int4-weights"; or "auto" for the fastest within the budget, which `handle.calibrate(prompts)` searches. None
            quantizes only what `layers` names.
        layers: A format by layer, or None to leave it as it is. A plain name is the full dotted name of a linear, or of a
            module for all linears in it; `re:` starts a pattern for full names. An exact name precedes a module's, and that
            one a pattern.
        scales: "row" computes a scale for every row of an input. "static" uses one scale a layer, and "step" one a layer and
            step; `handle.calibrate(prompts)` measures them, and until then every row has its own.
        rotate: The columns of a group that are rotated before rounding to int8: 16, 64 or 256. "auto" rotates the layers
            for which `handle.calibrate(prompts)` measured a gain; False rotates none.
        steps: Steps of an image that run unquantized, or with other scales.
        attention: "int8" computes attention in 8 bits wherever that can compute a call; "auto" only where measuring finds it
            at least 3 % faster, with errors 25 dB below the result. None leaves attention as it is.
        keep: "device" leaves the parameters as they are, with quantized copies beside them. "cpu" replaces them by quantized
            bytes and keeps the originals in host memory. None is "cpu" if only weights are quantized, else "device".
        one_row: The format of layers whose input is one row an image, such as modulations; None leaves them as they are.
        group: The number of columns that share a scale in "int4-weights"; a smaller one where it does not divide a layer.
        budget: The loss that "auto" accepts; by default a PSNR of 33 dB.
        measured: What `handle.calibrate(prompts)` chose: by layer its format, or None, and scales of its input.

    >>> Quantize("int8", layers={"proj_out": None}).layers
    (('proj_out', None),)
    """

    linear: str | None = "fp8"
    layers: Mapping[str, str | None] | tuple[tuple[str, str | None], ...] = ()
    scales: Scales = "row"
    rotate: int | str = "auto"
    steps: Steps | None = None
    attention: str | None = None
    keep: Keep | None = None
    one_row: str | None = None
    group: int = 64
    budget: Budget | None = None
    measured: tuple[tuple[str, str | None, tuple[float, ...]], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        _check_format("linear", self.linear, [*FORMATS, AUTO])
        object.__setattr__(self, "layers", _layers(self.layers))
        if self.scales not in get_args(Scales):
            raise ConfigError(f"scales cannot be {self.scales!r}; {nearest(str(self.scales), get_args(Scales))}")
        if self.rotate is not False and self.rotate != AUTO and self.rotate not in ROTATIONS[1:]:
            raise ConfigError(
                f"rotate takes {', '.join(map(str, ROTATIONS[1:]))}, 'auto' or False, got {self.rotate!r}"
            )
        for name, kind in (("steps", Steps), ("budget", Budget)):
            object.__setattr__(self, name, _of_kind(kind, name, getattr(self, name)))
        _check_format("attention", self.attention, [*ATTENTIONS, AUTO])
        if self.keep is not None and self.keep not in get_args(Keep):
            raise ConfigError(f"keep cannot be {self.keep!r}; {nearest(str(self.keep), get_args(Keep))}")
        _check_format("one_row", self.one_row, ["int8-weights", "int4-weights"])
        if self.group not in GROUPS:
            raise ConfigError(f"group takes {', '.join(map(str, GROUPS))}, got {self.group!r}")
        _check_measured(self.measured)
        self._check_combination()

    def _check_combination(self) -> None:
        formats = self.formats
        if self.linear is None and not formats and self.attention is None:
            raise ConfigError("nothing is quantized: give linear a format, or layers")
        if self.attention is not None and self.steps is not None:
            raise ConfigError("steps runs some steps unquantized, and attention is quantized in all; leave one out")
        if self.budget is not None and self.linear != AUTO:
            raise ConfigError(
                "a budget is for linear='auto', which searches within it; a named format is used as it is"
            )
        if self.steps is not None and self.keeps_bytes:
            raise ConfigError("steps runs some steps unquantized, and keep='cpu' has no other weights on the device")
        if self.scales != "row" and not self.multiplies and self.linear != AUTO:
            raise ConfigError(
                f"scales={self.scales!r} are those of inputs, and only weights are quantized; leave scales out"
            )
        if self.scales != "row" and self.keeps_bytes:
            raise ConfigError(f"scales={self.scales!r} need keep='device'")
        if self.steps is not None and self.steps.instead == "row" and self.scales == "row":
            raise ConfigError(
                "Steps(instead='row') is for scales='static' or 'step': all steps have a scale per row here"
            )

    def __str__(self) -> str:
        attention = f"{self.attention} attention" if self.attention else ""
        if self.linear is None and not self.formats:
            return attention
        linears = self.linear or "some layers in " + "/".join(sorted(self.formats))
        if self.linear == AUTO and self.measured:
            linears = "/".join(sorted(self.formats))
        return f"{linears} linears" + (f", {attention}" if attention else "")

    @property
    def searches(self) -> bool:
        """True if `handle.calibrate(prompts)` chooses the formats, and has not yet."""
        return self.linear == AUTO and not self.measured

    @property
    def needs_measuring(self) -> bool:
        """True if `handle.calibrate(prompts)` has something to choose or to measure."""
        return self.linear == AUTO or self.scales != "row" or (self.rotate == AUTO and "int8" in self.formats)

    @property
    def formats(self) -> set[str]:
        """Return every format that this config names."""
        named = [self.linear, self.one_row, *dict(self.layers).values(), *(entry[1] for entry in self.measured)]
        return {format_ for format_ in named if format_ is not None and format_ != AUTO}

    @property
    def keeps_bytes(self) -> bool:
        """True if the parameters hold quantized bytes."""
        if self.keep is not None:
            return self.keep == "cpu"
        return self.linear != AUTO and not self.multiplies

    @property
    def multiplies(self) -> bool:
        """True if products of some layers are computed in 8 bits."""
        return bool(self.formats & {*PRODUCTS, ROTATED})

    def precision(self, format_: str, columns: int, *, few_rows: bool = False) -> Precision:
        """Return how a linear of this format and number of columns is computed."""
        rotate = self.rotate if format_ == "int8" and isinstance(self.rotate, int) else 0
        if format_ == ROTATED:
            format_ = "int8"
            sizes = (self.rotate,) if self.rotate in ROTATIONS[1:] else GROUPS_TO_ROTATE
            rotate = next((size for size in sizes if columns % int(size) == 0), sizes[0])
        groups = [size for size in sorted(GROUPS, reverse=True) if size <= self.group and columns % size == 0]
        group = groups[0] if groups else self.group
        return Precision(format_, int(rotate), group, few_rows)  # type: ignore[arg-type]  # a checked format


def _check_format(name: str, value: Any, known: list[str]) -> None:
    if value is not None and value not in known:
        raise ConfigError(f"{name} cannot be {value!r}; {nearest(str(value), known)}")


def _layers(value: Any) -> tuple[tuple[str, str | None], ...]:
    pairs: Any = tuple(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ConfigError(f"layers maps names of layers to formats or None, got {value!r}")
    for pair in pairs:
        name, format_ = pair
        if not isinstance(name, str) or not name.removeprefix(PATTERN):
            raise ConfigError(f"layers: a layer is named by a string, got {name!r}")
        _check_format(f"layers[{name!r}]", format_, list(FORMATS))
        if name.startswith(PATTERN):
            try:
                re.compile(name.removeprefix(PATTERN))
            except re.error as error:
                raise ConfigError(f"layers: {name!r} is no regular expression: {error}") from error
    return pairs


def _check_measured(value: Any) -> None:
    entries = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(entry, tuple) and len(entry) == 3 and isinstance(entry[2], tuple) for entry in entries):
        raise ConfigError("measured is what handle.calibrate(prompts) returns in its config; leave it out")
    for name, format_, _ in entries:
        _check_format(f"measured[{name!r}]", format_, list(FORMATS))


def _of_kind(kind: Any, name: str, value: Any) -> Any:
    """Return a value of a class, created from a mapping if it is one, or None."""
    try:
        value = kind(**value) if isinstance(value, Mapping) else value
    except TypeError as error:
        raise ConfigError(f"{name} cannot be {dict(value)!r}: {error}") from error
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name} takes a {kind.__name__}, got {value!r}")
    return value
