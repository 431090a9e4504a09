"""Denoisers as workloads: stock classes at full width and a real number of tokens, with few blocks and random weights.

Blocks repeat, so few of them are enough. On a CPU the full width would take minutes a step, so there the same class
shrinks, and every result says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tritium.bench.models import MODELS, Size, StockModel, size_of
from tritium.bench.workload import Built, Normals
from tritium.errors import ConfigError, nearest
from tritium.example import load_example

# A float64 run keeps all scores of attention in memory, which a GPU lacks for more tokens than this.
MOST_TOKENS_IN_FLOAT64 = 5000


@dataclass(frozen=True)
class Denoiser:
    """A stock class at full size, and at the size for a CPU."""

    name: str
    model: StockModel
    full: Size
    small: Size
    # In `families`: seconds after which optional variants are cut, and whether mode "reduce-overhead" is one.
    budget: float
    reduce_overhead: bool
    dynamic: Sequence[bool] = (False,)

    @property
    def fits_float64(self) -> bool:
        return self.model.tokens(self.full) + self.full.text <= MOST_TOKENS_IN_FLOAT64

    def build(self, device: str, dtype: torch.dtype, *, small: bool) -> Built:
        """Build a seeded model and its inputs; keep the global random state."""
        size = self.small if small else self.full
        model = self.model.build(size.config, device, dtype)
        inputs = self.model.arguments(model.config, size, Normals(device, dtype))
        return Built(model, inputs, describe(self.model, model.config, size), small)


class ExampleTransformer:
    """The transformer of the example pipeline with its trained weights, at the size of the plain call. It never shrinks."""

    name = "example-transformer"
    dynamic: Sequence[bool] = (False,)

    def build(self, device: str, dtype: torch.dtype, *, small: bool) -> Built:
        del small
        model, stock = load_example(device, dtype).transformer, MODELS["flux"]
        size = Size(model.config, (8, 8), 512)
        inputs = stock.arguments(model.config, size, Normals(device, dtype))
        return Built(model, inputs, describe(stock, model.config, size), shrunk=False)


def describe(model: StockModel, config: Any, size: Size) -> str:
    """Describe a built model and the size of its call. The text is part of a row's key."""
    batch = [f"batch {size.batch}"] * (size.batch > 1)
    if "block_out_channels" in config:
        channels = f"channels {', '.join(map(str, config.block_out_channels))}"
        latents = f"latents {' x '.join(map(str, size.grid))}"
        return ", ".join([f"{config.layers_per_block} resnets a level", channels, latents, *batch])
    blocks = _first_of(config, "num_layers", "n_layers", "num_mmdit_layers")
    single = _first_of(config, "num_single_layers", "num_single_dit_layers")
    refiners = _first_of(config, "num_refiner_layers", "n_refiner_layers")
    words = f"{blocks} block{'s' * (blocks > 1)}"
    if single:
        words = f"{blocks} double + {single} single block{'s' * (single > 1)}"
    elif refiners:
        # One stack refines the prompt, another one the image.
        words += f" and {2 * refiners} refiners"
    width = _first_of(config, "hidden_size", "dim") or config.num_attention_heads * config.attention_head_dim
    tokens = f"{model.tokens(size)} + {size.text} tokens" if size.text else f"{model.tokens(size)} tokens"
    return ", ".join([words, f"width {width}", *batch, tokens])


def _first_of(config: Mapping[str, Any], *names: str) -> int:
    return next((int(config[name]) for name in names if config.get(name)), 0)


def _read(group: str, small: str) -> tuple[Denoiser, ...]:
    """Read the sizes of a group; on a CPU, models have the configuration called `small`."""
    return tuple(
        Denoiser(
            name,
            model,
            size_of(fields, model.published),
            replace(getattr(model, small), batch=fields.get("batch", 1)),
            fields.get("budget", 60.0),
            fields.get("reduce_overhead", False),
        )
        for model in MODELS.values()
        for name, fields in getattr(model, group).items()
    )


DENOISERS = _read("workloads", "shrunk")
EXAMPLE = ExampleTransformer()

# The workloads of `tritium bench families`. Image models with `512` in the name are at 512 x 512 pixels, the others at
# 1024 x 1024; U-Nets run as pipelines call them with guidance, at batch 2.
FAMILIES = _read("families", "tiny")

# A call without names measures these on a CPU: two kinds of blocks, a U-Net, and a call with a timestep per token.
FEW = ("flux-512", "pixart-512", "wan-per-token", "sd15-512")


def find_families(names: Sequence[str]) -> list[Denoiser]:
    """Return the families of these names in the order of the catalogue; raise for an unknown name."""
    known = {family.name: family for family in FAMILIES}
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no family {name!r} in `tritium bench families`; {nearest(name, known)}")
    return [family for family in FAMILIES if family.name in names]


def with_few_tokens(family: Denoiser) -> Denoiser:
    """Take the full width with the small grid, where a float64 run fits whatever the family."""
    full = replace(family.full, grid=family.small.grid, text=family.small.text)
    return replace(family, name=f"{family.name} few tokens", full=full)
