"""Record the source and the launches of generated kernels while the wrapper code is generated."""

from __future__ import annotations

import ast
import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch


@dataclass(frozen=True)
class KernelArgument:
    """One argument of a kernel launch, as a value that can be recreated (dynamic sizes by hint)."""

    # "tensor", "number", or "workspace": memory that must be zero before the first launch.
    kind: str
    buffer: str = ""
    dtype: str = ""
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    device: str = ""
    value: int | float = 0
    # The node of Inductor's graph whose value is in the buffer; None if no operator returns it.
    node: str | None = None


class KernelRecorder(Protocol):
    """The callbacks of `recorded_kernels` during code generation."""

    def source(self, name: str, language: str, text: str) -> None: ...

    def launch(self, name: str, arguments: Callable[[], list[KernelArgument]]) -> None: ...


_RECORDER: ContextVar[KernelRecorder | None] = ContextVar("tritium_kernel_recorder", default=None)


# The wrapper's attribute with the scratch memory of its kernels, by name.
_WORKSPACES = "tritium_workspaces"


# Replaces a size that depends on data, for which Inductor has no hint; equal to Inductor's guess.
_UNKNOWN_SIZE = 8192


# The method of generated code that compiles a kernel's source -> the language of the source.
_LANGUAGES = {"triton": "triton", "cpp_pybinding": "cpp"}


@contextlib.contextmanager
def recorded_kernels(recorder: KernelRecorder) -> Iterator[None]:
    """Report the source and launches of the kernels in Inductor's Python wrappers to a recorder."""
    _install_recording()
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)


def _install_recording() -> None:
    wrapper: Any = importlib.import_module("torch._inductor.codegen.wrapper").PythonWrapperCodegen
    if hasattr(wrapper.define_kernel, "tritium_original"):
        return
    define, call = wrapper.define_kernel, wrapper.generate_kernel_call
    allocate = wrapper.generate_workspace_allocation

    def define_kernel(self: Any, kernel_name: str, kernel_body: str, *args: Any, **kwargs: Any) -> Any:
        recorder = _RECORDER.get()
        if recorder is not None and (found := _kernel_source(kernel_body)) is not None:
            recorder.source(str(kernel_name), *found)
        return define(self, kernel_name, kernel_body, *args, **kwargs)

    def generate_kernel_call(self: Any, kernel_name: str, call_args: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = _RECORDER.get()
        if recorder is not None:
            given, spaces = list(call_args), vars(self).get(_WORKSPACES, {})
            recorder.launch(str(kernel_name), lambda: [_kernel_argument(argument, spaces) for argument in given])
        return call(self, kernel_name, call_args, *args, **kwargs)

    def generate_workspace_allocation(self: Any, ws: Any) -> Any:
        vars(self).setdefault(_WORKSPACES, {})[ws.outer_name] = ws
        return allocate(self, ws)

    define_kernel.tritium_original = define  # type: ignore[attr-defined]
    wrapper.define_kernel, wrapper.generate_kernel_call = define_kernel, generate_kernel_call
    wrapper.generate_workspace_allocation = generate_workspace_allocation


def _kernel_source(body: str) -> tuple[str, str] | None:
    """Return language and source from the expression that compiles a kernel, or None for other forms."""
    try:
        call = ast.parse(body.strip(), mode="eval").body
    except SyntaxError:
        return None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or len(call.args) < 2:
        return None
    source = call.args[1]
    language = _LANGUAGES.get(call.func.attr)
    if language is None or not isinstance(source, ast.Constant) or not isinstance(source.value, str):
        return None
    return language, source.value.strip("\n") + "\n"


def _kernel_argument(argument: Any, workspaces: Mapping[str, Any]) -> KernelArgument:
    """Return a wrapper's kernel argument; call it while Inductor still has the graph."""
    graph = importlib.import_module("torch._inductor.virtualized").V.graph
    if not isinstance(argument, str):
        return KernelArgument("number", value=_hint(graph, getattr(argument, "inner_expr", argument)))
    if argument in workspaces:
        space = workspaces[argument]
        dtype, count = str(space.dtype).removeprefix("torch."), int(_hint(graph, space.count))
        return KernelArgument("workspace", dtype=dtype, size=(count,), stride=(1,), device=str(space.device))
    held = graph.try_get_buffer(argument)
    if held is None:
        held = graph.constants.get(argument)
    if held is None:
        return KernelArgument("number", value=_number(graph, argument))
    is_tensor = isinstance(held, torch.Tensor)
    size = held.shape if is_tensor else held.get_size()
    stride = held.stride() if is_tensor else held.get_stride()
    return KernelArgument(
        "tensor",
        buffer=argument,
        dtype=str(held.dtype if is_tensor else held.get_dtype()).removeprefix("torch."),
        size=tuple(int(_hint(graph, part)) for part in size),
        stride=tuple(int(_hint(graph, part)) for part in stride),
        device=str(held.device if is_tensor else held.get_device()),
        node=argument if argument in graph.graph_input_names else _origin_name(held),
    )


def buffer_argument(name: str) -> KernelArgument:
    """Return a buffer of Inductor's current graph as a kernel argument."""
    return _kernel_argument(name, {})


def _origin_name(held: Any) -> str | None:
    ask = getattr(held, "get_origin_node", None)
    node = ask() if ask is not None else None
    return node.name if node is not None else None


def _hint(graph: Any, expression: Any) -> int | float:
    if isinstance(expression, (int, float)):
        return expression
    ask = getattr(graph.sizevars, "optimization_hint", None) or graph.sizevars.size_hint
    return cast("int", ask(expression, fallback=_UNKNOWN_SIZE))


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
