"""Select the linears of a model that are quantized, each with its precision; the others have a reason."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tritium import compat, models
from tritium.compiler.passes.quantize import Precision
from tritium.errors import PipelineError, nearest
from tritium.techniques.experts.mixture import grouped_linears
from tritium.techniques.quantize.config import AUTO, PATTERN, ROTATED, Quantize
from tritium.techniques.quantize.storage import StoredLinear

# Parts of names of layers whose input is one row an image: modulations, embeddings of time and of pooled text.
ONE_ROW = re.compile(
    r"(^|[._])(norm\w*|adaln\w*|\w*mod|\w*modulation\w*|time\w*|temb\w*|t_embedder|guidance\w*|pooled\w*)([._]|$)",
    re.IGNORECASE,
)

# The dtypes of weights that are quantized.
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

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
    rules = _Rules(module, linears, config)
    chosen: dict[str, Precision] = {}
    kept: dict[str, str] = {}
    for name, linear in linears.items():
        decision = rules.decide(name, linear)
        if isinstance(decision, str):
            kept[name] = decision
        else:
            chosen[name] = decision
    return Selection(linears, chosen, kept)


class _Rules:
    """What decides about a linear, in this order: `layers`, the model's own facts, measurements, and the default."""

    def __init__(self, module: nn.Module, linears: dict[str, nn.Linear], config: Quantize) -> None:
        self._module, self._config = module, config
        self._named = _named(module, linears, config)
        self._measured = {name: format_ for name, format_, _ in config.measured}
        self._grouped = set() if config.keeps_bytes else grouped_linears(module)
        family = models.family_of(type(module).__name__)
        self._sensitive = [re.compile(pattern) for pattern in (family.precise if family is not None else ())]

    def decide(self, name: str, linear: nn.Linear) -> Precision | str:
        """Return the precision of a linear, or the reason why it keeps its own."""
        if not has_own_weight(linear):
            return "its weight is quantized already"
        config, columns = self._config, _columns_of(linear)
        if id(linear) in self._grouped:
            return "its mixture multiplies groups of tokens in the model's dtype"
        if name in self._named:
            format_ = self._named[name]
            return "layers says None" if format_ is None else config.precision(format_, columns, few_rows=True)
        reason = _reason(self._module, name, config)
        if reason is not None:
            return reason
        if is_one_row(name):
            assert config.one_row is not None
            return config.precision(config.one_row, columns)
        if name in self._measured:
            format_ = self._measured[name]
            return "its error is too large for the budget" if format_ is None else config.precision(format_, columns)
        return self._default(name, columns)

    def _default(self, name: str, columns: int) -> Precision | str:
        default = self._config.linear
        if default == AUTO:
            return "linear='auto' waits for handle.calibrate(prompts)"
        if default is None:
            return "linear is None, and layers does not name it"
        is_sensitive = default == "fp8" and any(pattern.search(name) for pattern in self._sensitive)
        return self._config.precision(ROTATED if is_sensitive else default, columns)


def candidates(module: nn.Module, config: Quantize) -> list[str]:
    """Return the linears that formats are measured for: those in blocks that `layers` does not name."""
    linears = linears_of(module)
    named = _named(module, linears, config)
    return [
        name
        for name, linear in linears.items()
        if name not in named and _reason(module, name) is None and has_own_weight(linear)
    ]


def _columns_of(linear: nn.Linear) -> int:
    """Return the inputs of a linear's weight, which are fewer than its `in_features` where ranks share them."""
    return (linear.stored.original if isinstance(linear, StoredLinear) else linear.weight).shape[1]


def has_own_weight(linear: nn.Linear) -> bool:
    """Return True for a weight in floating point, or one that Tritium stores in bytes until it is removed."""
    if isinstance(linear, StoredLinear):
        return True
    return type(linear.weight) is nn.Parameter and linear.weight.dtype in DTYPES


def _reason(module: nn.Module, name: str, config: Quantize | None = None) -> str | None:
    """Return why a linear that `layers` does not name keeps its precision, or None."""
    in_block = is_in_block(module, name)
    if is_one_row(name):
        is_stored = config is not None and config.one_row is not None and in_block
        return None if is_stored else "its input is one row an image"
    for pattern in compat.diffusers.precise_patterns(module):
        if re.search(pattern, name):
            return "the model's class keeps it in high precision"
    return None if in_block else "outside of the repeated blocks"


def is_one_row(name: str) -> bool:
    """Return True for a layer whose input is one row an image, by its name."""
    return ONE_ROW.search(name) is not None


def linears_of(module: nn.Module) -> dict[str, nn.Linear]:
    """Return the linears of a model by name, without those of adapters."""
    return {
        name: inner
        for path, inner in module.named_modules()
        if isinstance(inner, nn.Linear)
        and (name := ".".join(part for part in path.split(".") if part != "base_layer"))
        and not any(part in _ADAPTERS for part in path.split("."))
    }


def is_in_block(module: nn.Module, name: str) -> bool:
    """Return True if a linear is in a repeated block: in an element of a module list that has several linears."""
    current: Any = module
    for part in name.split(".")[:-1]:
        inner = getattr(current, part, None)
        if isinstance(current, nn.ModuleList) and isinstance(inner, nn.Module) and _has_several(inner):
            return True
        current = inner
    return False


def _has_several(module: nn.Module) -> bool:
    linears = (inner for inner in module.modules() if isinstance(inner, nn.Linear))
    return len(list(itertools.islice(linears, 2))) == 2


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
