"""The source and the launches of generated kernels, as the wrapper code is written."""

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
    """One argument of a generated kernel's launch, as a value that can be made again (dynamic sizes by their hint)."""

    # "tensor", "number", or "workspace": memory that is zero before the first launch.
    kind: str
    buffer: str = ""
    dtype: str = ""
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    device: str = ""
    value: int | float = 0
    # The node of Inductor's graph whose value the buffer holds; None where no operator returns it.
    node: str | None = None


class KernelRecorder(Protocol):
    """What `recorded_kernels` tells while Inductor generates code."""

    def source(self, name: str, language: str, text: str) -> None: ...

    def launch(self, name: str, arguments: Callable[[], list[KernelArgument]]) -> None: ...


_RECORDER: ContextVar[KernelRecorder | None] = ContextVar("tritium_kernel_recorder", default=None)


# The wrapper's attribute that keeps the scratch memory its kernels are given, by name.
_WORKSPACES = "tritium_workspaces"


# Stands for a size that depends on data, where Inductor has no hint; its own guess is the same.
_UNKNOWN_SIZE = 8192


# What generated code calls to compile a kernel's source -> the source's language.
_LANGUAGES = {"triton": "triton", "cpp_pybinding": "cpp"}


@contextlib.contextmanager
def recorded_kernels(recorder: KernelRecorder) -> Iterator[None]:
    """Let a recorder see the source and the launches of the kernels that Inductor writes into Python wrappers inside."""
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
    """Language and source out of the Python expression that compiles a kernel; None for one of another form."""
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
    """What a wrapper passes to a kernel; to be asked while Inductor still has the graph."""
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
    """A buffer of the graph that Inductor is working on, as a kernel would be given it."""
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
    """The value of a size that a wrapper spells as Python (`s0`, `2*s0`), by the hints of the sizes in it."""
    environment = graph.sizevars.shape_env
    hints = environment.backed_var_to_val if hasattr(environment, "backed_var_to_val") else environment.var_to_val
    names = {str(symbol): float(value) if value.is_Float else int(value) for symbol, value in hints.items()}
    try:
        # The text is a size in code that Inductor wrote and that the process runs in any case.
        return cast("int", eval(text, {"__builtins__": {}}, names))  # noqa: S307
    except NameError as error:
        raise ValueError(f"the size {text} is not known before the model runs") from error
