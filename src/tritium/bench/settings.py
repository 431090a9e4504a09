"""Settings of a run, the same for all variants of a workload, and how progress is reported."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tritium import compat, device
from tritium.bench.results import EAGER, EXACT, GRAPHS, INDUCTOR, REDUCE_OVERHEAD, TRITIUM, Row
from tritium.bench.workload import Built, Workload
from tritium.config import CompilationConfig
from tritium.errors import ConfigError, nearest
from tritium.techniques.choice import configured
from tritium.techniques.quantize import Quantize
from tritium.techniques.skip.config import Skip

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# Called with the current activity and the share of the work that is done.
Notify = Callable[[str, float], None]


def part_of(notify: Notify, index: int, count: int) -> Notify:
    """Return a reporter for one of several equal parts of the work."""
    return lambda what, share: notify(what, (index + share) / count)


def silent(what: str, share: float) -> None:
    del what, share


@dataclass(frozen=True, kw_only=True)
class Settings:
    against: tuple[str, ...] = (EAGER, INDUCTOR)
    mode: str = "default"
    seconds: float = 10.0
    device_type: str = "cpu"
    # Compile in an empty cache folder. Otherwise the second variant would load kernels that the first one built.
    cold: bool = True
    config: CompilationConfig | None = None
    # Only dynamic sizes, or only static ones; all that a workload has if None.
    dynamic: bool | None = None
    kernels: bool = False
    profile: bool = False
    exact: bool = False
    graphs: bool = False
    errors: bool = False
    # The name of a dtype; the device's default if None.
    dtype_name: str | None = None
    # Also measure `tritium.optimize` with quantized linears: the format, or the JSON of a `Quantize`.
    quantize: str | None = None
    # `bench pipeline`: also measure skipped steps: letters, a recipe, or the JSON of a `Skip`; with `quantize` also both.
    skip: str | None = None
    # The images of whole pipelines: `WIDTHxHEIGHT` and a number of steps.
    size: str | None = None
    steps: int | None = None
    # Called with rows as soon as they are measured, and again with more fields, so that an interrupted run keeps them.
    on_rows: Callable[[list[Row]], object] = len

    def __post_init__(self) -> None:
        _check("variant to measure against", self.against, [EAGER, INDUCTOR])
        _check("mode", [self.mode], MODES)
        _check("dtype", [self.dtype_name or "float32"], list(DTYPES))
        if self.profile and EAGER not in self.against:
            raise ConfigError("--profile compares with the operators one by one: --against needs eager")
        if self.quantize is not None:
            quantized(self.quantize)
            if self.mode != "default":
                raise ConfigError(
                    f"--quantize measures tritium.optimize, which has no mode: leave out --mode {self.mode}"
                )
        if self.skip is not None:
            skipped(self.skip)
        if self.graphs and self.mode != "default":
            raise ConfigError(f"--graphs compares with mode 'reduce-overhead' already: leave out --mode {self.mode}")
        if self.device_type == "cuda" and not device.cuda_available():
            raise ConfigError("device 'cuda' was asked for, and torch sees no CUDA device")

    def build(self, workload: Workload) -> Built:
        return workload.build(self.device_type, self.dtype, small=self.small)

    def refuse_options_of_models(self, name: str, what: str) -> None:
        """Raise for options that only single models have."""
        if self.mode != "default" or self.exact or self.errors or self.kernels or self.profile:
            options = "--mode, --exact, --errors, --kernels and --profile"
            raise ConfigError(f"{name} {what}: {options} concern single models")

    @property
    def variants(self) -> list[str]:
        """The variants of every workload, in order."""
        others = [name for name in (EAGER, INDUCTOR) if name in self.against]
        captured = [GRAPHS] * self.graphs + [REDUCE_OVERHEAD] * (self.graphs and INDUCTOR in self.against)
        return [*others, TRITIUM, *captured, *[EXACT] * self.exact, *[self.quantized] * (self.quantize is not None)]

    @property
    def quantized(self) -> str:
        return f"{TRITIUM} {self.quantize}"

    @property
    def lossy(self) -> dict[str, dict[str, Any]]:
        """The variants of whole pipelines with lossy techniques, each with its fields of a plan."""
        found: dict[str, dict[str, Any]] = {}
        if self.quantize is not None:
            found[self.quantized] = {"quantize": quantized(self.quantize)}
        if self.skip is not None:
            table = {"skip": skipped(self.skip)}
            found |= {f"{name} skip": fields | table for name, fields in [(TRITIUM, {}), *found.items()]}
        return found

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name or ("bfloat16" if self.device_type == "cuda" else "float32")]

    @property
    def dtype_text(self) -> str:
        """The dtype as rows name it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def small(self) -> bool:
        """On a CPU every workload shrinks."""
        return self.device_type == "cpu"

    def caches(self) -> contextlib.AbstractContextManager[None]:
        """Compile with empty caches, unless existing ones are to be used."""
        return compat.inductor.empty_cache() if self.cold else contextlib.nullcontext()


def quantized(text: str) -> Quantize:
    """Return the config that an option gives: the name of a format, or the fields of a `Quantize` as JSON.

    >>> quantized("int8").linear, quantized('{"linear": "fp8", "keep": "cpu"}').keep
    ('int8', 'cpu')
    """
    found: Quantize = configured("Plan", "quantize", _text_or_json("--quantize", text, "a format"))
    return found


def skipped(text: str) -> Skip:
    """Return the table that an option gives: letters, the path of a recipe, or the fields of a `Skip` as JSON.

    >>> skipped("RR(R1)").rows, skipped('{"table": ["RRR1R1"], "over": "sigma"}').over
    (('RR(R1)',), 'sigma')
    """
    found: Skip = configured("Plan", "skip", _text_or_json("--skip", text, "a table"))
    return found


def _text_or_json(option: str, text: str, what: str) -> object:
    """Return the text of an option, or the JSON value that it holds; raise a `ConfigError` for damaged JSON."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text!r} is neither {what} nor JSON: {error}") from error


def _check(what: str, names: Sequence[str], valid: Sequence[str]) -> None:
    for name in names:
        if name not in valid:
            raise ConfigError(f"there is no {what} {name!r}; {nearest(name, valid)}")
