"""Workloads: a model with its inputs, how to compile it, and whether its sizes are static or dynamic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tritium import compat

SEED = 0

# Compiles a module for a variant, or returns it unchanged.
Compile = Callable[[Any], Any]


class Normals:
    """A seeded source of normal tensors. From the CPU, a seed gives the same tensors on every device."""

    def __init__(self, device: str, dtype: torch.dtype, *, source: str = "cpu") -> None:
        self.device, self.dtype, self._source = device, dtype, source
        self._generator = torch.Generator(source).manual_seed(SEED)

    def __call__(self, *shape: int) -> torch.Tensor:
        tensor = torch.randn(*shape, generator=self._generator, device=self._source)
        return tensor.to(self.device, self.dtype)


def whole(model: Any, compile_: Compile) -> Any:
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
    # With dynamic sizes, also measure torch.compile with static sizes.
    against_static: bool = False

    def marked(self) -> dict[str, Any]:
        """Return the inputs with dynamic dims marked for Dynamo; marked tensors are copies."""
        inputs = dict(self.inputs)
        for name, dims in (self.dims or {}).items():
            inputs[name] = compat.dynamo.mark_dynamic(inputs[name].clone(), dims)
        return inputs


def shapes_of(tensors: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the shapes of the tensors among some arguments."""
    return {name: list(value.shape) for name, value in tensors.items() if isinstance(value, torch.Tensor)}


class Workload(Protocol):
    """A model that can be built, and measured with static sizes, with dynamic ones, or with both."""

    @property
    def name(self) -> str: ...

    # Static sizes are constants of the compiled code; with dynamic ones, height and width, or tokens, are not.
    @property
    def dynamic(self) -> Sequence[bool]: ...

    def build(self, device: str, dtype: torch.dtype, *, small: bool) -> Built: ...
