"""Generate a flat function that calls compiled pieces and drops each value at its last use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from tritium import compat
from tritium.compiler.blocks.segments import Segment


def stitch(graph: fx.Graph, segments: Sequence[Segment], runs: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """Return a function with a graph's inputs and results that runs the compiled segments in order."""
    placeholders = list(graph.find_nodes(op="placeholder"))
    (output,) = graph.find_nodes(op="output")
    names = {node: f"a{place}" for place, node in enumerate(placeholders)}
    for segment in segments:
        for node in segment.outputs:
            names[node] = f"v{len(names)}"
    constants: dict[str, Any] = {f"run{place}": compat.inductor.boxed(run) for place, run in enumerate(runs)}
    returned = fx.map_arg(output.args[0], lambda node: _Name(names[node]))
    last = {node: place for place, segment in enumerate(segments) for node in segment.inputs}
    kept = set(output.all_input_nodes)
    lines = [f"def call({', '.join(names[node] for node in placeholders)}):"]
    for place, segment in enumerate(segments):
        lines += _step(
            place, segment, names, [node for node in segment.inputs if last[node] == place and node not in kept]
        )
    lines.append(f"    return {_text(returned, constants)}")
    exec(compile("\n".join(lines), "<tritium.blocks>", "exec"), constants)  # noqa: S102 - the text above, of names alone
    made: Callable[..., Any] = constants["call"]
    return made


def _step(place: int, segment: Segment, names: Mapping[fx.Node, str], read_last: Sequence[fx.Node]) -> list[str]:
    lines = [f"    values = [{', '.join(names[node] for node in segment.inputs)}]"]
    if read_last:
        # Delete them before the piece runs: the piece empties the list, and can then free the memory.
        lines.append(f"    del {', '.join(names[node] for node in read_last)}")
    results = "".join(f"{names[node]}, " for node in segment.outputs)
    lines.append(f"    {f'{results}= ' if results else ''}run{place}(values)")
    return lines


class _Name(str):
    """The name of a variable in the generated function."""

    __slots__ = ()


def _text(value: Any, constants: dict[str, Any]) -> str:
    if isinstance(value, _Name):
        return value
    if isinstance(value, (tuple, list)):
        inner = "".join(f"{_text(part, constants)}, " for part in value)
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    if isinstance(value, dict):
        return "{" + "".join(f"{name!r}: {_text(part, constants)}, " for name, part in value.items()) + "}"
    name = f"constant{len(constants)}"
    constants[name] = value
    return name
