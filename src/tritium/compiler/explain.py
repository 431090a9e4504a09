"""Find the compilation records of a model, a function or a handle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, Protocol, runtime_checkable

import torch

from tritium import ops
from tritium.compiler.time_kernels import time_kernels
from tritium.errors import ReportError
from tritium.report import LEDGER, Component, Failure, GraphRecord, Report, Violation


@runtime_checkable
class InParts(Protocol):
    """An object with several modules, each reported as a component: the result of `optimize`."""

    @property
    def entries(self) -> list[torch.nn.Module]: ...

    @property
    def components(self) -> list[Component]: ...

    @property
    def violations(self) -> list[Violation]: ...


def explain(thing: Any = None, *, call: Callable[[], Any] | None = None) -> Report:
    """Return the report of a compiled model or function, a module with compiled blocks, or a handle.

    Without an argument, report everything that this process compiled with Tritium. Call it after the first run of the
    model, or pass `call`, which runs the model once: it is then called again under the profiler, and kernels get
    `measured_us`, the time of one launch.
    """
    if call is not None:
        call()
    records = LEDGER.records()
    if thing is not None:
        records = _records_of(thing, records)
        if not records:
            raise ReportError(
                f"nothing compiled by tritium belongs to this {type(thing).__name__}: compile it with "
                "backend='tritium' and call it once before explaining it"
            )
    limits = LEDGER.limits_of(records)
    if call is not None and any(record.kernels for record in records):
        timed, measurement = time_kernels(records, call)
        report = Report(timed, limits, measurement=measurement)
    else:
        report = Report(records, limits)
    if isinstance(thing, InParts):
        report.components = list(thing.components)
        report.violations = list(thing.violations)
    _add_failed_providers(report)
    return report


def _records_of(thing: Any, records: list[GraphRecord]) -> list[GraphRecord]:
    if isinstance(thing, InParts):
        found = [record for entry in thing.entries for record in _records_of(entry, records)]
        return [record for record in records if record in found]
    if not isinstance(thing, torch.nn.Module):
        codes = {id(code) for code in _codes(thing)}
        return [record for record in records if codes & record.callers]
    model = getattr(thing, "_orig_mod", thing)
    own = [record for record in records if record.belongs_to(model) or record.belongs_to(thing)]
    # A module that reuses code compiled for an equal module was not on the stack: find it by its code.
    covered = {record.code for record in own}
    candidates = [module for module in model.modules() if _is_compiled_itself(module)]
    if not own:
        candidates.append(model)
    for module in candidates:
        own += [record for record in records if record.code not in covered and _is_code_of(record, module)]
    return [record for record in records if record in own]


def _is_compiled_itself(module: torch.nn.Module) -> bool:
    """Return True if calling this module enters compiled code; False inside its parent's graph."""
    of_class = (getattr(type(module), name) for name in ("forward", "_call_impl"))
    return module._compiled_call_impl is not None or any(hasattr(f, "_torchdynamo_orig_callable") for f in of_class)


def _is_code_of(record: GraphRecord, module: torch.nn.Module) -> bool:
    code = record.code() if record.code is not None else None
    if code is None or all(code is not own for own in _codes(type(module).forward)):
        return False
    return any(type(owner()) is type(module) for owner in record.owners)


def _codes(thing: Any) -> Iterator[CodeType]:
    """Yield the code objects of a function or method, also behind wrappers of torch.compile."""
    seen: set[int] = set()
    stack = [thing]
    while stack:
        current = stack.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        for name in ("__wrapped__", "_torchdynamo_orig_callable", "__func__", "func"):
            inner = getattr(current, name, None)
            if callable(inner):
                stack.append(inner)
        code = getattr(current, "__code__", None)
        # Skip the wrapper's code, which is the same for every function that torch.compile wraps.
        if isinstance(code, CodeType) and not hasattr(current, "_torchdynamo_orig_callable"):
            yield code


def _add_failed_providers(report: Report) -> None:
    """Add a failure where a provider was used that failed at run time and is disabled for the process."""
    for (op, provider), reason in ops.failed_providers().items():
        for record in report.records:
            used = any(site.fusion == op and site.outcome == "fused" for site in record.sites)
            entry = Failure(f"provider {provider!r} of op {op!r}", reason)
            if used and entry not in record.failures:
                record.failures.append(entry)
