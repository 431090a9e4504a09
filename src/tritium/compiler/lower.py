"""Hand the rewritten graph to the engine that runs it, with the settings that were asked for.

A lowering that fails is tried once more on the graph as Dynamo made it, without requests; if that fails too the graph
runs uncompiled. Each step down is in the report with the error and the graphs that caused it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import fx

from tritium import compat
from tritium.compiler import libraries
from tritium.compiler.dissect import Dissection
from tritium.compiler.observe import KernelObserver, code_key, store, store_key
from tritium.report import Failure, GraphRecord, PassRecord, SharedPiece
from tritium.tiling import hooks
from tritium.tiling.policy import OFF, Decisions, TilingPolicy

# The setting that carries our identity into Inductor's cache key.
SALT = "post_grad_custom_pre_pass"

# The entry of the tiling policy among the passes of a graph.
TILING = "tiling_policy"

# Graphs that an earlier process compiled and this one had to compile once more. One is enough to expect no other in the
# cache: not every graph can be kept there.
_compiled_again: list[str] = []


@dataclass
class Lowering:
    """One attempt: a graph, its inputs, Inductor's settings, and the identity that goes into the cache key."""

    gm: fx.GraphModule
    example_inputs: Sequence[Any]
    settings: Mapping[str, Any]
    identity: bytes
    tiling: TilingPolicy = OFF
    # The piece of a graph that this is; None for a graph that is compiled whole.
    piece: SharedPiece | None = None
    # What code generation has written so far.
    dissection: Dissection = field(default_factory=Dissection)

    @property
    def unfinished(self) -> list[dict[str, Any]]:
        """The kernels that code generation had written when the attempt failed."""
        return self.dissection.unfinished()


@dataclass(frozen=True)
class Lowered:
    """Compiled code, and what its generation showed now or in an earlier process; None if that is not known."""

    run: Callable[..., Any]
    observation: Mapping[str, Any] | None = None
    source: Literal["codegen", "store"] = "codegen"


@dataclass
class Attempt:
    """A lowering that another may follow, with the name and graphs that the report gets if it fails."""

    part: str
    lowering: Lowering
    graphs: Sequence[tuple[str, fx.Graph]]
    is_tiled: bool = False
    error: Exception | None = None

    @property
    def failed_in_tiling(self) -> bool:
        return self.is_tiled and self.error is not None and compat.came_from_tiling(self.error)

    @property
    def failed_part(self) -> str:
        return "tiling analysis" if self.failed_in_tiling else self.part


def lower(attempt: Lowering, record: GraphRecord) -> Lowered:
    """Compile with Inductor, and write into the record what its code generation did, now or in an earlier process."""
    settings = dict(attempt.settings)
    own = settings[SALT] if SALT in settings else compat.setting(SALT)
    settings[SALT] = compat.salted_pass(attempt.identity, own)
    libraries.install()
    observer = KernelObserver(record.device_type)
    attempt.dissection = observer.dissection
    tiling = PassRecord(TILING, declined=_why_untiled(attempt.tiling, record.device_type))
    record.passes = [*(entry for entry in record.passes if entry.name != TILING), tiling]
    with compat.inductor_patched(settings):
        key = store_key(attempt.gm.graph, attempt.identity + attempt.tiling.identity.encode())
        known = store().load(key)
        with (
            compat.observed_codegen(observer),
            compat.recorded_kernels(observer),
            _tiled(attempt.tiling, tiling, record) as observer.tilings,
            _without_workers() if _expected(known, record.device_type) else contextlib.nullcontext(),
        ):
            compiled = compat.compile_fx(attempt.gm, attempt.example_inputs)
    lowered = Lowered(compiled, *_observation(observer, key, known))
    if lowered.observation is not None:
        record.observed(lowered.observation, lowered.source, attempt.piece)
    _describe_tiling(attempt.tiling, tiling, record)
    _write_for_debugging(record)
    return lowered


def _observation(
    observer: KernelObserver, key: str, known: dict[str, Any] | None
) -> tuple[dict[str, Any] | None, Literal["codegen", "store"]]:
    """Return what code generation showed, which is kept for other processes, or what an earlier process kept."""
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


def _expected(known: Mapping[str, Any] | None, device_type: str) -> bool:
    """Whether Inductor's cache should have a graph for a GPU: an earlier process that used the same cache compiled it."""
    return known is not None and device_type != "cpu" and compat.caching_obstacle() is None and not _compiled_again


def _without_workers() -> contextlib.AbstractContextManager[None]:
    """Compile here what there is to compile: for every graph on a GPU Inductor else starts its worker processes first."""
    return compat.inductor_patched({"compile_threads": 1})


def _write_for_debugging(record: GraphRecord) -> None:
    """The kernels beside what torch writes for TORCH_COMPILE_DEBUG=1."""
    folder = compat.debug_folder()
    if folder is None:
        return
    try:
        record.write_kernels(folder / "tritium")
    except OSError as error:
        warnings.warn(f"tritium: kernels cannot be written into {folder}: {error}", RuntimeWarning, stacklevel=2)


@contextlib.contextmanager
def _tiled(policy: TilingPolicy, entry: PassRecord, record: GraphRecord) -> Iterator[Decisions | None]:
    """Let the tiling policy act on Triton kernels, unless it declined."""
    if entry.declined is not None:
        yield None
        return
    with hooks.active(policy) as decisions:
        try:
            yield decisions
        except Exception as error:
            entry.failed = f"{type(error).__name__} while it was active"
            raise
        finally:
            record.failures += [Failure("tiling analysis of one kernel", retry) for retry in decisions.retries]


def _describe_tiling(policy: TilingPolicy, entry: PassRecord, record: GraphRecord) -> None:
    tilings = [found for kernel in record.kernels if (found := kernel.get("tiling")) is not None]
    entry.changed = any(
        found["choice"] != "coalesced" or found["sizes"] or _reduces_otherwise(found) for found in tilings
    )
    names = {kernel["name"] for kernel in record.kernels}
    unmet = [kernel for kernel, _ in policy.pins if kernel not in names]
    if unmet and entry.declined is None and record.kernels_from != "none":
        entry.declined = f"force_tiling: this graph has no kernel {', '.join(unmet)}"


def _reduces_otherwise(tiling: Mapping[str, Any]) -> bool:
    reduction = tiling.get("reduction")
    return reduction is not None and reduction["form"] != reduction["inductor"]


def _why_untiled(policy: TilingPolicy, device_type: str) -> str | None:
    if device_type == "cpu" and compat.inductor_config().cpu_backend != "triton":
        return "C++ kernels have no tiles"
    if not policy.is_on:
        return "switched off"
    return compat.tiling_obstacle()
