"""What an entry of the zoo is: a tiny stock diffusers model, built from its config with seeded weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from support import SEED
from tritium.bench.workload import Normals


@dataclass(frozen=True, eq=False)
class ZooModel:
    """One tiny model.

    `build(dtype)` returns it in eval mode, `inputs(dtype, size)` the keyword arguments of its forward. `size` is one
    number: a token count, or the height of a latent, whichever the model's users vary; `sizes` are two values that
    work, the first is the default. `dynamic` names the dims that `size` changes, of an argument ("hidden_states") or of
    an item of one ("rope.0"); it is empty where stock code specialises them, so that only a second size makes them
    dynamic. `graphs` is the number of graphs that Dynamo makes of one call.
    """

    name: str
    build: Callable[..., torch.nn.Module]
    inputs: Callable[..., dict[str, Any]]
    sizes: tuple[int, int]
    repeated_blocks: bool
    dynamic: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    graphs: int = 1
    notes: str = ""

    def mark_dynamic(self, inputs: dict[str, Any]) -> None:
        """Mark the varying dims of `inputs` for Dynamo."""
        for path, dims in self.dynamic.items():
            name, *items = path.split(".")
            tensor = inputs[name]
            for item in items:
                tensor = tensor[int(item)]
            for dim in dims:
                torch._dynamo.mark_dynamic(tensor, dim)


def normals(dtype: torch.dtype) -> Normals:
    """Return a seeded source of inputs of one dtype."""
    return Normals("cpu", dtype)


def builder(make: Callable[..., torch.nn.Module], **config: Any) -> Callable[..., torch.nn.Module]:
    """Make `build(dtype)` of a class: seeded weights, nothing left at a constant, cast as `from_pretrained` casts."""

    def build(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            model = make(**config).eval()
            unsettle(model)
        return cast(model, dtype)

    return build


@torch.no_grad()
def unsettle(model: torch.nn.Module) -> None:
    """Let every site matter: no parameter keeps a constant start (zeroed outputs, unit norm weights), no layer fades.

    torch starts a linear layer with a third of the variance that keeps a signal's size; through a text stream of a few
    layers little of it arrives.
    """
    for parameter in model.parameters():
        if parameter.numel() and bool((parameter == parameter.flatten()[0]).all()):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.mul_(3**0.5)


def cast(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Cast all but what the class asks to keep in float32 (`_keep_in_fp32_modules`), by name as diffusers does."""
    keep = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    kept = {
        name: tensor.detach().clone()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if keep & set(name.split("."))
    }
    torch.nn.Module.to(model, dtype)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in kept:
            tensor.data = kept[name]
    return model
