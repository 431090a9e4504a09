"""Workloads: a model with its inputs, how to compile it, and whether its sizes are static or dynamic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

SEED = 0

# `static`: every size is a constant of the compiled code. `dynamic`: height and width, or tokens, are not.
Regime = Literal["static", "dynamic"]

# Compiles a module for a variant, or returns it unchanged.
Compile = Callable[[Any], Any]

# Makes a normal tensor of a shape in the workload's dtype, on its device.
Draw = Callable[..., torch.Tensor]


def drawing(device: str, dtype: torch.dtype) -> Draw:
    """Return seeded draws, made on the CPU so that a seed gives the same inputs on every device."""
    generator = torch.Generator().manual_seed(SEED)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return draw


def whole(model: Any, compile_: Compile) -> Any:
    """Compile the model as one."""
    return compile_(model)


@dataclass(frozen=True)
class Built:
    """A workload ready to run: `install(model, compile_)(**inputs)`."""

    model: Any
    inputs: dict[str, Any]
    note: str
    shrunk: bool
    # Installs compiled parts as a user would: the default compiles the model itself.
    install: Callable[[Any, Compile], Any] = whole
    # The dynamic dims by argument. None: torch.compile(dynamic=True) decides.
    dims: Mapping[str, Sequence[int]] | None = None
    # Also measure torch.compile with static sizes in the dynamic regime.
    against_static: bool = False

    @property
    def shapes(self) -> dict[str, list[int]]:
        return {name: list(value.shape) for name, value in self.inputs.items() if isinstance(value, torch.Tensor)}

    def marked(self) -> dict[str, Any]:
        """Return the inputs with dynamic dims marked for Dynamo; marked tensors are copies."""
        inputs = dict(self.inputs)
        for name, dims in (self.dims or {}).items():
            inputs[name] = inputs[name].clone()
            torch._dynamo.mark_dynamic(inputs[name], list(dims))
        return inputs


class Workload(Protocol):
    """A model that can be built and measured in each of its regimes."""

    @property
    def name(self) -> str: ...

    @property
    def regimes(self) -> Sequence[Regime]: ...

    def build(self, device: str, dtype: torch.dtype, *, small: bool) -> Built: ...


def label(workload: Workload, regime: Regime) -> str:
    """Return the name of a workload's rows; static sizes need no suffix."""
    return workload.name if regime == "static" else f"{workload.name} dynamic"
