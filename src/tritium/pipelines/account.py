"""Describe what was done to a part, from its choice and the recorded graphs."""

from __future__ import annotations

from types import CodeType
from typing import Any

from torch import nn

from tritium import compat
from tritium.pipelines.part import Part
from tritium.report.ledger import LEDGER
from tritium.report.records import GraphRecord


def of(part: Part, pipe: Any, handle: Any) -> str:
    component = pipe.components.get(part.name.partition(".")[0])
    if not isinstance(component, nn.Module):
        return "the pipeline has no module there any more"
    if all(module is not part.module for module in component.modules()):
        stale = "; the figures are of the one before" if part.times.calls else ""
        return f"the pipeline has another module there now, which runs as it is{stale}"
    if part.module in part.replaced:
        return "compiled by its own compile() since, which runs instead; remove() leaves it there"
    done, notes = _done(part)
    techniques = [note.text for note in part.technique_notes.values() if note.text]
    notes = [*([part.why] if part.why else []), *notes, *part.notes]
    others = {type(other.pipe).__name__ for other in part.claims.handles if other is not handle}
    if others:
        notes.append(f"shared with another {', '.join(sorted(others))}")
    return "; ".join([done, *techniques]) + (f" ({'; '.join(notes)})" if notes else "")


def _done(part: Part) -> tuple[str, list[str]]:
    """Return how the part runs, and notes for the reader."""
    how, what = part.choice.how, part.what
    if how == "eager":
        return "left alone", []
    plain = f"compiled: {what}" if how == "tritium" else f"torch.compile: {what}"
    if not part.times.calls:
        return ("not called yet; to be " if how == "tritium" else "not called yet; ") + plain, []
    codes = {code for block in part.spec.blocks for code in compat.modules.codes(block.module.forward)}
    records = [record for record in LEDGER.records() if _is_of(record, part, codes)]
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
    if part.replaced:
        notes.append(f"{len(part.replaced)} blocks were compiled by their own compile() since, which runs instead")
    return plain, notes


def _is_of(record: GraphRecord, part: Part, codes: set[CodeType]) -> bool:
    """Return True if a graph was compiled in a call of the part, or for an equal module with its code."""
    code = record.code() if record.code is not None else None
    return record.belongs_to(part.module) or code in codes
