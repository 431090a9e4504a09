"""Measure on a model's own inputs what each format does to each linear, and the range of its input.

The model runs eagerly, with hooks on its linears that compute samples of their rows in each format as well. The error is
a signal-to-noise ratio in dB: the energy of the product divided by that of its error, over all sampled rows.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import nn

from tritium.compiler.passes.quantize import PRODUCTS, Precision, weight_quantizer
from tritium.ops import quantize_rows, weight_only_linear
from tritium.techniques.quantize.config import FORMATS, Quantize
from tritium.techniques.quantize.selection import linears_of

# Rows of an input that are sampled in a call, evenly: more change the ratio by less than 0.1 dB.
ROWS = 256

# A key of largest magnitudes: the size of the groups that are rotated, and the step.
Key = tuple[int, int]


@dataclass
class Observation:
    """What was measured at one linear."""

    # The energy of the products, and of the errors by format.
    signal: Any = 0.0
    noise: dict[str, Any] = field(default_factory=lambda: defaultdict(float))
    # The largest magnitude of its input by rotation and step.
    largest: dict[Key, Any] = field(default_factory=dict)
    # The precision that each format stands for.
    precisions: dict[str, Precision] = field(default_factory=dict)

    def ratio(self, format_: str) -> float:
        """Return the signal-to-noise ratio of a format in dB; infinite without an error, NaN if none was measured."""
        signal, noise = float(self.signal), float(self.noise.get(format_, math.nan))
        if noise == 0:
            return math.inf
        return 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else math.nan

    def largest_by_step(self, rotate: int) -> dict[int, float]:
        return {step: float(value) for (group, step), value in sorted(self.largest.items()) if group == rotate}


class Sensitivity(Mapping[str, Mapping[str, float]]):
    """The signal-to-noise ratio in dB of each linear in each format; `str()` shows the worst ones.

    >>> tritium.optimize(pipe).sensitivity(prompts)["transformer"].worst("fp8", 1)  # doctest: +SKIP
    [('transformer_blocks.0.ff.net.2', 28.1)]
    """

    def __init__(self, observations: Mapping[str, Observation]) -> None:
        self.observations = dict(observations)
        self._ratios = {
            name: {format_: found.ratio(format_) for format_ in found.precisions}
            for name, found in self.observations.items()
        }

    def __getitem__(self, name: str) -> Mapping[str, float]:
        return self._ratios[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ratios)

    def __len__(self) -> int:
        return len(self._ratios)

    def worst(self, format_: str, count: int = 5) -> list[tuple[str, float]]:
        """Return the linears with the lowest ratio in a format, the lowest first."""
        found = [
            (name, ratios[format_]) for name, ratios in self.items() if not math.isnan(ratios.get(format_, math.nan))
        ]
        return sorted(found, key=lambda pair: pair[1])[:count]

    def __str__(self) -> str:
        lines = []
        for format_ in dict.fromkeys(format_ for ratios in self.values() for format_ in ratios):
            worst = ", ".join(f"{name} {ratio:.1f}" for name, ratio in self.worst(format_))
            lines.append(f"{format_:13} SQNR in dB, worst: {worst or 'no calls'}")
        return "\n".join(lines)


@contextlib.contextmanager
def observing(
    module: nn.Module,
    names: Iterable[str],
    config: Quantize,
    step_of: Callable[[], int],
    measures_errors: Callable[[int], bool],
    formats: Iterable[str] = FORMATS,
) -> Iterator[dict[str, Observation]]:
    """Observe linears while a model runs eagerly inside the context.

    Args:
        module: The model.
        names: The linears to observe.
        config: Which groups are rotated, and which share a scale.
        step_of: Returns the current step; 0 for a model without steps.
        measures_errors: Whether the errors of formats are measured in a step: they take as long as several products.
        formats: The formats to measure.
    """
    linears = linears_of(module)
    found: dict[str, Observation] = {}
    handles = []
    for name in names:
        found[name] = seen = Observation()
        for format_ in formats:
            precision = config.precision(format_, linears[name].in_features)
            if fits(precision, linears[name].in_features):
                seen.precisions[format_] = precision

        def observe(linear: nn.Module, args: Any, kwargs: Any, seen: Observation = seen) -> None:
            x = args[0] if args else kwargs["input"]
            step = step_of()
            _observe(seen, linear, x, step, measures_errors(step))

        handles.append(linears[name].register_forward_pre_hook(observe, with_kwargs=True))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def fits(precision: Precision, columns: int) -> bool:
    """Return True if the groups of a precision divide the columns of a linear."""
    size = precision.group if precision.format == "int4-weights" else precision.rotate
    return not size or columns % size == 0


@torch.no_grad()
def _observe(seen: Observation, linear: Any, x: torch.Tensor, step: int, measures_errors: bool) -> None:
    rows = x.detach().reshape(-1, x.shape[-1])
    if rows.shape[0] == 0:
        return
    for rotate in {precision.rotate for precision in seen.precisions.values()} | {0}:
        largest = quantize_rows.rotated(rows.float(), rotate).abs().amax()
        before = seen.largest.get((rotate, step))
        seen.largest[rotate, step] = largest if before is None else torch.maximum(before, largest)
    if not measures_errors:
        return
    sample = rows[:: max(1, rows.shape[0] // ROWS)].float()
    weight = linear.weight.detach().float()
    product = F.linear(sample, weight)
    seen.signal = seen.signal + product.double().square().sum()
    for format_, precision in seen.precisions.items():
        error = quantized_product(sample, weight, precision) - product
        seen.noise[format_] = seen.noise[format_] + error.double().square().sum()


def quantized_product(x: torch.Tensor, weight: torch.Tensor, precision: Precision) -> torch.Tensor:
    """Return `x @ weight.T` of values that were rounded to a precision, in the dtype of x."""
    quantize, options = weight_quantizer(precision)
    bytes_, scale = quantize(weight, *options)
    if precision.format not in PRODUCTS:
        return F.linear(x, weight_only_linear.dequantize(bytes_, scale, x.dtype))
    q, rows = quantize_rows.reference(x, PRODUCTS[precision.format], precision.rotate)
    return F.linear(_dequantized(q, rows, x.dtype), _dequantized(bytes_, scale, x.dtype))


def _dequantized(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (q.to(torch.float32) * scale).to(dtype)


@contextlib.contextmanager
def emulating(module: nn.Module, chosen: Mapping[str, Precision]) -> Iterator[None]:
    """Compute linears in a precision while a model runs eagerly inside the context; no code is compiled."""
    linears = linears_of(module)
    handles = []
    for name, precision in chosen.items():

        def replace(
            linear: Any, args: Any, kwargs: Any, _output: torch.Tensor, precision: Precision = precision
        ) -> torch.Tensor:
            x = args[0] if args else kwargs["input"]
            product = quantized_product(x, linear.weight, precision)
            return product if linear.bias is None else product + linear.bias

        handles.append(linears[name].register_forward_hook(replace, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
