"""Change how Dynamo names sizes and guards them, with the differences between versions of torch.

By default, equal sizes in the first call become one symbol ("duck shaping"). This is a good guess for tokens, but equal
sizes of images are a coincidence, as in a square or if a height equals a number of channels: the next size recompiles
everything.

On a CPU, torch selects the routine of a float32 convolution by the number of elements (20,480), and tracing calls this
selection to get the layout of the result. The selection becomes a guard on the image size, even if both routines return
the same layout.

Tracing gets the sizes of a GroupNorm by evaluating its whole definition on symbols, which takes tens of milliseconds
each, in every process. On a GPU the result is known: the input's sizes, in the input's layout.

Before torch 2.13 Dynamo cannot trace `tensor == "a word"`, with which Wan's decoder checks whether a frame was kept: it
skips the decoder and compiles the functions that it calls, one by one and for each size.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tritium.compat.versions import TORCH, decline_name
from tritium.compat.wrapping import wrap_once

# The attribute of the symbols of graphs to which the wrappers below apply.
_MARK = "_tritium_sizes_apart"


def keep_sizes_apart(when: Callable[[Any, Mapping[str, Any]], bool]) -> bool:
    """Give every size of a frame's arguments a separate symbol if `when(backend, arguments)` is True.

    Installed once per process; frames of other backends are unchanged. Returns False if this torch does not support it.
    """
    output_graph = importlib.import_module("torch._dynamo.output_graph").OutputGraph
    settings: Any = importlib.import_module("torch.fx.experimental._config")
    if decline_sizes_apart() is not None:
        return False
    signature = inspect.signature(output_graph.__init__)

    def start(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        if not when(backend_of(given["compiler_fn"]), given["local_scope"]):
            original(self, *args, **kwargs)
            return
        # A graph's symbols keep the setting from their creation.
        with settings.patch(use_duck_shape=False):
            original(self, *args, **kwargs)
        setattr(self.shape_env, _MARK, True)

    wrap_once(output_graph, "__init__", start)
    _drop_guards_that_decide_nothing()
    _know_the_sizes_of_group_norm()
    if TORCH < (2, 13):
        _compare_tensors_with_words()
    return True


def decline_sizes_apart() -> str | None:
    """Return why `keep_sizes_apart` cannot work on this torch, or None."""
    output_graph = importlib.import_module("torch._dynamo.output_graph").OutputGraph
    settings = importlib.import_module("torch.fx.experimental._config")
    needed = decline_name(output_graph, "__init__", ("compiler_fn", "local_scope"))
    return needed or decline_name(settings, "use_duck_shape")


def backend_of(compiler: Any) -> Any:
    """Return the `backend` argument of torch.compile, without Dynamo's wrappers."""
    while (inner := getattr(compiler, "_torchdynamo_orig_backend", None)) is not None:
        compiler = inner
    return getattr(compiler, "compiler_fn", compiler)


def _drop_guards_that_decide_nothing() -> None:
    """Select convolution routines without a guard in marked graphs if all candidates have the same layout."""
    bindings: Any = torch._C
    names = ("_select_conv_backend", "_conv_determine_backend_memory_format", "_ConvBackend")
    if not all(hasattr(bindings, name) for name in names):
        return
    routines = bindings._ConvBackend
    # The routines that differ only by the number of elements, by the weight's dims.
    candidates = {4: (routines.Mkldnn, routines.Slow2d), 5: (routines.Mkldnn, routines.Slow3d)}

    def select(original: Any, *args: Any, **kwargs: Any) -> Any:
        # Some versions pass all arguments by name.
        tensor, weight = (args + tuple(kwargs[name] for name in ("input", "weight") if name in kwargs))[:2]
        symbols: Any = getattr(getattr(tensor, "fake_mode", None), "shape_env", None)
        if not hasattr(symbols, _MARK) or tensor.device.type != "cpu":
            return original(*args, **kwargs)
        with symbols.suppress_guards():
            found = original(*args, **kwargs)
        among = candidates.get(weight.dim(), ())
        if found in among:
            layouts = {bindings._conv_determine_backend_memory_format(tensor, weight, one) for one in among}
            if len(layouts) == 1:
                return found
        return original(*args, **kwargs)

    wrap_once(bindings, "_select_conv_backend", select)


def _know_the_sizes_of_group_norm() -> None:
    """Create the results of a GroupNorm on a GPU without its definition, in marked graphs only."""
    table = getattr(importlib.import_module("torch._subclasses.fake_impls"), "FAST_OP_IMPLEMENTATIONS", None)
    op: Any = torch.ops.aten.native_group_norm.default
    by_definition = importlib.import_module("torch._decomp").decomposition_table.get(op)
    if table is None or by_definition is None or op in table:
        return

    def made(mode: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            if not hasattr(mode.shape_env, _MARK) or x.device.type != "cuda" or kwargs or not _is_dense(x):
                return by_definition(x, *args, **kwargs)
            _, _, batch, _, _, groups, _ = args
            return (torch.empty_like(x), *(x.new_empty((batch, groups)) for _ in range(2)))

    table[op] = made


def _is_dense(x: torch.Tensor) -> bool:
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim(), torch.contiguous_format)
    return x.is_contiguous() or x.is_contiguous(memory_format=channels_last)


def _compare_tensors_with_words() -> None:
    """Trace `tensor == "a word"` as False in marked graphs, as Python does after the tensor declines."""
    variables: Any = importlib.import_module("torch._dynamo.variables")

    def call_method(original: Any, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in ("__eq__", "__ne__") and hasattr(tx.output.shape_env, _MARK) and len(args) == 1:
            (other,) = args
            if isinstance(other, variables.ConstantVariable) and isinstance(other.as_python_constant(), str):
                return variables.ConstantVariable.create(name == "__ne__")
        return original(self, tx, name, args, kwargs)

    wrap_once(variables.TensorVariable, "call_method", call_method)


def with_replacements(value: Any) -> Any:
    """Return a symbolic size written with the symbol that sizes of tensors have, or any other value as it is.

    Tracing may find two sizes equal and use one symbol for both. Inductor still defines an input of the other size by its
    own symbol, and the graph may have no other input that defines the symbol in use.

    A size that tracing found to be a number stays symbolic: AOTAutograd gives a number among the inputs a new symbol,
    which Dynamo cannot guard on.
    """
    if not isinstance(value, torch.SymInt) or value.node._expr == value.node.expr or not value.node.expr.is_Symbol:
        return value
    return value.node.shape_env.create_symintnode(value.node.expr, hint=value.node.hint)
