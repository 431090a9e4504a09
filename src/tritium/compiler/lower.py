"""Compile the rewritten graph with its engine, under the requested settings.

If lowering fails, it is tried again on the graph from Dynamo without requests; if that fails too, the graph runs
uncompiled. The report lists each failure with its error and graphs.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import fx

from tritium import compat
from tritium.artifacts import libraries
from tritium.artifacts.observations import code_key, store, store_key
from tritium.ops import triton_launch
from tritium.ops.op import NAMESPACE
from tritium.report import Failure, GraphRecord, PassRecord, SharedPiece
from tritium.report.kernel_dump import KernelSource
from tritium.report.kernel_dump.dissection import Dissection
from tritium.report.observation import Observation
from tritium.report.observer import KernelObserver
from tritium.tiling import session
from tritium.tiling.policy import OFF, Decisions, TilingPolicy

# The Inductor setting whose value adds Tritium's identity to Inductor's cache key.
SALT = "post_grad_custom_pre_pass"

# Name of the tiling policy in the list of a graph's passes.
TILING = "tiling_policy"

# Graphs that an earlier process compiled and this one compiled again. After one such graph no cache hit is expected,
# because some graphs cannot be cached.
_compiled_again: list[str] = []


@dataclass
class Lowering:
    """One attempt: a graph, its inputs, Inductor's settings, and the identity for the cache key."""

    gm: fx.GraphModule
    example_inputs: Sequence[Any]
    settings: Mapping[str, Any]
    identity: bytes
    tiling: TilingPolicy = OFF
    # The piece of a graph, or None for a whole graph.
    piece: SharedPiece | None = None
    # The result of code generation so far.
    dissection: Dissection = field(default_factory=Dissection)

    @property
    def unfinished(self) -> list[KernelSource]:
        """The kernels generated before the attempt failed."""
        return self.dissection.unfinished()


@dataclass(frozen=True)
class Lowered:
    """Compiled code, and the observation of its generation in this or an earlier process, or None."""

    run: Callable[..., Any]
    observation: Observation | None = None
    source: Literal["codegen", "store"] = "codegen"


@dataclass
class Attempt:
    """A lowering, with the name and graphs to report if it fails. Another attempt may follow."""

    part: str
    lowering: Lowering
    graphs: Sequence[tuple[str, fx.Graph]]
    is_tiled: bool = False
    error: Exception | None = None

    @property
    def failed_in_tiling(self) -> bool:
        return self.is_tiled and self.error is not None and compat.tiling.came_from_tiling(self.error)

    @property
    def failed_part(self) -> str:
        return "tiling analysis" if self.failed_in_tiling else self.part


def lower(attempt: Lowering, record: GraphRecord) -> Lowered:
    """Compile with Inductor, and record its code generation, from this or an earlier process."""
    settings = dict(attempt.settings)
    own = settings[SALT] if SALT in settings else compat.inductor.setting(SALT)
    settings[SALT] = compat.inductor.salted_pass(attempt.identity, own)
    libraries.install()
    observer = KernelObserver(record.device_type, NAMESPACE, triton_launch.op_of)
    attempt.dissection = observer.dissection
    tiling = PassRecord(TILING, declined=_why_untiled(attempt.tiling, record.device_type))
    record.passes = [*(entry for entry in record.passes if entry.name != TILING), tiling]
    with compat.inductor.inductor_patched(settings):
        key = store_key(attempt.gm.graph, attempt.identity + attempt.tiling.identity.encode())
        known = store().load(key)
        with (
            compat.observation.observed_codegen(observer),
            compat.kernels.recorded_kernels(observer),
            _tiled(attempt.tiling, tiling, record) as observer.tilings,
            _without_workers() if _expected(known, record.device_type) else contextlib.nullcontext(),
        ):
            compiled = compat.inductor.compile_fx(attempt.gm, attempt.example_inputs)
    lowered = Lowered(compiled, *_observation(observer, key, known))
    if lowered.observation is not None:
        record.observed(lowered.observation, lowered.source, attempt.piece)
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
        if known is not None:
            _compiled_again.append(key)
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
        and compat.artifacts.caching_obstacle() is None
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
def _tiled(policy: TilingPolicy, entry: PassRecord, record: GraphRecord) -> Iterator[Decisions | None]:
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


def _why_untiled(policy: TilingPolicy, device_type: str) -> str | None:
    if device_type == "cpu" and compat.inductor.inductor_config().cpu_backend != "triton":
        return "C++ kernels have no tiles"
    if not policy.is_on:
        return "switched off"
    return compat.tiling.decline_tiling()
