"""Layer functions as workloads: `attention`, `sparse-attention` and `layers`, each a list of cases with shapes of known models.

The variants of a case run on the same tensors, interleaved. `ratio` is against the case's reference, which every note
names. On a CPU the shapes shrink, and the results say so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from tritium import measure
from tritium.bench.comparison import Comparison, Variant
from tritium.bench.results import Row
from tritium.bench.settings import Notify, Settings, silent

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
    """Variants of one function on one set of tensors; the first is the reference."""

    name: str
    variants: Mapping[str, Callable[[], torch.Tensor]]
    note: str
    shapes: dict[str, list[int]] = field(default_factory=dict)
    # Variants that are left out if they fail or are too slow; ours and the reference are always measured.
    optional: frozenset[str] = frozenset()

    @property
    def reference(self) -> str:
        return next(iter(self.variants))


def cases(name: str, device_type: str, dtype: torch.dtype, *, small: bool) -> Iterator[Case]:
    """Yield the cases of a workload, each built when it is reached."""
    yield from importlib.import_module(_HOME[name]).cases(device_type, dtype, small=small)


def run(name: str, settings: Settings, notify: Notify) -> list[Row]:
    """Measure every case of a workload."""
    settings.refuse_options_of_models(name, "measures functions")
    rows: list[Row] = []
    with torch.inference_mode():
        for case in cases(name, settings.device_type, settings.dtype, small=settings.small):
            notify(f"{name}: {case.name}", 0.0)
            measured = _measure(f"{name}: {case.name}", case, settings)
            settings.on_rows(measured)
            rows += measured
            if settings.device_type == "cuda":
                torch.cuda.empty_cache()
    notify(f"{name}: done", 1.0)
    return rows


def _measure(name: str, case: Case, settings: Settings) -> list[Row]:
    where = settings.device_type
    reference: torch.Tensor | None = None
    warm: dict[str, float] = {}
    left_out: dict[str, str] = {}
    comparison = Comparison(name, settings, case.note, case.shapes, settings.small, case.reference)
    for variant, call in case.variants.items():
        try:
            first_call_s = measure.first_call(call, where)
            result = call().clone()
            warm[variant] = measure.first_call(call, where)
        except Exception as error:
            # A kernel that does not support these shapes, or runs out of memory: the note says so.
            if variant not in case.optional:
                raise
            first_line = (str(error).strip().splitlines() or [""])[0]
            full = isinstance(error, torch.OutOfMemoryError)
            left_out[variant] = "out of memory" if full else f"{type(error).__name__}: {first_line}"
            continue
        reference = result if reference is None else reference
        fields = {"mode": None, "first_call_s": first_call_s, "first_call_cold": False}
        comparison.variants[variant] = Variant(call, fields=fields)
        fields["relative_l2"] = measure.relative_l2(result, reference)
    for variant in sorted(case.optional & warm.keys()):
        if warm[variant] > HOPELESS * min(warm.values()):
            left_out[variant] = f"over {HOPELESS:g} times the fastest one's time"
            del comparison.variants[variant]
    comparison.note += f"; ratio against {case.reference}"
    comparison.note += "".join(f"; without {variant} ({why})" for variant, why in left_out.items())
    comparison.time(silent, burst=5 if where == "cuda" else 1)
    for variant, measured in comparison.variants.items():
        measured.fields["peak_memory_bytes"] = comparison.peak_memory(variant)
    return comparison.rows()
