"""The `torch.compile` backend."""

from __future__ import annotations

import inspect
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import fx

from tritium import compat, fusions
from tritium.compiler.blocks.reuse import forget_pieces
from tritium.compiler.compilation import Compilation
from tritium.compiler.pipeline import compile_graph, passes_for
from tritium.config import CompilationConfig
from tritium.errors import ConfigError, nearest
from tritium.fusions import Fusion
from tritium.passes import Pass
from tritium.report.ledger import LEDGER
from tritium.report.recompiles import Recompile, parse_guard_failure
from tritium.report.records import GraphRecord
from tritium.tuning import check_pins


class Backend:
    """A `torch.compile` backend: `torch.compile(model, backend=tritium.Backend(config))`.

    Backends with equal configuration, passes and fusions are equal, so wrapping a model twice compiles nothing again.
    """

    def __init__(
        self,
        config: CompilationConfig | None = None,
        *,
        passes: Iterable[Pass] = (),
        fusions: Iterable[Fusion] = (),
    ) -> None:
        if config is not None and not isinstance(config, CompilationConfig):
            raise ConfigError(f"Backend takes a CompilationConfig, got {type(config).__name__}")
        self.config = config if config is not None else CompilationConfig()
        self.passes = _tuple_of(Pass, "passes", passes)
        self.fusions = _tuple_of(Fusion, "fusions", fusions)
        # Check now, so that errors appear in the user's code and not in the first call of the model.
        check_pins(self.config)
        self.all_passes()
        self.all_fusions()
        compat.shapes.keep_sizes_apart(_is_of_pictures)
        compat.dynamo.log_only_for_readers()
        self._hash = hash(self._identity())

    # Dynamo and its logs show this name.
    __name__ = "tritium"

    def __eq__(self, other: object) -> bool:
        # Dynamo compares backends on every call of compiled code, for every compiled version.
        if self is other:
            return True
        return isinstance(other, Backend) and self._hash == other._hash and self._identity() == other._identity()

    def _identity(self) -> tuple[Any, ...]:
        return self.config, self.passes, self.fusions

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Backend({self.config!r})"

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compile one graph from Dynamo, with `mode` and `options` of torch.compile."""
        compat.dynamo.watch_recompile_limit(LEDGER.limit_reached)
        start = time.perf_counter()
        record = _start_record(gm, example_inputs, self.config.engine)
        LEDGER.begin(record)
        compilation = Compilation(
            gm,
            list(example_inputs),
            self.config,
            record,
            self.all_passes(),
            self.all_fusions(),
            self._user_settings(mode, options),
        )
        compiled = compile_graph(compilation)
        record.seconds = time.perf_counter() - start
        LEDGER.add(record)
        return compiled

    def all_passes(self) -> list[Pass]:
        """Return every pass of this backend in order: built-in, plug-ins', constructor's."""
        return passes_for(self.config, self.passes)

    def all_fusions(self) -> list[Fusion]:
        """Return every fusion of this backend: built-in, plug-ins', constructor's."""
        return fusions.ordered([*fusions.catalog().values(), *self.fusions])

    def reset(self) -> None:
        """Clear records and kept pieces: `torch._dynamo.reset()` calls this after dropping the compiled code."""
        LEDGER.clear()
        forget_pieces()

    def _user_settings(self, mode: str | None, options: dict[str, Any] | None) -> dict[str, Any]:
        settings = compat.inductor.mode_settings(mode)
        for spelled, value in (options or {}).items():
            # torch.compile accepts dashes in option names.
            name = spelled.replace("-", "_")
            if compat.inductor.unknown_settings([name]):
                raise ConfigError(
                    f"options: Inductor has no setting {name!r}; {nearest(name, compat.inductor.inductor_settings())}"
                )
            settings[name] = value
        if settings and self.config.engine == "eager":
            raise ConfigError("mode and options concern Inductor, and engine is 'eager'")
        if settings and self.config.graphs == "only":
            raise ConfigError("mode and options concern Inductor, and graphs='only' captures the graph as it is")
        if settings.get("triton.cudagraphs") and self.config.graphs != "off":
            raise ConfigError(
                f"graphs={self.config.graphs!r} captures graphs, and so would this mode or option of Inductor "
                "(triton.cudagraphs): give one of them"
            )
        return settings


T = TypeVar("T")


def _tuple_of(kind: type[T], name: str, values: Iterable[T]) -> tuple[T, ...]:
    """Return the values as a tuple; raise a `ConfigError` for one of another type."""
    found: tuple[Any, ...] = tuple(values) if isinstance(values, Iterable) else (values,)
    for value in found:
        if not isinstance(value, kind):
            raise ConfigError(
                f"Backend({name}=...) takes several {kind.__name__} values, got a {type(value).__name__} ({value!r})"
            )
    return found


def _is_of_pictures(backend: Any, arguments: Mapping[str, Any]) -> bool:
    """Return True if a frame compiled by Tritium belongs to a module of mostly convolutions.

    Its sizes are heights, widths, frames and channels, and equal sizes are a coincidence.
    """
    if not isinstance(backend, Backend):
        return False
    # The module whose method this frame is; frames of torch's containers have the method as an argument instead.
    owners = (value.__self__ if inspect.ismethod(value) else value for value in arguments.values())
    module = next((owner for owner in owners if isinstance(owner, torch.nn.Module)), None)
    layers = [type(inner) for inner in module.modules()] if module is not None else []
    convolutions = sum(issubclass(layer, (torch.nn.Conv2d, torch.nn.Conv3d)) for layer in layers)
    return convolutions > 1 and convolutions > sum(issubclass(layer, torch.nn.Linear) for layer in layers)


def _start_record(gm: fx.GraphModule, example_inputs: Sequence[Any], engine: str) -> GraphRecord:
    frame = compat.dynamo.compiling_frame()
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    devices = [tensor.device.type for tensor in tensors]
    owners, callers = _callers(frame)
    return GraphRecord(
        graph=frame.compile_id if frame is not None else "?",
        function=_function_name(frame),
        engine=engine,
        device_type="cuda" if "cuda" in devices else devices[0] if devices else "cpu",
        nodes=sum(node.op.startswith("call_") for node in gm.graph.nodes),
        break_reason=compat.dynamo.break_reason(gm),
        needs_gradients=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors),
        recompile=_recompile(frame),
        code=weakref.ref(frame.code) if frame is not None else None,
        owners=owners,
        callers=callers,
    )


def _function_name(frame: compat.dynamo.Frame | None) -> str:
    if frame is None:
        return "?"
    owner = frame.arguments.get("self")
    if isinstance(owner, torch.nn.Module):
        # Decorators in diffusers replace forward by a function named `wrapper`.
        is_forward = getattr(type(owner).forward, "__code__", None) is frame.code
        return f"{type(owner).__qualname__}.{'forward' if is_forward else frame.code.co_name}"
    return frame.code.co_qualname


def _callers(frame: compat.dynamo.Frame | None) -> tuple[tuple[weakref.ref[Any], ...], frozenset[int]]:
    """Return the modules and code objects on the stack: the graph belongs to their reports."""
    owners: list[Any] = [frame.arguments.get("self")] if frame is not None else []
    codes = {id(frame.code)} if frame is not None else set()
    current = inspect.currentframe()
    while current is not None:
        codes.add(id(current.f_code))
        owners.append(_self_of(current))
        current = current.f_back
    modules = {id(owner): owner for owner in owners if isinstance(owner, torch.nn.Module)}
    return tuple(map(weakref.ref, modules.values())), frozenset(codes)


def _self_of(frame: FrameType) -> Any:
    """Return `self` from a method's frame, or None."""
    code = frame.f_code
    if not (code.co_flags & inspect.CO_OPTIMIZED and code.co_varnames and code.co_varnames[0] == "self"):
        return None
    found = frame.f_locals.get("self")
    if sys.version_info < (3, 13):
        # Before 3.13, reading f_locals stores a copy of all locals in the frame. It would keep a pipeline alive that
        # the method deletes later. The next read creates a new copy.
        frame.f_locals.clear()
    return found


def _recompile(frame: compat.dynamo.Frame | None) -> Recompile | None:
    """Return why this frame is compiled again, or None the first time."""
    if frame is None or "/" not in frame.compile_id:
        return None
    number, _, version = frame.compile_id.partition("/")
    attempt = int(version.split("_")[0])
    # A version that another backend compiled does not count as a recompile.
    failures = [text for text in compat.dynamo.guard_failures(frame.code) if "BACKEND_MATCH" not in text]
    if attempt == 0 or not failures:
        return None
    of_previous = [text for text in failures if text.startswith(f"{number}/{attempt - 1}")]
    return parse_guard_failure(frame.compile_id, (of_previous or failures)[-1], frame.arguments)
