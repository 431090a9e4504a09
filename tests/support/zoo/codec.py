"""Halves of tiny stock autoencoders. Two of them are in the zoo; layouts are tested with all."""

from __future__ import annotations

from typing import Any

import torch

from support.small_vaes import SMALL_VAES
from support.zoo.model import ZooModel, builder, normals


def _half(name: str, argument: str, *shape: int, notes: str = "") -> ZooModel:
    """Return a decoder or encoder that takes tensors [2, *shape, size, 8]."""
    vae, _, half = name.rpartition("_")

    def inputs(dtype: torch.dtype = torch.float32, size: int = 8) -> dict[str, Any]:
        return {argument: normals(dtype)(2, *shape, size, 8)}

    build = builder(lambda: getattr(SMALL_VAES[vae].make(), half))
    return ZooModel(name, build, inputs, (8, 12), False, {argument: (1 + len(shape),)}, notes=notes)


ALL_FRAMES = "Called without the feature cache: all frames at once, no temporal upsampling."

CODECS: dict[str, ZooModel] = {
    model.name: model
    for model in (
        _half("kl_decoder", "sample", 4),
        _half("wan_decoder", "x", 4, 2, notes=ALL_FRAMES),
        _half("ltx_video_decoder", "hidden_states", 8, 2),
        _half("hunyuan_video_decoder", "hidden_states", 4, 2),
        _half("dc_decoder", "hidden_states", 4),
        _half("qwen_image_decoder", "x", 4, 2),
        _half("kl_encoder", "sample", 3),
    )
}
