"""Functions as workloads: `attention`, `sparse-attention` and `layers`, each a list of cases with shapes of known models.

The variants of a case run on the same tensors, interleaved. `ratio` is against the case's yardstick, which every note
names. On a CPU the shapes shrink, and the results say so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from tritium import measure
from tritium.bench.results import Row
from tritium.bench.run import Notify, Outcome, Settings

# The module with the cases of each workload.
_HOME = {
    "attention": "tritium.bench.attention_cases",
    "sparse-attention": "tritium.bench.sparse_cases",
    "layers": "tritium.bench.layer_cases",
}
NAMES = tuple(_HOME)

# A variant this many times slower than the fastest is not timed: rounds would take minutes, and a GPU that is idle for ten
# milliseconds changes its clock.
HOPELESS = 8.0


@dataclass(frozen=True)
class Case:
    """Variants of one function on one set of tensors."""

    name: str
    variants: Mapping[str, Callable[[], torch.Tensor]]
    yardstick: str
    note: str
    shapes: dict[str, list[int]] = field(default_factory=dict)
    # Variants that are left out if they fail or are too slow; ours and the yardstick are always measured.
    optional: frozenset[str] = frozenset()


def is_function(name: str) -> bool:
    return name in _HOME


def cases(name: str, device_type: str, dtype: torch.dtype, *, small: bool) -> Iterator[Case]:
    """Yield the cases of a workload, each built when it is reached."""
    yield from importlib.import_module(_HOME[name]).cases(device_type, dtype, small=small)


def run(name: str, settings: Settings, notify: Notify) -> Outcome:
    """Measure every case of a workload."""
    settings.refuse_options_of_models(name, "measures functions")
    small = settings.device_type == "cpu"
    rows: list[Row] = []
    with torch.inference_mode():
        for case in cases(name, settings.device_type, settings.dtype, small=small):
            notify(f"{name}: {case.name}", 0.0)
            measured = _measured(f"{name}: {case.name}", case, settings, small=small)
            settings.on_rows(measured)
            rows += measured
            if settings.device_type == "cuda":
                torch.cuda.empty_cache()
    notify(f"{name}: done", 1.0)
    return Outcome(rows, {})


def _measured(name: str, case: Case, settings: Settings, *, small: bool) -> list[Row]:
    where = settings.device_type
    first = {case.yardstick: measure.first_call(case.variants[case.yardstick], where)}
    reference = case.variants[case.yardstick]().clone()
    errors: dict[str, float] = {}
    warm: dict[str, float] = {}
    left_out: dict[str, str] = {}
    for variant, call in case.variants.items():
        try:
            first.setdefault(variant, measure.first_call(call, where))
            errors[variant] = measure.relative_l2(call(), reference)
            warm[variant] = measure.first_call(call, where)
        except Exception as error:
            # A kernel that does not support these shapes, or runs out of memory: the note says so.
            if variant not in case.optional:
                raise
            first_line = (str(error).strip().splitlines() or [""])[0]
            full = isinstance(error, torch.OutOfMemoryError)
            left_out[variant] = "out of memory" if full else f"{type(error).__name__}: {first_line}"
    slow = {variant for variant, taken in warm.items() if taken > HOPELESS * min(warm.values())} & case.optional
    left_out |= dict.fromkeys(sorted(slow), f"over {HOPELESS:g} times the fastest one's time")
    calls = {variant: case.variants[variant] for variant in warm if variant not in slow}
    meter = measure.LoadMeter()
    timings = measure.interleave(calls, where, seconds=settings.seconds, burst=5 if where == "cuda" else 1)
    load = meter.read()
    note = f"{case.note}; ratio against {case.yardstick}"
    note += "".join(f"; without {variant} ({why})" for variant, why in left_out.items())
    return [
        Row(
            workload=name,
            variant=variant,
            mode=None,
            dtype=str(settings.dtype).removeprefix("torch."),
            shrunk=small,
            note=note,
            shapes=case.shapes,
            **asdict(timing),
            ratio=timings[case.yardstick].median_ms / timing.median_ms,
            first_call_s=first[variant],
            first_call_cold=False,
            peak_memory_bytes=measure.peak_memory(calls[variant], where),
            relative_l2=errors[variant],
            disturbed=load.disturbed if load is not None else None,
        )
        for variant, timing in timings.items()
    ]


def shapes_of(**tensors: Any) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}


def drawer(device_type: str, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Return a function that draws seeded normal tensors of one dtype on one device."""
    generator = torch.Generator(device_type).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device_type).to(dtype)

    return draw
