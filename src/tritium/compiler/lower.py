"""Lower graphs with Inductor in one loop over attempts, the same for whole graphs, pieces and blocks.

1. `rewritten`       the graph that the passes leave, with their requests, under the tiling policy
2. `without_tiling`  the same without Inductor's tiling analysis and the policy, if that analysis failed
3. `untouched`       a whole graph as Dynamo gave it, without requests, if a pass did anything
4. `eager`           no code generation; not for a block, whose graph is then compiled whole

The report lists each attempt that fails with its error and graphs.

Several graphs can be started before the first is finished: while Inductor's worker processes compile the kernels of one,
the code of the next is generated.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import fx

from tritium import compat
from tritium.artifacts import libraries
from tritium.artifacts.observations import code_key, store, store_key
from tritium.compiler import together
from tritium.compiler.compilation import Compilation, Graphs, Unit, is_the_callers
from tritium.graph import copied, is_dynamic, with_graph
from tritium.ops import triton_launch
from tritium.ops.op import NAMESPACE
from tritium.report.kernel_dump.dissection import Dissection
from tritium.report.observation import Observation
from tritium.report.observer import KernelObserver
from tritium.report.records import Failure, GraphRecord, PassRecord
from tritium.tiling import session
from tritium.tiling.policy import OFF, TilingPolicy, policy_of

# The Inductor setting whose value adds Tritium's identity to Inductor's cache key.
SALT = "post_grad_custom_pre_pass"

# Graphs that an earlier process compiled and this one compiled again. After one such graph no cache hit is expected,
# because some graphs cannot be cached.
_compiled_again: list[str] = []


@dataclass
class Attempt:
    """A graph, its inputs and Inductor's settings; with the name and the graphs to report if it fails."""

    part: str
    gm: fx.GraphModule
    example_inputs: Sequence[Any] = ()
    # None if no code is generated.
    settings: Mapping[str, Any] | None = None
    graphs: Graphs = ()
    tiling: TilingPolicy = OFF
    # The result of code generation so far.
    dissection: Dissection = field(default_factory=Dissection)


@dataclass(frozen=True)
class Lowered:
    """Compiled code, and the observation of its generation in this or an earlier process, or None."""

    run: Callable[..., Any]
    observation: Observation | None = None
    source: Literal["codegen", "store"] = "codegen"


def rewritten(c: Compilation, unit: Unit, error: Exception | None) -> Attempt | None:
    del error
    graphs = [("rewritten", unit.graph)]
    if unit.piece is None:
        graphs.append(("original", c.dynamo.graph))
    return Attempt(unit.part, unit.gm, unit.example_inputs, c.settings, graphs, policy_of(c.config))


def without_tiling(c: Compilation, unit: Unit, error: Exception | None) -> Attempt | None:
    if error is None or not compat.tiling.came_from_tiling(error):
        return None
    settings = {**c.settings, **compat.tiling.NO_TILING_ANALYSIS}
    again = with_graph(unit.gm, copied(unit.graph))
    return Attempt(unit.part, again, unit.example_inputs, settings, [("rewritten", unit.graph)])


def untouched(c: Compilation, unit: Unit, error: Exception | None) -> Attempt | None:
    del error
    if unit.piece is not None or not c.withdraw_rewrites():
        return None
    again = with_graph(c.dynamo, copied(c.dynamo.graph))
    graphs = [("original", c.dynamo.graph)]
    return Attempt("lowering of the untouched graph", again, c.example_inputs, c.user_settings, graphs)


def eager(c: Compilation, unit: Unit, error: Exception | None) -> Attempt | None:
    if error is None:
        return Attempt(unit.part, unit.gm)
    if not unit.may_run_eagerly:
        return None
    if unit.piece is not None:
        return Attempt(unit.part, with_graph(unit.gm, unit.graph))
    c.record.engine = "eager"
    return Attempt(unit.part, c.dynamo)


ATTEMPTS = (rewritten, without_tiling, untouched, eager)


# Lowers a graph; stops after each generation of code, when kernels may still compile.
Steps = Generator[None, None, Lowered]


class Started:
    """A graph whose code is generated, and whose kernels may still compile in Inductor's worker processes."""

    def __init__(self, steps: Steps, waits: str | None) -> None:
        self._steps = steps
        self._lowered: Lowered | None = None
        # Why kernels were waited for at once, or None.
        self.waits = waits
        self._advance()

    def _advance(self) -> None:
        try:
            next(self._steps)
        except StopIteration as end:
            self._lowered = end.value

    def result(self) -> Lowered:
        """Wait for the kernels; make other attempts if one of them cannot be compiled."""
        while self._lowered is None:
            self._advance()
        return self._lowered


def start(c: Compilation, unit: Unit) -> Started:
    """Generate the code of a graph; its kernels compile until the result is asked for, if possible."""
    waits = _decline_late_kernels(c, unit)
    return Started(_steps(c, unit, is_late=waits is None), waits)


def lower(c: Compilation, unit: Unit) -> Lowered:
    """Return the result of the first attempt that succeeds; report each that fails."""
    return Started(_steps(c, unit, is_late=False), None).result()


def _decline_late_kernels(c: Compilation, unit: Unit) -> str | None:
    """Return why a graph waits for its kernels before the next graph starts, or None."""
    if c.is_eager:
        return "no code is generated"
    if together.RANKS:
        return "ranks compile in turn, and each reads what the one before stored"
    if is_dynamic(unit.gm.graph):
        # They would be guards of this graph's cache entry.
        return "later pieces add guards to the symbols of dynamic sizes"
    with compat.inductor.inductor_patched(c.settings):
        return compat.late_kernels.decline_late_kernels()


def _steps(c: Compilation, unit: Unit, *, is_late: bool) -> Steps:
    error: Exception | None = None
    for step in (eager,) if c.is_eager else ATTEMPTS:
        attempt = step(c, unit, error)
        if attempt is None:
            continue
        if attempt.settings is None:
            return Lowered(attempt.gm.forward)
        try:
            return (yield from _compiled(c, attempt, attempt.settings, unit, is_late=is_late))
        except Exception as raised:
            if is_the_callers(raised):
                raise
            error = raised
            in_tiling = step is rewritten and compat.tiling.came_from_tiling(raised)
            part = "tiling analysis" if in_tiling else attempt.part
            c.fail(part, raised, attempt.graphs, attempt.dissection.unfinished())
    raise RuntimeError("a block cannot be lowered, so the graph is compiled whole")


def record_tiling_policy(c: Compilation) -> None:
    """Record the policy under which rewritten graphs are lowered; its decisions are recorded with their kernels."""
    if not c.is_eager:
        c.tiling.declined = _decline_tiling(policy_of(c.config), c.record.device_type)
        c.record.passes.append(c.tiling)


def lower_untouched(c: Compilation) -> Callable[..., Any]:
    """Leave Dynamo's graph to Inductor and autograd, because it needs gradients; errors are the caller's."""
    with compat.inductor.inductor_patched(c.user_settings):
        return compat.inductor.compile_fx(c.dynamo, c.example_inputs)


def _compiled(c: Compilation, attempt: Attempt, settings: Mapping[str, Any], unit: Unit, *, is_late: bool) -> Steps:
    """Compile with Inductor, and record its code generation, from this or an earlier process."""
    record = c.record
    # The ops of the rewritten graph count for every attempt.
    key = c.identity(unit.graph)
    own = settings[SALT] if SALT in settings else compat.inductor.setting(SALT)
    settings = {**settings, SALT: compat.inductor.salted_pass(key, own)}
    libraries.install()
    observer = KernelObserver(record.device_type, NAMESPACE, triton_launch.op_of)
    attempt.dissection = observer.dissection
    tiling = c.tiling
    tiling.declined, tiling.failed = _decline_tiling(attempt.tiling, record.device_type), None
    with compat.inductor.inductor_patched(settings):
        place = store_key(attempt.gm.graph, key + attempt.tiling.identity.encode())
        known = store().load(place)
        expected = _expected(known, record.device_type)
        if record.device_type != "cpu" and not expected:
            compat.inductor.start_workers()
        with (
            compat.observation.observed_codegen(observer),
            _tiled(attempt.tiling, tiling, record) as observer.tilings,
            _without_workers() if expected else contextlib.nullcontext(),
            together.turn(place),
            compat.late_kernels.postponed() if is_late else contextlib.nullcontext() as kernels,
        ):
            inputs = [compat.shapes.with_replacements(value) for value in attempt.example_inputs]
            compiled = compat.inductor.compile_fx(attempt.gm, inputs)
    if observer.saw_codegen and known is not None:
        _compiled_again.append(place)
    yield
    if kernels is not None:
        with compat.inductor.inductor_patched(settings):
            kernels.finish()
    lowered = Lowered(compiled, *_observation(observer, place, known))
    if lowered.observation is not None:
        record.observed(lowered.observation, lowered.source, unit.piece)
    _describe_tiling(attempt.tiling, tiling, record)
    _write_for_debugging(record)
    return lowered


def _observation(
    observer: KernelObserver, key: str, known: Observation | None
) -> tuple[Observation | None, Literal["codegen", "store"]]:
    """Return and store the observation of code generation, or return the one of an earlier process."""
    if observer.saw_codegen:
        observation = observer.observation()
        store().save(key, observation)
        if observer.codes:
            store().link(code_key(observer.codes), key)
        return observation, "codegen"
    if known is None:
        known = store().linked(code_key(observer.codes))
        if known is not None:
            store().save(key, known)
    return known, "store"


def _expected(known: Observation | None, device_type: str) -> bool:
    """Return True if Inductor's cache should contain a GPU graph, compiled by an earlier process."""
    return (
        known is not None
        and device_type != "cpu"
        and compat.artifacts.decline_caching() is None
        and not _compiled_again
    )


def _without_workers() -> contextlib.AbstractContextManager[None]:
    """Compile in this process: otherwise Inductor starts its worker processes first for every GPU graph."""
    return compat.inductor.inductor_patched({"compile_threads": 1})


def _write_for_debugging(record: GraphRecord) -> None:
    """Write the kernels next to torch's TORCH_COMPILE_DEBUG=1 output."""
    folder = compat.inductor.debug_folder()
    if folder is None:
        return
    try:
        record.write_kernels(folder / "tritium")
    except OSError as error:
        warnings.warn(f"tritium: kernels cannot be written into {folder}: {error}", RuntimeWarning, stacklevel=2)


@contextlib.contextmanager
def _tiled(policy: TilingPolicy, entry: PassRecord, record: GraphRecord) -> Iterator[session.Session | None]:
    """Apply the tiling policy to Triton kernels, unless it declined."""
    if entry.declined is not None:
        yield None
        return
    with session.active(policy) as decisions:
        try:
            yield decisions
        except Exception as error:
            entry.failed = f"{type(error).__name__} while it was active"
            raise
        finally:
            record.failures += [Failure("tiling analysis of one kernel", retry) for retry in decisions.retries]


def _describe_tiling(policy: TilingPolicy, entry: PassRecord, record: GraphRecord) -> None:
    entry.changed = any(kernel.tiling is not None and kernel.tiling.differs for kernel in record.kernels)
    names = {kernel.name for kernel in record.kernels}
    unmet = [kernel for kernel, _ in policy.pins if kernel not in names]
    if unmet and entry.declined is None and record.kernels_from != "none":
        entry.declined = f"force_tiling: this graph has no kernel {', '.join(unmet)}"


def _decline_tiling(policy: TilingPolicy, device_type: str) -> str | None:
    """Return why kernels are not tiled by the policy, or None."""
    if device_type == "cpu" and compat.inductor.inductor_config().cpu_backend != "triton":
        return "C++ kernels have no tiles"
    if not policy.is_on:
        return "switched off"
    return compat.tiling.decline_tiling()
