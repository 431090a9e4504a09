"""Run one pass: check what it did, record it, and undo it if it fails."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tritium import compat
from tritium.compiler.compilation import Compilation
from tritium.errors import UnrequestedConfig
from tritium.graph import call, copied, fingerprint
from tritium.passes import Applied, ConfigRequest, Decline, Outcome, Pass, PassContext
from tritium.report.records import PassRecord


class ChangedInterface(Exception):
    """A pass changed a graph's inputs or outputs."""


def run_pass(c: Compilation, entry: Pass, *, adds_inputs: bool = False) -> PassRecord:
    """Run a pass on the graph. After an error the graph is as before, and the other passes run."""
    gm = c.gm
    c.log.note(gm.graph, entry.name, "before")
    before, sites = copied(gm.graph), len(c.context.sites)
    with c.recorded(entry.name, f"pass {entry.name!r}", lambda: [("before", before), ("broken", gm.graph)]) as record:
        outcome = _without_settings(entry, gm.graph, c.context)
        gm.graph.lint()
        _check_interface(before, gm.graph, adds_inputs=adds_inputs)
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


def _take(c: Compilation, entry: Pass, outcome: Outcome, record: PassRecord) -> None:
    """Record the outcome of a pass, and merge its requests."""
    if isinstance(outcome, Decline):
        record.declined = outcome.reason
    elif isinstance(outcome, Applied):
        record.summary, record.left_alone = outcome.summary, dict(outcome.declined)
    else:
        requests = [outcome] if isinstance(outcome, ConfigRequest) else list(outcome or ())
        record.requests = [{"settings": dict(request.settings), "because": request.because} for request in requests]
        for reason in c.merge(entry.name, requests):
            record.declined = reason


def _check_interface(before: fx.Graph, after: fx.Graph, *, adds_inputs: bool) -> None:
    """Raise `ChangedInterface` if inputs, or number, order, shape or dtype of outputs differ."""
    names, new_names = ([node.name for node in graph.find_nodes(op="placeholder")] for graph in (before, after))
    if names != (new_names[: len(names)] if adds_inputs else new_names):
        raise ChangedInterface(f"the graph's inputs were {', '.join(names)} and are {', '.join(new_names)}")
    old, new = _outputs(before), _outputs(after)
    if len(old) != len(new):
        raise ChangedInterface(f"the graph had {len(old)} outputs and has {len(new)}")
    remaining = {node.name for node in after.nodes}
    places = {value.name: place for place, value in enumerate(old) if isinstance(value, fx.Node)}
    for place, (was, now) in enumerate(zip(old, new, strict=True)):
        if not (isinstance(was, fx.Node) and isinstance(now, fx.Node)):
            if isinstance(was, fx.Node) or isinstance(now, fx.Node) or was != now:
                raise ChangedInterface(f"output {place} was {was} and is {now}")
        elif was.name != now.name:
            if now.name in places and was.name in remaining:
                raise ChangedInterface(
                    f"output {place} was {was.name} and is {now.name}, which was output {places[now.name]}"
                )
            expected, result = _properties(was.meta.get("example_value")), _properties(_value(now))
            if expected is not None and expected != result:
                raise ChangedInterface(f"output {place} had {expected} and has {result}")


def _outputs(graph: fx.Graph) -> list[Any]:
    nodes = list(graph.find_nodes(op="output"))
    if len(nodes) != 1:
        raise ChangedInterface(f"the graph has {len(nodes)} output nodes")
    return compat.tensors.leaves_of(nodes[0].args, is_leaf=lambda value: value is None)


def _properties(value: Any) -> str | None:
    """Return shape, dtype and kind of device of a tensor as text; None for anything else."""
    if not isinstance(value, torch.Tensor):
        return None
    # The sizes of this call, so that equal sizes with different expressions match; add no guard.
    shape = [size if isinstance(size, int) else compat.dynamo.size_hint(size) for size in value.shape]
    return f"shape {shape}, dtype {value.dtype} and device {value.device.type}"


def _value(node: fx.Node) -> Any:
    """Return the fake value of a node; compute it if a pass has not set one."""
    if "example_value" in node.meta or node.op not in ("call_function", "call_method"):
        return node.meta.get("example_value")
    args, kwargs = fx.map_arg((node.args, node.kwargs), _value)
    mode = compat.tensors.fake_mode_of((args, kwargs))
    if mode is None:
        return None
    with mode, torch.no_grad():
        return call(node, *args, **kwargs)
