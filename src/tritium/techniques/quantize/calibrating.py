"""What measurements on a model decide: rotations, scales of inputs, and the ladder of formats of `quantize="auto"`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import nn

from tritium import compat, device
from tritium.compiler.passes.quantize import PRODUCTS, Precision
from tritium.ops import scaled_linear
from tritium.ops.quantize_rows import LARGEST
from tritium.techniques.quantize.config import AUTO, ROTATED, Quantize
from tritium.techniques.quantize.selection import candidates, select
from tritium.techniques.quantize.sensitivity import Observation, Sensitivity

# A rotation has to gain this many dB: it costs a product with a small matrix.
GAIN = 1.0

# Static scales leave room for inputs above the measured ones. float8 loses nothing by it; int8 loses the bit.
HEADROOM = {torch.float8_e4m3fn: 2.0, torch.int8: 1.0}

# The shares of layers that `auto` moves to a more accurate format, those with the largest errors first.
SHARES = (0, 1 / 16, 1 / 8, 1 / 4, 1 / 2)


@dataclass
class Figures:
    """Measurements of a model, for the summary."""

    sensitivity: Sensitivity | None = None
    # Milliseconds of a call with `quantize` and `without` it, by config.
    times: dict[Quantize, Mapping[str, float]] = field(default_factory=dict)

    def sqnr(self, name: str, how: Precision) -> float | None:
        """Return the signal-to-noise ratio of a linear in dB, if it was measured in this format."""
        ratios = self.sensitivity.get(name, {}) if self.sensitivity is not None else {}
        ratio = ratios.get(ROTATED if how.rotate else how.format, math.nan)
        return ratio if math.isfinite(ratio) else None


_OF_MODULE: WeakKeyDictionary[nn.Module, Figures] = WeakKeyDictionary()


def remember(module: nn.Module, found: Sensitivity) -> None:
    _OF_MODULE.setdefault(module, Figures()).sensitivity = found


def remember_times(module: nn.Module, config: Quantize, times: Mapping[str, float]) -> None:
    _OF_MODULE.setdefault(module, Figures()).times[config] = times


def figures_of(module: nn.Module) -> Figures:
    return _OF_MODULE.get(module, Figures())


def bases(module: nn.Module) -> list[str]:
    """Return the formats that may be faster than the model's own dtype on its device."""
    where = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    if where.type == "cpu":
        return ["int8"] if compat.operators.int8_products_are_exact() else []
    capability = device.capability(where)
    has_float8 = capability is not None and capability >= scaled_linear.ROW_SCALES
    return ["fp8", "int8"] if has_float8 else ["int8"]


def with_measured(config: Quantize, module: nn.Module, errors: Sensitivity) -> Quantize:
    """Return a config with the rotations and the scales that were measured."""
    chosen = select(module, dataclasses.replace(config, measured=())).chosen
    measured = []
    for name, how in chosen.items():
        if name not in errors.observations:
            continue
        format_ = ROTATED if how.rotate else how.format
        if format_ == "int8" and config.rotate == AUTO:
            format_ = _rotated_if_better(errors[name])
        measured.append((name, format_, _scales(config, errors.observations[name], format_)))
    return dataclasses.replace(config, measured=tuple(measured))


def _rotated_if_better(ratios: Mapping[str, float]) -> str:
    gain = ratios.get(ROTATED, -math.inf) - ratios.get("int8", math.inf)
    return ROTATED if gain >= GAIN else "int8"


def ladder(config: Quantize, module: nn.Module, errors: Sensitivity, base: str) -> Iterator[Quantize]:
    """Yield configs of a format, each with more of the worst layers in a more accurate one.

    float8 is followed by int8, rotated where that is better, and int8 by the model's own dtype.
    """
    names = [name for name in candidates(module, config) if name in errors]
    formats = {name: _best(errors[name], base, config) for name in names}
    # A layer that was not called has no ratio: its format makes no difference.
    order = sorted(names, key=lambda name: _finite(errors[name].get(formats[name], math.nan)))
    for share in SHARES:
        moved = order[: math.ceil(share * len(order))]
        better = {name: _best(errors[name], "int8", config) if base == "fp8" else None for name in moved}
        chosen: dict[str, str | None] = {**formats, **better}
        measured = tuple(
            (name, format_, _scales(config, errors.observations[name], format_)) for name, format_ in chosen.items()
        )
        yield dataclasses.replace(config, measured=measured)


def _best(ratios: Mapping[str, float], base: str, config: Quantize) -> str:
    if base != "int8" or config.rotate is False:
        return base
    return _rotated_if_better(ratios) if config.rotate == AUTO else ROTATED


def _finite(ratio: float) -> float:
    return math.inf if math.isnan(ratio) else ratio


def _scales(config: Quantize, seen: Observation, format_: str | None) -> tuple[float, ...]:
    """Return the static scales of an input, one for each step with scales="step"; none where each row has its own."""
    if config.scales == "row" or format_ is None or format_ not in seen.precisions:
        return ()
    precision = seen.precisions[format_]
    if precision.format not in PRODUCTS:
        return ()
    dtype = PRODUCTS[precision.format]
    largest = seen.largest_by_step(precision.rotate)
    if not largest:
        return ()
    overall = max(largest.values())
    steps = [largest.get(step, overall) for step in range(max(largest) + 1)] if config.scales == "step" else [overall]
    return tuple(_scale(value * HEADROOM[dtype], dtype) for value in steps)


def _scale(largest: float, dtype: torch.dtype) -> float:
    scale = max(largest, 1e-30) / LARGEST[dtype]
    return 2.0 ** math.ceil(math.log2(scale)) if dtype.is_floating_point else scale
