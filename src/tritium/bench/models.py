"""Stock diffusers denoisers: the class, the arguments of a call, and a tiny configuration that tests can run."""

from __future__ import annotations

import importlib
import itertools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tritium import compat
from tritium.bench.workload import SEED, Normals
from tritium.errors import MissingExtra


@dataclass(frozen=True)
class Size:
    """The size of a call: the model's configuration, the grid of the latents, the tokens of the prompt, the batch."""

    config: Mapping[str, Any]
    grid: tuple[int, ...]
    text: int
    batch: int = 1


def size_of(fields: Mapping[str, Any], published: Mapping[str, Any]) -> Size:
    """Read a size; its configuration is changes of the published one."""
    config = {**published, **fields["config"]}
    return Size(config, tuple(fields["grid"]), fields["text"], fields.get("batch", 1))


@dataclass(frozen=True, kw_only=True)
class StockModel:
    """A class of diffusers. `models.json` has one entry for each."""

    class_name: str
    # The arguments by name: a method of `Arguments`, a method with its arguments as a list, or a constant.
    call: Mapping[str, Any]
    # The changes of the class's defaults that make a published model.
    published: Mapping[str, Any] = field(default_factory=dict)
    # A call that takes milliseconds on a CPU, and a larger one whose figures mean something there.
    tiny: Size
    shrunk: Size | None = None
    # Sizes of the full model by name: of `tritium bench families`, and of workloads. `about` says what a size stands for.
    families: Mapping[str, Any] = field(default_factory=dict)
    workloads: Mapping[str, Any] = field(default_factory=dict)
    # Sizes that are planned and explained only.
    unmeasured: Mapping[str, Any] = field(default_factory=dict)
    # Rows and columns of latents in one token.
    patch: int = 2

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> StockModel:
        published = fields.get("published", {})
        sizes = {name: size_of(fields[name], published) for name in ("tiny", "shrunk") if name in fields}
        return cls(**{**fields, **sizes})

    def build(self, config: Mapping[str, Any], device: str, dtype: torch.dtype) -> Any:
        """Build a seeded model in evaluation mode, with the dtypes of a loaded checkpoint."""
        model = seeded(lambda: getattr(diffusers(), self.class_name)(**config), device)
        cast_as_loading_does(model, dtype)
        return model

    def arguments(self, config: Any, size: Size, normal: Normals) -> dict[str, Any]:
        """Return the arguments of a call, for the configuration of a built model."""
        made = Arguments(config, size, normal)
        arguments = {name: made.value(how) for name, how in self.call.items()}
        moved: dict[str, Any] = compat.tensors.map_tensors(lambda x: x.to(normal.device), arguments)
        return {**moved, "return_dict": False}

    @property
    def full(self) -> tuple[str, Size]:
        """Return the first size of the full model, with its name."""
        name, fields = next(itertools.chain(*(one.items() for one in (self.workloads, self.families, self.unmeasured))))
        return name, size_of(fields, self.published)

    def tokens(self, size: Size) -> int:
        *frames, height, width = size.grid
        return math.prod(frames) * (height // self.patch) * (width // self.patch)


@dataclass(frozen=True)
class Arguments:
    """Makes the arguments of a call; `config` is that of the built model."""

    config: Any
    size: Size
    normal: Normals

    def value(self, how: Any) -> Any:
        """Make one argument, as an entry of `models.json` describes it; words after the method name config fields."""
        if isinstance(how, dict):
            return how
        method, *given = [how] if isinstance(how, str) else how
        return getattr(self, method)(*(self.config[one] if isinstance(one, str) else one for one in given))

    def latents(self) -> torch.Tensor:
        return self.normal(self.size.batch, self.config.in_channels, *self.size.grid)

    def latents_by_frame(self) -> torch.Tensor:
        frames, *grid = self.size.grid
        return self.normal(self.size.batch, frames, self.config.in_channels, *grid)

    def packed_latents(self) -> torch.Tensor:
        """Return latents as tokens [B, S, C]."""
        return self.normal(self.size.batch, math.prod(self.size.grid), self.config.in_channels)

    def z_images(self) -> list[torch.Tensor]:
        return [self.normal(self.config.in_channels, 1, *self.size.grid) for _ in range(self.size.batch)]

    def z_prompts(self) -> list[torch.Tensor]:
        return [self.normal(self.size.text, self.config.cap_feat_dim) for _ in range(self.size.batch)]

    def prompt(self, width: int) -> torch.Tensor:
        return self.normal(self.size.batch, self.size.text, width)

    def hidream_t5(self) -> torch.Tensor:
        return self.prompt(self.config.caption_channels[0])

    def hidream_llama(self) -> torch.Tensor:
        """Return the hidden states of a language model, of all layers up to the last that is read."""
        layers = max(self.config.llama_layers) + 1
        return self.normal(layers, self.size.batch, self.size.text, self.config.caption_channels[1])

    def pooled(self, width: int) -> torch.Tensor:
        return self.normal(self.size.batch, width)

    def prompt_mask(self) -> torch.Tensor:
        return self.filled(1, self.size.text)

    def lumina_mask(self) -> torch.Tensor:
        return self.prompt_mask().bool()

    def chroma_mask(self) -> torch.Tensor:
        # A quarter of the prompt's tokens are words: the pipeline masks the others.
        mask = self.filled(True, self.size.text + math.prod(self.size.grid))
        mask[:, self.size.text // 4 : self.size.text] = False
        return mask

    def filled(self, value: float, *shape: int) -> torch.Tensor:
        """Return a tensor [B, ...] of one value, in the dtype of the value."""
        return torch.full((self.size.batch, *shape), value)

    def cast(self, value: float, *shape: int) -> torch.Tensor:
        """Return the same tensor in the model's dtype."""
        return self.filled(value, *shape).to(self.normal.dtype)

    def scheduler_time(self) -> torch.Tensor:
        # Schedulers give a timestep without dims.
        return torch.tensor(500)

    def token_times(self) -> torch.Tensor:
        frames, height, width = (n // by for n, by in zip(self.size.grid, self.config.patch_size, strict=True))
        # An image to a video: the first frame is given, so its tokens are at time 0.
        times = self.filled(500.0, frames * height * width)
        times[:, : height * width] = 0
        return times

    def flux_guidance(self) -> torch.Tensor | None:
        return self.filled(3.5) if self.config.guidance_embeds else None

    def extent(self, axis: int) -> int:
        return self.size.grid[axis]

    def pixels(self) -> torch.Tensor:
        return torch.tensor([[8.0 * extent for extent in self.size.grid]] * self.size.batch, dtype=self.normal.dtype)

    def position_ids(self, axes: int) -> torch.Tensor:
        """Return the ids [S, axes] of the latents: row and column in axes 1 and 2."""
        height, width = self.size.grid
        ids = torch.zeros(height, width, axes)
        ids[..., 1], ids[..., 2] = torch.arange(height)[:, None], torch.arange(width)
        return ids.flatten(0, 1).to(self.normal.dtype)

    def text_ids(self, axes: int) -> torch.Tensor:
        return torch.zeros(self.size.text, axes, dtype=self.normal.dtype)

    def flux2_image_ids(self) -> torch.Tensor:
        return self.position_ids(4).long().expand(self.size.batch, -1, -1)

    def flux2_text_ids(self) -> torch.Tensor:
        ids = self.filled(0, self.size.text, 4)
        ids[..., 3] = torch.arange(self.size.text)
        return ids

    def qwen_shapes(self) -> list[list[tuple[int, ...]]]:
        # The pipeline drops the prompt's mask if it masks nothing, as for one prompt.
        return [[(1, *self.size.grid)]] * self.size.batch

    def cogvideox_rotary(self) -> Any:
        frames, *grid = self.size.grid
        rows, columns = (extent // self.config.patch_size for extent in grid)
        embeddings: Any = importlib.import_module("diffusers.models.embeddings")
        return embeddings.get_3d_rotary_pos_embed(
            self.config.attention_head_dim,
            ((0, 0), (rows, columns)),
            (rows, columns),
            frames,
            device=self.normal.device,
        )

    def unet_conditions(self) -> dict[str, torch.Tensor] | None:
        if self.config.addition_embed_type != "text_time":
            return None
        width = self.config.projection_class_embeddings_input_dim - 6 * self.config.addition_time_embed_dim
        pixels = 8.0 * self.size.grid[0]
        times = torch.tensor([[pixels, pixels, 0.0, 0.0, pixels, pixels]] * self.size.batch, dtype=self.normal.dtype)
        return {"text_embeds": self.pooled(width), "time_ids": times}


def seeded(make: Callable[[], nn.Module], device: str) -> Any:
    """Make a module with the seed of all workloads, on the device, in evaluation mode; keep the random state."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if device == "cuda" else ()):
        torch.manual_seed(SEED)
        with torch.device(device):
            model = make().eval()
        roughen(model)
    return model


def diffusers() -> Any:
    try:
        return importlib.import_module("diffusers")
    except ImportError as error:
        raise MissingExtra("diffusers", "diffusers", "a benchmark workload") from error


def roughen(model: nn.Module) -> None:
    # Norm weights start as ones: a kernel that ignored them would still look right.
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight") and parameter.ndim == 1:
            nn.init.normal_(parameter, mean=1.0, std=0.1)


def cast_as_loading_does(model: Any, dtype: torch.dtype) -> None:
    """Change dtypes the way `from_pretrained(torch_dtype=...)` does.

    `model.to(dtype)` would also round the tables of rotary embeddings and the modules a class keeps in float32, and
    then another graph would be measured than pipelines run.
    """
    kept = compat.diffusers.kept_in_float32(model)
    persistent = set(model.state_dict())
    for path, module in model.named_modules():
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            full_name = f"{path}.{name}" if path else name
            if full_name not in persistent or not tensor.is_floating_point() or kept.intersection(full_name.split(".")):
                continue
            # A separate tensor, as after loading: SD3's table of positions is built as a view, and torch 2.11 cannot
            # trace a view whose base has another dtype.
            fresh = tensor.detach().to(dtype).clone()
            setattr(module, name, nn.Parameter(fresh) if isinstance(tensor, nn.Parameter) else fresh)


def _read(path: Path) -> dict[str, StockModel]:
    entries: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    models = {}
    for name, fields in entries.items():
        like = entries[fields.pop("like", name)]
        models[name] = StockModel.read({**like, **fields, "call": {**like["call"], **fields["call"]}})
    return models


# Published are Stable Diffusion 3.5 large, PixArt-Sigma, DiT-XL/2, Sana 1.6B, Wan 2.1 and CogVideoX 5B.
MODELS = _read(Path(__file__).parent / "models.json")

# Those with full sizes.
