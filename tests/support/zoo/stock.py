"""Models of the zoo that have the configurations and inputs of the benchmark's tiny stock models."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import diffusers
import torch

from support.zoo.model import ZooModel, builder, normals
from tritium.bench.models import MODELS as STOCK


def stock(
    name: str,
    rows: int,
    repeated_blocks: bool,
    dynamic: Mapping[str, tuple[int, ...]] | None = None,
    *,
    of: str | None = None,
    batch: int = 2,
    square: bool = False,
    **fields: Any,
) -> ZooModel:
    """Return a stock model whose size is the rows of its latents: those of the benchmark's tiny call, or `rows`."""
    model = STOCK[of or name]
    make = functools.partial(getattr(diffusers, model.class_name), **model.tiny.config)
    *frames, height, width = model.tiny.grid

    @functools.cache
    def config() -> Any:
        with torch.device("meta"):
            return make().config

    def inputs(dtype: torch.dtype = torch.float32, size: int = height) -> dict[str, Any]:
        call = replace(model.tiny, batch=batch, grid=(*frames, size, size if square else width))
        return model.arguments(config(), call, normals(dtype))

    return ZooModel(name, builder(make), inputs, (height, rows), repeated_blocks, dynamic or {}, **fields)


IMAGE = {"hidden_states": (2,)}
VIDEO = {"hidden_states": (3,)}
IMG_SHAPES = "img_shapes holds the size as Python ints, which specialise it."
PYTHON_HEIGHT = "height holds the size as a Python int, which specialises it."

IMAGE_MODELS = (
    stock("flux", 8, True, {"hidden_states": (1,), "img_ids": (0,)}),
    stock("flux2", 8, True, {"hidden_states": (1,), "img_ids": (1,)}),
    stock("chroma", 8, True, {"hidden_states": (1,), "img_ids": (0,), "attention_mask": (1,)}),
    stock("qwen_image", 6, True, notes=IMG_SHAPES),
    stock("sd3", 12, False, IMAGE, notes="Block 0 has SD 3.5's second attention."),
    stock("pixart", 12, False, IMAGE),
    stock("dit", 12, False, {"hidden_states": (2, 3)}, square=True, notes="Takes square latents only."),
    stock(
        "lumina2",
        12,
        False,
        graphs=4,
        notes="Breaks at the mask lengths (`.item()`), which also specialise the height.",
    ),
    stock(
        "z_image",
        12,
        True,
        {"x.0": (2,)},
        batch=1,
        graphs=5,
        notes="Takes a list of images without a batch dim. The model makes its RoPE tables once, in float64.",
    ),
    stock("sana", 12, False, IMAGE),
    stock("auraflow", 12, False, IMAGE),
    stock("cogview4", 12, False, IMAGE),
    stock(
        "hidream",
        12,
        False,
        {"hidden_states": (2, 3)},
        square=True,
        graphs=20,
        notes="Breaks at the experts (`.numpy()`), which share frames. Latents that are not square are padded.",
    ),
)
VIDEO_MODELS = (
    stock("wan", 12, True, VIDEO),
    stock("hunyuan_video", 12, True, VIDEO),
    stock("cogvideox", 12, False, VIDEO | {"image_rotary_emb.0": (0,), "image_rotary_emb.1": (0,)}),
    stock("ltx", 5, True, notes=PYTHON_HEIGHT),
)
UNET = stock("sdxl_unet", 12, False, {"sample": (2,)}, of="sdxl")
