"""The custom-op bridge: wrap an opaque kernel so that it does not break the graph.

    @tritium.plugins.custom_op("mylib::attention", outputs=["q"], boundary=True)
    def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return my_kernel(q, k, v, scale)

    @attention.register_kernel("cpu")
    def _(q, k, v, scale): ...

`outputs` describes the results: for each result the name of a parameter with the same shape and dtype, or a function of
the same parameters that returns empty tensors. Results are contiguous; every call checks their shapes and dtypes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tritium import compat
from tritium.errors import CustomOpError

OutputMeta = Sequence[str] | Callable[..., Any]


@dataclass
class CustomOp:
    """A registered custom op: call it like the function it wraps."""

    name: str
    boundary: bool
    definition: Any
    make_outputs: Callable[..., Any]
    # The decorated function, and those of `register_kernel`.
    functions: list[Callable[..., Any]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.definition(*args, **kwargs)

    def register_kernel(self, device_type: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Add an implementation for one device type (`"cpu"`, `"cuda"`)."""

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            self.functions.append(function)
            self.definition.register_kernel(device_type)(_checked(self.name, function, self.make_outputs))
            return function

        return register

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., Any]) -> None:
        """Add a backward, with the arguments of `torch.library.register_autograd`."""
        self.definition.register_autograd(backward, setup_context=setup_context)

    @property
    def overload(self) -> Any:
        return compat.operators.overload_of(self.definition)

    def files(self) -> list[Path]:
        """The source files of this op's kernels and fake: Inductor's cache key contains only the op's name."""
        functions = filter(inspect.isfunction, [self.make_outputs, *self.functions])
        files = {Path(file) for function in functions if (file := inspect.getsourcefile(function))}
        return sorted(files - {Path(__file__)})


_OPS: dict[str, CustomOp] = {}


def custom_op(name: str, *, outputs: OutputMeta, boundary: bool = False) -> Callable[[Callable[..., Any]], CustomOp]:
    """Register a function as an operator that `torch.compile` does not trace into.

    The function is the implementation for every device; `register_kernel` adds others. It must not change its
    arguments. With `boundary=True` a graph may be split at calls of this op.
    """
    if name.count("::") != 1 or not all(part.isidentifier() for part in name.split("::")):
        raise CustomOpError(f"custom op name {name!r} must be 'namespace::name', both Python identifiers")

    def wrap(function: Callable[..., Any]) -> CustomOp:
        if name in _OPS:
            other = inspect.getsourcefile(_OPS[name].functions[0])
            raise CustomOpError(f"custom op {name!r} exists already, declared in {other}")
        make_outputs = _output_maker(name, function, outputs)
        schema = torch.library.infer_schema(function, mutates_args=())
        checked = _checked(name, function, make_outputs)
        definition = torch.library.custom_op(name, checked, mutates_args=(), schema=schema)
        definition.register_fake(make_outputs)
        _OPS[name] = CustomOp(name, boundary, definition, make_outputs, [function])
        return _OPS[name]

    return wrap


def _output_maker(name: str, function: Callable[..., Any], outputs: OutputMeta) -> Callable[..., Any]:
    if callable(outputs):
        return outputs
    signature = inspect.signature(function)
    names = list(outputs)
    if isinstance(outputs, str) or not names:
        raise CustomOpError(f"custom op {name!r}: outputs must be a list of parameter names or a function")
    unknown = [output for output in names if output not in signature.parameters]
    if unknown:
        parameters = ", ".join(signature.parameters)
        raise CustomOpError(f"custom op {name!r}: outputs {unknown} name no parameter; parameters: {parameters}")

    def make_outputs(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        made = [bound[output].new_empty(bound[output].shape) for output in names]
        return made[0] if len(made) == 1 else tuple(made)

    return make_outputs


def _checked(name: str, function: Callable[..., Any], make_outputs: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to check its results: a mismatch with the fake would give wrong results silently."""
    promises: dict[Any, list[tuple[torch.Size, torch.dtype]]] = {}

    def promise_for(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[torch.Size, torch.dtype]]:
        key = (_key(args), tuple((word, _key(value)) for word, value in sorted(kwargs.items())))
        if key not in promises:
            meta = compat.tensors.map_tensors(lambda tensor: tensor.to("meta"), {"args": args, "kwargs": kwargs})
            with torch.device("meta"):
                outputs = make_outputs(*meta["args"], **meta["kwargs"])
            promises[key] = [(out.shape, out.dtype) for out in _several(outputs)]
        return promises[key]

    def checked(*args: Any, **kwargs: Any) -> Any:
        results = function(*args, **kwargs)
        promised = promise_for(args, kwargs)
        if len(_several(results)) != len(promised):
            count = len(_several(results))
            raise CustomOpError(f"custom op {name!r} returned {count} results, its outputs promise {len(promised)}")
        for index, (result, (shape, dtype)) in enumerate(zip(_several(results), promised, strict=True)):
            if result.shape != shape or result.dtype != dtype:
                raise CustomOpError(
                    f"custom op {name!r}, result {index}: returned {tuple(result.shape)} {result.dtype}, "
                    f"its outputs promise {tuple(shape)} {dtype}"
                )
        contiguous = tuple(result.contiguous() for result in _several(results))
        return contiguous if isinstance(results, (tuple, list)) else contiguous[0]

    return checked


def _several(results: Any) -> Sequence[Any]:
    return results if isinstance(results, (tuple, list)) else (results,)


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    return tuple(map(_key, value)) if isinstance(value, (tuple, list)) else value


def in_graph(graph: fx.Graph) -> list[CustomOp]:
    """Return the bridged ops that a graph calls, each once, in order of first use."""
    calls = (_of_target(node.target) for node in graph.nodes)
    return list({op.name: op for op in calls if op is not None}.values())


def boundaries(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the nodes at which a graph may be split."""
    return [node for node in nodes if (op := _of_target(node.target)) is not None and op.boundary]


def _of_target(target: Any) -> CustomOp | None:
    for op in _OPS.values():
        if target is op.definition or target is op.overload or target is op.overload.overloadpacket:
            return op
    return None
