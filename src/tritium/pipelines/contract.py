"""The check of a part's calls against what `warmup()` has seen: names what is new, and does with it what was asked.

Dynamo's guards stay the protection of what is computed. This is about never compiling in silence.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tritium import compat
from tritium.compat import capture as compat_capture
from tritium.errors import ShapeViolation
from tritium.pipelines.shapes import OnViolation
from tritium.report import LEDGER, parse_guard_failure
from tritium.report.suggestions import suggest

# What is known of one call: a fact for each argument by its path.
Signature = Mapping[str, Hashable]

# Versions of one function that a contract may need besides those it has: a warm-up that goes on compiling has none.
_SPARE_VERSIONS = 8


@dataclass(frozen=True)
class New:
    """What was not promised about a call, and the line that would promise it."""

    what: str
    suggestion: str | None = None


class Contract:
    """The calls of one part that compile nothing."""

    def __init__(self, part: str, entry: nn.Module, on_violation: OnViolation, buckets: int) -> None:
        self._part = part
        self._names = list(inspect.signature(entry.forward).parameters)
        self._on_violation = on_violation
        self._versions = _SPARE_VERSIONS + 4 * buckets
        self._known: dict[Hashable, Signature] = {}
        # None before warm-up, when everything compiles as it comes; True while it lasts, False from then on.
        self.learning: bool | None = None
        # What was new, what was done with it, and how often.
        self.violations: Counter[tuple[New, str]] = Counter()

    def call(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.learning is None:
            return inner(*args, **kwargs)
        found = self.signature(args, kwargs)
        key = tuple(found.items())
        if self.learning:
            self._known.setdefault(key, found)
            with compat_capture.recompile_limit(self._versions):
                return inner(*args, **kwargs)
        promised = key in self._known
        if not promised:
            self._note(self._new(found))
        elif self._on_violation != "compile":
            try:
                with compat_capture.compiling_fails():
                    return inner(*args, **kwargs)
            except Exception as error:
                reason = compat_capture.why_compiling_failed(error)
                if reason is None:
                    raise
                self._note(_would_compile(reason))
        if self._on_violation == "eager":
            with compat_capture.compiled_code_runs_eagerly():
                return inner(*args, **kwargs)
        self._known[key] = found
        return self._may_compile(inner, args, kwargs, promised=promised)

    def _may_compile(
        self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, promised: bool
    ) -> Any:
        """A call that may compile; if it does although it is as promised, that is told."""
        graphs, before = compat.graphs_compiled(), {id(record) for record in LEDGER.records()}
        with compat_capture.recompile_limit(self._versions + len(self._known)):
            result = inner(*args, **kwargs)
        if promised and compat.graphs_compiled() != graphs:
            causes = [new.recompile for new in LEDGER.records() if id(new) not in before]
            self._note(_would_compile(next((cause.reason for cause in causes if cause is not None), "")))
        return result

    def _note(self, new: New) -> None:
        """Keep what was new; an error where that was asked for."""
        done = {"compile": "compiled", "eager": "ran eagerly", "error": "refused"}[self._on_violation]
        self.violations[new, done] += 1
        if self._on_violation == "error":
            hint = f"; to prevent it: {new.suggestion}" if new.suggestion else ""
            raise ShapeViolation(f"{self._part}: outside of Plan(shapes=...): {new.what}{hint}")

    def signature(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Signature:
        """Every argument by its name: layout of tensors, value of scalars, whether it is None, what it holds."""
        found: dict[str, Hashable] = {}
        for place, value in enumerate(args):
            name = self._names[place] if place < len(self._names) else f"argument {place}"
            _facts(name, value, found)
        for name in sorted(kwargs):
            _facts(name, kwargs[name], found)
        found["mode"] = (
            "inference mode"
            if torch.is_inference_mode_enabled()
            else "gradients"
            if torch.is_grad_enabled()
            else "no_grad"
        )
        return found

    def _new(self, found: Signature) -> New:
        """What is new about a call, against the promised one that is nearest."""
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
    """The line that promises one difference, as the report has it for recompiles."""
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
    """A call as promised that compiles all the same: something beside its arguments changed."""
    text = "as promised, and yet to be compiled again"
    if not reason:
        return New(text)
    cause = parse_guard_failure("", reason, {})
    told = f"{cause.argument}: {cause.reason}" if cause.argument else cause.reason
    return New(f"{text} ({told})", cause.suggestion)
