"""Compute the attention of stock diffusers models by `attention_forward`.

    handle = tritium.set_attention(pipe.transformer)      # and handle.remove()
    pipe.transformer.set_attention_backend("tritium")     # after tritium.register_attention_backend()

Recent models call diffusers' dispatcher, where a name is registered. Older ones call PyTorch's function, which is
intercepted while their attention processors run.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name
from torch import nn
from torch.overrides import TorchFunctionMode

from tritium.errors import ArgumentError, ArgumentTypeError, MissingExtra
from tritium.layers.attention.choice import RUNTIME, check_choice
from tritium.layers.attention.forward import attention_forward

NAME = "tritium"

# (query, key, value, attn_mask, scale, is_causal, enable_gqa) with tokens before heads.
Attend = Callable[..., torch.Tensor]


@dataclass
class AttentionHandle:
    """The changes of `set_attention`; `remove()` undoes them."""

    # The number of replaced layers, and the paths of others: processors that are modules have special computations.
    layers: int
    skipped: list[str] = field(default_factory=list)
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def remove(self) -> None:
        """Restore the original attention of every layer."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> AttentionHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def set_attention(
    module: nn.Module, *, opt_mode: str = RUNTIME, op_type: str | None = None, layout: str | None = None
) -> AttentionHandle:
    """Make every attention layer of a stock diffusers model compute by `attention_forward`.

    Args:
        module: A transformer, a UNet, or any module that contains diffusers attention layers.
        opt_mode: As in `attention_forward`.
        op_type: As in `attention_forward`.
        layout: As in `attention_forward`.
    """
    check_choice(opt_mode, op_type, layout)
    words = [part for part in (opt_mode, op_type, layout) if part]
    name = NAME if words == [RUNTIME] else ":".join((NAME, *words))
    attend = functools.partial(attention_forward, opt_mode=opt_mode, op_type=op_type, layout=layout)
    return serve(module, name, attend)


def serve(module: nn.Module, name: str, attend: Attend) -> AttentionHandle:
    """Make the attention layers of a module compute by `attend`, registered with diffusers under `name`."""
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(f"attention is set for a module such as pipe.transformer, got {type(module).__name__}")
    member = _register(name, attend)
    handle = AttentionHandle(0)
    # Layers may share a processor.
    served: set[int] = set()
    for path, layer in module.named_modules():
        processor = getattr(layer, "processor", None)
        if processor is None or not callable(processor):
            continue
        if isinstance(processor, nn.Module) and not hasattr(processor, "_attention_backend"):
            handle.skipped.append(path)
            continue
        handle.layers += 1
        if id(processor) not in served:
            served.add(id(processor))
            handle._undo.append(_Place.of(processor).serve(member, attend))
    if handle.layers == 0:
        raise ArgumentError(f"{type(module).__name__} has no attention layers of diffusers")
    return handle


_ABSENT = object()


@dataclass(eq=False)
class _Place:
    """A processor, its original state, and the functions that were set on it; the last one is active."""

    processor: weakref.ref[Any]
    # Whether diffusers' dispatcher reads a backend name from it. Otherwise its class is replaced to intercept its calls.
    asked: bool
    # The backend name, or the class.
    original: Any
    served: list[tuple[Any, Attend]] = field(default_factory=list)
    # The name or class that Tritium set. If the processor has another one, other code set that, and it stays.
    applied: Any = None

    @classmethod
    def of(cls, processor: Any) -> _Place:
        place = _PLACES.get(processor)
        asked = hasattr(processor, "_attention_backend")
        if place is None or _held(processor, asked=asked) is not place.applied:
            place = _PLACES[processor] = cls(weakref.ref(processor), asked, _held(processor, asked=asked))
        return place

    def serve(self, member: Any, attend: Attend) -> Callable[[], None]:
        """Make `attend` active and return a function that undoes this; undos may run in any order."""
        own = (member, attend)
        self.served.append(own)
        self._put(own)

        def undo() -> None:
            self.served = [other for other in self.served if other is not own]
            processor = self.processor()
            if processor is None or _PLACES.get(processor) is not self:
                return
            if _held(processor, asked=self.asked) is self.applied:
                self._put(self.served[-1] if self.served else None)
            elif self.asked and not self.served:
                # Other code has set the name since; the class is still Tritium's.
                processor.__class__ = _own_class(processor)

        return undo

    def _put(self, server: tuple[Any, Attend] | None) -> None:
        processor: Any = self.processor()
        if server is None:
            _PLACES.pop(processor, None)
            self.applied = self.original
        else:
            # Derive from the original class: with nested classes the attention of the outer one would apply.
            self.applied = server[0] if self.asked else _intercepting(self.original, server[1])
        if not self.asked:
            processor.__class__ = self.applied
            return
        _set_backend(vars(processor), self.applied)
        own = _own_class(processor)
        processor.__class__ = own if server is None else _copied_as_it_was(own)


def _own_class(processor: Any) -> type:
    """Return the original class of a processor whose backend is set by name."""
    return getattr(type(processor), "_tritium_serves", type(processor))


def _set_backend(state: dict[str, Any], backend: Any) -> None:
    if backend is _ABSENT:
        state.pop("_attention_backend", None)
    else:
        state["_attention_backend"] = backend


def _held(processor: Any, *, asked: bool) -> Any:
    return vars(processor).get("_attention_backend", _ABSENT) if asked else type(processor)


_PLACES: weakref.WeakKeyDictionary[Any, _Place] = weakref.WeakKeyDictionary()


def register_attention_backend(name: str = NAME, attend: Attend = attention_forward) -> Any:
    """Register a name for `model.set_attention_backend(name)` and return diffusers' enum member for it.

    Raises `ArgumentError` if this version of diffusers has no attention backends, or already has one of this name.
    """
    if not isinstance(name, str) or not name:
        raise ArgumentTypeError(f"an attention backend has a name, got {name!r}")
    if not callable(attend):
        raise ArgumentTypeError(f"an attention backend is a function such as attention_forward, got {attend!r}")
    return _register(name, attend)


# Names that Tritium added to diffusers' enumeration.
_REGISTERED: set[str] = set()


def _register(name: str, attend: Attend) -> Any:
    names, registry = _dispatcher()
    member = names._value2member_map_.get(name)
    if member is not None and name not in _REGISTERED:
        raise ArgumentError(f"diffusers has an attention backend {name!r} of its own; choose another name")
    if member is None:
        _REGISTERED.add(name)
        # Enumerations cannot be extended, so create a member as the enum metaclass does.
        member = str.__new__(names, name)
        member._name_, member._value_ = name.upper().replace(":", "_"), name
        names._member_map_[member._name_] = member
        names._value2member_map_[name] = member
        names._member_names_.append(member._name_)
    registry.register(member)(_backend(attend))
    return member


def forget_attention_backend(name: str) -> None:
    """Unregister a name; do nothing if it is not registered."""
    names, registry = _dispatcher()
    _REGISTERED.discard(name)
    member = names._value2member_map_.pop(name, None)
    if member is None:
        return
    del names._member_map_[member._name_]
    names._member_names_.remove(member._name_)
    for known in (registry._backends, registry._constraints, registry._supported_arg_names):
        known.pop(member, None)


def _dispatcher() -> tuple[Any, Any]:
    try:
        module = importlib.import_module("diffusers.models.attention_dispatch")
    except ImportError as error:
        if importlib.util.find_spec("diffusers") is None:
            raise MissingExtra("diffusers", "diffusers", "set_attention") from error
        raise ArgumentError("this version of diffusers has no attention backends; 0.36 and later have them") from error
    try:
        names, registry = module.AttentionBackendName, module._AttentionBackendRegistry
        _ = names._value2member_map_, names._member_map_, names._member_names_, registry.register
    except AttributeError as error:
        raise ArgumentError(f"this version of diffusers lets no attention backend be registered: {error}") from error
    return names, registry


def _backend(attend: Attend) -> Callable[..., torch.Tensor]:
    """Return a function for diffusers' dispatcher; it raises for arguments that it cannot apply."""

    def tritium_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> torch.Tensor:
        if dropout_p or return_lse or _parallel_config is not None:
            raise ArgumentError(
                "attention by tritium has no dropout, returns no logarithms of sums and knows no context parallelism: "
                f"got dropout_p={dropout_p}, return_lse={return_lse}, parallel={_parallel_config is not None}"
            )
        # A 2-D mask has one row per sample in diffusers, and one per query in PyTorch.
        by_sample = attn_mask is not None and attn_mask.dim() == 2
        if by_sample and attn_mask is not None and tuple(attn_mask.shape) == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None]
        return attend(query, key, value, attn_mask, scale, is_causal=is_causal, enable_gqa=enable_gqa)

    return tritium_attention


class _Replaced(TorchFunctionMode):
    """Replace F.scaled_dot_product_attention by another function."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _as_pytorch(self.attend, *args, **kwargs)
        return func(*args, **kwargs)


def _as_pytorch(
    attend: Attend,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if dropout_p:
        raise ArgumentError(f"attention by tritium has no dropout: got dropout_p={dropout_p}")
    given = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return attend(*given, attn_mask, scale, is_causal=is_causal, enable_gqa=enable_gqa).transpose(1, 2)


def _intercepting(cls: type, attend: Attend) -> type:
    """Return a subclass of a processor's class whose calls run with PyTorch's attention replaced."""
    plain: Callable[..., Any] = cls.__call__

    # Keep the signature: diffusers inspects it to see which arguments a processor takes.
    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Replaced(attend):
            return plain(self, *args, **kwargs)

    return _another_class(cls, {"__call__": call})


@functools.cache
def _copied_as_it_was(cls: type) -> type:
    """Return a subclass for processors whose backend is set by name; only copying and pickling differ."""
    return _another_class(cls, {"_tritium_serves": cls})


def _another_class(cls: type, body: Mapping[str, Any]) -> type:
    """Return a subclass of a class whose copies and pickles have a processor's original state."""

    def reduced(self: Any, protocol: Any) -> tuple[Any, ...]:
        del protocol
        state, place = vars(self).copy(), _PLACES.get(self)
        if place is not None and place.asked and _held(self, asked=True) is place.applied:
            _set_backend(state, place.original)
        return _processor_of, (cls, state)

    return type(f"Tritium{cls.__name__}", (cls,), {"__module__": cls.__module__, "__reduce_ex__": reduced, **body})


def _processor_of(cls: type, state: Mapping[str, Any]) -> Any:
    """Return a copy of a processor in its original state, since no handle would restore the copy."""
    made: Any = object.__new__(cls)
    vars(made).update(state)
    return made
