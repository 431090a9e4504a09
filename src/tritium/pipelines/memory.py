"""Estimate the memory that a decode needs before it starts.

The decoder runs on fake tensors (`tritium.techniques.memory.estimate`). The estimate is a lower bound, and a decode is
refused only if even that does not fit.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tritium import compat, device
from tritium.errors import MemoryShortage
from tritium.techniques.memory.estimate import Live, fake_arguments

# A frame cache is empty, then partly filled, then full: calls from the third on need the same memory.
_REGIMES = 3


def needed(decoder: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, calls: int = 1) -> int:
    """Return a lower bound of the bytes that a call needs, in addition to its arguments and the weights.

    With `calls`, the bound holds for that many calls in a row that share a frame cache.
    """
    fakes = compat.tensors.fake_mode(allow_non_fake_inputs=True)
    live, outputs = Live(), []
    # In inference mode composite operators arrive here undecomposed, without the routines they call.
    with torch.inference_mode(mode=False), torch.no_grad(), fakes, _attributes_kept(decoder):
        args, named = fake_arguments(args, kwargs)
        started = {name: list(value) for name, value in named.items() if _counts(value)}
        with live:
            for _ in range(min(calls, _REGIMES)):
                outputs.append(decoder.forward(*args, **named))
                # Each call counts layers from the start, and only the first call has the first chunk.
                named |= {name: list(value) for name, value in started.items()}
                named |= {name: False for name, value in named.items() if value is True}
    # Decoded frames are kept until the last one is decoded; the calls above already hold theirs.
    last = outputs[-1]
    piled = max(0, calls - _REGIMES) * (last.untyped_storage().nbytes() if isinstance(last, torch.Tensor) else 0)
    return live.most + piled


@contextlib.contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    """Restore the attributes of all modules inside a module: some decoders keep frames in them between calls."""
    before = [(inner, dict(vars(inner))) for inner in module.modules()]
    try:
        yield
    finally:
        for inner, attributes in before:
            inner.__dict__.clear()
            inner.__dict__.update(attributes)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, int) for item in value)


@dataclass(frozen=True)
class _Signature:
    """The inputs that determine the memory of a call: shapes, and all other properties."""

    shapes: tuple[tuple[int, ...], ...]
    rest: tuple[Any, ...]
    calls: int

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], calls: int) -> _Signature:
        leaves = compat.tensors.leaves_of((args, dict(kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        rest = [(leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else str(leaf) for leaf in leaves]
        return cls(tuple(tuple(tensor.shape) for tensor in tensors), tuple(rest), calls)

    def is_within(self, other: _Signature) -> bool:
        """Return True if no size of this call is larger than the other's and everything else is equal."""
        if self.rest != other.rest or self.calls > other.calls:
            return False
        sizes = zip(self.shapes, other.shapes, strict=True)
        return all(len(own) == len(its) and all(map(operator.le, own, its)) for own, its in sizes)


class Guard:
    """Refuse decodes that do not fit the device before they start."""

    def __init__(self, vae: nn.Module, decoder: nn.Module, cache: Sequence[str]) -> None:
        self._vae = vae
        self._decoder = decoder
        self._cache = tuple(cache)
        self._known: dict[_Signature, int | None] = {}
        # Why there is no estimate, if the decoder cannot run on fake tensors.
        self.unknown = ""

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise a `MemoryShortage` if a call cannot fit."""
        latent = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
        free = device.free_memory(latent.device) if latent is not None else None
        if latent is None or free is None or compat.dynamo.is_compiling():
            return
        call = _Signature.of(args, kwargs, self._calls(latent, kwargs))
        if call not in self._known:
            if any(
                known is not None and known <= free and call.is_within(other) for other, known in self._known.items()
            ):
                return
            self._known[call] = self._estimate(args, kwargs, call.calls)
        estimate = self._known[call]
        if estimate is not None and estimate > free:
            raise MemoryShortage(
                f"decoding a latent of shape {tuple(latent.shape)} takes {_gib(estimate)} at least, and {_gib(free)} are "
                f"free on {latent.device}: {self._advice(latent)}"
            )

    def _estimate(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], calls: int) -> int | None:
        try:
            return needed(self._decoder, args, kwargs, calls=calls)
        except Exception as error:  # noqa: BLE001 - a failed estimate must not prevent a decode
            self.unknown = f"memory not estimated: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            return None

    def _calls(self, latent: torch.Tensor, kwargs: Mapping[str, Any]) -> int:
        """Return how many frames a series of calls will decode, from the storage of the first one; else 1."""
        first = any(isinstance(kwargs.get(name), list) and set(kwargs[name]) == {None} for name in self._cache)
        if not first or latent.numel() == 0:
            return 1
        return max(1, latent.untyped_storage().nbytes() // (latent.numel() * latent.element_size()))

    def _advice(self, latent: torch.Tensor) -> str:
        if latent.shape[0] > 1 and not getattr(self._vae, "use_slicing", False):
            return "vae.enable_slicing() decodes one of the batch at a time, and vae.enable_tiling() in tiles"
        if getattr(self._vae, "use_tiling", False):
            return "its tiles are too large; vae.enable_tiling() takes smaller ones, or free memory on the device"
        return "vae.enable_tiling() decodes it in tiles"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
