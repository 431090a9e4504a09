"""Active tiling policies: one in a context or for the process, with the decisions that it makes for Inductor.

`compat.tiling` wraps Inductor's functions and calls these methods, each with Inductor's own answer.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import sympy

from tritium import compat, device
from tritium.compat import generated
from tritium.errors import brief
from tritium.report.observation import Form, KernelTiling, ReductionChoice
from tritium.tiling import choose as choosing
from tritium.tiling import reductions
from tritium.tiling.divisibility import is_multiple
from tritium.tiling.narrow import Facts, narrow
from tritium.tiling.policy import TilingPolicy
from tritium.tiling.reductions import Reduction
from tritium.tuning import Machine, ReductionLimits, tables

# A bound for processes that compile all day.
MOST_DECISIONS = 4096


class Session:
    """An active policy and its decisions, for one graph or for a process: one with a reason for each kernel."""

    def __init__(self, policy: TilingPolicy) -> None:
        self.policy = policy
        self.kernels: deque[KernelTiling] = deque(maxlen=MOST_DECISIONS)
        # Errors of Inductor's analysis after which the kernel was tiled without it.
        self.retries: deque[str] = deque(maxlen=MOST_DECISIONS)
        # Keyed by the kernel's nodes; their names are unique only within the graph being compiled.
        self._latest: dict[frozenset[str], KernelTiling] = {}
        self._proofs: deque[str] = deque(maxlen=MOST_DECISIONS)
        # Proofs since the last kernel was begun.
        self._recent: dict[str, None] = {}
        # Rows left whole that Inductor would cut, keyed by their number and their elements.
        self._whole: dict[tuple[int | None, int | None], ReductionChoice] = {}

    @property
    def identity(self) -> str:
        return self.policy.identity

    @property
    def proofs(self) -> list[str]:
        """All proofs, without repetitions."""
        return list(dict.fromkeys(self._proofs))

    def of(self, nodes: Iterable[str]) -> KernelTiling | None:
        return self._latest.get(frozenset(nodes))

    def proves_multiple(self, numerator: Any, denominator: Any) -> bool:
        if not self.policy.prove_divisibility or not is_multiple(numerator, denominator):
            return False
        proof = f"({numerator}) / ({denominator})"
        self._recent[proof] = None
        self._proofs.append(proof)
        return True

    def survives(self, error: Exception, node: str) -> bool:
        """Return True if a kernel is tiled without Inductor's analysis after this error of it."""
        if not self.policy.retry_analysis or compat.dynamo.steers_dynamo(error):
            return False
        self.retries.append(f"{node}: {brief(error)}")
        return True

    def begin_kernel(self) -> None:
        self._recent.clear()

    def end_kernel(self, nodes: Sequence[str]) -> None:
        """End the code of a kernel: add the proofs since `begin_kernel` to its decision."""
        kernel = self.of(nodes)
        if kernel is not None:
            kernel.proofs = list(self._recent)

    def tile(
        self, scheduling: Any, schedule: Any, numel: Any, reduction_numel: Any, analysis: Any, answer: Any
    ) -> tuple[Any, Any]:
        """Return the tiling of one kernel with its scores."""
        sizes = sympy.sympify(numel), sympy.sympify(reduction_numel)
        question = choosing.Question(scheduling, schedule, *sizes, analysis, *answer)
        target = generated.current_device()
        try:
            tiling, scores, kernel = choosing.choose(
                question,
                pin=self._pin(schedule),
                compare=self.policy.choose_tiling,
                index_bits=32 if self.policy.narrow_sizes else 64,
                multiprocessors=device.multiprocessors(target.type, target.index),
            )
        except Exception as error:
            if compat.dynamo.steers_dynamo(error):
                raise
            tiling, scores, kernel = question.keep(f"the cost model failed: {brief(error)}")
        self.kernels.append(kernel)
        self._latest[frozenset(compat.tiling.node_names(schedule))] = kernel
        return tiling, scores

    def _pin(self, schedule: Sequence[Any]) -> str | None:
        if not self.policy.pins:
            return None
        name = generated.next_kernel_name(schedule)
        # `triton_poi_fused_add_0`: the middle part is known only with the code.
        return next((tiling for kernel, tiling in self.policy.pins if kernel.split("_", 2)[2:] == [name]), None)

    def finish(self, kernel: Any, source: str) -> str:
        """Return the source of a finished kernel with 32-bit index arithmetic where that is proven to be equal."""
        if not self.policy.narrow_sizes:
            return source
        try:
            source, summary = _narrow(kernel, source)
        except Exception as error:
            if compat.dynamo.steers_dynamo(error):
                raise
            summary = f"all in 64 bits: {brief(error)}"
        decision = self.of(compat.tiling.node_names(kernel.features.node_schedule))
        if decision is not None:
            decision.sizes = summary
        return source

    def split(self, target: Any, rows: int, elements: int, parts: int) -> int:
        """Return the number of parts into which rows are cut; `parts` is Inductor's."""
        if not self._reduces(target):
            return parts
        choice = reductions.cut(rows, elements, parts, self._limits())
        if choice.differs:
            self._whole[rows, elements] = choice
        return choice.parts

    def persists(self, features: Any, answer: bool) -> bool:
        """Return True if a kernel holds its rows in registers; `answer` is Inductor's."""
        if not self._reduces(generated.current_device()):
            return answer
        inductor: Form = "persistent" if answer else "looped"
        try:
            choice = reductions.walk(_reduction(features), inductor, self._limits())
            sizes = generated.hinted_size(features.numel), generated.hinted_size(features.reduction_numel)
            earlier = self._whole.get(sizes)
        except Exception as error:
            if compat.dynamo.steers_dynamo(error):
                raise
            choice, earlier = ReductionChoice(inductor, inductor, f"the rules failed: {brief(error)}"), None
        kernel = self.of(compat.tiling.node_names(features.node_schedule))
        if kernel is not None:
            kernel.reduction = choice if earlier is None else choice.after(earlier)
        return choice.form == "persistent"

    def _reduces(self, target: Any) -> bool:
        return self.policy.choose_reduction and target.type == "cuda"

    def _limits(self) -> ReductionLimits:
        return self.policy.reduction_limits or tables.reduction_limits(Machine.of("cuda"))


def _narrow(kernel: Any, source: str) -> tuple[str, str | None]:
    sizes = generated.kernel_sizes(kernel)
    if not sizes:
        return source, None
    if kernel.index_dtype != "tl.int32":
        return source, "all in 64 bits: so is the kernel's index"
    if generated.compiles_ahead_of_time():
        return source, "all in 64 bits: code compiled ahead of time runs without guards"
    extents, limits = generated.kernel_extents(kernel), generated.guarded_sizes(kernel.features)
    result = narrow(source, Facts(sizes, extents, limits, generated.least_size))
    return result.source, result.summary


def _reduction(features: Any) -> Reduction:
    length = sympy.sympify(features.reduction_numel)
    elements = int(length) if length.is_Integer else None
    reads, once, in_passes = generated.reduction_reads(features)
    return Reduction(
        rows=generated.hinted_size(features.numel),
        elements=elements,
        reads=reads,
        bytes_per_row=once * (elements or 0),
        looped_bytes_per_row=in_passes * (elements or 0),
        is_contiguous=bool(features.get_reduction_hint().name == "INNER"),
    )


# --- active policies ---


_CONTEXT: ContextVar[Session | None] = ContextVar("tritium_tiling", default=None)
_process: Session | None = None
_lock = threading.RLock()


def current() -> Session | None:
    """Return the active policy of this context, else that of the process, else None."""
    return _CONTEXT.get() or _process


@contextlib.contextmanager
def active(policy: TilingPolicy) -> Iterator[Session]:
    """Apply a policy to everything compiled inside the block, in this context."""
    session = Session(policy)
    compat.tiling.wrap(current)
    token = _CONTEXT.set(session)
    try:
        yield session
    finally:
        _CONTEXT.reset(token)
        compat.tiling.unwrap()


def set_for_process(session: Session | None) -> None:
    """Set the session of the process, for every thread; None restores Inductor."""
    global _process  # noqa: PLW0603 - the process has one default policy
    with _lock:
        before = _process
        if session is not None and before is None:
            compat.tiling.wrap(current)
        _process = session
        if session is None and before is not None:
            compat.tiling.unwrap()


def of_process() -> Session | None:
    return _process
