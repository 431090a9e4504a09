"""Compare a part's calls with those of `warmup()`; report, compile, run eagerly or refuse new ones.

Dynamo's guards still ensure correct results. The contract only prevents silent compilation.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tritium import compat
from tritium.errors import ShapeViolation
from tritium.pipelines.shapes import OnViolation
from tritium.report.recompiles import parse_guard_failure, suggest

# The properties of each argument of a call, by its path.
Signature = Mapping[str, Hashable]

# Versions of one function that a contract may add to the existing ones: a warm-up without end reaches the limit.
_SPARE_VERSIONS = 8

# The most promised calls that are kept for lookup without binding their arguments.
_MOST_SPELLINGS = 4096

_NOTHING_COMPILED = "nothing to compile"


@dataclass(frozen=True)
class New:
    """A difference from the promised calls, and the code that would promise it."""

    what: str
    suggestion: str | None = None


class Contract:
    """The calls of one part that are promised not to compile."""

    def __init__(self, part: str, entry: nn.Module, on_violation: OnViolation, buckets: int) -> None:
        self._part = part
        self._signature = inspect.signature(entry.forward)
        self._on_violation = on_violation
        self._versions = _SPARE_VERSIONS + 4 * buckets
        self._known: dict[Hashable, Signature] = {}
        # Promised calls in the form in which they were written: see `_spelling`.
        self._spellings: set[Hashable] = set()
        # None before warm-up, when every call may compile; True during warm-up; False after it.
        self.learning: bool | None = None
        # Number of calls, by their difference and the reaction to it.
        self.violations: Counter[tuple[New, str]] = Counter()
        self._lock = threading.Lock()

    def around(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.learning is None:
            return inner(*args, **kwargs)
        spelling = _spelling(args, kwargs)
        if not self.learning and spelling in self._spellings:
            return self._run(_Call(self), inner, args, kwargs)
        try:
            found = self.signature(args, kwargs)
        except TypeError:
            # The module does not take these arguments: let it raise its error.
            return inner(*args, **kwargs)
        key = tuple(found.items())
        if self.learning or key in self._known:
            self._promise(key, found, spelling)
            return self._run(_Call(self), inner, args, kwargs)
        new = self._new(found)
        if self._on_violation != "compile":
            self._note(new, "ran eagerly")
            return self._run(_Call(self, eager=True), inner, args, kwargs)
        call = _Call(self, new)
        try:
            return self._run(call, inner, args, kwargs)
        finally:
            self._promise(key, found, spelling)
            self._note(new, "compiled" if call.compiled else _NOTHING_COMPILED)

    @staticmethod
    def _run(call: _Call, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = _CURRENT.set(call)
        try:
            return inner(*args, **kwargs)
        finally:
            _CURRENT.reset(before)

    def _promise(self, key: Hashable, found: Signature, spelling: Hashable) -> None:
        with self._lock:
            self._known.setdefault(key, found)
            if len(self._spellings) >= _MOST_SPELLINGS:
                self._spellings.clear()
            self._spellings.add(spelling)

    def refused(self, call: _Call, compiled: Callable[..., Any], reason: str) -> Callable[..., Any] | None:
        """Return the call for a module without fitting compiled code, None to run it eagerly, or raise."""
        if not self.learning and call.outside is None:
            self._note(_would_compile(reason), {"compile": "compiled"}.get(self._on_violation, "ran eagerly"))
            if self._on_violation == "eager":
                call.eager = True
                return None
        call.compiled = True

        def run(*args: Any, **kwargs: Any) -> Any:
            with compat.cached_code.recompile_limit(self._versions + len(self._known)):
                return compiled(*args, **kwargs)

        return run

    def _note(self, new: New, done: str) -> None:
        """Count a violation; raise it if `on_violation` is "error"."""
        refused = self._on_violation == "error"
        with self._lock:
            self.violations[new, "refused" if refused else done] += 1
        if refused:
            hint = f"; to prevent it: {new.suggestion}" if new.suggestion else ""
            raise ShapeViolation(f"{self._part}: outside of Plan(shapes=...): {new.what}{hint}")

    def signature(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Signature:
        """Return all arguments by name: layouts of tensors, values of scalars, items of containers."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        found: dict[str, Hashable] = {}
        more: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            if self._signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                more = value
            else:
                _facts(name, value, found)
        for name in sorted(more):
            _facts(name, more[name], found)
        found["mode"] = _MODES[_mode()]
        return found

    def _new(self, found: Signature) -> New:
        """Describe a call's differences from the most similar promised call."""
        if not self._known:
            return New("warmup() did not call it")
        nearest = min(self._known.values(), key=lambda known: len(_differing(found, known)))
        paths = _differing(found, nearest)
        hints = dict.fromkeys(_suggestion(path, found.get(path), nearest.get(path)) for path in paths)
        texts = [self._difference(path, found.get(path), nearest.get(path)) for path in paths]
        return New("; ".join(texts), next((hint for hint in hints if hint is not None), None))

    def _difference(self, path: str, now: Hashable, was: Hashable) -> str:
        if not (_is_tensor(now) and _is_tensor(was)):
            return f"{path} is {_brief(now)}, promised was {_brief(was)}"
        shape, dtype, device = now[1:]  # type: ignore[index]
        known_shape, known_dtype, known_device = was[1:]  # type: ignore[index]
        for what, here, there in (("dtype", dtype, known_dtype), ("device", device, known_device)):
            if here != there:
                return f"{path} has {what} {here}, promised was {there}"
        if len(shape) != len(known_shape):
            return f"{path} has {len(shape)} dims, promised were {len(known_shape)}"
        dims = [dim for dim, (here, there) in enumerate(zip(shape, known_shape, strict=True)) if here != there]
        promised = {dim: sorted(self._sizes(path, dim, len(shape))) for dim in dims}
        return f"{path} has " + ", ".join(
            f"size {shape[dim]} at dim {dim} (promised: {', '.join(map(str, promised[dim]))})" for dim in dims
        )

    def _sizes(self, path: str, dim: int, dims: int) -> set[int]:
        facts = (known.get(path) for known in self._known.values())
        return {fact[1][dim] for fact in facts if _is_tensor(fact) and len(fact[1]) == dims}  # type: ignore[index]


class _Call:
    __slots__ = ("compiled", "contract", "eager", "outside")

    def __init__(self, contract: Contract, outside: New | None = None, *, eager: bool = False) -> None:
        self.contract = contract
        # The difference from the promised calls, if this call may compile because of it.
        self.outside = outside
        self.eager = eager
        self.compiled = False

    def compile(self, compiled: Callable[..., Any], reason: str) -> Callable[..., Any] | None:
        return self.contract.refused(self, compiled, reason)


# The call of a part that is running in this thread. The part's contract decides once for the call, and the modules inside
# follow; no state is global to the process.
_CURRENT: ContextVar[_Call | None] = ContextVar("tritium_part_call", default=None)


class Gate:
    """Run a module's compiled call as the current call of its part decides.

    `compiled` is the result of `torch.compile(function)`. `prepare` turns either of the two into a call of the module.
    """

    def __init__(
        self,
        module: nn.Module,
        function: Callable[..., Any],
        compiled: Callable[..., Any],
        prepare: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        self._eager = compat.modules.eager_call(module)
        self.compiled = prepare(compiled)
        self._cached = prepare(compat.cached_code.only_cached(function, compiled))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Check `is_compiling` first: Dynamo cannot trace context variables.
        if compat.dynamo.is_compiling() or (call := _CURRENT.get()) is None:
            return self.compiled(*args, **kwargs)
        if call.eager:
            return self._eager(*args, **kwargs)
        try:
            return self._cached(*args, **kwargs)
        except compat.cached_code.WouldCompile as refusal:
            run = call.compile(self.compiled, refusal.reason)
        return (run or self._eager)(*args, **kwargs)


_MODES = ("gradients", "no_grad", "inference mode")


def _mode() -> int:
    return 2 if torch.is_inference_mode_enabled() else 0 if torch.is_grad_enabled() else 1


def _spelling(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Return the properties of a call as written: cheaper than `signature`, which binds the arguments.

    The key depends on the order of keywords and on which defaults are passed. It is computed in every call.
    """
    return (_mode(), len(args), *kwargs, *map(_fact, args), *map(_fact, kwargs.values()))


def _fact(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.device
    if value is None or isinstance(value, (bool, int, float, str)):
        # 1, 1.0 and True are equal as keys, and so are 0.0 and -0.0.
        return (type(value), repr(value)) if isinstance(value, float) else (type(value), value)
    if isinstance(value, Mapping):
        return ("mapping", *value, *map(_fact, value.values()))
    if isinstance(value, (tuple, list)):
        return (type(value), *map(_fact, value))
    return type(value)


def _facts(path: str, value: Any, found: dict[str, Hashable]) -> None:
    if isinstance(value, torch.Tensor):
        found[path] = ("tensor", tuple(value.shape), value.dtype, value.device)
    elif isinstance(value, Mapping):
        found[path] = ("mapping", len(value))
        for name in sorted(value, key=str):
            _facts(f"{path}.{name}", value[name], found)
    elif isinstance(value, (tuple, list)):
        found[path] = (type(value).__name__, len(value))
        for place, item in enumerate(value):
            _facts(f"{path}[{place}]", item, found)
    elif value is None or isinstance(value, (bool, int, float, str)):
        found[path] = ("value", type(value), repr(value))
    else:
        found[path] = ("object", type(value).__qualname__)


def _is_tensor(fact: Any) -> bool:
    return isinstance(fact, tuple) and fact[0] == "tensor"


def _brief(fact: Any) -> str:
    if fact is None:
        return "not given"
    if isinstance(fact, str):
        return fact
    if fact[0] == "tensor":
        return f"a tensor of shape {fact[1]}, {fact[2]}"
    return str(fact[-1]) if fact[0] == "value" else " ".join(map(str, fact))


def _differing(left: Signature, right: Signature) -> list[str]:
    return [path for path in dict.fromkeys((*left, *right)) if left.get(path) != right.get(path)]


def _suggestion(path: str, now: Hashable, was: Hashable) -> str | None:
    """Return the code that promises one difference, as the report suggests it for recompiles."""
    if path == "mode":
        return suggest(None, None, None, "grad_mode")
    if not (_is_tensor(now) and _is_tensor(was)):
        return suggest(path, _brief(was), _brief(now), "")
    shape, dtype, _ = now[1:]  # type: ignore[index]
    known_shape, known_dtype, _ = was[1:]  # type: ignore[index]
    if dtype != known_dtype:
        return suggest(path, f"dtype {known_dtype}", f"dtype {dtype}", "")
    dims = [dim for dim, (here, there) in enumerate(zip(shape, known_shape, strict=False)) if here != there]
    if len(shape) != len(known_shape) or not dims:
        return None
    return suggest(path, f"size {known_shape[dims[0]]} at dim {dims[0]}", f"size {shape[dims[0]]} at dim {dims[0]}", "")


def _would_compile(reason: str) -> New:
    """Describe a promised call that would compile: something other than its arguments changed."""
    text = "as promised, and yet to be compiled again"
    if not reason:
        return New(text)
    cause = parse_guard_failure("", reason, {})
    told = f"{cause.argument}: {cause.reason}" if cause.argument else cause.reason
    return New(f"{text} ({told})", cause.suggestion)
