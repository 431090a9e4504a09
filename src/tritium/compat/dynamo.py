"""Dynamo's data about a graph: frames, guards, breaks, recompiles, sources and sizes of inputs."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import fx

from tritium.compat.wrapping import wrap_once


@dataclass(frozen=True)
class Frame:
    """The Python frame that Dynamo is compiling when it calls a backend."""

    code: CodeType
    arguments: Mapping[str, Any]
    compile_id: str


def compiling_frame() -> Frame | None:
    """Return the frame being compiled, or None if the backend is called directly."""
    convert = importlib.import_module("torch._dynamo.symbolic_convert")
    try:
        output = convert.InstructionTranslator.current_tx().output
    except AttributeError:
        return None
    root = output.root_tx
    return Frame(root.f_code, root.f_locals, str(getattr(output, "dynamo_compile_id", None) or "?"))


def is_watched() -> bool:
    """Return True if a dispatch mode or a trace intercepts operators."""
    return (
        torch._C._len_torch_dispatch_stack() != 0
        # Pre-dispatch modes are kept on a separate stack.
        or torch._ops._len_torch_dispatch_stack_pre_dispatch() != 0
        or torch._C._get_tracing_state() is not None
    )


def is_transformed() -> bool:
    """Return True inside vmap, grad, jvp or forward-mode derivatives, which operators must support.

    An operator without rules for these loses derivatives or batches, and tensors do not show it: under vmap none of
    them requires gradients.
    """
    return torch._C._functorch.maybe_current_level() is not None or has_tangents()


def has_tangents() -> bool:
    """Return True if forward-mode derivatives are computed, with dual tensors."""
    return torch.autograd.forward_ad._current_level >= 0


def is_mapped(*tensors: torch.Tensor) -> bool:
    """Return True if vmap runs over one of these tensors: its values cannot be read. False in graphs."""
    if is_compiling():
        return False
    return any(torch._C._functorch.is_batchedtensor(tensor) for tensor in tensors)


_guards: Any = importlib.import_module("torch._guards")


def is_compiling() -> bool:
    """Return True if this thread traces or compiles; Dynamo replaces it by True in code that it traces.

    `torch.compiler.is_compiling()` is global to the process on torch 2.13. On 2.11 it returns False for Python code
    that runs while a graph is compiled, such as an operator's code for fake tensors.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    if _guards.CompileContext.current_compile_id() is not None or _guards.TracingContext.try_get() is not None:
        return True
    # An export without Dynamo runs the code directly, under dispatch modes that trace it.
    return torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() != 0


def graphs_compiled() -> int:
    """Return the number of graphs that Dynamo has passed to any backend in this process."""
    return int(_utils().counters["stats"]["unique_graphs"])


def inductor_seconds() -> float | None:
    """Return the seconds that Inductor has compiled in this process; None if torch does not count them."""
    spent = getattr(_utils(), "calculate_time_spent", None)
    return None if spent is None else float(spent().get("inductor_compile", 0.0))


@functools.cache
def _utils() -> Any:
    """Import late and cache: the import is slow, and every call of a part needs the module."""
    return importlib.import_module("torch._dynamo.utils")


def log_only_for_readers() -> None:
    """Skip work of Dynamo whose only result is a log, unless that log is enabled.

    It tokenises every file of a model to get the names of its functions: half a second of a start with existing
    kernels. It also times the guards of every graph, with empty caches: emptying them took 25 ms on a CPU.
    """
    for module, name, logs, otherwise in (
        ("torch._dynamo.symbolic_convert", "get_funcname", ("trace_call", "trace_source"), None),
        ("torch._dynamo.guards", "profile_guard_manager", ("guards",), 0.0),
    ):
        wrap_once(importlib.import_module(module), name, functools.partial(_only_for_readers, logs, otherwise))


def _only_for_readers(logs: Sequence[str], otherwise: Any, original: Callable[..., Any], *arguments: Any) -> Any:
    log_state = importlib.import_module("torch._logging._internal").log_state
    is_read = os.environ.get("TORCH_TRACE") or any(map(log_state.is_artifact_enabled, logs))
    return original(*arguments) if is_read else otherwise


def guard_failures(code: CodeType) -> list[str]:
    """Return why the compiled versions of a frame did not fit, oldest first, in Dynamo's words."""
    return list(_utils().guard_failures.get(code, ()))


def compiled_versions(code: CodeType) -> int:
    """Return the number of compiled versions that Dynamo keeps of a code object, for all backends."""
    internals: Any = importlib.import_module("torch._C._dynamo.eval_frame")
    return len(internals._debug_get_cache_entry_list(code))


def with_code_of_its_own(function: FunctionType) -> FunctionType:
    """Copy a function with a new code object: Dynamo keys its cache and recompile limit on that object."""
    made = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def break_reason(gm: fx.GraphModule) -> str | None:
    """Return why Dynamo ended the graph early, in one line, or None if it did not."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    text = str(reason.reason)
    headline = text.strip().splitlines()[0]
    explanation = re.search(r"Explanation: (.+)", text)
    where = reason.user_stack[-1] if reason.user_stack else None
    place = f" at {Path(where.filename).name}:{where.lineno}" if where is not None else ""
    return headline + place + (f" ({explanation[1].strip()})" if explanation else "")


_LIMIT_MESSAGE = "torch._dynamo hit config.%s (%s)"


@dataclass(frozen=True)
class LimitReached:
    """Dynamo stopped recompiling a function: arguments that fit no compiled version now run eagerly."""

    limit: str
    value: int
    function: str
    file: str
    line: int
    reason: str


@functools.cache
def watch_recompile_limit(notify: Callable[[LimitReached], None]) -> None:
    """Call `notify` whenever Dynamo reaches a recompile limit; Dynamo reports that only in its log."""

    def read(record: logging.LogRecord) -> bool:
        arguments = record.args
        if str(record.msg).startswith(_LIMIT_MESSAGE) and isinstance(arguments, tuple):
            limit, value, function, reason, *_ = map(str, arguments)
            (place,) = re.findall(r"^'(.+)' \((.+):(\d+)\)", function)
            notify(LimitReached(limit, int(value), place[0], place[1], int(place[2]), reason))
        return True

    logging.getLogger("torch._dynamo.convert_frame").addFilter(read)


def is_parameter_placeholder(node: fx.Node) -> bool:
    """Return True if Dynamo made this graph input from a parameter or buffer of a module."""
    return re.search(r"\._(parameters|buffers)\['[^']+'\]$", _source_text(node) or "") is not None


def source_name(node: fx.Node) -> str:
    """Return the user's name of a graph input: `hidden_states`, or `norm.weight` for a parameter."""
    text = _source_text(node)
    if text is None:
        return node.name
    text = re.sub(r"L\['(\w+)'\]", r"\1", text)
    text = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", text)
    return re.sub(r"\.__dict__\['([^']+)'\]", r".\1", text)


def _source_text(node: fx.Node) -> str | None:
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return None
    # `name` was a method before it became a property.
    text = str(source.name() if callable(source.name) else source.name)
    # After Dynamo has read one attribute of the module, it writes the path to others in this way.
    return re.sub(r"\.__dict__\['(_modules|_parameters|_buffers)'\]", r".\1", text)


def module_path(node: fx.Node) -> tuple[str, ...]:
    """Return the path of a node's module, such as `("blocks", "0", "norm1")`; () for the model."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ()
    innermost = list(stack.values())[-1]
    words = re.findall(r"\w+", str(innermost[0]))
    return tuple(word for word in words if word not in ("L", "self", "__dict__", "_modules"))


def module_stack(node: fx.Node) -> tuple[tuple[str, str], ...]:
    """Return key and name of the modules whose forwards a node comes from, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    return tuple((str(key), str(entry[0])) for key, entry in stack.items())


def is_traced(node: fx.Node) -> bool:
    """Return True if Dynamo traced a node, and False if a pass added it."""
    return "source_fn_stack" in node.meta


def is_static_input(node: fx.Node) -> bool:
    """Return True if compiled code may assume that a graph input has the same address in every call."""
    return "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})


def floats_as_constants() -> AbstractContextManager[None]:
    """Let Dynamo trace Python floats as guarded constants in calls inside, even under `dynamic=True`.

    As inputs, the `eps` of each norm becomes a symbol, and Inductor makes Dynamo trace the model a second time.
    """
    config: Any = importlib.import_module("torch._dynamo.config")
    return config.patch(specialize_float=True)  # type: ignore[no-any-return]


def size_hint(size: Any) -> int | None:
    """Return the value of a symbolic size in the current compilation, without a guard; None if unknown."""
    node = getattr(size, "node", None)
    hint = getattr(node, "hint", None)
    return int(hint) if isinstance(hint, int) else None


def known_size(size: Any) -> Any:
    """Return a number, or the hint of a symbolic one; raise a `TypeError` for a size that depends on data."""
    if isinstance(size, (int, float)):
        return size
    hint = size_hint(size)
    if hint is None:
        raise TypeError(f"{size} is not known before the model runs")
    return hint


def describe_new_input(node: fx.Node, *, is_static: bool) -> None:
    """Add to a placeholder that Dynamo did not create the attributes that AOTAutograd expects."""
    node._dynamo_source = None
    node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"} if is_static else {}


def mark_dynamic(tensor: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """Mark dims of a tensor dynamic for Dynamo, and return the tensor."""
    torch._dynamo.mark_dynamic(tensor, list(dims))
    return tensor


@contextlib.contextmanager
def marked_dynamic(marks: Sequence[tuple[torch.Tensor, int]], *, weakly: bool = False) -> Iterator[None]:
    """Mark dims dynamic for the calls inside, and restore all tensor attributes that marking sets.

    With `weakly`, a dim that the model specialises raises no error.
    """
    saved = {id(tensor): (tensor, {name: tensor.__dict__[name] for name in _mark_names(tensor)}) for tensor, _ in marks}
    try:
        for tensor, attributes in saved.values():
            # Marking adds to existing sets: copy them, so that the caller's are unchanged.
            tensor.__dict__.update({name: copy.copy(value) for name, value in attributes.items()})
        for tensor, dim in marks:
            # Sizes 0 and 1 are always specialised; a strict mark on them would raise an error.
            if weakly or tensor.shape[dim] < 2:
                torch._dynamo.maybe_mark_dynamic(tensor, dim)
            else:
                torch._dynamo.mark_dynamic(tensor, dim)
        yield
    finally:
        for tensor, attributes in saved.values():
            for name in _mark_names(tensor):
                del tensor.__dict__[name]
            tensor.__dict__.update(attributes)


def _mark_names(tensor: torch.Tensor) -> list[str]:
    """Return the attributes that Dynamo's marks set on a tensor; newer torch versions have more of them."""
    # torch 2.13 guards on the first of those without Dynamo's prefix.
    others = ("_has_dynamo_dim_marking", "_specialize_on")
    return [name for name in tensor.__dict__ if name.startswith("_dynamo_") or name in others]


def why_not_traced(error: Exception) -> str | None:
    """Return why Dynamo could not trace a call in one graph, as one line; None for any other error.

    No part of the call has run in that case: Dynamo raises while tracing, or when it must not compile again.
    """
    exc = importlib.import_module("torch._dynamo.exc")
    limit = getattr(exc, "FailOnRecompileLimitHit", None)
    if limit is not None and isinstance(error, limit):
        return "it reached Dynamo's recompile limit"
    if not isinstance(error, (exc.Unsupported, exc.UserError, exc.InternalTorchDynamoError, exc.TorchRuntimeError)):
        return None
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].removeprefix(_ADVICE) if lines else type(error).__name__


# Dynamo's prefix to the reason if a number depends on data.
_ADVICE = "Consider annotating your code using torch._check*(). "


def passes_through(error: Exception) -> bool:
    """Return True for exceptions of Dynamo's control flow or of the user, not failures of a backend."""
    shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    return steers_dynamo(error) or isinstance(
        error, (shapes.ConstraintViolationError, shapes.GuardOnDataDependentSymNode)
    )


def steers_dynamo(error: Exception) -> bool:
    """Return True for Dynamo's control exceptions and out-of-memory errors, which must not be caught."""
    exc = importlib.import_module("torch._dynamo.exc")
    return isinstance(error, (exc.RestartAnalysis, exc.SkipFrame, exc.UserError, torch.OutOfMemoryError))


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that Dynamo does not trace, even inside an operator that a graph calls."""
    # Unlike torch.compiler.disable, this imports torch's compiler at the first call and not here.
    return torch._compile._disable_dynamo(function)


def needs_gradients(*tensors: torch.Tensor) -> bool:
    """Return whether derivatives of the results may be taken."""
    if not torch.compiler.is_compiling() and is_transformed():
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
