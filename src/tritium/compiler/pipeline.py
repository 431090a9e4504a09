"""The stages of a compilation, in order.

1. `channels_last`     convert regions of convolutions; before `fuse`, whose choice of kernels depends on strides
2. `early_plugins`     early passes of plug-ins, of techniques (`quantize`) and of the backend: fusions see what they wrote
3. `quantized_weights` run linears whose weights arrived quantized through Tritium's ops (fidelity 'fast')
4. `fuse`              recognise every fusion's sites; rewrite those with an owned provider
5. `convolution_bias`  add biases of convolutions in the rewritten norms that follow them
6. `plugins`           plug-ins' passes sorted by name, then those passed to the backend, in that order
7. `freezing`          freeze the parameter-only part (enable_freezing), or the values in it that a pass marked
8. `diagram`           keep a part of the graph before and after these stages, for the report
9. `boundaries`        cut at boundary ops, if calls are captured: they run between the captured pieces
10. `tiling_policy`    choose the policy by which `lower` tiles Triton kernels
11. `reuse_blocks`     cut at repeated blocks, so that each distinct piece is lowered once
12. `lower`            Inductor compiles what is not lowered yet, with the merged requests of the passes;
                       or engine `eager` runs the graph without code generation
13. `capture`          capture each call as a static device graph and replay it (`graphs`)

A graph that needs gradients, and one under graphs='only', stays as it is: stages that would change it do not run, and
`fuse` only counts its sites.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from tritium.catalog import Entry, plugins, unique
from tritium.compiler.blocks.reuse import reuse_blocks
from tritium.compiler.capture.stage import capture, split_at_boundaries
from tritium.compiler.compilation import Compilation
from tritium.compiler.lower import lower, lower_untouched, record_tiling_policy, start
from tritium.compiler.passes import channels_last, convolution_bias, freezing, fuse, quantized_weights
from tritium.compiler.passes.run import run_pass
from tritium.config import CompilationConfig
from tritium.errors import brief
from tritium.passes import Pass, PassContext
from tritium.report.diagram import diagram
from tritium.report.records import Failure


@dataclass(frozen=True)
class Stage:
    """A named step of every compilation."""

    name: str
    run: Callable[[Compilation], None]
    # True if it also runs for a graph that stays as it is.
    keeps_graph: bool = False
    # The built-in pass that this stage runs; the switch `PassConfig.enable_<name>` removes it.
    builtin: Pass | None = None


def _builtin(builtin: Pass, *, keeps_graph: bool = False) -> Stage:
    def run(c: Compilation) -> None:
        for entry in c.passes:
            if entry.name == builtin.name:
                run_pass(c, entry)

    return Stage(builtin.name, run, keeps_graph, builtin)


def _run_plugins(c: Compilation, *, early: bool) -> None:
    names = {stage.name for stage in PIPELINE if stage.builtin is not None}
    for entry in c.passes:
        if entry.name not in names and entry.early == early:
            run_pass(c, entry)


def _freeze(c: Compilation) -> None:
    only = None if c.config.enable_freezing else freezing.marked(c.gm.graph)
    if only == []:
        return

    def run(graph: fx.Graph, context: PassContext) -> None:
        c.frozen, c.record.frozen = freezing.freeze(graph, context.example_inputs, only)

    record = run_pass(c, Pass(freezing.NAME, run), adds_inputs=True)
    if record.failed is not None:
        c.frozen, c.record.frozen = None, []
    elif c.frozen is not None:
        c.example_inputs += c.frozen.example_values


def _keep_diagram(c: Compilation) -> None:
    try:
        c.record.diagram = diagram(c.dynamo.graph, c.gm.graph)
    except Exception as error:  # noqa: BLE001 - a failed diagram must not stop a model from running
        c.record.failures.append(Failure("diagram", brief(error)))


def _lower(c: Compilation) -> None:
    if c.record.needs_gradients and not c.is_eager:
        c.programs = [lower_untouched(c)]
    elif not c.programs:
        units = c.units
        c.record.order = [unit.piece.number for unit in units if unit.piece is not None]
        if len(units) == 1:
            c.programs = [lower(c, units[0]).run]
        else:
            started = [start(c, unit) for unit in units]
            c.programs = [unit.result().run for unit in started]


PIPELINE: tuple[Stage, ...] = (
    _builtin(channels_last.PASS),
    Stage("early_plugins", functools.partial(_run_plugins, early=True)),
    _builtin(quantized_weights.PASS),
    _builtin(fuse.PASS, keeps_graph=True),
    _builtin(convolution_bias.PASS),
    Stage("plugins", functools.partial(_run_plugins, early=False)),
    Stage("freezing", _freeze),
    Stage("diagram", _keep_diagram),
    Stage("boundaries", split_at_boundaries, keeps_graph=True),
    Stage("tiling_policy", record_tiling_policy),
    Stage("reuse_blocks", reuse_blocks),
    Stage("lower", _lower, keeps_graph=True),
    Stage("capture", capture, keeps_graph=True),
)


def compile_graph(c: Compilation) -> Callable[..., Any]:
    """Run the stages on one graph; return its compiled code."""
    for stage in PIPELINE:
        if stage.keeps_graph or c.context.read_only is None:
            stage.run(c)
    (program,) = c.programs
    return c.frozen.wrap(program) if c.frozen is not None else program


def passes_for(config: CompilationConfig, passes: Sequence[Pass]) -> list[Pass]:
    """Return every pass that a backend runs, in order: built-in, plug-ins', the backend's."""
    here = Path(__file__)
    own = [stage.builtin for stage in PIPELINE if stage.builtin is not None]
    own = [entry for entry in own if getattr(config.pass_config, f"enable_{entry.name}", True)]
    entries = [*(Entry(entry, here, "tritium") for entry in own), *_installed_passes()]
    entries += [Entry(entry, entry.file() or here, "Backend(passes=...)") for entry in passes]
    return [entry.value for entry in unique(entries, "pass").values()]


@functools.cache
def _installed_passes() -> tuple[Entry[Pass], ...]:
    return tuple(plugins("tritium.passes", Pass))
