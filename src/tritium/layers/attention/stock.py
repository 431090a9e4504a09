"""Attention of stock diffusers models by `attention_forward`.

    handle = tritium.set_attention(pipe.transformer)      # and handle.remove()
    pipe.transformer.set_attention_backend("tritium")     # after tritium.register_attention_backend()

Models of today ask diffusers' dispatcher, where a name is registered; older ones call PyTorch's function, which their
attention processors then find replaced while they run.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
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
    """What `set_attention` changed, and the way back."""

    # How many attention layers are served, and the paths of those that are not: modules as processors have their own ways.
    layers: int
    skipped: list[str] = field(default_factory=list)
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def remove(self) -> None:
        """Give every layer back what it had."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> AttentionHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def set_attention(
    module: nn.Module, *, opt_mode: str = RUNTIME, op_type: str | None = None, layout: str | None = None
) -> AttentionHandle:
    """Let every attention layer of a stock diffusers model compute by `attention_forward`.

    Args:
        module: A transformer, a UNet, or any module that has attention layers of diffusers.
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
    """Let the attention layers of a module compute by a function that diffusers knows under a name."""
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(f"attention is set for a module such as pipe.transformer, got {type(module).__name__}")
    member = _register(name, attend)
    handle = AttentionHandle(0)
    # Layers may share one.
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
    """A processor: what it had before anybody served it, and who has done so since, the last of whom does."""

    processor: weakref.ref[Any]
    # Whether diffusers' dispatcher asks it for a name. Otherwise its calls are intercepted, by another class meanwhile.
    asked: bool
    # The name, or the class.
    original: Any
    served: list[tuple[Any, Attend]] = field(default_factory=list)
    # What it has while it is served; something else was put there by somebody else, and is his.
    applied: Any = None

    @classmethod
    def of(cls, processor: Any) -> _Place:
        place = _PLACES.get(processor)
        asked = hasattr(processor, "_attention_backend")
        if place is None or _held(processor, asked=asked) is not place.applied:
            place = _PLACES[processor] = cls(weakref.ref(processor), asked, _held(processor, asked=asked))
        return place

    def serve(self, member: Any, attend: Attend) -> Callable[[], None]:
        """What takes it back, in whatever order others are taken back."""
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
                # The name is somebody else's by now; the class is not.
                processor.__class__ = _own_class(processor)

        return undo

    def _put(self, server: tuple[Any, Attend] | None) -> None:
        processor: Any = self.processor()
        if server is None:
            _PLACES.pop(processor, None)
            self.applied = self.original
        else:
            # Made of the class that it had: one inside of another would have the outer one's attention.
            self.applied = server[0] if self.asked else _intercepting(self.original, server[1])
        if not self.asked:
            processor.__class__ = self.applied
            return
        _set_backend(vars(processor), self.applied)
        own = _own_class(processor)
        processor.__class__ = own if server is None else _copied_as_it_was(own)


def _own_class(processor: Any) -> type:
    """The class of a processor that is asked for a name, served or not."""
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
    """Make a name known to `model.set_attention_backend(name)`; returns diffusers' word for it.

    An `ArgumentError` where this version of diffusers has no such names, or has one of its own that is called so.
    """
    if not isinstance(name, str) or not name:
        raise ArgumentTypeError(f"an attention backend has a name, got {name!r}")
    if not callable(attend):
        raise ArgumentTypeError(f"an attention backend is a function such as attention_forward, got {attend!r}")
    return _register(name, attend)


# Names that were not there before.
_REGISTERED: set[str] = set()


def _register(name: str, attend: Attend) -> Any:
    names, registry = _dispatcher()
    member = names._value2member_map_.get(name)
    if member is not None and name not in _REGISTERED:
        raise ArgumentError(f"diffusers has an attention backend {name!r} of its own; choose another name")
    if member is None:
        _REGISTERED.add(name)
        # An enumeration has no way to grow: a member is made as the enumeration's own class makes them.
        member = str.__new__(names, name)
        member._name_, member._value_ = name.upper().replace(":", "_"), name
        names._member_map_[member._name_] = member
        names._value2member_map_[name] = member
        names._member_names_.append(member._name_)
    registry.register(member)(_backend(attend))
    return member


def forget_attention_backend(name: str) -> None:
    """Take a name back that was registered for one use; one that is not there is none to take back."""
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
    """A function with the arguments that diffusers' dispatcher gives; what it cannot honour is an error."""

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
        # Diffusers means one mask a sample, where PyTorch means one a query.
        by_sample = attn_mask is not None and attn_mask.dim() == 2
        if by_sample and attn_mask is not None and tuple(attn_mask.shape) == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None]
        return attend(query, key, value, attn_mask, scale, is_causal=is_causal, enable_gqa=enable_gqa)

    return tritium_attention


class _Replaced(TorchFunctionMode):
    """F.scaled_dot_product_attention by another function."""

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
    """A processor's class whose calls find PyTorch's function replaced."""
    plain: Callable[..., Any] = cls.__call__

    # Wrapped: diffusers looks at the signature to see which arguments a processor takes.
    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Replaced(attend):
            return plain(self, *args, **kwargs)

    return _another_class(cls, {"__call__": call})


@functools.cache
def _copied_as_it_was(cls: type) -> type:
    """A processor's class, for as long as one that is asked for a name is served: all that differs is how it is copied."""
    return _another_class(cls, {"_tritium_serves": cls})


def _another_class(cls: type, body: Mapping[str, Any]) -> type:
    """A class for a processor that is served; a copy of it, and a pickle, has what the processor had before."""

    def reduced(self: Any, protocol: Any) -> tuple[Any, ...]:
        del protocol
        state, place = vars(self).copy(), _PLACES.get(self)
        if place is not None and place.asked and _held(self, asked=True) is place.applied:
            _set_backend(state, place.original)
        return _processor_of, (cls, state)

    return type(f"Tritium{cls.__name__}", (cls,), {"__module__": cls.__module__, "__reduce_ex__": reduced, **body})


def _processor_of(cls: type, state: Mapping[str, Any]) -> Any:
    """A copy of a processor that was served: no handle would give it back what it had, so it has it."""
    made: Any = object.__new__(cls)
    vars(made).update(state)
    return made
