"""Routed mixtures of a model, found by structure: equal SwiGLU experts in a list, and a gate that chooses among them.

A mixture's class is replaced by a subclass whose forward groups tokens by expert. The weights of its experts become slices
of one tensor; they stay parameters of their linears, so LoRA, `state_dict` and in-place changes work as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tritium import compat
from tritium.errors import PipelineError, brief
from tritium.layers import experts as layers

# Names of an expert's linears: the activated one, the one that it is multiplied with, and the last one.
_NAMES = (("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj"))

# Random tokens with which a mixture is compared with its stock forward, and the largest relative error in units of the
# dtype's precision: another activation gives an error of 10 % and more.
_TOKENS, _TOLERANCE = 64, 4

# Replaces `Grouped.mixed`: gets the mixture, tokens [S, D], and their experts and weights [S, k].
Mix = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Routed:
    """A mixture's path, module, and the names of its experts' linears."""

    path: str
    module: Any
    names: tuple[str, str, str]

    @property
    def linears(self) -> list[list[nn.Linear]]:
        """Return the linears of all experts by name, without adapters around them."""
        return linears_of(self.module, self.names)


def linears_of(module: Any, names: tuple[str, ...]) -> list[list[nn.Linear]]:
    experts = [[getattr(expert, name) for expert in module.experts] for name in names]
    return [[getattr(linear, "base_layer", linear) for linear in side] for side in experts]


def find(module: nn.Module) -> Iterator[Routed]:
    """Yield the routed mixtures of a model."""
    for path, inner in module.named_modules():
        names = _names_of(inner)
        if names is not None:
            yield Routed(path, inner, names)


def _names_of(module: Any) -> tuple[str, str, str] | None:
    """Return the names of the linears of a mixture's experts; None for other modules."""
    experts = getattr(module, "experts", None)
    if (
        not isinstance(experts, nn.ModuleList)
        or len(experts) < 2
        or not isinstance(getattr(module, "gate", None), nn.Module)
    ):
        return None
    for names in _NAMES:
        if all(all(hasattr(expert, name) for name in names) for expert in experts):
            sides = linears_of(module, names)
            return names if all(map(_are_alike, sides)) else None
    return None


def _are_alike(linears: list[nn.Linear]) -> bool:
    return len({(linear.weight.shape, linear.weight.dtype) for linear in linears}) == 1 and all(
        isinstance(linear, nn.Linear) and linear.bias is None for linear in linears
    )


class Grouped(nn.Module):
    """The forward of a mixture whose class was replaced by `group`."""

    names: tuple[str, str, str]
    # Set while the experts are split over ranks.
    mix: Mix | None
    # The settings of `Experts`, for ranks.
    slots: int | None
    moves: int | None
    gate: nn.Module
    experts: nn.ModuleList

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        indices, weights = self.gate(x)[:2]
        rows = x.reshape(-1, x.shape[-1])
        mix = type(self).mixed if self.mix is None else self.mix
        out = mix(self, rows, indices.reshape(len(rows), -1), weights.reshape(len(rows), -1)).view(x.shape)
        shared = getattr(self, "shared_experts", None)
        return out if shared is None else out + shared(x)

    def mixed(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        linears = [[getattr(expert, name) for expert in self.experts] for name in self.names]
        if all(compat.modules.is_plain(linear, nn.Linear) for side in linears for linear in side):
            gate, up, down = ([linear.weight for linear in side] for side in linears)
            return layers.routed_swiglu(x, indices, weights, gate, up, down)
        # Adapters, hooks and stored bytes are called as modules.
        return layers.every_expert(x, indices, weights, list(self.experts))

    def _apply(self, fn: Callable[..., torch.Tensor], recurse: bool = True) -> Any:
        if self.mix is not None:
            raise PipelineError(
                "experts that are split over ranks cannot be moved or cast; call remove() on the handle, and optimize again"
            )
        # Moves and casts give each parameter a separate storage.
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        stack(self, self.names)
        return result


def grouped_linears(module: nn.Module) -> set[int]:
    """Return the ids of the linears whose weights grouped products read, in place of calls."""
    mixtures = [routed for routed in find(module) if isinstance(routed.module, Grouped)]
    return {id(linear) for routed in mixtures for side in routed.linears for linear in side}


@functools.cache
def _grouped(stock: type) -> type:
    return type(stock.__name__, (Grouped, stock), {"__module__": stock.__module__})


@torch.inference_mode(mode=False)
@torch.no_grad()
def group(routed: Routed, slots: int | None = None, moves: int | None = 0) -> str | None:
    """Replace a mixture's class and stack its experts' weights; return why the mixture stays as it is, or None."""
    module, stock = routed.module, type(routed.module)
    if any(linear.weight.is_meta for side in routed.linears for linear in side):
        return "its weights are on the meta device"
    module.__class__ = _grouped(stock)  # type: ignore[arg-type]  # types are hashable
    module.__dict__.update(names=routed.names, mix=None, slots=slots, moves=moves)
    stack(module, routed.names)
    reason = _disagreement(module, stock)
    if reason is not None:
        ungroup(routed)
    return reason


@torch.inference_mode(mode=False)
@torch.no_grad()
def ungroup(routed: Routed) -> None:
    """Restore a mixture's class, and give each weight a separate storage."""
    module = routed.module
    module.__class__ = type(module).__bases__[1]
    for name in ("names", "mix", "slots", "moves"):
        del module.__dict__[name]
    for side in routed.linears:
        for linear in side:
            linear.weight.data = linear.weight.data.clone()


@torch.inference_mode(mode=False)
@torch.no_grad()
def stack(module: Any, names: tuple[str, ...]) -> None:
    """Move the weights of a mixture's experts into one tensor for each name."""
    for side in linears_of(module, names):
        kinds = {(linear.weight.dtype, linear.weight.device, type(linear.weight)) for linear in side}
        if len(kinds) == 1 and isinstance(side[0].weight, nn.Parameter) and side[0].weight.is_floating_point():
            whole = torch.stack([linear.weight.data for linear in side])
            for linear, weight in zip(side, whole.unbind(), strict=True):
                linear.weight.data = weight


def _disagreement(module: Any, stock: type) -> str | None:
    """Return how a mixture's results differ from those of its stock forward, or None."""
    weight = linears_of(module, module.names)[0][0].weight
    if compat.tensors.fake_mode_of(weight) is not None:
        # It has no values.
        return None
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(1, _TOKENS, weight.shape[1], dtype=weight.dtype, device=weight.device, generator=generator)
    try:
        expected, found = stock.forward(module, x), module(x)  # type: ignore[attr-defined]
    except Exception as error:  # noqa: BLE001 - a class of another structure raises anything
        return f"its forward is another one ({brief(error)})"
    distance = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
    if distance <= _TOLERANCE * torch.finfo(x.dtype).eps:
        return None
    return f"its forward is another one (results differ by {distance:.1e})"
