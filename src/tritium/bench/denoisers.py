"""Denoisers as workloads: stock classes at full width and a real number of tokens, with few blocks and random weights.

Blocks repeat, so few of them are enough. On a CPU the full width would take minutes a step, so there the same class
shrinks, and every result says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tritium.bench.models import MODELS, Size, StockModel
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
    budget: float = 60.0
    reduce_overhead: bool = False
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


def _denoiser(
    name: str, model: str, config: Mapping[str, Any], grid: tuple[int, ...], text: int, batch: int = 1, **limits: Any
) -> Denoiser:
    """Make a workload: the published model with changes of its configuration, tiny on a CPU."""
    stock = MODELS[model]
    full = Size({**stock.published, **config}, grid, text, batch)
    return Denoiser(name, stock, full, replace(stock.tiny, batch=batch), **limits)


DENOISERS: tuple[Denoiser, ...] = tuple(
    replace(denoiser, small=denoiser.model.shrunk or denoiser.small)
    for denoiser in (
        # FLUX.1-dev at 1024 x 1024; it has 19 double and 38 single blocks.
        _denoiser("flux", "flux", {"num_layers": 4, "num_single_layers": 8}, (64, 64), 512),
        # 1024 x 1024; it has 60 blocks.
        _denoiser("qwen-image", "qwen_image", {"num_layers": 4}, (64, 64), 256),
        # The 14B model at 81 frames of 480 x 832; it has 40 blocks.
        _denoiser("wan", "wan", {"num_layers": 2}, (21, 60, 104), 512),
        # 1024 x 1024, whose prompt is 77 CLIP and 256 T5 tokens; it has 38 blocks.
        _denoiser("sd3", "sd3", {"num_layers": 4}, (128, 128), 333),
        # Short kernels, so a GPU waits for their launches. It has 28 blocks.
        _denoiser("pixart", "pixart", {"num_layers": 8}, (64, 64), 300),
    )
)
EXAMPLE = ExampleTransformer()

# The workloads of `tritium bench families`. Image models with `512` in the name are at 512 x 512 pixels, the others at
# 1024 x 1024; U-Nets run as pipelines call them with guidance, at batch 2. The whole U-Net comes last: it compiles for
# minutes.
FAMILIES: tuple[Denoiser, ...] = (
    _denoiser("flux-512", "flux", {"num_layers": 2, "num_single_layers": 4}, (32, 32), 512),
    _denoiser("flux", "flux", {"num_layers": 2, "num_single_layers": 4}, (64, 64), 512),
    _denoiser("flux2-512", "flux2", {"num_layers": 1, "num_single_layers": 3}, (32, 32), 512),
    _denoiser("qwen-image-512", "qwen_image", {"num_layers": 4}, (32, 32), 256, batch=2),
    _denoiser("qwen-image", "qwen_image", {"num_layers": 3}, (64, 64), 256),
    _denoiser("sd3-512", "sd3", {"num_layers": 4}, (64, 64), 333, batch=2),
    # Inductor compiles its approximator for a minute.
    _denoiser("chroma", "chroma", {"num_layers": 2, "num_single_layers": 4}, (64, 64), 512, budget=150.0),
    _denoiser("pixart-512", "pixart", {"num_layers": 8}, (64, 64), 300, batch=2),
    # Its autoencoder compresses 32 times.
    _denoiser("sana", "sana", {"num_layers": 4}, (32, 32), 300, batch=2),
    _denoiser("dit-512", "dit", {"num_layers": 8}, (64, 64), 0, batch=2),
    _denoiser("z-image", "z_image", {"n_layers": 3, "n_refiner_layers": 1}, (128, 128), 96),
    _denoiser("lumina2", "lumina2", {"num_layers": 3, "num_refiner_layers": 1}, (128, 128), 256),
    _denoiser("auraflow-512", "auraflow", {"num_mmdit_layers": 1, "num_single_dit_layers": 4}, (64, 64), 256, batch=2),
    _denoiser("cogview4", "cogview4", {"num_layers": 3}, (128, 128), 224),
    # The model of 1.3 B parameters at 41 frames of 480 x 832.
    _denoiser("wan", "wan", {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 4}, (11, 60, 104), 512),
    # 53 frames of 704 x 1280.
    _denoiser("wan-per-token", "wan_per_token", {"num_layers": 3}, (14, 44, 80), 512),
    # 65 frames of 512 x 704.
    _denoiser("ltx-512", "ltx", {"num_layers": 5}, (9, 16, 22), 128, batch=2),
    # 33 frames of 544 x 960.
    _denoiser(
        "hunyuan-video",
        "hunyuan_video",
        {"num_layers": 1, "num_single_layers": 2, "num_refiner_layers": 1},
        (9, 68, 120),
        256,
    ),
    # 25 frames of 480 x 720, with guidance.
    _denoiser("cogvideox", "cogvideox", {"num_layers": 2}, (7, 60, 90), 226, batch=2),
    _denoiser("sd15-512", "sd15", {"layers_per_block": 1}, (64, 64), 77, batch=2, budget=90.0),
    _denoiser(
        "sdxl-shallow-512",
        "sdxl",
        {"layers_per_block": 1, "transformer_layers_per_block": (1, 1, 2)},
        (64, 64),
        77,
        batch=2,
        budget=120.0,
        reduce_overhead=True,
    ),
    _denoiser("sdxl", "sdxl", {}, (128, 128), 77, batch=2, budget=450.0, reduce_overhead=True),
)

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
