"""Several ranks that run one pipeline: they agree before it changes, and a call raises on all if it raises on one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import tritium
from tritium import compat, disk, ops
from tritium.artifacts.fingerprint import config_digest
from tritium.errors import RankError
from tritium.pipelines.part import Part
from tritium.pipelines.parts import BareModel, modules_of
from tritium.pipelines.plan import Plan
from tritium.techniques.choice import Choice, Off
from tritium.techniques.parallel import Parallel, mesh, ranks
from tritium.techniques.parallel.ranks import Control

# Of every weight, so many values are compared between ranks.
_SAMPLES = 8

# Bytes of a tensor argument that are compared.
_COMPARED = 1 << 20

# A value that is not compared, such as a callback: one rank may show its progress.
_ANY = "?"


def is_parallel(plan: Plan) -> bool:
    """Return True if a plan names `Parallel`, for all parts or for one."""
    configs = [*plan.techniques, *(one for choice in plan.components.values() for one in choice.techniques)]
    return any(isinstance(config, Parallel) for config in configs)


class Together:
    """The other ranks, as one handle sees them. On one rank nothing is done."""

    def __init__(self, pipe: Any, plan: Plan) -> None:
        self._pipe, self._plan = pipe, plan
        self._parts: list[Part] = []
        self._control: Control | None = None
        if is_parallel(plan):
            mesh.start(_device_of(pipe))
            self._control = ranks.control()

    @contextlib.contextmanager
    def installing(self) -> Iterator[None]:
        """Raise on all ranks if the installation fails on one, or if they differ."""
        with self._control.guarded() if self._control is not None else contextlib.nullcontext():
            yield

    def agree(self, parts: list[Part]) -> None:
        """Raise on all ranks if their plans, code, models or weights differ; change nothing."""
        self._parts = parts
        if self._control is None:
            return
        self._control.step(0)
        compare(self._control, _ingredients(self._pipe, self._plan, parts), "cannot run one pipeline")

    def guard(self) -> None:
        if self._control is None:
            return
        self._control.watch(self)
        if not isinstance(self._pipe, BareModel):
            _guards[self._pipe] = _guards.get(self._pipe, 0) + 1
            if _guards[self._pipe] == 1:
                kind: Any = type(self._pipe)
                self._pipe.__class__ = _guarded(kind)

    def release(self) -> None:
        """Leave the calls of the pipeline as they were."""
        if self._control is None or self._pipe not in _guards:
            return
        _guards[self._pipe] -= 1
        if not _guards[self._pipe]:
            del _guards[self._pipe]
            self._pipe.__class__ = type(self._pipe).__mro__[1]

    def after_failure(self, *, renewed: bool) -> None:
        """Split the parts again if their groups were created again: graphs contain the names of groups."""
        for part in self._parts if renewed else ():
            if part.state_of("parallel") is not None:
                choice = part.choice
                part.use(Choice(how="eager", techniques=(Off("parallel"),)))
                part.use(choice)


def _device_of(pipe: Any) -> torch.device:
    weights = (weight for module in modules_of(pipe).values() for weight in module.parameters())
    return next((weight.device for weight in weights), torch.device("cpu"))


# The number of handles that guard a pipeline.
_guards: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


# --- what must be equal ---


def compare(control: Control, own: Mapping[str, str], what: str) -> None:
    """Raise on all ranks if a value of one differs from the first rank's; `what` are the words of the message."""
    everyone = control.gather(dict(own))
    first = everyone[0]
    for rank, theirs in enumerate(everyone[1:], 1):
        names = [
            name
            for name in (*first, *(theirs.keys() - first.keys()))
            if (one := first.get(name)) != (other := theirs.get(name)) and _ANY not in (one, other)
        ]
        if names:
            shown = "; ".join(
                f"{name} ({_short(first.get(name))} and {_short(theirs.get(name))})" for name in names[:4]
            )
            raise RankError(f"ranks 0 and {rank} {what}: they differ in {shown}")


def _short(text: str | None) -> str:
    return "none" if text is None else text if len(text) <= 60 else f"{text[:57]}..."


def _ingredients(pipe: Any, plan: Plan, parts: list[Part]) -> dict[str, str]:
    """Return what decides the calls of a rank, by name."""
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    # A rank may be silent.
    fields.pop("progress")
    found = {f"plan.{name}": _text(value) for name, value in fields.items()}
    found |= {f"versions.{name}": str(version) for name, version in compat.versions.versions().items()}
    found["code"] = _code_digest()
    for name, component in sorted(pipe.components.items()):
        config = getattr(component, "config", None)
        found[f"models.{name}"] = f"{type(component).__name__} {_digest_of(config)}"
    for part in parts:
        # The weights of a part that is split already differ.
        if part.state_of("parallel") is None:
            found[f"weights.{part.name}"] = _weights_digest(part.module)
    return found


def _text(value: Any) -> str:
    return str({key: str(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value)


def _digest_of(config: Any) -> str:
    return config_digest(config)[:12] if isinstance(config, Mapping) else ""


@functools.cache
def _code_digest() -> str:
    root = Path(tritium.__file__).parent
    files = ops.code_in(root)
    return disk.digest(*(file.relative_to(root).as_posix() for file in files), *files)[:12]


@torch.no_grad()
def _weights_digest(module: torch.nn.Module) -> str:
    """Return a digest of the shapes, dtypes and some values of all weights."""
    tensors = [
        tensor for tensor in module.state_dict().values() if isinstance(tensor, torch.Tensor) and not tensor.is_meta
    ]
    forms = str([(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors])
    plain = [tensor for tensor in tensors if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.numel()]
    samples = [tensor.reshape(-1)[:: max(1, tensor.numel() // _SAMPLES)][:_SAMPLES].double() for tensor in plain]
    values = torch.cat([one.to("cpu") for one in _joined(samples)]) if samples else torch.empty(0)
    return disk.digest(forms, values.numpy().tobytes())[:12]


def _joined(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Join the tensors of each device, so that each device is waited for once."""
    places = dict.fromkeys(tensor.device for tensor in tensors)
    return [torch.cat([tensor for tensor in tensors if tensor.device == place]) for place in places]


# --- calls of the pipeline ---


@functools.cache
def _guarded(kind: type) -> type:
    """Return a class of pipelines whose calls raise on all ranks if they raise on one."""
    original = kind.__call__

    @functools.wraps(original)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        control = ranks.control()
        if control is None or control.is_guarded:
            return original(self, *args, **kwargs)
        with control.guarded():
            return original(self, *args, **_agreed(control, original, (self, *args), kwargs))

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {**names, "__call__": call})


def _agreed(control: Control, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments with a generator; raise on all ranks if the arguments differ."""
    control.step(ranks.START)
    signature = inspect.signature(function)
    given = signature.bind_partial(*args, **kwargs).arguments
    named = {**{name: value for name, value in given.items() if name != "kwargs"}, **given.get("kwargs", {})}
    own = {name: _described(value) for name, value in list(named.items())[1:] if value is not None}
    needs_seed = "generator" in signature.parameters and named.get("generator") is None
    if needs_seed:
        # All ranks draw, as one would, and take the first rank's.
        seeds = control.gather(int(torch.randint(2**62, ()).item()))
    own["adapters"] = _adapters(args[0])
    compare(control, own, "were called with different arguments")
    if not needs_seed:
        return kwargs
    warnings.warn(
        f"tritium: no generator was given, so all ranks use the seed {seeds[0]} that rank 0 drew; pass "
        "generator=torch.Generator().manual_seed(...) to choose it",
        RuntimeWarning,
        stacklevel=4,
    )
    return {**kwargs, "generator": torch.Generator().manual_seed(seeds[0])}


def _adapters(pipe: Any) -> str:
    """Return a digest of the adapters that are loaded, and their scales; empty if there are none."""
    if "peft" not in sys.modules:
        return ""
    found = [
        (name, path, sorted(layer.scaling.items()), layer.active_adapters, layer.disable_adapters)
        for name, module in modules_of(pipe).items()
        for path, layer in module.named_modules()
        if hasattr(layer, "lora_A") and hasattr(layer, "scaling")
    ]
    return disk.digest(str(found))[:12] if found else ""


def _described(value: Any) -> str:
    """Return a text that is equal for equal arguments; "?" for those that cannot be compared."""
    if value is None or isinstance(value, (str, bytes, bool, int, float)):
        return repr(value)
    if isinstance(value, torch.Generator):
        return f"generator in the state {disk.digest(value.get_state().numpy().tobytes())[:12]}"
    if isinstance(value, torch.Tensor):
        flat = value.detach().reshape(-1)[: _COMPARED // value.element_size()]
        content = flat.to("cpu").contiguous().view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return f"{value.dtype} {tuple(value.shape)} {disk.digest(content)[:12]}"
    if isinstance(value, (list, tuple)):
        inner = [_described(one) for one in value]
        return _ANY if _ANY in inner else str(inner)
    if isinstance(value, Mapping):
        return _described([part for pair in value.items() for part in pair])
    if hasattr(value, "tobytes") and hasattr(value, "size"):
        # An image of PIL, or an array.
        return f"{type(value).__name__} {value.size} {disk.digest(value.tobytes())[:12]}"
    return _ANY
