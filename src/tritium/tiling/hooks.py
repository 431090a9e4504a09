"""Wrap the Inductor functions that the policy changes while it is active, and restore them afterwards.

    SizeVarAllocator.statically_known_multiple_of    the divisibility proof, before torch 2.14
    SIMDScheduling.get_tiling_and_scores             a kernel's tiling is compared with others
    SIMDScheduling.select_tiling_with_memory         the same ranking for the scheduler, since torch 2.14: retry only
    TritonKernel.codegen_kernel                      indices of a finished kernel are narrowed
    InductorChoices.reduction_split_factor           the number of parts of a row
    InductorChoices.should_use_cooperative_reduction parts of a row may wait for each other inside one kernel
    InductorChoices.should_use_persistent_reduction  rows are held in registers if that was measured faster
    the coalescing analysis                          after an error the kernel is tiled without it
    FxGraphHashDetails                               the policy is part of the key of every compiled graph

Without an active policy in this context or process, each wrapper calls the original.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import sympy

from tritium import compat, device
from tritium.report.tiling import Form, KernelTiling, ReductionChoice
from tritium.tiling import choose as choosing
from tritium.tiling import reductions
from tritium.tiling.divisibility import is_multiple
from tritium.tiling.narrow import Facts, narrowed
from tritium.tiling.policy import Decisions, TilingPolicy, printed
from tritium.tiling.reductions import Reduction
from tritium.tuning import Machine, tables
from tritium.tuning.reductions import ReductionLimits


@dataclass(frozen=True)
class Session:
    """An active policy and the record of its decisions."""

    policy: TilingPolicy
    decisions: Decisions


_CONTEXT: ContextVar[Session | None] = ContextVar("tritium_tiling", default=None)
# Inductor also ranks tilings to decide on fusions; the policy changes only the tiling of generated code.
_IN_CODEGEN: ContextVar[bool] = ContextVar("tritium_tiling_codegen", default=False)
# True inside `get_tiling_and_scores`, which has a retry around `select_tiling_with_memory`.
_RANKING: ContextVar[bool] = ContextVar("tritium_tiling_ranking", default=False)
_process: Session | None = None
_lock = threading.RLock()
_users = 0
_installed: list[tuple[Any, str, Any, Any]] = []


def current() -> Session | None:
    """Return the active policy of this context, else that of the process, else None."""
    return _CONTEXT.get() or _process


@contextlib.contextmanager
def active(policy: TilingPolicy) -> Iterator[Decisions]:
    """Apply a policy to everything compiled inside the block, in this context."""
    session = Session(policy, Decisions())
    _acquire()
    token = _CONTEXT.set(session)
    try:
        yield session.decisions
    finally:
        _CONTEXT.reset(token)
        _release()


def enable_for_process(policy: TilingPolicy) -> Decisions:
    """Apply a policy to everything compiled from now on, in every thread."""
    session = Session(policy, Decisions())
    restore_for_process(session)
    return session.decisions


def disable_for_process() -> None:
    restore_for_process(None)


def restore_for_process(session: Session | None) -> None:
    """Set the session of the process; an earlier one keeps its decisions, None restores Inductor."""
    global _process  # noqa: PLW0603 - the process has one default policy
    with _lock:
        before = _process
        if session is not None and before is None:
            _acquire()
        _process = session
        if session is None and before is not None:
            _release()


def process_session() -> Session | None:
    return _process


# --- wrapping ---


def _acquire() -> None:
    global _users  # noqa: PLW0603
    with _lock:
        _users += 1
        if _users == 1:
            _install()


def _release() -> None:
    global _users  # noqa: PLW0603
    with _lock:
        _users -= 1
        if _users == 0:
            _remove()


def _install() -> None:
    scheduling, kernel = compat.tiling.simd_scheduling(), compat.tiling.triton_kernel()
    divisibility, selection = compat.tiling.divisibility_hook(), compat.tiling.selection_hook()
    if divisibility is not None:
        _wrap(*divisibility, _multiple_of)
    if selection is not None:
        _wrap(*selection, _select_tiling)
    _wrap(scheduling, "get_tiling_and_scores", _get_tiling_and_scores)
    _wrap(scheduling, "codegen_node_schedule", _codegen_node_schedule)
    _wrap(kernel, "codegen_kernel", _codegen_kernel)
    _wrap(*compat.tiling.split_hook(), _split_factor)
    _wrap(*compat.tiling.cooperative_hook(), _use_cooperative)
    _wrap(*compat.tiling.persistent_hook(), _use_persistent)
    _wrap(*compat.tiling.coalescing_analysis(), _analyse)
    _wrap(compat.tiling.graph_key(), "__init__", _describe_graph)


def _wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    found = vars(owner)[name]
    kind = type(found) if isinstance(found, classmethod | staticmethod) else None
    original = found.__func__ if kind is not None else found
    wrapper = functools.wraps(original)(make(original))
    replacement = kind(wrapper) if kind is not None else wrapper
    setattr(owner, name, replacement)
    _installed.append((owner, name, found, replacement))


def _remove() -> None:
    while _installed:
        owner, name, found, replacement = _installed.pop()
        # A later wrapper still calls this one, which without a session calls the original.
        if vars(owner)[name] is replacement:
            setattr(owner, name, found)


# --- the wrappers ---


def _multiple_of(original: Any) -> Any:
    def statically_known_multiple_of(self: Any, numerator: Any, denominator: Any) -> bool:
        if original(self, numerator, denominator):
            return True
        session = current()
        if session is None or not session.policy.prove_divisibility:
            return False
        if not is_multiple(sympy.sympify(numerator), sympy.sympify(denominator)):
            return False
        session.decisions.prove(f"({numerator}) / ({denominator})")
        return True

    return statically_known_multiple_of


def _analyse(original: Any) -> Any:
    def analyse(fused_node: Any) -> Any:
        session = current()
        if session is None or not session.policy.retry_analysis:
            return original(fused_node)
        try:
            return original(fused_node)
        except Exception as error:
            if compat.dynamo.steers_dynamo(error):
                raise
            # Since torch 2.14 the fused node may be a view, which has no name.
            session.decisions.retries.append(f"{fused_node.get_nodes()[0].get_name()}: {_brief(error)}")
            return None

    return analyse


def _codegen_node_schedule(original: Any) -> Any:
    def codegen_node_schedule(self: Any, kernel_features: Any) -> Any:
        session = current()
        if session is None:
            return original(self, kernel_features)
        token = _IN_CODEGEN.set(True)
        session.decisions.begin()
        try:
            return original(self, kernel_features)
        finally:
            _IN_CODEGEN.reset(token)
            session.decisions.finish(_names(kernel_features.node_schedule))

    return codegen_node_schedule


def _get_tiling_and_scores(original: Any) -> Any:
    def get_tiling_and_scores(
        cls: Any,
        node_schedule: Any,
        numel: sympy.Expr,
        reduction_numel: sympy.Expr = sympy.S.One,
        coalesce_analysis: Any = None,
    ) -> Any:
        session = current()
        if session is None:
            return original(cls, node_schedule, numel, reduction_numel, coalesce_analysis)
        token = _RANKING.set(True)
        try:
            answer, coalesce_analysis = _ranked(
                session, functools.partial(original, cls), node_schedule, numel, reduction_numel, coalesce_analysis
            )
        finally:
            _RANKING.reset(token)
        if not _IN_CODEGEN.get():
            return answer
        question = choosing.Question(
            cls,
            compat.tiling.lowering_graph().sizevars,
            node_schedule,
            sympy.sympify(numel),
            sympy.sympify(reduction_numel),
            coalesce_analysis,
            *answer,
        )
        return _chosen(session, question)

    return get_tiling_and_scores


def _select_tiling(original: Any) -> Any:
    def select_tiling_with_memory(
        cls: Any,
        node_schedule: Any,
        numel: sympy.Expr,
        reduction_numel: sympy.Expr = sympy.S.One,
        coalesce_analysis: Any = None,
    ) -> Any:
        session = current()
        rank = functools.partial(original, cls)
        if session is None or _RANKING.get():
            return rank(node_schedule, numel, reduction_numel, coalesce_analysis)
        return _ranked(session, rank, node_schedule, numel, reduction_numel, coalesce_analysis)[0]

    return select_tiling_with_memory


def _ranked(
    session: Session, rank: Callable[..., Any], schedule: Any, numel: Any, reduction_numel: Any, analysis: Any
) -> tuple[Any, Any]:
    """Rank tilings, without the analysis if that fails. Return the result and the analysis that was used."""
    try:
        return rank(schedule, numel, reduction_numel, analysis), analysis
    except Exception as error:
        if not session.policy.retry_analysis or analysis is None or compat.dynamo.steers_dynamo(error):
            raise
        names = _names(schedule)
        session.decisions.retries.append(f"{names[0] if names else '?'}: {_brief(error)}")
    return rank(schedule, numel, reduction_numel, None), None


def _chosen(session: Session, question: choosing.Question) -> Any:
    policy, decisions = session.policy, session.decisions
    names = _names(question.schedule)
    try:
        answer = choosing.choose(
            question,
            pin=_pin(session, question.schedule),
            compare=policy.choose_tiling,
            index_bits=32 if policy.narrow_sizes else 64,
            multiprocessors=_multiprocessors(),
        )
    except Exception as error:
        if compat.dynamo.steers_dynamo(error):
            raise
        kept = KernelTiling(printed(question.answer), "coalesced", f"the cost model failed: {_brief(error)}")
        decisions.decide(names, kept)
        return question.answer, question.scores
    decisions.decide(names, answer.decision)
    return answer.tiling, answer.scores


def _pin(session: Session, schedule: Sequence[Any]) -> str | None:
    if not session.policy.pins:
        return None
    name = compat.tiling.next_kernel_name(schedule)
    for kernel, choice in session.policy.pins:
        # `triton_poi_fused_add_0`: the middle part is known only with the code.
        if kernel.split("_", 2)[2:] == [name]:
            return choice
    return None


def _codegen_kernel(original: Any) -> Any:
    def codegen_kernel(self: Any, name: Any = None) -> Any:
        source = original(self, name)
        session = current()
        if session is None or not session.policy.narrow_sizes or type(self) is not compat.tiling.triton_kernel():
            return source
        # The guards that bound the indices come from the kernel's schedule.
        if compat.tiling.has_nodes_of_another_stage(self.features):
            return source
        decision = session.decisions.of(_names(self.features.node_schedule))
        try:
            source, summary = _narrow(self, source)
        except Exception as error:
            if compat.dynamo.steers_dynamo(error):
                raise
            summary = f"all in 64 bits: {_brief(error)}"
        if decision is not None:
            decision.sizes = summary
        return source

    return codegen_kernel


def _narrow(kernel: Any, source: str) -> tuple[str, str | None]:
    sizes = compat.tiling.kernel_sizes(kernel)
    if not sizes:
        return source, None
    if not compat.tiling.indexes_with_32_bits(kernel):
        return source, "all in 64 bits: so is the kernel's index"
    if compat.tiling.compiles_ahead_of_time():
        return source, "all in 64 bits: code compiled ahead of time runs without guards"
    facts = Facts(
        sizes,
        compat.tiling.kernel_extents(kernel),
        compat.tiling.guarded_sizes(kernel.features),
        compat.tiling.least_size,
    )
    done = narrowed(source, facts)
    return done.source, done.summary


def _split_factor(original: Any) -> Any:
    # Since torch 2.14 the arguments start with `self`.
    def reduction_split_factor(*question: Any, inner_reduction: bool) -> int:
        parts = int(original(*question, inner_reduction=inner_reduction))
        device, reduction_numel_hint, numel_hint = question[-3:]
        session = current()
        if session is None or not _reduces(session, device) or not inner_reduction:
            return parts
        # The hints are the sizes of one call. With other sizes an uncut row could be slow, and more rows than
        # multiprocessors could deadlock in a cooperative kernel.
        if compat.tiling.has_dynamic_sizes():
            return parts
        reduction = Reduction(
            rows=int(numel_hint),
            elements=int(reduction_numel_hint),
            multiprocessors=compat.tiling.target_multiprocessors(device),
        )
        choice = reductions.cut(reduction, parts, _limits(session))
        if choice.differs:
            session.decisions.cut(choice)
        return choice.parts if choice.form == "split" else 1

    return reduction_split_factor


def _use_cooperative(original: Any) -> Any:
    def should_use_cooperative_reduction(*question: Any) -> bool:
        if original(*question):
            return True
        session = current()
        if session is None or not _IN_CODEGEN.get() or not _reduces(session):
            return False
        choice = _cut_before(session, *compat.tiling.cooperative_sizes(*question))
        kernel = session.decisions.latest
        if choice is None or kernel is None:
            return False
        kernel.reduction = choice
        # Inductor supports cooperative reductions only with one other tile dim.
        return choice.form == "cooperative" and "y" not in kernel.dims

    return should_use_cooperative_reduction


def _use_persistent(original: Any) -> Any:
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        answer = bool(original(features, cooperative_reduction))
        session = current()
        if session is None or not _IN_CODEGEN.get() or not _reduces(session) or cooperative_reduction:
            return answer
        # The user's settings take precedence.
        if not compat.tiling.persistence_is_allowed() or compat.tiling.measures_reductions():
            return answer
        if compat.tiling.keeps_order_of_additions(features):
            return answer
        inductor: Form = "persistent" if answer else "looped"
        try:
            choice = reductions.walk(_reduction(features), inductor, _limits(session))
            before = _cut_before(session, features.numel, features.reduction_numel)
        except Exception as error:
            if compat.dynamo.steers_dynamo(error):
                raise
            choice, before = ReductionChoice(inductor, inductor, f"the rules failed: {_brief(error)}"), None
        kernel = session.decisions.of(_names(features.node_schedule))
        if kernel is not None:
            kernel.reduction = choice if before is None else choice.after(before)
        return choice.form == "persistent"

    return should_use_persistent_reduction


def _reduction(features: Any) -> Reduction:
    length = sympy.sympify(features.reduction_numel)
    elements = int(length) if length.is_Integer else None
    reads, once, in_passes = compat.tiling.reduction_reads(features)
    return Reduction(
        rows=compat.tiling.hinted_size(features.numel),
        elements=elements,
        reads=reads,
        bytes_per_row=once * (elements or 0),
        looped_bytes_per_row=in_passes * (elements or 0),
        is_contiguous=compat.tiling.reduces_contiguous_rows(features),
        multiprocessors=_multiprocessors(),
    )


def _cut_before(session: Session, rows: Any, elements: Any) -> ReductionChoice | None:
    """Return the choice made for these rows at lowering, if it differs from Inductor's."""
    sizes = compat.tiling.hinted_size(rows), compat.tiling.hinted_size(elements)
    return None if sizes[0] is None or sizes[1] is None else session.decisions.cut_into(sizes[0], sizes[1])


def _reduces(session: Session, target: Any = None) -> bool:
    target = target if target is not None else compat.tiling.lowering_graph().get_current_device_or_throw()
    return session.policy.choose_reduction and target.type == "cuda"


def _limits(session: Session) -> ReductionLimits:
    return session.policy.reduction_limits or tables.reduction_limits(Machine.of("cuda"))


def _describe_graph(original: Any) -> Any:
    def describe(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        session = current()
        if session is not None:
            self.tritium_tiling = session.policy.identity

    return describe


def _names(schedule: Sequence[Any]) -> list[str]:
    return [node.get_name() for node in schedule if hasattr(node, "get_name")]


def _multiprocessors() -> int | None:
    target = compat.tiling.lowering_graph().get_current_device_or_throw()
    return device.multiprocessors(target.type, target.index)


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
