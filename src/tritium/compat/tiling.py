"""The functions of Inductor that decide a Triton kernel's tiling: wrappers for a policy, and the data that it reads."""

from __future__ import annotations

import functools
import importlib
import threading
import traceback
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritium.compat import generated
from tritium.compat.inductor import inductor_config
from tritium.compat.versions import TORCH, Version, decline_name
from tritium.compat.wrapping import wrapped

# Versions on which the hooks below were compared with Inductor's source.
TILING_KNOWN = ((2, 11), (2, 12), (2, 13), (2, 14), (2, 15))

# From this version on, Inductor proves that a product of sums is a multiple of its factors.
PROVES_PRODUCTS: Version = (2, 14)

# A policy has a method for each decision, which gets Inductor's own: see `tritium.tiling.session.Session`.
Policy = Any

# Inductor also ranks tilings to decide on fusions; a policy changes only the tiling of generated code.
_IN_CODEGEN: ContextVar[bool] = ContextVar("tritium_tiling_codegen", default=False)
# True inside `get_tiling_and_scores`, which has a retry around `select_tiling_with_memory`.
_RANKING: ContextVar[bool] = ContextVar("tritium_tiling_ranking", default=False)


# --- the wrappers: each gets the active policy, the original function and its arguments ---


def _multiple_of(policy: Policy, original: Any, sizes: Any, numerator: Any, denominator: Any) -> bool:
    return bool(original(sizes, numerator, denominator)) or policy.proves_multiple(numerator, denominator)


def _analyse(policy: Policy, original: Any, fused_node: Any) -> Any:
    try:
        return original(fused_node)
    except Exception as error:
        # Since torch 2.14 the fused node may be a view, which has no name.
        if not policy.survives(error, fused_node.get_nodes()[0].get_name()):
            raise
        return None


def _rank(
    policy: Policy,
    original: Any,
    scheduling: Any,
    schedule: Any,
    numel: Any,
    reduction_numel: Any = None,
    coalesce_analysis: Any = None,
) -> tuple[Any, Any, Any]:
    """Rank tilings, without the analysis if that fails. Return the result, the reduction's size and the analysis."""
    if reduction_numel is None:
        reduction_numel = importlib.import_module("sympy").S.One
    rank = functools.partial(original, scheduling, schedule, numel, reduction_numel)
    try:
        return rank(coalesce_analysis), reduction_numel, coalesce_analysis
    except Exception as error:
        name = next(iter(node_names(schedule)), "?")
        if coalesce_analysis is None or not policy.survives(error, name):
            raise
    return rank(None), reduction_numel, None


def _tile(
    policy: Policy, original: Any, scheduling: Any, node_schedule: Any, numel: Any, *rest: Any, **named: Any
) -> Any:
    token = _RANKING.set(True)
    try:
        answer, *found = _rank(policy, original, scheduling, node_schedule, numel, *rest, **named)
    finally:
        _RANKING.reset(token)
    return policy.tile(scheduling, node_schedule, numel, *found, answer) if _IN_CODEGEN.get() else answer


def _select_tiling(policy: Policy, original: Any, *arguments: Any, **named: Any) -> Any:
    return original(*arguments, **named) if _RANKING.get() else _rank(policy, original, *arguments, **named)[0]


def _generate(policy: Policy, original: Any, scheduling: Any, kernel_features: Any) -> Any:
    """Generate the code of one kernel; proofs inside belong to it."""
    token = _IN_CODEGEN.set(True)
    policy.begin_kernel()
    try:
        return original(scheduling, kernel_features)
    finally:
        _IN_CODEGEN.reset(token)
        policy.end_kernel(node_names(kernel_features.node_schedule))


def _finish(policy: Policy, original: Any, kernel: Any, name: Any = None) -> Any:
    """Let the policy narrow the indices of a finished kernel."""
    source = original(kernel, name)
    # The guards that bound the indices come from the kernel's schedule; nested reductions, since torch 2.15, have nodes
    # outside of it.
    indexing = getattr(kernel.features, "indexing_node_schedule", None)
    is_nested = indexing is not None and indexing is not kernel.features.node_schedule
    return (
        source
        if type(kernel) is not _inductor("codegen.triton").TritonKernel or is_nested
        else policy.finish(kernel, source)
    )


def _split(policy: Policy, original: Any, *question: Any, inner_reduction: bool) -> int:
    # Since torch 2.14 the arguments start with `self`.
    parts = int(original(*question, inner_reduction=inner_reduction))
    device, elements, rows = question[-3:]
    # The hints are the sizes of one call. With other sizes an uncut row could be slow, and more rows than
    # multiprocessors could deadlock in a cooperative kernel.
    if not inner_reduction or generated.lowering_graph().sizevars.shape_env.var_to_range:
        return parts
    return int(policy.split(device, int(rows), int(elements), parts))


def _persist(policy: Policy, original: Any, features: Any, cooperative_reduction: bool) -> bool:
    answer = bool(original(features, cooperative_reduction))
    triton = inductor_config().triton
    # The user's settings take precedence: no persistent reductions, several forms that Inductor times, or, since torch
    # 2.15, a fixed order of additions (`numerics="strict"`).
    block = getattr(features, "strict_reduction_rblock", None)
    is_set = not triton.persistent_reductions or triton.multi_kernel or (block is not None and block() is not None)
    if is_set or cooperative_reduction or not _IN_CODEGEN.get():
        return answer
    return bool(policy.persists(features, answer))


def _describe_graph(policy: Policy, original: Any, details: Any, *arguments: Any, **named: Any) -> None:
    original(details, *arguments, **named)
    details.tritium_tiling = policy.identity


# --- wrapping ---


@dataclass(frozen=True)
class Hook:
    """A function of Inductor that a policy calls, with the expected parameters, and its wrapper if there is one."""

    owner: Any
    attribute: str
    parameters: tuple[str, ...] = ()
    wrapper: Callable[..., Any] | None = None

    def decline(self) -> str | None:
        """Return how this torch's function differs from the expected one, or None."""
        return decline_name(self.owner, self.attribute, self.parameters)


def hooks() -> list[Hook]:
    """Return the functions that a policy wraps or calls on this torch."""
    simd, choices = _inductor("codegen.simd").SIMDScheduling, _inductor("choices").InductorChoices
    ranking = ("node_schedule", "numel", "reduction_numel", "coalesce_analysis")
    split = ("device", "reduction_numel_hint", "numel_hint", "inner_reduction")
    wrapped = [
        Hook(simd, "get_tiling_and_scores", ranking, _tile),
        Hook(simd, "create_tiling", ("pw_tiling", "reduction_tiling")),
        Hook(simd, "tiling_is_compatible", ("node_schedule", "tiling")),
        Hook(simd, "codegen_node_schedule", ("kernel_features",), _generate),
        Hook(_inductor("codegen.triton").TritonKernel, "codegen_kernel", ("name",), _finish),
        Hook(*coalescing_analysis(), (), _analyse),
        Hook(choices, "should_use_persistent_reduction", ("features", "cooperative_reduction"), _persist),
        Hook(choices, "reduction_split_factor", split, _split),
        Hook(_inductor("codecache").FxGraphHashDetails, "__init__", ("gm", "example_inputs"), _describe_graph),
    ]
    # Since torch 2.14 the scheduler ranks tilings past `get_tiling_and_scores`.
    if hasattr(simd, "select_tiling_with_memory"):
        wrapped.append(Hook(simd, "select_tiling_with_memory", ranking, _select_tiling))
    if TORCH < PROVES_PRODUCTS:
        sizes = _inductor("sizevars").SizeVarAllocator
        wrapped.append(Hook(sizes, "statically_known_multiple_of", ("numerator", "denominator"), _multiple_of))
    return wrapped


def decline_tiling(version: Version = TORCH) -> str | None:
    """Return why the tiling policy cannot act on this torch, or None.

    >>> decline_tiling((2, 10))
    'supported on torch 2.11 to 2.15, not on 2.10'
    """
    if version not in TILING_KNOWN:
        oldest, newest, this = (".".join(map(str, known)) for known in (TILING_KNOWN[0], TILING_KNOWN[-1], version))
        return f"supported on torch {oldest} to {newest}, not on {this}"
    return next((reason for hook in hooks() if (reason := hook.decline()) is not None), None)


_lock = threading.RLock()
_users = 0
# Owner, attribute, original and wrapper.
_installed: list[tuple[Any, str, Any, Any]] = []


def wrap(current: Callable[[], Policy | None]) -> None:
    """Wrap Inductor's functions for the policy that `current` returns; without one they call the original.

    Every call needs an `unwrap`; the last of them restores the functions.
    """
    global _users  # noqa: PLW0603 - Inductor's functions are global too
    with _lock:
        _users += 1
        if _users > 1:
            return
        for hook in hooks():
            if hook.wrapper is not None:
                declared = vars(hook.owner)[hook.attribute]
                wrapper = wrapped(declared, functools.partial(_serve, current, hook.wrapper))
                setattr(hook.owner, hook.attribute, wrapper)
                _installed.append((hook.owner, hook.attribute, declared, wrapper))


def _serve(
    current: Callable[[], Policy | None], wrapper: Callable[..., Any], original: Any, *arguments: Any, **named: Any
) -> Any:
    policy = current()
    return original(*arguments, **named) if policy is None else wrapper(policy, original, *arguments, **named)


def unwrap() -> None:
    global _users  # noqa: PLW0603
    with _lock:
        _users -= 1
        while _users == 0 and _installed:
            owner, name, original, wrapper = _installed.pop()
            # A later wrapper still calls this one, which without a policy calls the original.
            if vars(owner)[name] is wrapper:
                setattr(owner, name, original)


def is_wrapped() -> bool:
    return bool(_installed)


def node_names(schedule: Sequence[Any]) -> list[str]:
    """Return the names of the nodes of a kernel's schedule, which also has marks between them."""
    return [node.get_name() for node in schedule if hasattr(node, "get_name")]


# Settings that make Inductor tile kernels without its coalescing analysis.
NO_TILING_ANALYSIS = {"triton.coalesce_tiling_analysis": False}


_TILING_FUNCTIONS = frozenset(
    {"get_tiling_and_scores", "select_tiling_with_memory", "compute_tiling_strategy", "_split_iteration_ranges"}
)


def came_from_tiling(error: BaseException) -> bool:
    """Return True if an error, or a cause of it, comes from Inductor's tiling analysis."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        for frame, _ in traceback.walk_tb(current.__traceback__):
            code = frame.f_code
            if Path(code.co_filename).name == "tiling_utils.py" or code.co_name in _TILING_FUNCTIONS:
                return True
        current = current.__cause__ or current.__context__
    return False


def _inductor(module: str) -> Any:
    return importlib.import_module(f"torch._inductor.{module}")


def coalescing_analysis() -> tuple[Any, str]:
    """Return the module and name from which code generation reads the coalescing analysis."""
    utilities = _inductor("tiling_utils")
    if hasattr(utilities, "_analyze_memory_coalescing"):
        return utilities, "_analyze_memory_coalescing"
    return _inductor("codegen.simd"), "analyze_memory_coalescing"
