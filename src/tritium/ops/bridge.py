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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

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
    function: Callable[..., Any]
    definition: Any
    make_outputs: Callable[..., Any]
    implementations: list[Callable[..., Any]] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.definition(*args, **kwargs)

    def register_kernel(self, device_type: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Add an implementation for one device type (`"cpu"`, `"cuda"`)."""

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            self.implementations.append(function)
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
        """The source files of this op's kernels and fake, for cache keys.

        Inductor's cache key contains only the op's name.
        """
        functions = [self.function, self.make_outputs, *self.implementations]
        found = (inspect.getsourcefile(function) for function in functions if inspect.isfunction(function))
        return sorted({Path(file) for file in found if file and Path(file) != Path(__file__)})


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
            other = inspect.getsourcefile(_OPS[name].function)
            raise CustomOpError(f"custom op {name!r} exists already, declared in {other}")
        make_outputs = _output_maker(name, function, outputs)
        definition = torch.library.custom_op(name, _checked(name, function, make_outputs), mutates_args=())
        definition.register_fake(make_outputs)
        made = CustomOp(name, boundary, function, definition, make_outputs)
        _OPS[name] = made
        return made

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
    """Wrap a function to check its results against the fake.

    A mismatch would otherwise give wrong results silently.
    """
    promises: dict[Any, list[tuple[torch.Size, torch.dtype]]] = {}

    def promise_for(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[torch.Size, torch.dtype]]:
        key = (tuple(map(_key, args)), tuple((word, _key(value)) for word, value in sorted(kwargs.items())))
        if key not in promises:
            with torch.device("meta"):
                made = make_outputs(*map(_to_meta, args), **{word: _to_meta(value) for word, value in kwargs.items()})
            promises[key] = [(out.shape, out.dtype) for out in (made if isinstance(made, (tuple, list)) else [made])]
        return promises[key]

    def checked(*args: Any, **kwargs: Any) -> Any:
        results = function(*args, **kwargs)
        many = isinstance(results, (tuple, list))
        given = list(results) if many else [results]
        promised = promise_for(args, kwargs)
        if len(given) != len(promised):
            raise CustomOpError(
                f"custom op {name!r} returned {len(given)} results, its outputs promise {len(promised)}"
            )
        for index, (result, (shape, dtype)) in enumerate(zip(given, promised, strict=True)):
            if result.shape != shape or result.dtype != dtype:
                raise CustomOpError(
                    f"custom op {name!r}, result {index}: returned {tuple(result.shape)} {result.dtype}, "
                    f"its outputs promise {tuple(shape)} {dtype}"
                )
        contiguous = [result.contiguous() for result in given]
        return tuple(contiguous) if many else contiguous[0]

    # torch.library reads this signature. Annotations must be types: it would resolve strings in this module.
    hints = get_type_hints(function)
    signature = inspect.signature(function)
    parameters = [
        part.replace(annotation=hints.get(word, part.annotation)) for word, part in signature.parameters.items()
    ]
    returns = hints.get("return", signature.return_annotation)
    checked.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=parameters, return_annotation=returns
    )
    checked.__name__ = getattr(function, "__name__", "custom_op")
    return checked


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    return tuple(map(_key, value)) if isinstance(value, (tuple, list)) else value


def _to_meta(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_to_meta(part) for part in value]
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def in_graph(graph: fx.Graph) -> list[CustomOp]:
    """Return the bridged ops that a graph calls, each once, in order of first use."""
    found: dict[str, CustomOp] = {}
    for node in graph.nodes:
        op = _of_target(node.target)
        if op is not None:
            found.setdefault(op.name, op)
    return list(found.values())


def boundaries(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the nodes at which a graph may be split."""
    return [node for node in nodes if (op := _of_target(node.target)) is not None and op.boundary]


def _of_target(target: Any) -> CustomOp | None:
    for op in _OPS.values():
        if target is op.definition or target is op.overload or target is op.overload.overloadpacket:
            return op
    return None
