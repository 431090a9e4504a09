"""Find the compilation records of a model, a function or a handle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from tritium.compat.modules import class_call_is_compiled, codes, compiled_call, unwrapped
from tritium.errors import ReportError
from tritium.report import Report
from tritium.report.ledger import FAILED_PROVIDERS, LEDGER
from tritium.report.records import Component, Failure, GraphRecord, Violation
from tritium.report.timing import time_kernels


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
        chosen = {id(record) for record in _records_of(thing, records)}
        records = [record for record in records if id(record) in chosen]
        if not records:
            raise ReportError(
                f"nothing compiled by tritium belongs to this {type(thing).__name__}: compile it with "
                "backend='tritium' and call it once before explaining it"
            )
    limits, measurement = LEDGER.limits_of(records), None
    if call is not None and any(record.kernels for record in records):
        records, measurement = time_kernels(records, call)
    report = Report(records, limits, measurement=measurement)
    if isinstance(thing, InParts):
        report.components = list(thing.components)
        report.violations = list(thing.violations)
    _add_failed_providers(report)
    return report


def _records_of(subject: Any, records: Sequence[GraphRecord]) -> list[GraphRecord]:
    if isinstance(subject, InParts):
        return [record for entry in subject.entries for record in _records_of(entry, records)]
    if isinstance(subject, torch.nn.Module):
        return _records_of_module(subject, records)
    callers = {id(code) for code in codes(subject)}
    return [record for record in records if callers & record.callers]


def _records_of_module(module: torch.nn.Module, records: Sequence[GraphRecord]) -> list[GraphRecord]:
    model = unwrapped(module)
    own = [record for record in records if record.belongs_to(model) or record.belongs_to(module)]
    # A module that reuses code compiled for an equal module was not on the stack: find it by its code.
    entries = [entry for entry in model.modules() if _enters_compiled_code(entry)]
    if not own:
        entries.append(model)
    covered = {record.code for record in own}
    others = [record for record in records if record.code not in covered]
    return own + [record for record in others if any(_is_code_of(record, entry) for entry in entries)]


def _enters_compiled_code(module: torch.nn.Module) -> bool:
    """Return True if calling this module enters compiled code; False inside its parent's graph."""
    return compiled_call(module) is not None or class_call_is_compiled(module)


def _is_code_of(record: GraphRecord, module: torch.nn.Module) -> bool:
    code = record.code() if record.code is not None else None
    if code is None or all(code is not own for own in codes(type(module).forward)):
        return False
    return any(type(owner()) is type(module) for owner in record.owners)


def _add_failed_providers(report: Report) -> None:
    """Add a failure where a provider was used that failed at run time and is disabled for the process."""
    for (op, provider), reason in FAILED_PROVIDERS.items():
        failure = Failure(f"provider {provider!r} of op {op!r}", reason)
        for record in report.records:
            uses_op = any(site.fusion == op and site.outcome == "fused" for site in record.sites)
            if uses_op and failure not in record.failures:
                record.failures.append(failure)
