"""Select the linears of a model that are quantized, each with its precision; the others have a reason."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from tritium import compat, models
from tritium.compiler.passes.quantize import Precision
from tritium.errors import PipelineError, nearest
from tritium.techniques.quantize.config import AUTO, PATTERN, Quantize

# Parts of names of layers whose input is one row an image: modulations, embeddings of time and of pooled text.
ONE_ROW = re.compile(
    r"(^|[._])(norm\w*|adaln\w*|\w*mod|\w*modulation\w*|time\w*|temb\w*|t_embedder|guidance\w*|pooled\w*)([._]|$)",
    re.IGNORECASE,
)

# PEFT's layers beside the linear that they adapt.
_ADAPTERS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")


@dataclass(frozen=True)
class Selection:
    """The linears of a model by name, as they are named without adapters."""

    modules: dict[str, nn.Linear]
    chosen: dict[str, Precision]
    # Why the others stay as they are.
    kept: dict[str, str]


def select(module: nn.Module, config: Quantize) -> Selection:
    """Return the linears that a config selects in a model; raise a `PipelineError` for names that match nothing."""
    linears = linears_of(module)
    named = _named(module, linears, config)
    default = None if config.linear == AUTO else config.linear
    chosen: dict[str, Precision] = {}
    kept: dict[str, str] = {}
    reasons = list(_reasons(module))
    for name, linear in linears.items():
        columns = linear.in_features
        if name in named:
            format_ = named[name]
            if format_ is None:
                kept[name] = "layers says None"
            else:
                chosen[name] = config.precision(format_, columns, few_rows=True)
            continue
        reason = next((why for pattern, why in reasons if pattern.search(name)), None)
        is_row = ONE_ROW.search(name) is not None
        if is_row and config.one_row is not None and is_in_list(module, name):
            chosen[name] = config.precision(config.one_row, columns)
        elif is_row or reason is not None:
            kept[name] = "its input is one row an image" if is_row else str(reason)
        elif not is_in_list(module, name):
            kept[name] = "outside of the repeated blocks"
        elif default is not None:
            chosen[name] = config.precision(default, columns)
        elif config.linear == AUTO:
            kept[name] = "linear='auto' waits for handle.calibrate(prompts)"
        else:
            kept[name] = "linear is None, and layers does not name it"
    return Selection(linears, chosen, kept)


def linears_of(module: nn.Module) -> dict[str, nn.Linear]:
    """Return the linears of a model by name, without those of adapters."""
    return {
        name: inner
        for path, inner in module.named_modules()
        if isinstance(inner, nn.Linear)
        and (name := ".".join(part for part in path.split(".") if part != "base_layer"))
        and not any(part in _ADAPTERS for part in path.split("."))
    }


def is_in_list(module: nn.Module, name: str) -> bool:
    """Return True if a module is inside an element of a module list: in a repeated block."""
    current: Any = module
    for part in name.split(".")[:-1]:
        if isinstance(current, nn.ModuleList):
            return True
        current = getattr(current, part, None)
    return False


def _reasons(module: nn.Module) -> Iterator[tuple[re.Pattern[str], str]]:
    """Yield patterns of names that keep their precision, with the reason: those of the model's class and its family."""
    for pattern in compat.diffusers.precise_patterns(module):
        yield re.compile(pattern), "the model's class keeps it in high precision"
    family = models.family_of(type(module).__name__)
    for pattern in family.precise if family is not None else ():
        yield re.compile(pattern), "known to be sensitive in this family"


def _named(module: nn.Module, linears: dict[str, nn.Linear], config: Quantize) -> dict[str, str | None]:
    """Return the format of each linear that `layers` names."""
    found: dict[str, str | None] = {}
    assert isinstance(config.layers, tuple)
    # Exact names are applied last, so that they replace what modules and patterns say.
    order = {True: 0, False: 1}
    for name, format_ in sorted(
        config.layers, key=lambda pair: (order[pair[0].startswith(PATTERN)], pair[0] in linears)
    ):
        covered = _covered(name, linears)
        if not covered:
            raise PipelineError(_no_layer(module, name, linears))
        found |= dict.fromkeys(covered, format_)
    return found


def _covered(name: str, linears: dict[str, nn.Linear]) -> list[str]:
    if name.startswith(PATTERN):
        pattern = re.compile(name.removeprefix(PATTERN))
        return [linear for linear in linears if pattern.fullmatch(linear)]
    return [linear for linear in linears if linear == name or linear.startswith(f"{name}.")]


def _no_layer(module: nn.Module, name: str, linears: dict[str, nn.Linear]) -> str:
    if name.startswith(PATTERN):
        return f"layers: {name!r} matches no linear of {type(module).__name__}; patterns match full names such as {next(iter(linears))!r}"
    if any(path == name for path, _ in module.named_modules()):
        return f"layers: {name!r} of {type(module).__name__} has no linear"
    paths = [path for path, _ in module.named_modules() if path]
    return f"layers names {name!r}, which is no module of {type(module).__name__}; {nearest(name, paths)}"
