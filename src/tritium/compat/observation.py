"""Observe code generation: kernels, called operators, and pairs of nodes that were not fused."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from tritium.compat.kernels import _hint


class CodegenObserver(Protocol):
    """The callbacks of `observed_codegen` during code generation."""

    def kernel(self, name: str, nodes: Sequence[Any]) -> None: ...

    def graph(self, lowering: Any) -> None: ...

    def not_fused(self, why: Any) -> None: ...

    def code(self, key: str) -> None: ...


_OBSERVER: ContextVar[CodegenObserver | None] = ContextVar("tritium_codegen_observer", default=None)


def _observe_define_kernel(scheduling: Any) -> None:
    original = scheduling.define_kernel

    def define_kernel(self: Any, src_code: str, nodes: Any, *args: Any, **kwargs: Any) -> Any:
        name = original(self, src_code, nodes, *args, **kwargs)
        observer = _OBSERVER.get()
        if observer is not None:
            observer.kernel(str(name), [node for node in nodes if hasattr(node, "read_writes")])
        return name

    define_kernel.tritium_original = original  # type: ignore[attr-defined]
    scheduling.define_kernel = define_kernel


def _observe_reasons(why_no_fuse: Any) -> None:
    # Do not use the log of these reasons: at its level Inductor also prints all candidate pairs, which takes seconds.
    original = why_no_fuse.__call__

    def call(self: Any, reason: str, *args: Any) -> None:
        original(self, reason, *args)
        observer = _OBSERVER.get()
        if observer is not None:
            observer.not_fused(self)

    why_no_fuse.__call__ = call


def _observe_code(compiled: Any) -> None:
    """Report the key of the code for a graph, new or from the cache; the key is a digest of its content."""
    original = compiled.post_compile

    def post_compile(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        observer = _OBSERVER.get()
        if observer is not None:
            observer.code(str(self.cache_key))

    compiled.post_compile = post_compile


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


# The wrapper's attribute with the names of these kernels in launch order.
_USER_KERNELS = "tritium_user_kernels"


def _observe_user_kernels(wrapper: Any) -> None:
    original = wrapper.define_user_defined_triton_kernel

    def define(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        vars(self).setdefault(_USER_KERNELS, []).append(str(found[0]))
        return found

    wrapper.define_user_defined_triton_kernel = define


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


def _install_observation() -> None:
    lowering = importlib.import_module("torch._inductor.graph").GraphLowering
    if hasattr(lowering.codegen, "tritium_original"):
        return
    original = lowering.codegen

    def codegen(self: Any) -> Any:
        result = original(self)
        observer = _OBSERVER.get()
        if observer is not None:
            observer.graph(self)
        return result

    codegen.tritium_original = original  # type: ignore[attr-defined]
    _observe_define_kernel(importlib.import_module("torch._inductor.codegen.cpp").CppScheduling)
    _observe_define_kernel(importlib.import_module("torch._inductor.codegen.triton").TritonScheduling)
    _observe_user_kernels(importlib.import_module("torch._inductor.codegen.wrapper").PythonWrapperCodegen)
    _observe_reasons(importlib.import_module("torch._inductor.scheduler").WhyNoFuse)
    _observe_code(importlib.import_module("torch._inductor.output_code").CompiledFxGraph)
    lowering.codegen = codegen


@contextlib.contextmanager
def observed_codegen(observer: CodegenObserver) -> Iterator[None]:
    """Report Inductor's kernels to an observer; it changes nothing, so cache keys do not include it."""
    _install_observation()
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


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
