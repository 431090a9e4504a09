"""Previews: a linear map from latents to RGB, fitted once to the VAE."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import Tensor

from tritium import compat

# Images of coloured patches that the map is fitted to. 16 channels have 17 unknowns, and each image 256 equations.
_IMAGES = 8
_PATCHES = 4
_LATENT_SIDE = 16


class Previewer:
    """Turn unfinished latents into small RGB images: `x @ weight + bias` for each latent pixel."""

    def __init__(self, pipe: Any, weight: Tensor, bias: Tensor) -> None:
        self._pipe, self._weight, self._bias = pipe, weight, bias

    def image(self, latents: Tensor, width: int, height: int) -> Image.Image | None:
        """Return the preview of one image or of a video's middle frame; None for latents of another form."""
        grid = _grid(self._pipe, latents, width, height)
        if grid is None or grid.shape[0] != self._weight.shape[0]:
            return None
        pixels = grid.permute(1, 2, 0).float().cpu() @ self._weight + self._bias
        levels = ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        return Image.frombytes("RGB", (levels.shape[1], levels.shape[0]), levels.numpy().tobytes())


def clean(scheduler: Any, before: Tensor | None, after: Tensor) -> Tensor:
    """Return the latents that a step of a flow heads for, from those before and after it; `after` for other steps."""
    sigmas, step = getattr(scheduler, "sigmas", None), getattr(scheduler, "step_index", None)
    if before is None or before.shape != after.shape or not type(scheduler).__name__.startswith("FlowMatchEuler"):
        return after
    if not isinstance(sigmas, Tensor) or not isinstance(step, int) or not 0 < step < len(sigmas):
        return after
    # A step moves along the line from the noise to the image, as far as sigma falls.
    old, new = float(sigmas[step - 1]), float(sigmas[step])
    return after if old == new else after - (after - before) * (new / (new - old))


def _grid(pipe: Any, latents: Tensor, width: int, height: int) -> Tensor | None:
    """Return latents of one image as [C, H, W]; None if they are packed in a way that the pipeline does not undo."""
    if latents.dim() == 3:
        unpacked = compat.diffusers.unpacked_latents(pipe, latents, height, width)
        if unpacked is None:
            return None
        latents = unpacked
    if latents.dim() == 5:
        latents = latents[:, :, latents.shape[2] // 2]
    return latents[0] if latents.dim() == 4 else None


def fit(pipe: Any) -> Previewer | None:
    """Fit the map by least squares to images that the VAE encodes; None for a pipeline without such a VAE."""
    vae: Any = getattr(pipe, "vae", None)
    factor = getattr(pipe, "vae_scale_factor", None) or getattr(pipe, "vae_scale_factor_spatial", None)
    if not hasattr(vae, "encode") or not isinstance(factor, int):
        return None
    images = _patches(_LATENT_SIDE * factor)
    is_video = any(parameter.dim() == 5 for parameter in vae.parameters())
    with torch.no_grad():
        inputs = (images.unsqueeze(2) if is_video else images).to(pipe.device, vae.dtype)
        encoded: Any = vae.encode(inputs)
        if not hasattr(encoded, "latent_dist"):
            return None
        latents = encoded.latent_dist.mode().float().cpu()
    latents = _as_denoised(vae.config, latents[:, :, 0] if is_video else latents)
    colours = torch.nn.functional.interpolate(images, size=latents.shape[-2:], mode="area")
    samples, wanted = (values.permute(0, 2, 3, 1).flatten(0, 2) for values in (latents, colours))
    rows = torch.cat([samples, torch.ones(len(samples), 1)], dim=1)
    solution = torch.linalg.lstsq(rows, wanted).solution
    return Previewer(pipe, solution[:-1].contiguous(), solution[-1].contiguous())


def _patches(side: int) -> Tensor:
    """Return images of patches in random colours, in -1 to 1: [N, 3, side, side]."""
    colours = torch.rand(_IMAGES, 3, _PATCHES, _PATCHES, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return torch.nn.functional.interpolate(colours, size=(side, side), mode="nearest")


def _as_denoised(config: Any, latents: Tensor) -> Tensor:
    """Return a VAE's latents in the scale in which pipelines denoise them."""
    mean, std = (config.get(name) for name in ("latents_mean", "latents_std"))
    shift = torch.tensor(mean).view(1, -1, 1, 1) if mean else config.get("shift_factor") or 0.0
    spread = torch.tensor(std).view(1, -1, 1, 1) if std else 1.0
    return (latents - shift) * (config.get("scaling_factor") or 1.0) / spread
