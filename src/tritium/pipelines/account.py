"""Describe what was done to a part, from its choice and the recorded graphs."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import nn

from tritium import compat
from tritium.pipelines.installed import Installed
from tritium.report.ledger import LEDGER
from tritium.report.records import GraphRecord


def of(installed: Installed, pipe: Any, handle: Any) -> str:
    """Return a part's line of the summary."""
    part, choice = installed.part, installed.choice
    component = pipe.components.get(part.name.partition(".")[0])
    if not isinstance(component, nn.Module):
        return "the pipeline has no module there any more"
    if all(module is not part.entry for module in component.modules()):
        stale = "; the figures are of the one before" if installed.entry.times.calls else ""
        return f"the pipeline has another module there now, which runs as it is{stale}"
    if part.entry in installed.replaced:
        return "compiled by its own compile() since, which runs instead; remove() leaves it there"
    done, notes = _done(installed)
    layout = "; weights channels-last" if choice.channels_last else ""
    notes = [*([installed.why] if installed.why else []), *notes, *installed.notes]
    others = {type(other.pipe).__name__ for other in installed.claims.handles if other is not handle}
    if others:
        notes.append(f"shared with another {', '.join(sorted(others))}")
    return done + layout + (f" ({'; '.join(notes)})" if notes else "")


def _done(installed: Installed) -> tuple[str, list[str]]:
    """Return how the part runs, and notes for the reader."""
    part, how, what = installed.part, installed.choice.how, installed.what
    if how == "eager":
        return "left alone", []
    plain = f"compiled: {what}" if how == "tritium" else f"torch.compile: {what}"
    if not installed.entry.times.calls:
        return ("not called yet; to be " if how == "tritium" else "not called yet; ") + plain, []
    codes = {code for target in part.targets for code in _codes(target.module)}
    records = [record for record in LEDGER.records() if _is_of(record, installed, codes)]
    failed = [record for record in records if record.lowering_failed]
    if failed and len(failed) == len(records):
        return f"runs eagerly: none of its {len(failed)} graphs could be compiled, see the failures in the report", []
    if not records and not any(map(compat.dynamo.compiled_versions, codes)):
        return "runs eagerly: nothing was compiled", []
    notes = [f"{len(failed)} of {len(records)} graphs run eagerly, see the failures in the report"] if failed else []
    notes += sorted(
        {
            f"{limit.limit} ({limit.value}) reached in {limit.function}: it runs eagerly where no compiled version fits"
            for limit in LEDGER.limits_of(records, codes)
        }
    )
    if installed.replaced:
        notes.append(f"{len(installed.replaced)} blocks were compiled by their own compile() since, which runs instead")
    return plain, notes


def _is_of(record: GraphRecord, installed: Installed, codes: set[CodeType]) -> bool:
    """Return True if a graph was compiled in a call of the part, or for an equal module with its code."""
    code = record.code() if record.code is not None else None
    return record.belongs_to(installed.part.entry) or code in codes


def _codes(module: nn.Module) -> Iterator[CodeType]:
    """Yield the code object of a module's forward, and those under its decorators."""
    function: Any = module.forward
    while function is not None:
        if hasattr(function, "__code__"):
            yield function.__code__
        function = getattr(function, "__wrapped__", None)
