"""Stock diffusers denoisers: the class, the arguments of a call, and a tiny configuration that tests can run."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True)
class Tensors:
    """Makes the tensors of a call; `config` is that of the built model."""

    config: Any
    size: Size
    normal: Normals

    def latents(self) -> torch.Tensor:
        return self.normal(self.size.batch, self.config.in_channels, *self.size.grid)

    def packed_latents(self) -> torch.Tensor:
        """Return latents as tokens [B, S, C]."""
        return self.normal(self.size.batch, math.prod(self.size.grid), self.config.in_channels)

    def prompt(self, width: int) -> torch.Tensor:
        return self.normal(self.size.batch, self.size.text, width)

    def pooled(self, width: int) -> torch.Tensor:
        return self.normal(self.size.batch, width)

    def prompt_mask(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.ones(self.size.batch, self.size.text, dtype=dtype)

    def filled(self, value: float, *shape: int) -> torch.Tensor:
        """Return a tensor [B, ...] of one value, in float32 or int64."""
        return torch.full((self.size.batch, *shape), value)

    def cast(self, value: float, *shape: int) -> torch.Tensor:
        """Return the same tensor in the model's dtype."""
        return self.filled(value, *shape).to(self.normal.dtype)

    def position_ids(self, axes: int) -> torch.Tensor:
        """Return the ids [S, axes] of the latents: row and column in axes 1 and 2."""
        height, width = self.size.grid
        ids = torch.zeros(height, width, axes)
        ids[..., 1], ids[..., 2] = torch.arange(height)[:, None], torch.arange(width)
        return ids.flatten(0, 1).to(self.normal.dtype)


@dataclass(frozen=True, kw_only=True)
class StockModel:
    """A class of diffusers."""

    class_name: str
    # Returns the arguments of a call without `return_dict`, on any device.
    inputs: Callable[[Tensors], dict[str, Any]]
    # The changes of the class's defaults that make a published model.
    published: Mapping[str, Any] = field(default_factory=dict)
    # A call that takes milliseconds on a CPU, and a larger one whose figures mean something there.
    tiny: Size
    shrunk: Size | None = None
    # Rows and columns of latents in one token.
    patch: int = 2

    def build(self, config: Mapping[str, Any], device: str, dtype: torch.dtype) -> Any:
        """Build a seeded model in evaluation mode, with the dtypes of a loaded checkpoint."""
        model = seeded(lambda: getattr(diffusers(), self.class_name)(**config), device)
        cast_as_loading_does(model, dtype)
        return model

    def arguments(self, config: Any, size: Size, normal: Normals) -> dict[str, Any]:
        """Return the arguments of a call, for the configuration of a built model."""
        arguments = {**self.inputs(Tensors(config, size, normal)), "return_dict": False}
        moved: dict[str, Any] = compat.tensors.map_tensors(lambda x: x.to(normal.device), arguments)
        return moved

    def tokens(self, size: Size) -> int:
        """Count the tokens of the latents."""
        *frames, height, width = size.grid
        return math.prod(frames) * (height // self.patch) * (width // self.patch)


def load(path: Path, inputs: Mapping[str, Callable[[Tensors], dict[str, Any]]]) -> dict[str, StockModel]:
    """Read the configurations of stock models; those of a size are changes of the published one."""
    models = {}
    for name, fields in json.loads(path.read_text(encoding="utf-8")).items():
        for size in fields.keys() & {"tiny", "shrunk"}:
            config = {**fields.get("published", {}), **fields[size]["config"]}
            fields[size] = Size(config, tuple(fields[size]["grid"]), fields[size]["text"])
        models[name] = StockModel(inputs=inputs[name], **fields)
    return models


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
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
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


def _flux(m: Tensors) -> dict[str, Any]:
    arguments = {
        "hidden_states": m.packed_latents(),
        "encoder_hidden_states": m.prompt(m.config.joint_attention_dim),
        "pooled_projections": m.pooled(m.config.pooled_projection_dim),
        "timestep": m.cast(0.5),
        "img_ids": m.position_ids(3),
        "txt_ids": torch.zeros(m.size.text, 3, dtype=m.normal.dtype),
    }
    return {**arguments, "guidance": m.filled(3.5)} if m.config.guidance_embeds else arguments


def _flux2(m: Tensors) -> dict[str, Any]:
    text_ids = torch.zeros(m.size.batch, m.size.text, 4, dtype=torch.int64)
    text_ids[..., 3] = torch.arange(m.size.text)
    return {
        "hidden_states": m.packed_latents(),
        "encoder_hidden_states": m.prompt(m.config.joint_attention_dim),
        "timestep": m.cast(0.5),
        "img_ids": m.position_ids(4).long().expand(m.size.batch, -1, -1),
        "txt_ids": text_ids,
        "guidance": m.filled(3.5),
    }


def _chroma(m: Tensors) -> dict[str, Any]:
    # A quarter of the prompt's tokens are words: the pipeline masks the others.
    mask = torch.ones(m.size.batch, m.size.text + math.prod(m.size.grid), dtype=torch.bool)
    mask[:, m.size.text // 4 : m.size.text] = False
    return {
        "hidden_states": m.packed_latents(),
        "encoder_hidden_states": m.prompt(m.config.joint_attention_dim),
        "timestep": m.cast(0.5),
        "img_ids": m.position_ids(3),
        "txt_ids": torch.zeros(m.size.text, 3, dtype=m.normal.dtype),
        "attention_mask": mask,
    }


def _wan(m: Tensors) -> dict[str, Any]:
    return {
        "hidden_states": m.latents(),
        "timestep": m.filled(500.0),
        "encoder_hidden_states": m.prompt(m.config.text_dim),
    }


def _wan_per_token(m: Tensors) -> dict[str, Any]:
    frames, height, width = (extent // by for extent, by in zip(m.size.grid, m.config.patch_size, strict=True))
    # An image to a video: the first frame is given, so its tokens are at time 0.
    times = m.filled(500.0, frames * height * width)
    times[:, : height * width] = 0
    return {**_wan(m), "timestep": times}


def _cogview4(m: Tensors) -> dict[str, Any]:
    pixels = torch.tensor([[8.0 * extent for extent in m.size.grid]] * m.size.batch, dtype=m.normal.dtype)
    return {
        "hidden_states": m.latents(),
        "encoder_hidden_states": m.prompt(m.config.text_embed_dim),
        "timestep": m.filled(500),
        "original_size": pixels,
        "target_size": pixels,
        "crop_coords": torch.zeros_like(pixels),
    }


def _cogvideox(m: Tensors) -> dict[str, Any]:
    frames, height, width = m.size.grid
    embeddings: Any = importlib.import_module("diffusers.models.embeddings")
    grid = (height // m.config.patch_size, width // m.config.patch_size)
    return {
        "hidden_states": m.normal(m.size.batch, frames, m.config.in_channels, height, width),
        "encoder_hidden_states": m.prompt(m.config.text_embed_dim),
        "timestep": m.filled(500),
        "image_rotary_emb": embeddings.get_3d_rotary_pos_embed(
            m.config.attention_head_dim, ((0, 0), grid), grid, frames, device=m.normal.device
        ),
    }


def _unet(m: Tensors) -> dict[str, Any]:
    arguments = {
        "sample": m.latents(),
        # Schedulers give a timestep without dims.
        "timestep": torch.tensor(500),
        "encoder_hidden_states": m.prompt(m.config.cross_attention_dim),
    }
    if m.config.addition_embed_type != "text_time":
        return arguments
    width = m.config.projection_class_embeddings_input_dim - 6 * m.config.addition_time_embed_dim
    pixels = 8.0 * m.size.grid[0]
    times = torch.tensor([[pixels, pixels, 0.0, 0.0, pixels, pixels]] * m.size.batch, dtype=m.normal.dtype)
    return {**arguments, "added_cond_kwargs": {"text_embeds": m.pooled(width), "time_ids": times}}


_INPUTS: dict[str, Callable[[Tensors], dict[str, Any]]] = {
    "flux": _flux,
    "flux2": _flux2,
    "chroma": _chroma,
    # The pipeline drops the prompt's mask if it masks nothing, as for one prompt.
    "qwen_image": lambda m: {
        "hidden_states": m.packed_latents(),
        "encoder_hidden_states": m.prompt(m.config.joint_attention_dim),
        "timestep": m.cast(0.5),
        "img_shapes": [[(1, *m.size.grid)]] * m.size.batch,
    },
    "sd3": lambda m: {
        "hidden_states": m.latents(),
        "encoder_hidden_states": m.prompt(m.config.joint_attention_dim),
        "pooled_projections": m.pooled(m.config.pooled_projection_dim),
        "timestep": m.cast(500.0),
    },
    "pixart": lambda m: {
        "hidden_states": m.latents(),
        "encoder_hidden_states": m.prompt(m.config.caption_channels),
        "timestep": m.filled(500),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    },
    "sana": lambda m: {
        "hidden_states": m.latents(),
        "encoder_hidden_states": m.prompt(m.config.caption_channels),
        "encoder_attention_mask": m.prompt_mask(torch.int64),
        "timestep": m.filled(500.0),
    },
    "dit": lambda m: {
        "hidden_states": m.latents(),
        "timestep": m.filled(500),
        "class_labels": m.filled(3),
    },
    "lumina2": lambda m: {
        "hidden_states": m.latents(),
        "timestep": m.filled(0.5),
        "encoder_hidden_states": m.prompt(m.config.cap_feat_dim),
        "encoder_attention_mask": m.prompt_mask(torch.bool),
    },
    "z_image": lambda m: {
        "x": [m.normal(m.config.in_channels, 1, *m.size.grid) for _ in range(m.size.batch)],
        "t": m.filled(0.5),
        "cap_feats": [m.normal(m.size.text, m.config.cap_feat_dim) for _ in range(m.size.batch)],
    },
    "auraflow": lambda m: {
        "hidden_states": m.latents(),
        "encoder_hidden_states": m.prompt(m.config.joint_attention_dim),
        "timestep": m.cast(0.5),
    },
    "cogview4": _cogview4,
    "wan": _wan,
    "ltx": lambda m: {
        "hidden_states": m.packed_latents(),
        "encoder_hidden_states": m.prompt(m.config.caption_channels),
        "timestep": m.filled(500.0),
        "encoder_attention_mask": m.prompt_mask(torch.int64),
        **dict(zip(("num_frames", "height", "width"), m.size.grid, strict=True)),
    },
    "hunyuan_video": lambda m: {
        "hidden_states": m.latents(),
        "timestep": m.cast(500.0),
        "encoder_hidden_states": m.prompt(m.config.text_embed_dim),
        "encoder_attention_mask": m.prompt_mask(torch.int64),
        "pooled_projections": m.pooled(m.config.pooled_projection_dim),
        "guidance": m.cast(6000.0),
    },
    "cogvideox": _cogvideox,
    "sd15": _unet,
    "sdxl": _unet,
}

# Published are Stable Diffusion 3.5 large, PixArt-Sigma, DiT-XL/2, Sana 1.6B, Wan 2.1 and CogVideoX 5B.
MODELS = load(Path(__file__).parent / "models.json", _INPUTS)
# Wan 2.2 TI2V 5B, which makes a video from an image.
MODELS["wan_per_token"] = replace(
    MODELS["wan"],
    inputs=_wan_per_token,
    published={"num_attention_heads": 24, "in_channels": 48, "out_channels": 48, "ffn_dim": 14336},
)
