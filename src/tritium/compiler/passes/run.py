"""Run one pass: check what it did, record it, and undo it if it fails."""

from __future__ import annotations

from typing import Any

from torch import fx

from tritium import compat
from tritium.compiler.compilation import Compilation
from tritium.compiler.passes.interface import check_interface
from tritium.errors import UnrequestedConfig
from tritium.graph import copied, fingerprint
from tritium.passes import Applied, ConfigRequest, Decline, Outcome, Pass, PassContext
from tritium.report.records import PassRecord


def run_pass(compilation: Compilation, entry: Pass, *, adds_inputs: bool = False) -> PassRecord:
    """Run a pass on the graph. After an error the graph is as before, and the other passes run."""
    c, gm = compilation, compilation.gm
    c.log.note(gm.graph, entry.name, "before")
    before, sites = copied(gm.graph), len(c.context.sites)
    part = f"pass {entry.name!r}"
    with c.recorded(entry.name, part, lambda: [("before", before), ("broken", gm.graph)]) as record:
        outcome = _without_settings(entry, gm.graph, c.context)
        gm.graph.lint()
        check_interface(before, gm.graph, adds_inputs=adds_inputs)
        record.changed = fingerprint(gm.graph) != fingerprint(before)
        _take(c, entry, outcome, record)
        for name, error in c.context.failed:
            c.fail(name, error, [("before", before)])
    c.context.failed.clear()
    if record.failed is not None:
        gm.graph = before
        record.changed = False
        record.requests.clear()
        del c.context.sites[sites:]
    if record.changed:
        gm.recompile()
    c.log.note(gm.graph, entry.name, "after")
    return record


def _without_settings(entry: Pass, graph: fx.Graph, context: PassContext) -> Outcome:
    """Run a pass; if it assigns Inductor's settings, restore them and raise `UnrequestedConfig`."""
    before = compat.inductor.inductor_settings()
    outcome = entry.run(graph, context)
    after = compat.inductor.inductor_settings()
    changed = [name for name in before if not _equal(before[name], after[name])]
    for name in changed:
        compat.inductor.assign(name, before[name])
    if changed:
        raise UnrequestedConfig(
            f"pass {entry.name!r} assigned {', '.join(changed)}; it must return a ConfigRequest instead"
        )
    return outcome


def _equal(left: Any, right: Any) -> bool:
    return left is right or (type(left) is type(right) and bool(left == right))


def _take(compilation: Compilation, entry: Pass, outcome: Outcome, record: PassRecord) -> None:
    """Record the outcome of a pass, and merge its requests."""
    if isinstance(outcome, Decline):
        record.declined = outcome.reason
    elif isinstance(outcome, Applied):
        record.summary, record.left_alone = outcome.summary, dict(outcome.declined)
    else:
        requests = [outcome] if isinstance(outcome, ConfigRequest) else list(outcome or ())
        record.requests = [{"settings": dict(request.settings), "because": request.because} for request in requests]
        for reason in compilation.merge(entry.name, requests):
            record.declined = reason
