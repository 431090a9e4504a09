"""Observe code generation: kernels with their sources and launches, called operators, and nodes that were not fused."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import fx

from tritium.compat.wrapping import wrap_once


@dataclass(frozen=True, kw_only=True)
class KernelArgument:
    """One argument of a kernel launch, as a value that can be recreated (dynamic sizes by hint)."""

    # "tensor", "number", or "workspace": memory that must be zero before the first launch.
    kind: str
    # The name of the kernel's parameter.
    parameter: str = ""
    buffer: str = ""
    dtype: str = ""
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    device: str = ""
    value: int | float = 0


class CodegenObserver(Protocol):
    """The callbacks of `observed_codegen` during code generation."""

    def kernel(self, name: str, nodes: Sequence[Any]) -> None: ...

    def source(self, name: str, language: str, text: str) -> None: ...

    def launch(self, name: str, arguments: Callable[[], list[KernelArgument]]) -> None: ...

    def graph(self, lowering: Any) -> None: ...

    def not_fused(self, why: Any) -> None: ...

    def code(self, key: str) -> None: ...


_OBSERVER: ContextVar[CodegenObserver | None] = ContextVar("tritium_codegen_observer", default=None)

# The wrapper's attributes with the scratch memory of its kernels by name, and with the names of users' Triton kernels
# in launch order.
_WORKSPACES = "tritium_workspaces"
_USER_KERNELS = "tritium_user_kernels"

# Replaces a size that depends on data, for which Inductor has no hint; equal to Inductor's guess.
_UNKNOWN_SIZE = 8192

# The method of generated code that compiles a kernel's source -> the language of the source.
_LANGUAGES = {"triton": "triton", "cpp_pybinding": "cpp"}


@contextlib.contextmanager
def observed_codegen(observer: CodegenObserver) -> Iterator[None]:
    """Report Inductor's kernels to an observer; it changes nothing, so cache keys do not include it."""
    _install()
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


@functools.cache
def _install() -> None:
    wrapper: Any = importlib.import_module("torch._inductor.codegen.wrapper").PythonWrapperCodegen
    for module, name in (("cpp", "CppScheduling"), ("triton", "TritonScheduling")):
        scheduling = getattr(importlib.import_module(f"torch._inductor.codegen.{module}"), name)
        _observe(scheduling, "define_kernel", _kernel_defined)
    _observe(wrapper, "define_kernel", _source_defined)
    _observe(wrapper, "generate_kernel_call", _launched)
    _observe(wrapper, "generate_workspace_allocation", _workspace_allocated)
    _observe(wrapper, "define_user_defined_triton_kernel", _user_kernel_defined)
    lowering = importlib.import_module("torch._inductor.graph").GraphLowering
    _observe(lowering, "codegen", lambda observer, _, self: observer.graph(self))
    # Do not use the log of these reasons: at its level Inductor also prints all candidate pairs, which takes seconds.
    why = importlib.import_module("torch._inductor.scheduler").WhyNoFuse
    _observe(why, "__call__", lambda observer, _, self, *__: observer.not_fused(self))
    # The key of the code for a graph, new or from the cache, is a digest of its content.
    compiled = importlib.import_module("torch._inductor.output_code").CompiledFxGraph
    _observe(compiled, "post_compile", lambda observer, _, self, *__, **___: observer.code(str(self.cache_key)))


def _observe(owner: Any, name: str, notify: Callable[..., None]) -> None:
    """Let `notify` be called with an observer, the result and the arguments of every call of a method."""

    def method(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        observer = _OBSERVER.get()
        if observer is not None:
            notify(observer, result, *args, **kwargs)
        return result

    wrap_once(owner, name, method)


def _kernel_defined(observer: CodegenObserver, name: Any, _: Any, __: Any, nodes: Any, *___: Any) -> None:
    observer.kernel(str(name), [node for node in nodes if hasattr(node, "read_writes")])


def _source_defined(
    observer: CodegenObserver, _: Any, __: Any, kernel_name: str, kernel_body: str, *___: Any, **____: Any
) -> None:
    if (found := _kernel_source(kernel_body)) is not None:
        observer.source(str(kernel_name), *found)


def _launched(
    observer: CodegenObserver, _: Any, wrapper: Any, kernel_name: str, call_args: Any, *__: Any, **___: Any
) -> None:
    given, spaces = list(call_args), vars(wrapper).get(_WORKSPACES, {})
    observer.launch(str(kernel_name), lambda: [_kernel_argument(argument, spaces) for argument in given])


def _workspace_allocated(_: Any, __: Any, wrapper: Any, space: Any) -> None:
    vars(wrapper).setdefault(_WORKSPACES, {})[space.outer_name] = space


def _user_kernel_defined(_: Any, found: Any, wrapper: Any, *__: Any, **___: Any) -> None:
    vars(wrapper).setdefault(_USER_KERNELS, []).append(str(found[0]))


def _kernel_source(body: str) -> tuple[str, str] | None:
    """Return language and source from the expression that compiles a kernel, or None for other forms."""
    try:
        call = ast.parse(body.strip(), mode="eval").body
    except SyntaxError:
        return None
    match call:
        case ast.Call(func=ast.Attribute(attr=method), args=[_, ast.Constant(value=str(source)), *_]):
            return (_LANGUAGES[method], source.strip("\n") + "\n") if method in _LANGUAGES else None
    return None


def _kernel_argument(argument: Any, workspaces: Mapping[str, Any]) -> KernelArgument:
    """Return a wrapper's kernel argument; call it while Inductor still has the graph."""
    graph = importlib.import_module("torch._inductor.virtualized").V.graph
    if not isinstance(argument, str):
        return KernelArgument(kind="number", value=_hint(graph, getattr(argument, "inner_expr", argument)))
    if argument in workspaces:
        space = workspaces[argument]
        dtype, count = str(space.dtype).removeprefix("torch."), int(_hint(graph, space.count))
        return KernelArgument(kind="workspace", dtype=dtype, size=(count,), stride=(1,), device=str(space.device))
    buffer = graph.try_get_buffer(argument)
    held = graph.constants.get(argument) if buffer is None else buffer
    if held is None:
        return KernelArgument(kind="number", value=_number(graph, argument))
    is_tensor = isinstance(held, torch.Tensor)
    size = held.shape if is_tensor else held.get_size()
    stride = held.stride() if is_tensor else held.get_stride()
    return KernelArgument(
        kind="tensor",
        buffer=argument,
        dtype=str(held.dtype if is_tensor else held.get_dtype()).removeprefix("torch."),
        size=tuple(int(_hint(graph, part)) for part in size),
        stride=tuple(int(_hint(graph, part)) for part in stride),
        device=str(held.device if is_tensor else held.get_device()),
    )


def _hint(graph: Any, expression: Any) -> int | float:
    if isinstance(expression, (int, float)):
        return expression
    return cast("int", graph.sizevars.optimization_hint(expression, fallback=_UNKNOWN_SIZE))


def _number(graph: Any, text: str) -> int | float:
    """Return the value of a size in a wrapper's Python (`s0`, `2*s0`), from the hints of its symbols."""
    environment = graph.sizevars.shape_env
    hints = environment.backed_var_to_val if hasattr(environment, "backed_var_to_val") else environment.var_to_val
    names = {str(symbol): float(value) if value.is_Float else int(value) for symbol, value in hints.items()}
    try:
        # The text is a size in code from Inductor that the process runs in any case.
        return cast("int", eval(text, {"__builtins__": {}}, names))  # noqa: S307
    except NameError as error:
        raise ValueError(f"the size {text} is not known before the model runs") from error


@dataclass(frozen=True)
class UserKernel:
    """One launch of a user's Triton kernel in generated code."""

    # The name in generated code; several launches of one kernel share it.
    name: str
    # The argument of `triton.jit`.
    function: Any
    node: fx.Node
    # The values of the tensor arguments that are only read, and of those that are written to.
    read: tuple[Any, ...]
    written: tuple[Any, ...]


def user_kernels(lowering: Any) -> list[UserKernel]:
    """Return the launches of users' Triton kernels, in the order of generated code."""
    kind = importlib.import_module("torch._inductor.ir").UserDefinedTritonKernel
    scheduled = [inner.node for group in lowering.scheduler.nodes for inner in group.get_nodes()]
    operations = [operation for operation in scheduled if isinstance(operation, kind)]
    names = vars(lowering.wrapper_code).get(_USER_KERNELS, ())
    # Without this hook in Inductor, the launches are known but not their names.
    if len(names) != len(operations):
        names = [operation.get_kernel_and_metadata()[0].__name__ for operation in operations]
    return [_user_kernel(str(name), operation) for name, operation in zip(names, operations, strict=True)]


def _user_kernel(name: str, operation: Any) -> UserKernel:
    changed = {buffer for output in operation.get_outputs() for buffer in output.get_mutation_names()}
    node = operation.fx_node
    read: list[Any] = []
    written: list[Any] = []
    for parameter, argument in node.kwargs["kwargs"].items():
        if isinstance(argument, fx.Node) and isinstance(argument.meta.get("val"), torch.Tensor):
            held = operation.kwargs[parameter]
            (written if held.get_name() in changed else read).append(argument.meta["val"])
    return UserKernel(name, operation.get_kernel_and_metadata()[0].fn, node, tuple(read), tuple(written))


def kernel_dependencies(nodes: Sequence[Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Return a kernel's read and written buffers in memory, with bytes (dynamic sizes by hint)."""
    virtualized = importlib.import_module("torch._inductor.virtualized")
    graph = virtualized.V.graph
    written = {dep.name for node in nodes for dep in node.read_writes.writes}
    reads: dict[str, int] = {}
    writes: dict[str, int] = {}
    for node in nodes:
        for dep in node.read_writes.reads:
            if dep.name not in written:
                # A lookup, or a read from one of several inputs, counts for every result: limit it to the buffer.
                whole = _buffer_bytes(graph, dep.name)
                found = int(graph.get_dep_size_hint(dep))
                reads[dep.name] = max(reads.get(dep.name, 0), found if whole is None else min(found, whole))
        for dep in node.read_writes.writes:
            if dep.name not in graph.removed_buffers:
                writes[dep.name] = max(writes.get(dep.name, 0), int(graph.get_dep_size_hint(dep)))
    return reads, writes


def library_calls(lowering: Any) -> list[tuple[torch._ops.OpOverload, fx.Node]]:
    """Return the operators that generated code calls (products, attention, owned ops), in call order."""
    ir = importlib.import_module("torch._inductor.ir")
    found = []
    for group in lowering.scheduler.nodes:
        for scheduled in group.get_nodes():
            operation = scheduled.node
            overload = getattr(operation, "op_overload", None)
            if not isinstance(operation, ir.ExternKernel) or not isinstance(overload, torch._ops.OpOverload):
                continue
            # The origins also include the nodes of an operator's inputs.
            origins = [operation.get_origin_node(), *operation.origins]
            own = (node for node in origins if node is not None and _calls(node, overload))
            if (node := next(own, None)) is not None:
                found.append((overload, node))
    return found


def _calls(node: fx.Node, overload: torch._ops.OpOverload) -> bool:
    return getattr(node.target, "overloadpacket", None) is overload.overloadpacket


def loops_of(nodes: Sequence[Any]) -> str:
    """Return Inductor's loop IR of a kernel, one body after the other."""
    texts = []
    for inner in dict.fromkeys(inner for node in nodes for inner in node.get_nodes()):
        body = getattr(inner, "_body", None)
        texts.append(f"{inner.get_name()}: {type(inner).__name__}")
        texts.append(body.debug_str().strip("\n") if body is not None else "  (no loops: a template or an operator)")
    return "\n".join(texts) + "\n"


def has_lowering(overload: torch._ops.OpOverload) -> bool:
    """Return True if Inductor can generate code for an operator; a registered fallback does not count."""
    module = importlib.import_module("torch._inductor.lowering")
    return overload in module.lowerings and overload not in module.fallbacks


def has_decomposition(overload: torch._ops.OpOverload) -> bool:
    """Return True if Inductor decomposes an operator before lowering."""
    return overload in importlib.import_module("torch._inductor.decomposition").select_decomp_table()


def fallback_nodes(lowering: Any) -> list[tuple[torch._ops.OpOverload, list[tuple[torch.dtype, tuple[int, ...]]]]]:
    """Return operators that Inductor calls instead of generating code, with dtypes and sizes of inputs."""
    ir = importlib.import_module("torch._inductor.ir")
    found = []
    for operation in lowering.operations:
        overload = getattr(operation, "op_overload", None)
        if not isinstance(operation, ir.FallbackKernel) or not isinstance(overload, torch._ops.OpOverload):
            continue
        inputs = []
        for value in operation.inputs:
            try:
                sizes = tuple(int(_hint(lowering, size)) for size in value.get_size())
                inputs.append((value.get_dtype(), sizes))
            except (AttributeError, NotImplementedError):
                continue
        found.append((overload, inputs))
    return found


def is_view(target: Any) -> bool:
    """Return True if an operator returns its input's memory with another shape, or may do so."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    aliases = [result.alias_info for result in target._schema.returns]
    return target is torch.ops.aten.reshape.default or any(
        found is not None and not found.is_write for found in aliases
    )


def _buffer_bytes(graph: Any, name: str) -> int | None:
    held = graph.try_get_buffer(name)
    if held is None:
        return None
    try:
        return int(_hint(graph, held.get_numel())) * int(held.get_dtype().itemsize)
    except Exception:  # noqa: BLE001 - not every buffer has a size, and a missing count is not an error
        return None
