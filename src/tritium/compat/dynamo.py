"""What Dynamo knows of a graph: frames, guards, breaks, recompiles, sources and sizes of inputs."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import fx
from torch.utils._device import DeviceContext


@dataclass(frozen=True)
class Frame:
    """The Python frame that Dynamo is compiling while it calls a backend."""

    code: CodeType
    arguments: Mapping[str, Any]
    compile_id: str


def compiling_frame() -> Frame | None:
    """The frame being compiled, or None when a backend is called by hand."""
    convert = importlib.import_module("torch._dynamo.symbolic_convert")
    try:
        output = convert.InstructionTranslator.current_tx().output
    except AttributeError:
        return None
    root = output.root_tx
    return Frame(root.f_code, root.f_locals, str(getattr(output, "dynamo_compile_id", None) or "?"))


def called_eagerly() -> bool:
    """Whether nothing watches or transforms operators here."""
    return not is_watched() and not is_transformed()


def is_watched() -> bool:
    """Whether somebody looks at operators here: a dispatch mode, or a trace."""
    return (
        torch._C._len_torch_dispatch_stack() != 0
        # Modes that see operators before they are taken apart are kept elsewhere.
        or _modes_before_dispatch() != 0
        or torch._C._get_tracing_state() is not None
    )


_modes_before_dispatch: Callable[[], int] = torch._ops._len_torch_dispatch_stack_pre_dispatch


def replaces_functions() -> bool:
    """Whether a mode is on that may compute PyTorch's functions in another way. A default device is one that does not."""
    if torch._C._len_torch_function_stack() == 0:
        return False
    modes = (torch._C._get_function_stack_at(index) for index in range(torch._C._len_torch_function_stack()))
    return any(not isinstance(mode, DeviceContext) for mode in modes)


def is_transformed() -> bool:
    """Whether a transform is under way that reads derivatives or batches off operators: vmap, grad, jvp or dual tensors.

    What has no rules for these loses them, and tensors do not tell: under vmap none of them says that it requires gradients.
    """
    return torch._C._functorch.maybe_current_level() is not None or has_tangents()


def has_tangents() -> bool:
    """Whether derivatives are taken forward, along dual tensors."""
    return torch.autograd.forward_ad._current_level >= 0


def is_mapped(*tensors: torch.Tensor) -> bool:
    """Whether vmap runs over one of these, so that its numbers cannot be read. Never in a graph."""
    if is_compiling():
        return False
    return any(torch._C._functorch.is_batchedtensor(tensor) for tensor in tensors)


_guards: Any = importlib.import_module("torch._guards")


def is_compiling() -> bool:
    """Return whether this thread traces or compiles; Dynamo reads it as True in code that it traces.

    `torch.compiler.is_compiling()` belongs to the process on torch 2.13, and 2.11 returns False for Python code that runs
    while a graph is compiled, such as an operator's on fake tensors.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    if _guards.CompileContext.current_compile_id() is not None or _guards.TracingContext.try_get() is not None:
        return True
    # An export without Dynamo runs the code itself, under the modes that record it.
    return torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() != 0


def graphs_compiled() -> int:
    """How many graphs Dynamo has handed to any backend in this process."""
    return int(_utils().counters["stats"]["unique_graphs"])


def inductor_seconds() -> float | None:
    """Return the seconds that Inductor has compiled for in this process; None if torch does not count them."""
    spent = getattr(_utils(), "calculate_time_spent", None)
    return None if spent is None else float(spent().get("inductor_compile", 0.0))


@functools.cache
def _utils() -> Any:
    """Loaded late, because it takes long; asked for in every call of a part."""
    return importlib.import_module("torch._dynamo.utils")


def log_only_for_readers() -> None:
    """Let Dynamo find out what only its logs tell while somebody reads them.

    It tokenises every file of a model for the names of its functions: half a second of a start that finds all kernels
    compiled. And it times the guards of every graph, with empty caches: emptying them took 25 ms of a CPU.
    """
    _answer_only_readers("torch._dynamo.symbolic_convert", "get_funcname", ("trace_call", "trace_source"), None)
    _answer_only_readers("torch._dynamo.guards", "profile_guard_manager", ("guards",), 0.0)


def _answer_only_readers(module_name: str, name: str, logs: tuple[str, ...], otherwise: Any) -> None:
    module: Any = importlib.import_module(module_name)
    logging_internals: Any = importlib.import_module("torch._logging._internal")
    original = getattr(module, name, None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def answer(*arguments: Any) -> Any:
        traced = os.environ.get("TORCH_TRACE")
        read = traced or any(map(logging_internals.log_state.is_artifact_enabled, logs))
        return original(*arguments) if read else otherwise

    setattr(module, name, answer)


def guard_failures(code: CodeType) -> list[str]:
    """Why the compiled versions of a frame did not fit, oldest first, as Dynamo words it."""
    return list(_utils().guard_failures.get(code, ()))


def compiled_versions(code: CodeType) -> int:
    """How many compiled versions Dynamo keeps of some code, by any backend."""
    internals: Any = importlib.import_module("torch._C._dynamo.eval_frame")
    return len(internals._debug_get_cache_entry_list(code))


def with_code_of_its_own(function: FunctionType) -> FunctionType:
    """The same function to Python, one it has not met to Dynamo: what it knows, and how often it compiles, goes by code."""
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
    """Why Dynamo ended the graph early, in one line, or None when it did not."""
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
    """Dynamo gave up recompiling a function: from now on it runs eagerly for arguments that fit no compiled version."""

    limit: str
    value: int
    function: str
    file: str
    line: int
    reason: str


class _LimitHandler(logging.Handler):
    def __init__(self, notify: Callable[[LimitReached], None]) -> None:
        super().__init__(logging.WARNING)
        self.notify = notify

    def emit(self, record: logging.LogRecord) -> None:
        arguments = record.args
        if not str(record.msg).startswith(_LIMIT_MESSAGE) or not isinstance(arguments, tuple) or len(arguments) < 4:
            return
        match = re.match(r"'(.+)' \((.+):(\d+)\)", str(arguments[2]))
        if match is not None:
            value = int(str(arguments[1]))
            self.notify(LimitReached(str(arguments[0]), value, match[1], match[2], int(match[3]), str(arguments[3])))


def watch_recompile_limit(notify: Callable[[LimitReached], None]) -> None:
    """Call `notify` whenever Dynamo reaches a recompile limit; it announces that in its log and nowhere else."""
    logger = logging.getLogger("torch._dynamo.convert_frame")
    if not any(isinstance(handler, _LimitHandler) for handler in logger.handlers):
        logger.addHandler(_LimitHandler(notify))


@contextlib.contextmanager
def many_recompiles() -> Iterator[None]:
    """Lift Dynamo's limits of versions of one function, for whoever compiles it in many ways on purpose."""
    config: Any = importlib.import_module("torch._dynamo.config")
    with config.patch(recompile_limit=4096, accumulated_recompile_limit=65536):
        yield


def is_parameter_placeholder(node: fx.Node) -> bool:
    """Whether Dynamo made this graph input from a parameter or buffer of a module."""
    return re.search(r"\._(parameters|buffers)\['[^']+'\]$", _source_text(node) or "") is not None


def source_name(node: fx.Node) -> str:
    """The user's name of a graph input: `hidden_states`, or `transformer.norm.weight` for a parameter."""
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
    # A method before it became a property.
    text = str(source.name() if callable(source.name) else source.name)
    # Where Dynamo has looked at an attribute of the module before, it spells the way to the others so.
    return re.sub(r"\.__dict__\['(_modules|_parameters|_buffers)'\]", r".\1", text)


def module_path(node: fx.Node) -> tuple[str, ...]:
    """The module whose forward a node comes from: `("transformer_blocks", "0", "norm1")`; empty for the model's own."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ()
    innermost = list(stack.values())[-1]
    words = re.findall(r"\w+", str(innermost[0]))
    return tuple(word for word in words if word not in ("L", "self", "__dict__", "_modules"))


def module_stack(node: fx.Node) -> tuple[tuple[str, str], ...]:
    """The modules whose forwards a node comes from, outermost first: what tells an instance apart, and its name."""
    stack = node.meta.get("nn_module_stack") or {}
    return tuple((str(key), str(entry[0])) for key, entry in stack.items())


def is_static_input(node: fx.Node) -> bool:
    """Whether compiled code may rely on a graph input's lying at the same address in every call."""
    return "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})


@contextlib.contextmanager
def floats_as_constants() -> Iterator[None]:
    """Let Dynamo trace Python floats as constants with guards, for the calls inside, also under `dynamic=True`.

    As inputs, the `eps` of each norm is another symbol, and Inductor makes Dynamo trace the model a second time.
    """
    config: Any = importlib.import_module("torch._dynamo.config")
    with config.patch(specialize_float=True):
        yield


def size_hint(size: Any) -> int | None:
    """The number behind a symbolic size in the call that is being compiled; no guard is added."""
    node = getattr(size, "node", None)
    hint = getattr(node, "hint", None)
    return int(hint) if isinstance(hint, int) else None


def describe_new_input(node: fx.Node, *, is_static: bool) -> None:
    """Give a placeholder that Dynamo did not make what AOTAutograd expects of those it did."""
    node._dynamo_source = None
    node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"} if is_static else {}


@contextlib.contextmanager
def marked_dynamic(marks: Sequence[tuple[torch.Tensor, int]], *, weakly: bool = False) -> Iterator[None]:
    """Mark dims dynamic for the calls inside, and restore every attribute that marking sets on the caller's tensors.

    Marked weakly, a dim that the model specialises is no error.
    """
    tensors = list({id(tensor): tensor for tensor, _ in marks}.values())
    saved = [{name: tensor.__dict__[name] for name in _mark_names(tensor)} for tensor in tensors]
    try:
        for tensor, attributes in zip(tensors, saved, strict=True):
            # Marking adds to sets that are there: the caller's own stay as they are.
            tensor.__dict__.update({name: copy.copy(value) for name, value in attributes.items()})
        for tensor, dim in marks:
            # Sizes 0 and 1 are always specialised; asking for them to be dynamic would be an error.
            if weakly or tensor.shape[dim] < 2:
                torch._dynamo.maybe_mark_dynamic(tensor, dim)
            else:
                torch._dynamo.mark_dynamic(tensor, dim)
        yield
    finally:
        for tensor, attributes in zip(tensors, saved, strict=True):
            for name in _mark_names(tensor):
                del tensor.__dict__[name]
            tensor.__dict__.update(attributes)


def _mark_names(tensor: torch.Tensor) -> list[str]:
    """Attributes of a tensor that Dynamo's marks have set: their number grows with the versions of torch."""
    return [name for name in tensor.__dict__ if name.startswith("_dynamo_") or name in _MARKS]


# Set by mark_dynamic beside the attributes with Dynamo's prefix: torch 2.13 guards on the first.
_MARKS = ("_has_dynamo_dim_marking", "_specialize_on")


def why_not_traced(error: Exception) -> str | None:
    """Return why Dynamo could not trace a call in one graph, as one line; None for any other error.

    Nothing of the call has run then: Dynamo raises while it traces, or where it may not compile once more.
    """
    exc = importlib.import_module("torch._dynamo.exc")
    limit = getattr(exc, "FailOnRecompileLimitHit", None)
    if limit is not None and isinstance(error, limit):
        return "it reached Dynamo's recompile limit"
    if not isinstance(error, (exc.Unsupported, exc.UserError, exc.InternalTorchDynamoError, exc.TorchRuntimeError)):
        return None
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].removeprefix(_ADVICE) if lines else type(error).__name__


# What Dynamo puts before its reason where a number depends on data.
_ADVICE = "Consider annotating your code using torch._check*(). "


def hooks_registered() -> int:
    """How many module hooks this process has registered: a number that grows with each."""
    return int(torch.utils.hooks.RemovableHandle.next_id)


def passes_through(error: Exception) -> bool:
    """Whether Dynamo steers by this exception, or speaks to the user, through a backend: never a failure of ours."""
    exc = importlib.import_module("torch._dynamo.exc")
    shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    steering = (
        exc.RestartAnalysis,
        exc.SkipFrame,
        exc.UserError,
        shapes.ConstraintViolationError,
        shapes.GuardOnDataDependentSymNode,
        torch.OutOfMemoryError,
    )
    return isinstance(error, steering)


def steers_dynamo(error: Exception) -> bool:
    """Whether Dynamo steers by this exception, or the machine is out of memory: nothing may catch it on the way."""
    exc = importlib.import_module("torch._dynamo.exc")
    return isinstance(error, (exc.RestartAnalysis, exc.SkipFrame, exc.UserError, torch.OutOfMemoryError))


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that Dynamo does not look into, also where it is inside of an operator that a graph calls."""
    # Unlike torch.compiler.disable it imports torch's compiler with the first call, and not here.
    return torch._compile._disable_dynamo(function)
